"""MA-Echo: the aggregator, its projections into null spaces, and the probe that computes projection matrices."""
