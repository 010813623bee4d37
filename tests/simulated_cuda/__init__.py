"""A simulated CUDA device, on which runs are checked without a GPU.

`device` holds the simulation. `README.md` lists its limits.
"""
