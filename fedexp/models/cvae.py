"""Conditional variational autoencoders (Kingma & Welling 2014; Sohn et al. 2015) of linear layers.

MA-Echo draws digits with decoders 30-256-512-784 (Section 7.5): 30 is the latent code and the one-hot label, 20 + 10.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedexp.core.build import require
from fedexp.core.net import Net
from fedexp.core.weights import ModelSpec, Weights


class CvaeDecoder(nn.Module):
    """p(x | z, y): linear layers with biases and ReLU between them, on [latent code, one-hot label].

    Its layers are ``decoder.0``, ``decoder.1`` ...; it can be fused and run without the encoder.

    Args:
        input_shape: of one image; num_classes: of the label.
        latent: width of the code z.
        hidden: widths of the hidden layers, from the code to the image.
    """

    def __init__(
        self,
        *,
        input_shape: tuple[int, ...],
        num_classes: int,
        latent: int = 20,
        hidden: tuple[int, ...] = (256, 512),
    ) -> None:
        super().__init__()
        pixels = math.prod(input_shape)
        widths = (latent + num_classes, *hidden, pixels)
        require(
            min(latent, num_classes, *widths) >= 1,
            f"every width must be at least 1, got {latent=}, {hidden=}",
        )
        self.decoder = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    @property
    def linear_chain(self) -> tuple[tuple[str, str | None], ...]:
        """(weight, bias) names of the layers."""
        return tuple((f"decoder.{i}.weight", f"decoder.{i}.bias") for i in range(len(self.decoder)))

    def forward(self, code: Tensor) -> Tensor:
        """(batch, latent + classes) -> (batch, pixels) logits; their sigmoid is the probability of a white pixel."""
        x = code.flatten(1)
        for layer in self.decoder[:-1]:
            x = torch.relu(layer(x))
        logits: Tensor = self.decoder[-1](x)
        return logits


class Cvae(nn.Module):
    """Encoder q(z | x, y) and decoder p(x | z, y), the encoder's hidden widths being the decoder's in reverse.

    Layers: ``encoder.0`` ..., ``mean`` and ``logvar`` (of z), ``decoder.0`` ....

    Args:
        input_shape, num_classes, latent, hidden: as for `CvaeDecoder`.
        mean, std: the data set's normalisation by channel, which is undone: a Bernoulli pixel lies in [0, 1].
    """

    def __init__(
        self,
        *,
        input_shape: tuple[int, ...],
        num_classes: int,
        latent: int = 20,
        hidden: tuple[int, ...] = (256, 512),
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
    ) -> None:
        super().__init__()
        require(
            len(mean) == len(std),
            f"mean and std need one number per channel each, got {mean=}, {std=}",
        )
        self.normalisation = mean, std
        self.num_classes = num_classes
        generator = CvaeDecoder(
            input_shape=input_shape, num_classes=num_classes, latent=latent, hidden=hidden
        )
        self.decoder = generator.decoder
        widths = (math.prod(input_shape) + num_classes, *reversed(hidden))
        self.encoder = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.mean = nn.Linear(widths[-1], latent)
        self.logvar = nn.Linear(widths[-1], latent)

    def forward(self, x: Tensor, y: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """Negative evidence lower bounds, in nats.

        Args:
            x: (batch, *input_shape), normalised.
            y: (batch,) labels.
            noise: (batch, latent) of N(0, 1); None: z is the posterior's mean.

        Returns:
            (batch, 2): reconstruction loss and KL divergence of each image given its label; without labels,
            (batch, classes): the bound on log p(x | y) under each label, which orders the labels as a classifier would.
        """
        if y is None:
            bounds = [
                -self.forward(x, torch.full((len(x),), k, device=x.device)).sum(1)
                for k in range(self.num_classes)
            ]
            return torch.stack(bounds, dim=1)
        pixels, label = self.pixels(x).flatten(1), one_hot(y, self.num_classes, x.dtype)
        hidden = torch.cat([pixels, label], dim=1)
        for layer in self.encoder:
            hidden = torch.relu(layer(hidden))
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = mean if noise is None else mean + noise * torch.exp(0.5 * logvar)
        code = torch.cat([z, label], dim=1)
        for layer in self.decoder[:-1]:
            code = torch.relu(layer(code))
        logits = self.decoder[-1](code)
        missed = functional.binary_cross_entropy_with_logits(logits, pixels, reduction="none").sum(
            1
        )
        return torch.stack([missed, kl_to_standard_normal(mean, logvar)], dim=1)

    def pixels(self, x: Tensor) -> Tensor:
        """Normalised images as pixels in [0, 1], of the same shape (batch, *input_shape)."""
        if not self.normalisation[0]:
            return x
        shape = (-1,) + (1,) * (x.dim() - 2)
        mean, std = (
            torch.tensor(values, dtype=x.dtype, device=x.device).reshape(shape)
            for values in self.normalisation
        )
        return x * std + mean


def one_hot(labels: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """(n,) -> (n, num_classes). torch's own cannot be vectorised over clients."""
    return (labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)).to(dtype)


def kl_to_standard_normal(mean: Tensor, logvar: Tensor) -> Tensor:
    """KL(N(mean, diag exp(logvar)) || N(0, I)) in nats, summed over the last axis (Kingma & Welling 2014, App. B)."""
    return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(-1)


def decoder_of(weights: Weights) -> Weights:
    """The decoder of a `Cvae`, as a model of its own; the tensors are shared."""
    arch = f"{CvaeDecoder.__module__}.{CvaeDecoder.__qualname__}"
    params = {name: value for name, value in weights.params.items() if name.startswith("decoder.")}
    kwargs = tuple((key, value) for key, value in weights.spec.kwargs if key not in ("mean", "std"))
    return Weights(ModelSpec(arch, kwargs), params, {})


@torch.no_grad()
def generate(decoder: Weights, labels: Tensor, z: Tensor) -> Tensor:
    """Images (n, *input_shape) in [0, 1] of codes z (n, latent) and labels (n,): the pixels' probabilities."""
    given = dict(decoder.spec.kwargs)
    label = one_hot(labels, given["num_classes"], z.dtype)
    net = Net(decoder.spec, z.device, z.dtype)
    net.train(False)
    return (
        net(decoder.params, {}, torch.cat([z, label], dim=1))
        .sigmoid()
        .reshape(-1, *given["input_shape"])
    )
