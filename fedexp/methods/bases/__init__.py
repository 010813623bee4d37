"""Base classes and helpers of several methods that are not methods of a paper."""
