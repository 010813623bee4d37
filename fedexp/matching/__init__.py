"""Matching of hidden units: a network's units and their partners in other networks."""
