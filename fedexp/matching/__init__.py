"""Matching: which hidden units a network has, and which units of several trained networks belong together."""
