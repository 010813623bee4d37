"""Matching: hidden units of one network, and corresponding units of several networks.

The package contains the structure of networks, assignment problems and alignments. The
methods that use them are in `fedexp.methods`.
"""
