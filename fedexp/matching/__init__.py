"""Matching: finding the hidden units that correspond to each other in several networks.

The package describes which hidden units a network has, solves assignment problems and
aligns networks. The methods that use it are in `fedexp.methods`.
"""
