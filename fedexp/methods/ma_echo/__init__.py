"""MA-Echo: the aggregator, its iteration in null spaces, and the probe of projections.

The probe computes the projection matrices at the clients.
"""
