"""FedMRUR: MoFedSAM with a hyperbolic regulariser (H) and normalised aggregation (N).

Reference:
    An et al., Federated Learning with Manifold Regularization and Normalized Update
    Reaggregation, NeurIPS 2023, Eq. 2-5 and Algorithm 1.
    https://arxiv.org/abs/2311.05924

Update:
    The regulariser H acts at the clients, in this trainer. As in MoFedSAM, a step
    computes two gradients, at w and at the perturbed weights. Both are gradients of
    ``f_i + gamma R``, where f_i is client i's loss, R the regulariser, and gamma its
    weight. Let d2 be the squared Lorentzian distance between two representations of an
    input. The current model w computes the first one. The received model, frozen and in
    evaluation mode, computes the second one. R is an exponential of the distances d2 in
    a batch (`reduction`).

    The normalised aggregation N acts at the server, in the aggregator
    `fedexp.methods.fedmrur.normalized_mean.NormalizedMean`. For N without H, combine
    `NormalizedMean` with the trainer `MoFedSAM`.

Communication:
    Up: the trained model y_i. Down: the global model w and the momentum Delta.

State:
    Clients: none. Server: Delta (one float per parameter).

Logged:
    Means over all steps: ``train/lorentz`` (mean d2 of a batch) and
    ``train/hyperbolic`` (R minus 1). ``train/loss`` includes gamma R.

Differences from the paper:
    No code was published. The paper leaves three choices open: how a representation is
    lifted to hyperbolic space (here `fedexp.methods.fedmrur.lorentz`), which
    representation is used (`layer`), and how the distances of a batch are reduced
    (`reduction`). With the paper's constants H is weak for every choice. The norm of
    its gradient is 1e-5 to 4e-2 times that of the loss's gradient.

    As printed, Algorithm 1 ascends the loss. It also adds a momentum in the unit of
    parameters to gradients. ``method=fedmrur_printed`` follows the printed algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.build import require_not_negative, require_positive
from fedexp.core.layers import check_head
from fedexp.core.needs import Needs
from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx, FeatureTerm, Measured, RoundStats, ServerUpdate, TermValue
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import ModelSpec
from fedexp.methods.fedmrur.lorentz import squared_distance
from fedexp.methods.fedmrur.normalized_mean import PLAIN_MOMENTUM, before_normalisation
from fedexp.methods.mofedsam import LocalMoFedSAM

MAX_EXPONENT = 20.0  # bound of R's exponent, beyond which R is constant


@dataclass(frozen=True)
class FedMRUR(LocalMoFedSAM):
    """The trainer of FedMRUR.

    It also has the arguments of `LocalMoFedSAM`.

    Args:
        gamma: Weight of the regulariser R (Eq. 2). With 0 the trainer equals MoFedSAM
            bit-exactly.
        sigma: Scale of the distance (Eq. 3).
        beta: Parameter of the Lorentz model (Eq. 3).
        layer: The representation: ``penultimate`` (input of the network's head) or
            ``logits``.
        reduction: How the squared distances d2 of a batch give R: ``mean_exp`` (mean of
            exp(d2 / sigma)), ``sum_exp`` (sum of exp(d2 / sigma)), ``exp_mean``
            (exp(mean d2 / sigma)) or ``exp_sum`` (exp(sum d2 / sigma)).
        momentum_from: The aggregate from which the momentum Delta is computed: the
            aggregate that the server applies (``normalised``) or the mean before its
            normalisation (``plain``).
        momentum_units: Unit of Delta: that of a ``gradient``, or that of ``parameters``
            as in the printed Algorithm 1.
        measure_gradient: Whether to log ``train/hyperbolic_gradient``. It is the norm
            of gamma R's gradient divided by the norm of the task loss's gradient. Both
            gradients are with respect to the representation.
    """

    gamma: float = 0.005
    sigma: float = 1e4
    beta: float = 1.0
    layer: Literal["penultimate", "logits"] = "penultimate"
    reduction: Literal["mean_exp", "exp_mean", "exp_sum", "sum_exp"] = "mean_exp"
    momentum_from: Literal["normalised", "plain"] = "normalised"
    momentum_units: Literal["gradient", "parameters"] = "gradient"
    measure_gradient: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self, "gamma")
        require_positive(self, "sigma", "beta")

    @property
    def needs(self) -> Needs:
        return super().needs | (PLAIN_MOMENTUM if self.momentum_from == "plain" else Needs())

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        if self.gamma and self.layer == "penultimate":
            check_head(spec, input_shape)

    def feature_term(self) -> FeatureTerm | None:
        return FeatureTerm(self.layer, self.hyperbolic) if self.gamma else None

    def hyperbolic(
        self, z: Tensor, anchor: Tensor, share: float | Tensor, task_gradient: Callable[[], Tensor]
    ) -> TermValue:
        """Compute gamma R, its gradient with respect to z, and the logged scalars.

        This function is the field `of` of `FeatureTerm`, which describes the arguments.
        """
        d2, slope = squared_distance(z, anchor, self.beta)
        R, rate = self.reduced(d2, share)
        pull = self.gamma * rate.unsqueeze(-1) * slope
        scalars = {"lorentz": (d2 * share).sum(-1), "hyperbolic": R - 1}
        if self.measure_gradient:
            own, other = (
                torch.linalg.vector_norm(each, dim=(-2, -1)) for each in (pull, task_gradient())
            )
            scalars["hyperbolic_gradient"] = own / other.clamp(min=torch.finfo(other.dtype).tiny)
        return TermValue(self.gamma * R, pull, scalars)

    def loss(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> Tensor | Measured:
        if not self.gamma:
            return super().loss(net, params, buffers, batch, ctx)
        run = _Watched(net, self.layer == "penultimate")
        loss = ctx.task.loss(cast(Net, run), params, buffers, batch, ctx.noise)
        anchor = ctx.once("received model's z", lambda: self._received(run.inputs, ctx))
        z = run.z.flatten(1)

        def task_gradient() -> Tensor:
            return self._task_gradient(run, net, params, buffers, batch, ctx).flatten(1)

        with torch.no_grad():
            term = self.hyperbolic(z, anchor, 1 / len(z), task_gradient)
        return Measured(loss + _Term.apply(z, term.value, term.gradient), term.scalars)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _received(self, inputs: tuple[Tensor, ...], ctx: Ctx) -> Tensor:
        """Return the received model's representation of `inputs`, of shape (b, d)."""
        frozen = _Watched(ctx.reference, self.layer == "penultimate")
        frozen(*ctx.received, *inputs)
        return frozen.z.flatten(1)

    def reduced(self, d2: Tensor, share: float | Tensor) -> tuple[Tensor, Tensor]:
        """Compute the regulariser R (Eq. 3) and its derivatives with respect to d2.

        Args:
            d2: Squared distances, of shape (..., b).
            share: Weight of each sample in its client's mean, as in `FeatureTerm`.
                Samples of weight 0 do not count.

        Returns:
            R of shape (...,), and its derivatives of shape (..., b). The shape of the
            derivatives is (..., 1) if they are the same for all samples of a batch.
        """
        counted = (share > 0).to(d2.dtype) if isinstance(share, Tensor) else None
        number = d2.shape[-1] if counted is None else counted.sum(-1, keepdim=True)
        divisor = number if self.reduction in ("mean_exp", "exp_mean") else 1

        def reduce(each: Tensor) -> Tensor:
            return (each if counted is None else each * counted).sum(-1, keepdim=True) / divisor

        of_each = self.reduction in ("mean_exp", "sum_exp")
        exponent = (d2 if of_each else reduce(d2)) / self.sigma
        each = torch.exp(exponent.clamp(max=MAX_EXPONENT))
        rate = torch.where(exponent <= MAX_EXPONENT, each, 0) / (self.sigma * divisor)
        R = reduce(each) if of_each else each
        return R.squeeze(-1), rate if counted is None else rate * counted

    def _task_gradient(
        self, run: _Watched, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> Tensor:
        """Return the gradient of the task's loss with respect to the representation z.

        z is that of `run`.
        """

        def task(z: Tensor) -> Tensor:
            def above(params: Tree, buffers: Tree, *inputs: Tensor) -> Tensor:
                return z if self.layer == "logits" else net.head(params, buffers, z)

            return ctx.task.loss(cast(Net, above), params, buffers, batch, ctx.noise)

        gradient: Tensor = torch.func.grad(task)(run.z.detach())
        return gradient

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        if self.momentum_from == "plain":
            update = before_normalisation(update, stats)
        if self.momentum_units == "parameters":
            return {"Delta": trees.scale(update.mean, -1.0)}
        return super().update_shared(shared, payload_mean, update, stats)


class _Term(torch.autograd.Function):
    """A summand of a loss whose value and gradient with respect to z are known."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return slope * gradient, None, None


class _Watched:
    """A network that stores its inputs and its representation when it is called.

    The task's loss gets this object in place of the network and calls it once. Then
    `inputs` are the inputs of this call, and `z` of shape (b, ...) is the
    representation.
    """

    def __init__(self, net: Net, features: bool) -> None:
        self._net, self._features = net, features

    def __call__(self, params: Tree, buffers: Tree, *inputs: Tensor) -> Tensor:
        self.inputs = inputs
        seen = self._net.observe(params, buffers, *inputs, features=self._features)
        self.z = seen.output if seen.features is None else seen.features
        return seen.output
