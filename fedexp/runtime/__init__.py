"""Settings of a process before it trains.

The package has numerics, resources, the random-number guard and the allocator. Nothing
in it knows a method, an engine or a run.
"""
