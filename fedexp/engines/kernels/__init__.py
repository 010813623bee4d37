"""Kernels that compute the gradients of stacked clients."""
