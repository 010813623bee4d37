"""Kernels, which compute the gradients of several stacked clients at once.

All kernels implement the interface in `fedexp.engines.kernels.kernel`. Stacking the
clients, and the local training that calls a kernel, are in `fedexp.engines.stack`.
"""
