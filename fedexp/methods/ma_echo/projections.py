"""Projections ``P = K K^T`` onto the inputs of each layer.

Reference: MA-Echo, Su et al. 2023, Section 4.

A layer has d inputs. A bias counts as one more input, the constant 1. P (d x d) is
close to the projection onto the space of the inputs that occur in the client's data.
``Q = I - P`` is then close to the projection onto the null space. A change of the
layer's weights in the null space does not change the model's outputs on these data.

The client sends the factor K, never P. By default a recursion of rank-one updates is
used. With at most d / 2 updates it computes K directly, one column per update. With
more updates it computes Q, and P = I - Q is factored at the end.

Communication: up, one K per layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.build import require, require_positive
from fedexp.core.data import Samples
from fedexp.core.layers import Layer, layers_in
from fedexp.core.net import Net
from fedexp.core.probe import Probe
from fedexp.core.seeds import torch_generator
from fedexp.core.task import Batch, Task
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights

_BATCHES_AT_ONCE = 16
_NEGLIGIBLE = 1e-9  # eigenvalues of P up to this bound come from rounding


@dataclass(frozen=True)
class Projections(Probe):
    """The probe that computes the factor K of each layer at a client.

    The result is a tree of factors, whose keys are the names of the layers' weights.

    Args:
        layers: Names of the weights of the layers whose factors are computed.
        variant: ``recursion`` (the released code: one pass over the data in batches,
            with a damped rank-one update for every batch mean) or ``exact`` (the
            paper's closed form ``P = X^T (X X^T + z I)^-1 X``, where the rows of X are
            all inputs of the layer).
        damping: Factor of every rank-one update, in (0, 1]. With 1 the recursion gives
            the closed form for the batch means as rows of X.
        alpha: Parameter alpha of the recursion (`_Recursion`) in linear layers.
        alpha_conv: Parameter alpha of the recursion in convolutions.
        z: Parameter z of the closed form.
        batch_size: Number of samples per batch of the pass.
        rank: Number of eigenpairs of P that are sent, one number per layer (Table 6).
            None: all.
    """

    layers: tuple[str, ...]
    variant: Literal["recursion", "exact"] = "recursion"
    damping: float = 0.5
    alpha: float = 0.01**0.8
    alpha_conv: float = 0.00001**0.8
    z: float = 0.01
    batch_size: int = 64
    rank: tuple[int, ...] | None = None

    name: ClassVar[str] = "projections"

    def __post_init__(self) -> None:
        require(0 < self.damping <= 1, f"damping must be in (0, 1], got {self.damping}")
        require_positive(self, "alpha", "alpha_conv", "z")
        require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")
        require(
            self.rank is None
            or (len(self.rank) == len(self.layers) and min(self.rank, default=1) >= 1),
            f"rank needs a positive number for each of the {len(self.layers)} layers, "
            f"got {self.rank}",
        )

    def __call__(
        self, net: Net, weights: Weights, task: Task, samples: Samples, index: Tensor, seed: int
    ) -> Tree:
        order = index[
            torch.randperm(len(index), generator=torch_generator(seed, "order")).to(index.device)
        ]
        updates = -(-len(index) // self.batch_size)
        sums: dict[Layer, _Recursion | _Gram] = {}

        for given in self._inputs(net, weights, task, samples, order):
            for layer, x in given.items():
                if layer not in sums:
                    sums[layer] = self._begin(layer, x, updates)
                sums[layer].add(layer, x)

        factors = {layer.weight: total.factor() for layer, total in sums.items()}
        ranks = self.rank or (None,) * len(self.layers)
        dtype = next(iter(weights.params.values())).dtype

        return {
            name: _truncated(factors[name], rank).to(dtype)
            for name, rank in zip(self.layers, ranks, strict=True)
        }

    def _inputs(
        self, net: Net, weights: Weights, task: Task, samples: Samples, order: Tensor
    ) -> Iterator[dict[Layer, Tensor]]:
        """Yield the inputs (n, ...) of `layers` for n samples at a time.

        The n samples are 16 batches. There may be fewer samples at the end.
        """
        chunk, layers = self.batch_size * _BATCHES_AT_ONCE, layers_in(net)
        for start in range(0, len(order), chunk):
            part = order[start : start + chunk]
            batch = Batch(samples.inputs(part), samples.y.index_select(0, part))
            seen = net.observe(
                weights.params, weights.buffers, *task.inputs(batch), layers=self.layers
            )
            yield {layers[name]: value for name, value in seen.layers.items()}

    def _begin(self, layer: Layer, x: Tensor, updates: int) -> _Recursion | _Gram:
        columns = _patches(layer, x[:1]) if layer.kind == "conv" else x[:1, None]
        d = columns.shape[-1] + (layer.bias is not None)
        if self.variant == "exact":
            return _Gram(d, self.z, x.device)
        alpha = self.alpha_conv if layer.kind == "conv" else self.alpha
        a_batch = len(_windows(layer, x[:1])) if layer.kind == "conv" else 1
        kind = _LowRank if updates * a_batch <= d // 2 else _Dense
        return kind(d, self.damping, alpha, self.batch_size, x.device)


def _windows(layer: Layer, mean_map: Tensor) -> Tensor:
    """Return the patches of one feature map that the released code uses.

    The patches have the size of the kernel (kh, kw), stride 2 and no padding. Only a
    map that is smaller than the kernel gets the padding of the layer.

    Returns:
        Patches of shape (windows, channels * kh * kw).
    """
    small = any(
        size < kernel for size, kernel in zip(mean_map.shape[-2:], layer.kernel, strict=True)
    )
    return F.unfold(mean_map, layer.kernel, padding=layer.padding if small else 0, stride=2)[0].T


def _patches(layer: Layer, x: Tensor) -> Tensor:
    """Return the patches that the convolution multiplies with its weights.

    Returns:
        Patches of shape (b, windows, channels * kh * kw), for a kernel of size (kh,
        kw).
    """
    return F.unfold(x, layer.kernel, layer.dilation, layer.padding, layer.stride).transpose(1, 2)


def _with_one(layer: Layer, rows: Tensor) -> Tensor:
    """Append the constant input of the bias, if the layer has one."""
    return rows if layer.bias is None else F.pad(rows, (0, 1), value=1.0)


class _Gram:
    """The closed form of P, computed from the d x d Gram matrix X^T X.

    ``P = X^T (X X^T + z I)^-1 X = (X^T X + z I)^-1 X^T X``. The rows of X are the
    layer's inputs, and z > 0 is a regularisation.
    """

    def __init__(self, d: int, z: float, device: torch.device) -> None:
        self._gram = torch.zeros(d, d, dtype=torch.float64, device=device)
        self._z = z

    def add(self, layer: Layer, x: Tensor) -> None:
        rows = _patches(layer, x).flatten(0, 1) if layer.kind == "conv" else x
        rows = _with_one(layer, rows).double()
        self._gram.addmm_(rows.T, rows)

    def factor(self) -> Tensor:
        values, vectors = torch.linalg.eigh(self._gram)
        values = values.clamp(min=0)
        K: Tensor = vectors * (values / (values + self._z)).sqrt()
        return K


@dataclass(eq=False)
class _Recursion(ABC):
    """The recursion that computes ``Q = I - P`` from the batch means of the inputs.

    Q starts at I. Every batch mean r causes one update, ``k = Q r`` and
    ``Q <- Q - damping k k^T / (alpha + r^T k)``. In convolutions, the feature maps are
    averaged over the batch, and every patch r of the mean map causes one update.
    """

    d: int
    damping: float
    alpha: float
    batch_size: int
    device: torch.device

    def add(self, layer: Layer, x: Tensor) -> None:
        means = torch.stack([batch.mean(0) for batch in torch.split(x, self.batch_size)])
        rows = (
            torch.cat([_windows(layer, m[None]) for m in means]) if layer.kind == "conv" else means
        )
        for r in _with_one(layer, rows).double():
            self._update(r)

    @abstractmethod
    def _update(self, r: Tensor) -> None:
        """Apply the update of r, of shape (d,)."""

    @abstractmethod
    def factor(self) -> Tensor:
        """Return K with ``K K^T = I - Q``, of shape (d, columns)."""


@dataclass(eq=False)
class _LowRank(_Recursion):
    def __post_init__(self) -> None:
        self._K = torch.empty(self.d, self.d // 2 + 1, dtype=torch.float64, device=self.device)
        self._n = 0

    def _update(self, r: Tensor) -> None:
        K = self._K[:, : self._n]
        k = r - K @ (K.T @ r)
        self._K[:, self._n] = k * (self.damping / (self.alpha + r @ k)).sqrt()
        self._n += 1

    def factor(self) -> Tensor:
        return self._K[:, : self._n].clone()


@dataclass(eq=False)
class _Dense(_Recursion):
    def __post_init__(self) -> None:
        self._Q = torch.eye(self.d, dtype=torch.float64, device=self.device)

    def _update(self, r: Tensor) -> None:
        k = self._Q @ r
        self._Q.addr_(k, k * (-self.damping / (self.alpha + r @ k)))

    def factor(self) -> Tensor:
        P = torch.eye(self.d, dtype=torch.float64, device=self.device) - (self._Q + self._Q.T) / 2
        values, vectors = torch.linalg.eigh(P)
        is_relevant = values > _NEGLIGIBLE
        K: Tensor = vectors[:, is_relevant] * values[is_relevant].clamp(max=1.0).sqrt()
        return K


def _truncated(K: Tensor, rank: int | None) -> Tensor:
    """Reduce K to the `rank` largest eigenpairs of K K^T.

    If `rank` is None, return K itself.
    """
    if rank is None or rank >= min(K.shape):
        return K
    U, sigma, _ = torch.linalg.svd(K, full_matrices=False)
    cut: Tensor = U[:, :rank] * sigma[:rank].clamp(max=1.0)
    return cut


def full_size(d: int, rank: int | None) -> int:
    """Return the size of a layer's projection as Table 6 of the paper counts it.

    The size is d times the number of eigenpairs, for a layer with d inputs. The factor
    K that is sent may have fewer columns and be smaller.
    """
    return d * min(d, rank or d)
