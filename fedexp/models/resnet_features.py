"""Two trained linear layers on the features of a frozen ResNet-18 or ResNet-34.

MA-Echo uses such models for CIFAR-100 and DomainNet.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedexp.core.build import require
from fedexp.core.errors import ConfigError
from fedexp.core.paths import user_path
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec
from fedexp.models.mlp import MLP
from fedexp.models.resnet import ResNet
from fedexp.storage.files import file_sha256

# Patterns in torchvision's names of tensors, and their replacements in fedexp's names.
_RENAMED: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^conv1\.", "conv."),
    (r"^bn1\.", "norm."),
    (r"^layer([1-4])\.", lambda match: f"stages.{int(match[1]) - 1}."),
    (r"\.bn([12])\.", r".norm\1."),
    (r"\.downsample\.", ".shortcut."),
)


class ResNetExtractor(nn.Module):
    """torchvision's ResNet without its last layer, always in evaluation mode.

    BatchNorm uses its stored statistics.

    Args:
        input_shape: (channels, height, width) with 1 or 3 channels. Grey images are
            repeated on three channels.
        depth: 18 or 34.
        pretrained: File of torchvision's weights. It is a ``.pth`` file such as
            ``resnet18-....pth``, or a safetensors file with the same tensor names.
        sha256: Expected SHA-256 of the file's bytes. None accepts any file.
        random_features: Whether to use random weights instead of a file. They have He
            initialisation with a fixed seed, so they are equal for all clients and
            runs.
        resize: Height and width to which images are first scaled (bilinear), or None.
        width: Channels of the first stage. It is 64 in torchvision's weights.
    """

    frozen_parameters: ClassVar[tuple[str, ...]] = ("*",)

    def __init__(
        self,
        *,
        input_shape: tuple[int, int, int],
        depth: Literal[18, 34] = 18,
        pretrained: str | None = None,
        sha256: str | None = None,
        random_features: bool = False,
        resize: int | None = None,
        width: int = 64,
    ) -> None:
        super().__init__()
        require(
            len(input_shape) == 3 and input_shape[0] in (1, 3),
            "a feature extractor takes images (1 or 3 channels, height, width), "
            f"got samples of {input_shape}",
        )
        require(resize is None or resize >= 1, f"resize must be at least 1 or null, got {resize}")
        require(
            pretrained is None or not random_features,
            "give model.pretrained or model.random_features, not both",
        )

        if pretrained is None and not random_features:
            raise ConfigError(
                "the feature extractor has no weights",
                where="model.pretrained",
                expected=f"a local file of torchvision's ResNet-{depth} weights",
                got="null",
                do=f"set model.pretrained=/path/to/resnet{depth}.pth, "
                "or model.random_features=true for a trial",
            )

        self.resize = resize
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.resnet = ResNet(
                input_shape=(3, *input_shape[1:]),
                num_classes=1,
                depth=depth,
                norm="batch",
                width=width,
            )

        self.features = self.resnet.output.in_features
        self.resnet.output = nn.Identity()  # type: ignore[assignment]

        if pretrained is not None and self.resnet.conv.weight.device.type != "meta":
            self._load(user_path(pretrained, "model.pretrained"), sha256)
        self.eval()

    def _load(self, file: Path, sha256: str | None) -> None:
        if not file.is_file():
            raise ConfigError(
                "the file of pre-trained weights does not exist",
                where="model.pretrained",
                expected="a file as torchvision publishes it (a state dictionary), "
                "or the same as safetensors",
                got=str(file),
                do="put the file there, or correct model.pretrained; nothing is downloaded",
            )

        found = file_sha256(file) if sha256 is not None else None
        if found != sha256:
            raise ConfigError(
                "the pre-trained weights are not the ones that the config names",
                where="model.sha256",
                expected=sha256,
                got=f"{found} in {file}",
                do="give that file, or remove model.sha256",
            )

        weights = renamed(_read(file))
        own = self.resnet.state_dict()
        fits = {
            name
            for name, value in weights.items()
            if name in own and own[name].shape == value.shape
        }
        missing, unexpected = sorted(own.keys() - fits), sorted(weights.keys() - fits)
        if missing or unexpected:
            raise ConfigError(
                "the pre-trained weights do not belong to this network",
                where="model.pretrained",
                expected="torchvision's names and shapes; "
                f"missing: {', '.join(missing[:4]) or 'none'}",
                got=f"{file}; unexpected: {', '.join(unexpected[:4]) or 'none'}",
                do="give the weights of the depth that the model has (ResNet-18 or ResNet-34)",
            )

        self.resnet.load_state_dict(weights)

    def train(self, mode: bool = True) -> ResNetExtractor:
        """Stay in evaluation mode. The argument `mode` has no effect."""
        super().train(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to (batch, features).

        There are 512 features if `width` is 64.
        """
        if self.resize is not None:
            x = functional.interpolate(
                x, (self.resize, self.resize), mode="bilinear", antialias=True
            )
        with torch.no_grad():
            features: Tensor = self.resnet(x.expand(-1, 3, -1, -1))
        return features


