"""The choice between stacked teachers and looped teachers.

Stacked teachers run as one network, with their tensors stacked along a first axis.
Looped teachers run one after the other. With ``auto`` the choice depends on the device
and, on CUDA, on a short timing.

Stacking turns a convolution into a grouped convolution, which is slower on a CPU. Ten
teachers were measured on two cores with ``scripts/bench_distillation.py``. A stacked
pass with input gradient took 1.65 times as long as a looped pass in one measurement,
and 2.18 times as long in another. On a CPU ``auto`` therefore never stacks teachers.
It does not measure the time there either, so that equal runs are bit-identical.

On CUDA the number of kernel launches decides which way is faster. The caller stores the
choice, because the last bits of the results depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedexp.core.device import may_gain_by_stacks, synchronise
from fedexp.core.weights import Weights
from fedexp.distillation.ensemble import TeacherEnsemble

Running = Literal["auto", "stacked", "looped"]

_REPEATS = 5
# Stacked teachers are chosen if their time is below this fraction of the looped time
_GAIN = 0.95


def stacks(
    running: Running, teachers: Sequence[Weights], at_once: int | None, inputs: Tensor
) -> bool:
    """Decide whether `teachers` run stacked.

    With ``auto``, teachers of several architectures and teachers on a CPU are looped.
    On CUDA both ways are timed. Stacked teachers are chosen if their time is below 0.95
    times the looped time. Memory use is not compared.

    Args:
        running: ``auto``, ``stacked`` or ``looped`` (one after the other).
        teachers: The teachers.
        at_once: As in `TeacherEnsemble`.
        inputs: Inputs of a typical batch, of shape (b, ...).
    """
    alike = len({teacher.spec for teacher in teachers}) == 1
    may_gain = alike and len(teachers) > 1 and may_gain_by_stacks(inputs.device)
    if running != "auto" or not may_gain:
        return running == "stacked"
    in_turn = seconds(TeacherEnsemble(teachers, at_once), inputs)
    try:
        return seconds(TeacherEnsemble(teachers, at_once, stacked=True), inputs) < _GAIN * in_turn
    # The network cannot be stacked, or the stacked tensors do not fit into memory
    except RuntimeError:
        return False


def seconds(ensemble: TeacherEnsemble, inputs: Tensor, repeats: int = _REPEATS) -> float:
    """Measure the seconds of the fastest of `repeats` forward and backward passes.

    A pass includes the statistics of BatchNorms' inputs and the gradient with respect
    to `inputs`. One more pass runs before the `repeats` measured passes and is not
    counted.
    """
    return min([_pass_seconds(ensemble, inputs) for _ in range(1 + repeats)][1:])


def _pass_seconds(ensemble: TeacherEnsemble, inputs: Tensor) -> float:
    leaf = inputs.detach().requires_grad_()
    synchronise(inputs.device)
    began = time.perf_counter()
    shown = ensemble.show(leaf, norms=True)
    torch.autograd.grad(shown.logits.square().sum() + shown.statistics, leaf)
    synchronise(inputs.device)
    return time.perf_counter() - began
