"""Data sets, partitions, and what the runner sees of them."""
