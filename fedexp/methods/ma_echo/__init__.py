"""MA-Echo: aggregation in the null space of the clients' layer inputs.

The package has the aggregator, its projections into null spaces, and the probe that
computes projection matrices.
"""
