"""BatchNorm that is folded into the layer before it gives the same function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedexp.core.errors import ConfigError
from fedexp.core.net import Net
from fedexp.core.weights import Weights
from fedexp.matching.folding import fold_batch_norm, folded_spec
from fedexp.matching.structure import structure_of, with_widths
from tests.matching.nets import CLASSES, IMAGE, MODELS, spec_of, weights_of
from tests.world import CPU


class Normed(nn.Module):
    """A convolution with BatchNorm before or after the activation, or without a norm.

    The norm may have running statistics.
    """

    def __init__(
        self, *, norm: bool = True, between: str = "", affine: bool = True, stored: bool = True
    ) -> None:
        super().__init__()
        self.conv, self.output = nn.Conv2d(2, 6, 3, bias=False), nn.Linear(6 * 36, CLASSES)
        self.norm = (
            nn.BatchNorm2d(6, eps=0.3, affine=affine, track_running_stats=stored)
            if norm
            else nn.Identity()
        )
        if not norm:
            self.conv = nn.Conv2d(2, 6, 3)
        self.between = between

    @staticmethod
    def without_batch_norm(kwargs):
        return {"norm": False}

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = self.norm(torch.relu(x) if self.between == "relu" else x)
        y = y + x if self.between == "skip" else y
        return self.output(torch.relu(y).flatten(1))


def normed(**kwargs):
    return spec_of("tests.matching.test_folding.Normed", **kwargs)


def output(weights: Weights, x: Tensor) -> Tensor:
    net = Net(weights.spec, CPU, x.dtype)
    net.train(False)
    with torch.no_grad():
        return net(weights.params, weights.buffers, x)


FOLDABLE = {
    "cnn without biases": MODELS["cnn, BatchNorm"],
    "cnn with biases": spec_of(
        "fedexp.models.cnn.ConvNet", channels=[4, 6], kernel=3, hidden=[], norm="batch"
    ),
    "unet": MODELS["unet, BatchNorm"],
    "another eps": normed(),
    "not affine": normed(affine=False),
}


@pytest.mark.parametrize("name", FOLDABLE)
def test_the_folded_model_computes_the_same_and_has_no_norm(name: str) -> None:
    weights = weights_of(FOLDABLE[name], 1)
    folded = fold_batch_norm(weights, IMAGE)
    assert folded.spec == folded_spec(weights.spec, IMAGE)
    module = folded.module()
    assert list(dict(module.named_parameters())) == list(folded.params)
    assert not folded.buffers and not any(isinstance(m, nn.BatchNorm2d) for m in module.modules())
    assert {
        f"{n}.bias" for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)
    } <= set(folded.params)
    x = torch.randn(5, *IMAGE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(output(folded, x), output(weights, x), rtol=1e-10, atol=1e-10)


def test_folded_weights_equal_the_papers_formula() -> None:
    """W' is gamma / sqrt(var + eps) W, computed one channel at a time.

    b' is gamma (b - mean) / sqrt(var + eps) + beta.
    """
    weights = weights_of(FOLDABLE["cnn with biases"], 2)
    folded, w, s = fold_batch_norm(weights, IMAGE), weights.params, weights.buffers
    for layer in range(2):
        for k in range(len(w[f"convs.{layer}.weight"])):
            factor = (
                float(w[f"norms.{layer}.weight"][k])
                / float(s[f"norms.{layer}.running_var"][k] + 1e-5) ** 0.5
            )
            bias = factor * (w[f"convs.{layer}.bias"][k] - s[f"norms.{layer}.running_mean"][k])
            torch.testing.assert_close(
                folded.params[f"convs.{layer}.weight"][k], factor * w[f"convs.{layer}.weight"][k]
            )
            torch.testing.assert_close(
                folded.params[f"convs.{layer}.bias"][k], bias + w[f"norms.{layer}.bias"][k]
            )
    assert torch.equal(folded.params["output.weight"], w["output.weight"])


def test_float32_stays_float32_and_what_has_no_norm_stays_as_it_is() -> None:
    weights = Weights.init(MODELS["cnn, BatchNorm"], 0, CPU, torch.float32)
    assert {value.dtype for value in fold_batch_norm(weights, IMAGE).params.values()} == {
        torch.float32
    }
    plain = weights_of(MODELS["cnn"], 0)
    assert fold_batch_norm(plain, IMAGE) is plain


def test_a_folded_network_is_matched_and_grown_as_any_other() -> None:
    folded = folded_spec(MODELS["cnn, BatchNorm"], IMAGE)
    groups = {group.name: group.size for group in structure_of(folded, IMAGE).groups}
    assert groups == {"convs.0.weight": 4, "convs.1.weight": 6, "hidden.0.weight": 9}
    grown = dict(with_widths(folded, IMAGE, {"convs.1.weight": 11}).kwargs)
    assert (grown["channels"], grown["norm"], grown["bias"]) == ((4, 11), "none", True)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (MODELS["resnet, BatchNorm"], "cannot be folded into its layers"),
        (normed(between="relu"), "does not follow a layer directly"),
        (normed(between="skip"), "another function"),
        (normed(stored=False), "has no running statistics"),
    ],
)
def test_folding_of_unsuitable_networks_is_refused(spec, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        folded_spec(spec, IMAGE)
    with pytest.raises(ConfigError, match=match):
        fold_batch_norm(weights_of(spec, 0), IMAGE)
