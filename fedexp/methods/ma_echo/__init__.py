"""MA-Echo: aggregation in the null space of the clients' layer inputs.

The package contains the aggregator, the iteration of one layer, and the probe. The
probe computes at each client the factors K of the projections ``P = K K^T``.
"""
