"""What a process needs before it trains: numerics, resources, the random-number guard and the allocator.

Nothing here knows a method, an engine or a run.
"""
