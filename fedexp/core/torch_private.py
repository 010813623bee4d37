"""The private interfaces of torch that fedexp uses.

No other module uses a name ``torch._*``, except ``torch._foreach_*``. Other modules
also use private classes of ``torch.nn.modules``, such as ``_BatchNorm``, and the
attribute ``_version`` of tensors. The tests in ``tests/core/test_torch_private.py``
check each interface after an update of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._autograd import DeviceType as ProfilerDevice
from torch._C._autograd import _profiler_enabled as is_profiler_enabled
from torch._C._functorch import is_batchedtensor as is_vmapped

__all__ = ["ProfilerDevice", "is_profiler_enabled", "is_vmapped", "run_backward"]

_run_backward = torch.autograd.Variable._execution_engine.run_backward


def run_backward(output: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Compute the gradient of `output` with respect to `inputs`.

    The autograd engine is called directly, to save time. The argument checks of the
    public function `torch.autograd.grad` take a tenth of a training step of a small
    model. The graph is freed, and no second derivative can be taken.

    Args:
        output: Scalar tensor with a graph.
        inputs: Tensors that require a gradient.

    Returns:
        One gradient per input, None for an input that `output` does not depend on.
    """
    gradients: Sequence[Tensor | None] = _run_backward(
        (output,),
        (torch.ones_like(output),),
        False,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return gradients
