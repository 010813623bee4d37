import pytest
import torch

from fedexp.core.dropout import Dropout
from fedexp.core.seeds import torch_generator


def uniform(name, shape):
    return torch.rand(shape, generator=torch_generator("noise", name))


def layer(p, stream="drop"):
    module = Dropout(p)
    module.noise, module.stream = uniform, stream
    return module.train()


def test_mean_is_preserved_and_survivors_are_scaled():
    p, n = 0.3, 200_000
    out = layer(p)(torch.ones(n))
    assert set(out.unique().tolist()) == {0.0, out.max().item()}
    assert out.max().item() == pytest.approx(1 / (1 - p))
    # This is the standard deviation of the mean of Bernoulli(1 - p) / (1 - p)
    deviation = (p / (1 - p) / n) ** 0.5
    assert abs(out.mean().item() - 1) < 5 * deviation


def test_same_noise_same_mask_and_streams_differ():
    x = torch.ones(64, 8)
    assert torch.equal(layer(0.5)(x), layer(0.5)(x))
    assert not torch.equal(layer(0.5, "a")(x), layer(0.5, "b")(x))


def test_dropout_requests_noise_of_the_input_shape():
    asked = []
    module = layer(0.5, "dropouts.1")
    module.noise = lambda name, shape: asked.append((name, shape)) or torch.zeros(shape)
    module(torch.ones(2, 3, 4, 5))
    assert asked == [("dropouts.1", (2, 3, 4, 5))]


def test_an_element_is_dropped_exactly_where_its_number_is_below_p():
    module = layer(0.25)
    module.noise = lambda name, shape: torch.tensor([0.0, 0.2499, 0.25, 0.99])
    assert torch.equal(module(torch.ones(4)) > 0, torch.tensor([False, False, True, True]))


def test_gradient_passes_through_survivors_only():
    x = torch.ones(100, requires_grad=True)
    out = layer(0.5)(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, out.detach())


def test_double_precision_is_kept():
    out = layer(0.3)(torch.ones(100, dtype=torch.float64))
    assert out.dtype == torch.float64
    assert out.max().item() == 1 / (1 - 0.3)


def test_identity_in_evaluation_and_at_zero_without_any_noise():
    x = torch.randn(5, generator=torch_generator("x"))
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0).train()(x) is x


def test_training_without_noise_says_who_sets_it():
    with pytest.raises(RuntimeError, match=r"Net\.set_noise"):
        Dropout(0.5).train()(torch.ones(3))


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_dropout_with_impossible_probability_raises(p):
    with pytest.raises(ValueError, match="dropout must be"):
        Dropout(p)


def test_never_touches_the_global_generator():
    before = torch.random.get_rng_state()
    layer(0.5)(torch.ones(10))
    assert torch.equal(before, torch.random.get_rng_state())
