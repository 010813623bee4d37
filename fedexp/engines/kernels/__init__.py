"""Kernels: they compute the gradients of stacked clients as one.

All implement `fedexp.engines.kernels.kernel`. Stacking and local training around them
are in `fedexp.engines.stack`.
"""
