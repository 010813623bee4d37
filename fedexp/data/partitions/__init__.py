"""Partition schemes, one a file."""
