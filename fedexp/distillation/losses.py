"""Losses of data-free distillation on logits and images.

Losses are means over the batch unless stated otherwise. Divergences use the log-softmax
of both teacher and student, so that gradients stay finite if a probability underflows.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Literal["disagree", "agree", "none"]
"""The samples that count in a loss.

``disagree``: samples for which teacher and student predict different classes.
``agree``: samples for which they predict the same class. ``none``: all samples.
"""
Variation = Literal["l2", "l1"]
"""The form of `total_variation`."""

_TINY = 1e-8  # lower bound of a probability whose logarithm is taken


def kl(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """Compute the Kullback-Leibler divergence of each sample, of shape (b,).

    It is ``tau^2 KL(softmax(teacher / tau) || softmax(student / tau))``. Both arguments
    are differentiated.

    Args:
        teacher: Logits of shape (b, C). Log-probabilities are valid logits.
        student: Logits of shape (b, C).
        tau: Temperature.
    """
    log_p, log_q = F.log_softmax(teacher / tau, 1), F.log_softmax(student / tau, 1)
    return tau**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)


def boundary_support(
    teacher: Tensor, student: Tensor, tau: float = 1.0, mask: Mask = "disagree"
) -> Tensor:
    """Compute L_div of FedSyn (Zhang et al. 2021, Eq. 6), at most 0.

    It is ``L_div = -(1 / b) sum_i omega_i KL_tau(teacher_i || student_i)``. omega_i is
    1 if sample i counts according to `mask`, and 0 otherwise. The divisor is b, not the
    number of samples that count.
    """
    divergence = kl(teacher, student, tau)
    if mask != "none":
        same = teacher.argmax(1) == student.argmax(1)
        divergence = torch.where(same if mask == "agree" else ~same, divergence, 0.0)
    return -divergence.mean()


def hard_similarity(logits: Tensor, labels: Tensor, hardness: float) -> Tensor:
    """Compute the mean of ``(1 - p_y)^h CE(logits, y)``, where h is `hardness`.

    p_y is the probability of class y and counts as a constant for the gradient. With
    h = 0 the loss is cross-entropy. Reference: Co-Boosting, Dai et al. 2024.
    """
    loss = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-loss.detach()).exp()) ** hardness * loss).mean()


def one_hot_loss(logits: Tensor) -> Tensor:
    """Compute ``L_oh``, the cross-entropy against the logits' own largest class.

    Reference: DAFL, Chen et al. 2019.
    """
    return F.cross_entropy(logits, logits.argmax(1))


def information_entropy(logits: Tensor, base: float = 10.0) -> Tensor:
    """Compute ``L_ie = sum_c p_c log p_c``, the negative entropy, at least -log C.

    p is the mean softmax of the batch. Logarithms have base `base`. Reference: DAFL,
    whose code has base 10.
    """
    p = F.softmax(logits, 1).mean(0).clamp_min(_TINY)
    return (p * p.log()).sum() / math.log(base)


def competition(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute ``R_c = 1 - JS``, in [0, 1], as in the authors' code.

    P and Q are the softmaxes of student and teacher at temperature 3, and M is their
    mean. P, Q and M are clamped to [0.01, 0.99]. JS is the mean of KL(M || P) and KL(M
    || Q). Reference: Adaptive DeepInversion, Yin et al. 2020.
    """
    p, q = F.softmax(student / 3, 1), F.softmax(teacher / 3, 1)
    middle, p, q = (value.clamp(0.01, 0.99) for value in ((p + q) / 2, p, q))
    parts = (F.kl_div(other.log(), middle, reduction="batchmean") for other in (p, q))
    return 1 - (sum(parts, torch.zeros_like(p[0, 0])) / 2).clamp(0, 1)


def total_variation(images: Tensor, form: Variation = "l2") -> Tensor:
    """Compute the total variation of images (b, c, H, W).

    There are four tensors of differences: those of horizontal neighbours, vertical
    neighbours and the two kinds of diagonal neighbours.

    Args:
        images: The images.
        form: ``l2``: the sum of the four tensors' Frobenius norms, each over the whole
            batch (DeepInversion's code for CIFAR-10). ``l1``: the sum of the four mean
            absolute differences (the other form in DeepInversion's code).
    """
    across = images[..., :, 1:] - images[..., :, :-1]
    down = images[..., 1:, :] - images[..., :-1, :]
    falling = images[..., 1:, 1:] - images[..., :-1, :-1]
    rising = images[..., 1:, :-1] - images[..., :-1, 1:]
    measure = torch.linalg.vector_norm if form == "l2" else _mean_size
    return torch.stack(
        [measure(difference) for difference in (across, down, falling, rising)]
    ).sum()


def _mean_size(values: Tensor) -> Tensor:
    return values.abs().mean()