class ResNetFeatures(nn.Module):
    """A frozen `ResNetExtractor`, then two linear layers with one ReLU between them.

    Only the two linear layers are trained.

    Args:
        input_shape: As for `ResNetExtractor`.
        num_classes: Number of logits.
        depth: As for `ResNetExtractor`.
        pretrained: As for `ResNetExtractor`.
        sha256: As for `ResNetExtractor`.
        random_features: As for `ResNetExtractor`.
        resize: As for `ResNetExtractor`.
        width: As for `ResNetExtractor`.
        hidden: Number of outputs of the first linear layer.
        bias: Whether the two layers have biases.
    """

    frozen_parameters: ClassVar[tuple[str, ...]] = ("extractor.*",)
    content_keys: ClassVar[Mapping[str, Callable[[Path], str]]] = {"pretrained": file_sha256}

    def __init__(
        self,
        *,
        input_shape: tuple[int, int, int],
        num_classes: int,
        depth: Literal[18, 34] = 18,
        hidden: int = 256,
        bias: bool = False,
        pretrained: str | None = None,
        sha256: str | None = None,
        random_features: bool = False,
        resize: int | None = None,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.extractor = ResNetExtractor(
            input_shape=input_shape,
            depth=depth,
            pretrained=pretrained,
            sha256=sha256,
            random_features=random_features,
            resize=resize,
            width=width,
        )

        head = MLP(
            input_shape=(self.extractor.features,),
            num_classes=num_classes,
            hidden=(hidden,),
            bias=bias,
        )
        self.hidden, self.output = head.hidden, head.output

    @staticmethod
    def extractor_and_head(
        kwargs: Mapping[str, Any],
    ) -> tuple[ModelSpec, ModelSpec, tuple[int, ...]]:
        """Split the model into its frozen and its trained part.

        Args:
            kwargs: Constructor arguments of the model.

        Returns:
            The spec of the frozen part, the spec of the trained part, and the shape of
            the features between them.
        """
        own = dict(kwargs)
        head = {
            "num_classes": own.pop("num_classes"),
            "hidden": (own.pop("hidden", 256),),
            "bias": own.pop("bias", False),
        }
        features = head["input_shape"] = (own.get("width", 64) * 8,)
        return _spec(ResNetExtractor, own), _spec(MLP, head), features

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to logits (batch, num_classes)."""
        logits: Tensor = self.output(torch.relu(self.hidden[0](self.extractor(x))))
        return logits


def _spec(kind: type[nn.Module], kwargs: Mapping[str, Any]) -> ModelSpec:
    return ModelSpec(f"{kind.__module__}.{kind.__qualname__}", tuple(sorted(kwargs.items())))


def renamed(weights: Tree) -> Tree:
    """Rename the tensors of torchvision's state dictionary to fedexp's names.

    The last layer is left out.
    """
    found = {name: value for name, value in weights.items() if not name.startswith("fc.")}
    for pattern, ours in _RENAMED:
        found = {re.sub(pattern, ours, name): value for name, value in found.items()}
    return found


def _read(file: Path) -> Tree:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, "cpu", weights_only=True)
        )
    except (
        pickle.UnpicklingError,
        SafetensorError,
        RuntimeError,
        OSError,
        EOFError,
        ValueError,
    ) as error:
        # Only the first sentence of torch's message is used. The rest is advice that
        # should not be followed.
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ConfigError(
            "the file of pre-trained weights cannot be read",
            where="model.pretrained",
            expected="a state dictionary written by torch.save, or safetensors",
            got=f"{file}: {reason or type(error).__name__}",
            do="get the publisher's file again",
        ) from error

    if not isinstance(found, dict) or not all(
        isinstance(value, Tensor) for value in found.values()
    ):
        raise ConfigError(
            "the file of pre-trained weights does not contain a state dictionary",
            where="model.pretrained",
            expected="tensors by name",
            got=f"{type(found).__name__} in {file}",
        )
    return found
