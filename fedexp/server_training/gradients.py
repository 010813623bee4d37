"""The gradient of a loss with respect to trees.

A tree is a dictionary of tensors by name: a network's parameters, a generator's
parameters, or inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedexp.core.trees import Tree


def value_and_grad(loss: Callable[..., Tensor], *wrt: Tree) -> tuple[Tensor, tuple[Tree, ...]]:
    """Return ``loss(*wrt)``, a scalar, and its gradient with respect to each tree.

    The gradient is zero for tensors of `wrt` on which the loss does not depend. No
    gradient is computed for other tensors that the loss uses. A network in training
    mode updates its buffers in place. If `loss` runs such a network, pass it copies of
    the buffers.
    """
    leaves = [
        {name: value.detach().requires_grad_() for name, value in tree.items()} for tree in wrt
    ]
    with torch.enable_grad():
        value = loss(*leaves)
    flat = [leaf for tree in leaves for leaf in tree.values()]
    grads = iter(torch.autograd.grad(value, flat, allow_unused=True, materialize_grads=True))
    return value.detach(), tuple({name: next(grads) for name in tree} for tree in leaves)
