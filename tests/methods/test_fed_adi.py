"""Fed-ADI equals an independent loop."""

from __future__ import annotations

import torch
from torch import nn

from fedexp.core.seeds import torch_generator
from tests.methods.distilled_world import (
    assert_student,
    fresh_student,
    labels,
    modules_of,
    normalised,
    one_pass,
    small_world,
    states,
)


def competition(d: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Compute 1 - (KL(M || P) + KL(M || Q)) / 2 of softmaxes at temperature 3.

    Probabilities are between 0.01 and 0.99. J is at most 1.
    """
    p, q = (torch.distributions.Categorical(logits=logits / 3).probs for logits in (s, d))
    m, p, q = (value.clamp(0.01, 0.99) for value in ((p + q) / 2, p, q))
    return 1 - ((m * (m / p).log() + m * (m / q).log()).sum(1).mean() / 2).clamp(max=1)


def test_fed_adi_epochs_equal_a_torch_loop() -> None:
    """The epochs equal an independent loop with every term.

    The pixels are images before a sigmoid. They are rolled by one offset per step. The
    best of four steps is stored in the bank.
    """
    weights = ("w_f=0.3", "w_tv=0.01", "w_2=0.1", "w_c=2.0", "N_inv=4", "lr_pixels=0.5")
    world = small_world("fed_adi", *(f"aggregator.{one}" for one in weights))
    after, _ = states(world)
    modules, found = modules_of(after[0])
    teachers = lambda x: torch.stack([module(x) for module in modules]).mean(0)  # noqa: E731
    student, bank = fresh_student(world), []
    slow = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9)
    for epoch in (1, 2, 3):
        random = torch_generator(0, "pixels", 0, epoch)
        u = torch.randn((6, 1, 4, 4), generator=random).double().requires_grad_()
        offsets = torch.randint(-2, 3, (4, 2), generator=random).tolist()
        fast, y = torch.optim.Adam([u], lr=0.5), labels(world, epoch)
        student.eval()
        best = kept = None
        for down, across in offsets:
            x = torch.sigmoid(u)
            v = torch.stack([image.roll(down, 1).roll(across, 2) for image in x])
            found.clear()
            d, s = teachers(normalised(v)), student(normalised(v))
            tv = sum(
                (
                    v[..., max(i, 0) : 4 + min(i, 0), max(j, 0) :]
                    - v[..., max(-i, 0) : 4 - max(i, 0), : 4 - j]
                ).norm()
                for i, j in ((0, 1), (1, 0), (1, 1), (-1, 1))
            )
            loss = (
                nn.functional.cross_entropy(d, y)
                + 0.3 * sum(found) / 3
                + 0.01 * tv
                + 0.1 * v.norm()
            )
            loss = loss + 2 * competition(d, s)
            if best is None or loss < best:
                best, kept = loss.detach(), x.detach()
            fast.zero_grad()
            loss.backward()
            fast.step()
        bank.append((kept * 255).round() / 255)
        one_pass(student, slow, bank, teachers, 20.0, epoch)
        assert_student(student, world, after[epoch])
