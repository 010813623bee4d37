"""Conditional variational autoencoders of linear layers.

References are Kingma & Welling 2014 and Sohn et al. 2015. MA-Echo generates digits with
decoders of widths 30-256-512-784 (Section 7.5 of its paper). The 30 inputs are 20
entries of the latent code and 10 entries of the one-hot label.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedexp.core.build import require
from fedexp.core.net import Net
from fedexp.core.weights import ModelSpec, Weights


class CvaeDecoder(nn.Module):
    """The decoder p(x | z, y) of images x, given a latent code z and a label y.

    It consists of linear layers with biases and with ReLU between them. The input is
    the latent code followed by the one-hot label. The layers are named ``decoder.0``,
    ``decoder.1`` ... A server can merge decoders and run them without the encoders.

    Args:
        input_shape: Shape of one image.
        num_classes: Number of classes of the label.
        latent: Number of entries of the code z.
        hidden: Widths of the hidden layers, in the order from the code to the image.
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
        widths = (latent + num_classes, *hidden, math.prod(input_shape))
        require(
            min(latent, num_classes, *widths) >= 1,
            f"every width must be at least 1, got {latent=}, {hidden=}",
        )
        self.decoder = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    @property
    def linear_chain(self) -> tuple[tuple[str, str | None], ...]:
        """Return a pair (name of the weight, name of the bias) for each layer."""
        return tuple((f"decoder.{i}.weight", f"decoder.{i}.bias") for i in range(len(self.decoder)))

    def forward(self, code: Tensor) -> Tensor:
        """Map codes (batch, latent + classes) to logits (batch, pixels).

        The sigmoid of a logit is the probability of a white pixel.
        """
        return _decoded(self.decoder, code.flatten(1))


class Cvae(nn.Module):
    """A conditional VAE with an encoder q(z | x, y) and a decoder p(x | z, y).

    Here x is an image, y its label, and z a latent code. The hidden layers of the
    encoder have the widths of the decoder's hidden layers in reverse order. The layers
    are ``encoder.0`` ..., ``mean`` and ``logvar`` (of z), and ``decoder.0`` ...

    Args:
        input_shape: As for `CvaeDecoder`.
        num_classes: As for `CvaeDecoder`.
        latent: As for `CvaeDecoder`.
        hidden: As for `CvaeDecoder`.
        mean: Mean per channel of the data set's normalisation. The network undoes the
            normalisation of its inputs, because pixels of a Bernoulli model are in
            [0, 1].
        std: Standard deviation per channel of the normalisation.
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

        self.decoder = CvaeDecoder(
            input_shape=input_shape, num_classes=num_classes, latent=latent, hidden=hidden
        ).decoder

        widths = (math.prod(input_shape) + num_classes, *reversed(hidden))
        self.encoder = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.mean = nn.Linear(widths[-1], latent)
        self.logvar = nn.Linear(widths[-1], latent)

    def forward(self, x: Tensor, y: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """Compute the terms of the loss, or estimate log p(x | y) for every label y.

        All values are in nats.

        Args:
            x: Normalised images, (batch, *input_shape).
            y: Labels, (batch,). If None, the estimates for all labels are computed.
            noise: Samples of N(0, 1), (batch, latent), for the random code z. If None,
                z is the mean of q(z | x, y).

        Returns:
            With labels, the reconstruction loss and the KL divergence of each image,
            (batch, 2). Without labels, an estimate of log p(x | y) for each image and
            each label y, (batch, classes). It is the evidence lower bound with the mean
            of q in place of random codes, so it may exceed log p(x | y). The estimates
            can be used as the logits of a classifier.
        """
        if y is None:
            estimates = [
                -self.forward(x, torch.full((len(x),), k, device=x.device)).sum(1)
                for k in range(self.num_classes)
            ]
            return torch.stack(estimates, dim=1)

        pixels, label = self.pixels(x).flatten(1), one_hot(y, self.num_classes, x.dtype)
        hidden = torch.cat([pixels, label], dim=1)
        for layer in self.encoder:
            hidden = torch.relu(layer(hidden))

        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = mean if noise is None else mean + noise * torch.exp(0.5 * logvar)

        logits = _decoded(self.decoder, torch.cat([z, label], dim=1))
        missed = functional.binary_cross_entropy_with_logits(logits, pixels, reduction="none").sum(
            1
        )
        return torch.stack([missed, kl_to_standard_normal(mean, logvar)], dim=1)

    def pixels(self, x: Tensor) -> Tensor:
        """Undo the normalisation of images.

        Returns:
            Pixels in [0, 1], of shape (batch, *input_shape).
        """
        if not self.normalisation[0]:
            return x
        shape = (-1,) + (1,) * (x.dim() - 2)
        mean, std = (
            _constant(values, x.dtype, x.device).reshape(shape) for values in self.normalisation
        )
        return x * std + mean


@lru_cache(maxsize=16)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a constant tensor from a cache.

    Without the cache, the constant would be copied to the GPU in each step, and each
    copy would synchronise the GPU.
    """
    return torch.tensor(values, dtype=dtype, device=device)


def _decoded(layers: nn.ModuleList, code: Tensor) -> Tensor:
    """Apply a decoder's layers, with ReLU between them, to codes (batch, n)."""
    for layer in layers[:-1]:
        code = torch.relu(layer(code))
    logits: Tensor = layers[-1](code)
    return logits


def one_hot(labels: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Return the one-hot encoding, (n, num_classes), of labels (n,).

    `torch.nn.functional.one_hot` is not used, because it cannot be vectorised over
    clients.
    """
    return (labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)).to(dtype)


def kl_to_standard_normal(mean: Tensor, logvar: Tensor) -> Tensor:
    """Compute KL(N(mean, diag exp(logvar)) || N(0, I)) in nats.

    The last axis has the entries of the random vector, and the sum runs over it
    (Kingma & Welling 2014, App. B).
    """
    return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(-1)


def decoder_of(weights: Weights) -> Weights:
    """Return the decoder of a `Cvae` as a separate model, without copying tensors."""
    arch = f"{CvaeDecoder.__module__}.{CvaeDecoder.__qualname__}"
    params = {name: value for name, value in weights.params.items() if name.startswith("decoder.")}
    kwargs = tuple((key, value) for key, value in weights.spec.kwargs if key not in ("mean", "std"))
    return Weights(ModelSpec(arch, kwargs), params, {})


@torch.no_grad()
def generate(decoder: Weights, labels: Tensor, z: Tensor) -> Tensor:
    """Generate images from latent codes and labels.

    Args:
        decoder: Weights of a `CvaeDecoder`.
        labels: Labels, (n,).
        z: Latent codes, (n, latent).

    Returns:
        Images (n, *input_shape) in [0, 1]: the probabilities of the pixels.
    """
    given = dict(decoder.spec.kwargs)
    label = one_hot(labels, given["num_classes"], z.dtype)
    logits = Net.for_evaluation(decoder)(decoder.params, {}, torch.cat([z, label], dim=1))
    return logits.sigmoid().reshape(-1, *given["input_shape"])
