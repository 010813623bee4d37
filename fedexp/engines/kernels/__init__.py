"""Kernels, which compute the gradients of several stacked clients at once.

All implement the interface in `fedexp.engines.kernels.kernel`. The stacking of clients
and the local training that calls a kernel are in `fedexp.engines.stack`.
"""
