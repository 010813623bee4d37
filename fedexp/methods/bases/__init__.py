"""Bases and helpers that several methods share and that no paper calls a method."""
