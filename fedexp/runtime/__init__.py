"""Settings of a process, made before it trains.

They concern numerics, threads and GPUs, the guard of random numbers and the allocator.
Nothing here depends on a particular method, engine or run.
"""
