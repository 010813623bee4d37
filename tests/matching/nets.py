"""Networks for the tests, with units that can or cannot be reordered."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedexp.core.seeds import seed_of
from fedexp.core.weights import ModelSpec, Weights

IMAGE, CLASSES = (2, 8, 8), 3


class Concatenated(nn.Module):
    """A network whose last layer reads the concatenated maps of two branches.

    The maps are flattened with the channels last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 5, 3)
        self.output = nn.Linear(8 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([torch.relu(self.a(x)), torch.tanh(self.b(x))], 1)
        return self.output(nn.functional.max_pool2d(x, 2).permute(0, 2, 3, 1).flatten(1))


class PartlyFrozen(nn.Module):
    """A network that is frozen up to the norm after its convolution."""

    frozen_parameters = ("conv.*", "norm.*")

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6)
        self.hidden, self.output = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.relu(self.hidden(self.norm(self.conv(x)).mean((2, 3)))))


class FrozenHead(nn.Module):
    """A network whose output layer is frozen."""

    frozen_parameters = ("output.*",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 7), nn.Linear(7, 5)
        self.output = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.relu(self.second(torch.relu(self.first(x.flatten(1))))))


class Gated(nn.Module):
    """A network whose channels are multiplied by the units of a linear layer.

    Squeeze-and-excitation does the same. A LayerNorm precedes the output layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(2, 6, 3), nn.Linear(6, 6)
        self.norm, self.output = nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x * torch.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None]
        return self.output(self.norm(x.amax((2, 3))))


class Scaled(nn.Module):
    """A network with a parameter that does not belong to a layer.

    The parameter has one number per hidden unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(128, 6), nn.Linear(6, CLASSES)
        self.scale = nn.Parameter(torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.scale * self.hidden(x.flatten(1)))


class Ordered(nn.Module):
    """A network whose last layer reads the cumulative sums of the hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(128, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.hidden(x.flatten(1)).cumsum(1))


class InputAdded(nn.Module):
    """A network with a skip connection from the input.

    The hidden units cannot be reordered, because the order of the inputs is fixed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(128, 128), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.output(x + self.hidden(x))


class Half(nn.Module):
    """A network whose last layer reads only half of the hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(128, 6), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.hidden(x.flatten(1))[:, :3])


class TwoHeads(nn.Module):
    """A network whose output is the sum of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output, self.skip = (
            nn.Linear(128, 6),
            nn.Linear(6, CLASSES),
            nn.Linear(128, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.output(self.hidden(x)) + self.skip(x)


class Repeated(nn.Module):
    """A network that uses one layer twice, once on its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.output = (
            nn.Linear(128, 6),
            nn.Linear(6, 6),
            nn.Linear(6, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.again(torch.relu(self.again(torch.relu(self.first(x.flatten(1)))))))


class Crossed(nn.Module):
    """A network in which unit j of one layer is added to unit 5 - j of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.output = nn.Linear(128, 6), nn.Linear(128, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.output(self.a(x) + self.b(x).flip(1))


def spec_of(target: str, **kwargs) -> ModelSpec:
    path = target if "." in target else f"tests.matching.nets.{target}"
    return ModelSpec.of({"_target_": path, **kwargs}, IMAGE, CLASSES)


MODELS = {
    "mlp": spec_of("fedexp.models.mlp.MLP", hidden=[7, 5]),
    "mlp without biases, with dropout": spec_of(
        "fedexp.models.mlp.MLP", hidden=[7, 5], bias=False, dropout=0.5
    ),
    "linear": spec_of("fedexp.models.mlp.MLP", hidden=[]),
    "cnn": spec_of(
        "fedexp.models.cnn.ConvNet", channels=[4, 6], kernel=3, hidden=[9], conv_dropout=0.2
    ),
    "cnn, flattened at once": spec_of(
        "fedexp.models.cnn.ConvNet", channels=[5], kernel=3, hidden=[], bias=False
    ),
    "cnn, BatchNorm": spec_of(
        "fedexp.models.cnn.ConvNet", channels=[4, 6], kernel=3, hidden=[9], norm="batch", bias=False
    ),
    "resnet, BatchNorm": spec_of(
        "fedexp.models.resnet.ResNet", norm="batch", width=4, stem="cifar"
    ),
    "resnet, one group": spec_of("fedexp.models.resnet.ResNet", norm="group", groups=1, width=2),
    "unet, BatchNorm": spec_of(
        "fedexp.models.unet.UNet", down=[[4, 3], [5], [6]], up=[[3], [4, 2]]
    ),
    "concatenated": spec_of("Concatenated"),
    "gated": spec_of("Gated"),
}
REFUSED = {
    "normalises 2 groups": spec_of("fedexp.models.resnet.ResNet", norm="group", groups=2, width=4),
    "another function": spec_of("Scaled"),
    "mixes several units": spec_of("Ordered"),
    "function once": spec_of("InputAdded"),
    "more often than others": spec_of("Half"),
    "units of different layers": spec_of("Repeated"),
    "mixes different units": spec_of("Crossed"),
    "not only that of its last layer": spec_of("TwoHeads"),
}


def weights_of(spec: ModelSpec, *names: object) -> Weights:
    """Return float64 weights in which no two units are equal.

    The parameters of the norms and the biases are not constant.
    """
    start = Weights.init(spec, seed_of("nets", *names), torch.device("cpu"), torch.float64)
    generator = torch.Generator().manual_seed(seed_of("noise", *names))

    def noisy(tree: dict[str, Tensor]) -> dict[str, Tensor]:
        draws = {
            k: torch.rand(v.shape, generator=generator, dtype=torch.float64)
            for k, v in tree.items()
        }
        return {
            k: v * (0.5 + draws[k]) + 0.1 * draws[k] if v.is_floating_point() else v
            for k, v in tree.items()
        }

    return Weights(spec, noisy(start.params), noisy(start.buffers))
