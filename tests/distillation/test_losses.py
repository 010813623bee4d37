"""Tests of losses of distillation.

They cover golden values, closed forms of gradients, and limits. Losses are finite if
probabilities underflow.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedexp.distillation import losses

T = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]], dtype=torch.float64)
S = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 2.0]], dtype=torch.float64)
GOLDEN = {
    1: (0.91298290, 0.11457866),
    3: (1.09864118, 0.19319637),
    4: (1.08800899, 0.19646992),
    20: (1.02369647, 0.19611083),
}


@pytest.mark.parametrize("tau", GOLDEN)
def test_divergence_is_the_teachers_from_the_student(tau: int) -> None:
    assert losses.kl(T, S, tau).tolist() == pytest.approx(GOLDEN[tau], abs=5e-9)
    shifted = losses.kl(T + torch.tensor([[3.0], [-5.0]]), S - 7.0, tau)
    torch.testing.assert_close(shifted, losses.kl(T, S, tau), rtol=1e-12, atol=1e-12)
    assert losses.kl(T, T + 2.0, tau).abs().max() < 1e-12


def test_gradients_and_limit_of_the_divergence() -> None:
    t, s, tau = T.clone().requires_grad_(), S.clone().requires_grad_(), 3.0
    of_t, of_s = torch.autograd.grad(losses.kl(t, s, tau).sum(), (t, s))
    p, q = (T / tau).softmax(1), (S / tau).softmax(1)
    gap = p.log() - q.log()
    torch.testing.assert_close(of_s, tau * (q - p), rtol=1e-12, atol=1e-12)
    plain = (p * gap).sum(1, keepdim=True)
    torch.testing.assert_close(of_t, tau * p * (gap - plain), rtol=1e-12, atol=1e-12)
    centred = (T - T.mean(1, keepdim=True)) - (S - S.mean(1, keepdim=True))
    torch.testing.assert_close(
        losses.kl(T, S, 1e4), centred.square().sum(1) / 6, rtol=1e-3, atol=0.0
    )


def test_boundary_support_counts_disagreement_over_the_whole_batch() -> None:
    assert float(losses.boundary_support(T, S)) == pytest.approx(-0.45649145, abs=5e-9)
    assert float(losses.boundary_support(T, S, mask="agree")) == pytest.approx(
        -0.11457866 / 2, abs=5e-9
    )
    assert float(losses.boundary_support(T, S, 3.0, "none")) == pytest.approx(
        -(1.09864118 + 0.19319637) / 2, abs=5e-9
    )
    assert float(losses.boundary_support(T, T.clone())) == 0
    # The batch has one more sample on which both networks agree
    more = losses.boundary_support(torch.cat([T, T[1:]]), torch.cat([S, S[1:]]))
    assert float(more) == pytest.approx(-0.45649145 * 2 / 3, abs=5e-9)


def test_boundary_support_has_finite_gradients_where_probabilities_underflow() -> None:
    """Two logits of the teacher, in float32, differ by 200.

    Both networks get a gradient, but none through the mask.
    """
    t = torch.tensor([[200.0, 0.0, -3.0], [0.0, 200.0, 1.0]], requires_grad=True)
    s = torch.tensor([[0.0, 200.0, 0.0], [0.0, 1.0, 0.0]], requires_grad=True)
    value = losses.boundary_support(t, s)
    of_t, of_s = torch.autograd.grad(value, (t, s))
    assert float(value.detach()) == pytest.approx(-100.0)
    assert of_t.isfinite().all() and of_s.isfinite().all()
    assert of_s[0].abs().max() > 0.4 and of_s[1].abs().max() == 0


def test_similarity_weighs_samples_by_their_difficulty() -> None:
    y = torch.tensor([0, 1])
    assert float(losses.hard_similarity(T, y, 0.0)) == pytest.approx(1.41092720, abs=5e-9)
    assert float(losses.hard_similarity(T, y, 1.0)) == pytest.approx(1.24577377, abs=5e-9)
    t = T.clone().requires_grad_()
    (found,) = torch.autograd.grad(losses.hard_similarity(t, y, 1.0), t)
    p = T.softmax(1)
    # The gradient treats the weight as a constant
    expected = (1 - p.gather(1, y[:, None])) * (p - F.one_hot(y, 3)) / 2
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_labels_of_ones_own_and_evenly_used_classes() -> None:
    assert float(losses.one_hot_loss(T)) == pytest.approx(0.16092720, abs=5e-9)
    assert float(losses.information_entropy(T)) == pytest.approx(-0.40695814, abs=5e-9)
    assert float(losses.information_entropy(T, math.e)) == pytest.approx(-0.93705575, abs=5e-9)
    assert float(losses.information_entropy(torch.zeros(4, 5))) == pytest.approx(-math.log10(5))
    random = torch.Generator().manual_seed(0)
    uneven = [torch.randn(1, 5, generator=random) * size for size in (1e-3, 0.1, 1, 10, 100)]
    assert all(float(losses.information_entropy(logits)) > -math.log10(5) for logits in uneven[1:])
    assert float(losses.information_entropy(uneven[0])) == pytest.approx(-math.log10(5), abs=1e-6)
    # Each sample predicts a different class with certainty, so the mean p is uniform
    split = torch.eye(5) * 50
    assert float(losses.information_entropy(split)) == pytest.approx(-math.log10(5))
    gap = torch.tensor([[0.0, 200.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(losses.information_entropy(gap), gap)
    assert grad.isfinite().all()


def competition_by_hand(teacher: torch.Tensor, student: torch.Tensor) -> float:
    """Return 1 - J of lists of numbers.

    P and Q are taken at temperature 3, and M is their mean. Then all are limited to
    [0.01, 0.99].
    """
    total = 0.0
    for t, s in zip(teacher.tolist(), student.tolist(), strict=True):
        p, q = (
            [math.exp(z / 3) / sum(math.exp(other / 3) for other in row) for z in row]
            for row in (s, t)
        )
        for pair in zip(p, q, strict=True):
            m, a, b = (min(max(value, 0.01), 0.99) for value in (sum(pair) / 2, *pair))
            total += m * math.log(m / a) / 2 + m * math.log(m / b) / 2
    return 1 - min(max(total / len(teacher), 0.0), 1.0)


def test_competition_of_saturated_networks_is_that_of_probabilities_kept_from_0_and_1() -> None:
    """For one of two images, the networks are sure of different classes.

    There M is 1/2, P is 0.99, and Q is 0.01. Without limits, J would exceed 1.
    """
    sure, other = [300.0, 0.0, 0.0], [0.0, 300.0, 0.0]
    t, s = torch.tensor([sure, sure]).double(), torch.tensor([other, sure]).double()
    assert float(losses.competition(t, s)) == pytest.approx(
        1 - math.log(0.25 / 0.0099) / 4, abs=1e-12
    )
    # J is 1.61 and is bounded to 1
    assert float(losses.competition(t[:1], s[:1])) == 0
    assert float(losses.competition(t, t.clone())) == pytest.approx(1.0, abs=1e-12)
    # M is computed from P and Q before they are clipped, and is clipped afterwards
    milder = torch.tensor([[12.0, 0.0, 0.0], sure]).double()
    for pair in ((T, S), (t, s), (milder, s), (s, milder), (10 * T, S), (-3 * S, 5 * T)):
        expected = competition_by_hand(*pair)
        assert 0 < expected < 1 and float(losses.competition(*pair)) == pytest.approx(
            expected, abs=1e-12
        )


def test_competition_and_total_variation() -> None:
    assert float(losses.competition(T, S)) == pytest.approx(0.98225644, abs=5e-9)
    assert float(losses.competition(T, T.clone())) == pytest.approx(1.0)
    ramp = (torch.arange(16, dtype=torch.float64) / 15).reshape(1, 1, 4, 4)
    assert float(losses.total_variation(ramp)) == pytest.approx(2.75470054, abs=5e-9)
    assert float(losses.total_variation(ramp, "l1")) == pytest.approx(0.86666667, abs=5e-9)
    # The norm over a batch grows with the batch, and the mean does not
    two = torch.cat([ramp, ramp])
    assert float(losses.total_variation(two)) == pytest.approx(2**0.5 * 2.75470054, abs=1e-8)
    assert float(losses.total_variation(two, "l1")) == pytest.approx(0.86666667, abs=5e-9)
