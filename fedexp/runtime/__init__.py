"""Settings of a process before it trains.

The package has numerics, resources, the random-number guard and the allocator. Nothing
in it depends on a particular method, engine or run.
"""
