"""Settings of a process that are made before the process trains.

They concern numerics, threads, GPUs and the memory allocator. A guard that detects the
use of global random-number generators is here, too. Nothing here depends on a
particular method, engine or run.
"""
