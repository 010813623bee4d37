"""Losses of data-free distillation on logits and images. Batches are reduced by their mean unless said otherwise.

Everything is formed from log-softmax on both sides, so that gradients stay finite where a probability underflows.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Literal["disagree", "agree", "none"]
"""Which samples count: those on which teacher and student name different classes, the same one, or all."""
Variation = Literal["l2", "l1"]
"""Form of `total_variation`."""

_TINY = 1e-8  # of a probability whose logarithm is taken


def kl(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """(b,) of ``tau^2 KL(softmax(teacher / tau) || softmax(student / tau))``; both are differentiated.

    Args:
        teacher, student: (b, C) logits, of which log-probabilities are some.
    """
    log_p, log_q = F.log_softmax(teacher / tau, 1), F.log_softmax(student / tau, 1)
    return tau**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)


def boundary_support(
    teacher: Tensor, student: Tensor, tau: float = 1.0, mask: Mask = "disagree"
) -> Tensor:
    """``L_div = -(1 / b) sum_i omega_i KL_tau(teacher_i || student_i)``, at most 0 (FedSyn, Zhang et al. 2021, Eq. 6).

    Divided by b, not by the number of samples that count.
    """
    divergence = kl(teacher, student, tau)
    if mask != "none":
        same = teacher.argmax(1) == student.argmax(1)
        divergence = torch.where(same if mask == "agree" else ~same, divergence, 0.0)
    return -divergence.mean()


def hard_similarity(logits: Tensor, labels: Tensor, hardness: float) -> Tensor:
    """Mean of ``(1 - p_y)^h CE(logits, y)``, p_y without a gradient (Co-Boosting, Dai et al. 2024); h = 0 is cross-entropy."""
    loss = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-loss.detach()).exp()) ** hardness * loss).mean()


def one_hot(logits: Tensor) -> Tensor:
    """``L_oh``: cross-entropy against the logits' own largest class (DAFL, Chen et al. 2019)."""
    return F.cross_entropy(logits, logits.argmax(1))


def information_entropy(logits: Tensor, base: float = 10.0) -> Tensor:
    """``L_ie = sum_c p_c log p_c`` of the batch's mean softmax p, at least -log C (DAFL, whose code takes base 10)."""
    p = F.softmax(logits, 1).mean(0).clamp_min(_TINY)
    return (p * p.log()).sum() / math.log(base)


def competition(teacher: Tensor, student: Tensor) -> Tensor:
    """``R_c = 1 - JS``, in [0, 1] (Adaptive DeepInversion, Yin et al. 2020), as the authors' code has it.

    There P and Q are softmaxes at temperature 3, M is their mean, all are clamped to [0.01, 0.99], and the divergences are
    KL(M || P) and KL(M || Q).
    """
    p, q = F.softmax(student / 3, 1), F.softmax(teacher / 3, 1)
    middle, p, q = (value.clamp(0.01, 0.99) for value in ((p + q) / 2, p, q))
    parts = (F.kl_div(other.log(), middle, reduction="batchmean") for other in (p, q))
    return 1 - (sum(parts, torch.zeros_like(p[0, 0])) / 2).clamp(0, 1)


def total_variation(images: Tensor, form: Variation = "l2") -> Tensor:
    """Of (b, c, H, W) images, by differences of neighbours: horizontal, vertical and both diagonal ones.

    Args:
        form: ``l2``: the sum of the four Frobenius norms over the whole batch (DeepInversion's code for CIFAR-10); ``l1``: of the
            four mean absolute differences (the other form in DeepInversion's code).
    """
    across, down = (
        images[..., :, 1:] - images[..., :, :-1],
        images[..., 1:, :] - images[..., :-1, :],
    )
    falling = images[..., 1:, 1:] - images[..., :-1, :-1]
    rising = images[..., 1:, :-1] - images[..., :-1, 1:]
    measure = torch.linalg.vector_norm if form == "l2" else _mean_size
    return torch.stack(
        [measure(difference) for difference in (across, down, falling, rising)]
    ).sum()


def _mean_size(values: Tensor) -> Tensor:
    return values.abs().mean()
