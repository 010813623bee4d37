"""Tests of the U-Net: layers, channels, the forward pass, and refused arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedexp.core.errors import ConfigError
from fedexp.core.seeds import torch_generator
from fedexp.core.weights import ModelSpec
from tests.matching.nets import MODELS, weights_of


def spec(shape: tuple[int, int, int] = (3, 32, 32), **kwargs: object) -> ModelSpec:
    return ModelSpec.of({"_target_": "fedexp.models.unet.UNet", **kwargs}, shape, 1)


def test_the_default_has_nafis_nineteen_layers_and_reads_ronnebergers_channels() -> None:
    with torch.device("meta"):
        module = spec().module()
        assert module(torch.empty(2, 3, 32, 48)).shape == (2, 1, 32, 48)
    convs = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    assert [conv.kernel_size for conv in convs] == [(3, 3)] * 18 + [(1, 1)]
    assert [conv.in_channels for conv in convs[10:18:2]] == [1024, 512, 256, 128]
    assert [conv.bias is None for conv in convs] == [True] * 18 + [False]


def doubled(x: Tensor, axis: int) -> Tensor:
    """Double the size along `axis` by linear interpolation.

    The new values are at a quarter and at three quarters between the centres of
    neighbours. Outside the outermost centres, the value is that of the edge.
    """
    x = x.movedim(axis, 0)
    before, after = torch.cat([x[:1], x[:-1]]), torch.cat([x[1:], x[-1:]])
    return (
        torch.stack([0.25 * before + 0.75 * x, 0.75 * x + 0.25 * after], 1)
        .flatten(0, 1)
        .movedim(0, axis)
    )


def test_forward_is_the_network_written_out() -> None:
    weights = weights_of(MODELS["unet, BatchNorm"], 0)
    w, s = weights.params, weights.buffers

    def block(x: Tensor, name: str, count: int) -> Tensor:
        for i in range(count):
            columns = nn.functional.unfold(nn.functional.pad(x, (1, 1, 1, 1)), 3)
            x = (w[f"{name}.convs.{i}.weight"].flatten(1) @ columns).unflatten(2, x.shape[2:])
            mean, var = (
                s[f"{name}.norms.{i}.running_{what}"][:, None, None] for what in ("mean", "var")
            )
            scale, shift = (
                w[f"{name}.norms.{i}.{what}"][:, None, None] for what in ("weight", "bias")
            )
            x = ((x - mean) / (var + 1e-5).sqrt() * scale + shift).clamp(min=0)
        return x

    def halved(x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).amax((3, 5))

    x = torch.randn(3, 2, 8, 8, generator=torch_generator("x"), dtype=torch.float64)
    a = block(x, "down.0", 2)
    b = block(halved(a), "down.1", 1)
    c = block(halved(b), "down.2", 1)
    d = block(torch.cat([b, doubled(doubled(c, 2), 3)], 1), "up.0", 1)
    e = block(torch.cat([a, doubled(doubled(d, 2), 3)], 1), "up.1", 2)
    expected = (
        torch.einsum("oi,bihw->bohw", w["output.weight"][:, :, 0, 0], e)
        + w["output.bias"][:, None, None]
    )
    with torch.no_grad():
        torch.testing.assert_close(weights.module()(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("shape", "kwargs", "said"),
    [
        ((3, 32, 40), {}, "multiples of 16 for 4 poolings, got 32x40"),
        ((3, 32), {}, "takes images"),
        ((3, 32, 32), {"up": [[4]]}, "one block fewer than down, got 5 down and 1 up"),
        ((3, 32, 32), {"down": [[4], []], "up": [[4]]}, "every block needs a convolution"),
        ((3, 32, 32), {"down": [[4], [0]], "up": [[4]]}, "every convolution a channel"),
    ],
)
def test_unet_with_impossible_arguments_raises(
    shape: tuple[int, int, int], kwargs: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        spec(shape, **kwargs).module()
