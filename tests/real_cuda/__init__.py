"""Tests that need a CUDA GPU."""
