"""Whether an ensemble's teachers run stacked or one after the other: a rule of the device, and on CUDA a short timing.

On a CPU grouped convolutions, which stacking makes of a layer, lose: ten teachers with input gradient took 1.65 and 2.18
times as long on two cores (``scripts/bench_distillation.py`` measures it). There nothing is timed, so that runs alike have the
same bits. On CUDA launches decide; the choice is the caller's to keep, as last bits depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedexp.core.weights import Weights
from fedexp.distillation.ensemble import TeacherEnsemble

Running = Literal["auto", "stacked", "looped"]

_TIMED_ON = ("cuda",)  # kinds of device on which stacking may gain
_REPEATS = 5
_GAIN = 0.95  # of the time in turn: what gains less is no reason to stack


def stacks(
    running: Running, teachers: Sequence[Weights], at_once: int | None, inputs: Tensor
) -> bool:
    """Whether `teachers` shall run stacked on inputs like `inputs` (b, ...), in parts of `at_once` as `TeacherEnsemble` has it.

    With ``auto`` those of several architectures run one after the other, others as is faster; memory does not count.
    """
    alike = len({teacher.spec for teacher in teachers}) == 1
    if running != "auto" or not alike or len(teachers) == 1 or inputs.device.type not in _TIMED_ON:
        return running == "stacked"
    in_turn = seconds(TeacherEnsemble(teachers, at_once), inputs)
    try:
        return seconds(TeacherEnsemble(teachers, at_once, stacked=True), inputs) < _GAIN * in_turn
    except RuntimeError:  # the network cannot be stacked, or stacks do not fit into memory
        return False


def seconds(ensemble: TeacherEnsemble, inputs: Tensor, repeats: int = _REPEATS) -> float:
    """Of the fastest forward pass with statistics, and its gradient with respect to `inputs`, after one that does not count."""
    return min([_pass_seconds(ensemble, inputs) for _ in range(1 + repeats)][1:])


def _pass_seconds(ensemble: TeacherEnsemble, inputs: Tensor) -> float:
    leaf = inputs.detach().requires_grad_()
    _wait(inputs)
    began = time.perf_counter()
    shown = ensemble.show(leaf, norms=True)
    torch.autograd.grad(shown.logits.square().sum() + shown.statistics, leaf)
    _wait(inputs)
    return time.perf_counter() - began


def _wait(inputs: Tensor) -> None:
    if inputs.is_cuda:
        torch.cuda.synchronize(inputs.device)
