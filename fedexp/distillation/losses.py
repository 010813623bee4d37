"""Losses of data-free distillation on logits and images.

Losses are means over the batch unless stated otherwise. `kl` uses the log-softmax of
both teacher and student, and `competition` clamps probabilities. Gradients therefore
stay finite if a probability underflows.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Literal["disagree", "agree", "none"]
"""The choice of samples that count in a loss.

``disagree``: samples for which teacher and student predict different classes.
``agree``: samples for which they predict the same class. ``none``: all samples.
"""
Variation = Literal["l2", "l1"]
"""The variant of `total_variation`."""

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
    """Compute the loss L_div of FedSyn (Zhang et al. 2021, Eq. 6), which is at most 0.

    It is ``L_div = -(1 / b) sum_i omega_i KL_tau(teacher_i || student_i)``, with the
    sum over the b samples i of the batch. omega_i is 1 if sample i counts according to
    `mask`, and 0 otherwise. The divisor is b, not the number of samples that count.
    KL_tau is `kl` at temperature `tau`.
    """
    divergence = kl(teacher, student, tau)
    if mask != "none":
        same = teacher.argmax(1) == student.argmax(1)
        divergence = torch.where(same if mask == "agree" else ~same, divergence, 0.0)
    return -divergence.mean()


def hard_similarity(logits: Tensor, labels: Tensor, hardness: float) -> Tensor:
    """Compute the batch mean of ``(1 - p_y)^h CE(logits, y)``, where h is `hardness`.

    y is the label of a sample, CE is the cross-entropy, and p_y is the softmax
    probability of class y. No gradient flows through the factor ``(1 - p_y)^h``. With
    h = 0 the loss is the cross-entropy. Reference: Co-Boosting, Dai et al. 2024.
    """
    loss = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-loss.detach()).exp()) ** hardness * loss).mean()


def one_hot_loss(logits: Tensor) -> Tensor:
    """Compute the one-hot loss L_oh.

    It is the cross-entropy in which the class with the largest logit is the label.
    Reference: DAFL, Chen et al. 2019.
    """
    return F.cross_entropy(logits, logits.argmax(1))


def information_entropy(logits: Tensor, base: float = 10.0) -> Tensor:
    """Compute ``L_ie = sum_c p_c log p_c``, the negative entropy over C classes.

    p_c is the mean softmax probability of class c over the batch. Logarithms have base
    `base`. The loss is at least -log C. Reference: DAFL, Chen et al. 2019, whose code
    has base 10.
    """
    p = F.softmax(logits, 1).mean(0).clamp_min(_TINY)
    return (p * p.log()).sum() / math.log(base)


def competition(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute the competition loss ``R_c = 1 - JS``, in [0, 1].

    P and Q are the softmax probabilities of student and teacher at temperature 3, and M
    is their mean. Then P, Q and M are clamped to [0.01, 0.99]. JS is the mean of
    KL(M || P) and KL(M || Q), clamped to [0, 1]. Reference: the authors' code of
    Adaptive DeepInversion, Yin et al. 2020.
    """
    p, q = F.softmax(student / 3, 1), F.softmax(teacher / 3, 1)
    middle, p, q = (value.clamp(0.01, 0.99) for value in ((p + q) / 2, p, q))
    parts = (F.kl_div(other.log(), middle, reduction="batchmean") for other in (p, q))
    return 1 - (sum(parts, torch.zeros_like(p[0, 0])) / 2).clamp(0, 1)


def total_variation(images: Tensor, form: Variation = "l2") -> Tensor:
    """Compute the total variation of images.

    Differences of neighbouring pixels form four tensors: one for horizontal neighbours,
    one for vertical neighbours, and one for each of the two diagonals.

    Args:
        images: Images of shape (b, channels, H, W).
        form: ``l2``: the sum of the four tensors' Frobenius norms, each over the whole
            batch (DeepInversion's code for CIFAR-10). ``l1``: the sum of the four
            tensors' mean absolute values (the other variant in DeepInversion's code).
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
