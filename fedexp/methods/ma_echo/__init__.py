"""MA-Echo: aggregation in the null space of the clients' layer inputs.

The package contains the aggregator, the iteration of one layer, and the probe that
computes the factors of the projections at the clients.
"""
