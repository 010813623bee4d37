"""FedGen's clients: local training with two further terms on generated features.

The first term trains the head to classify generated features. The second pulls the
model's outputs toward the head's outputs on features generated for the same labels.

Reference:
    Zhu, Hong, Zhou, ICML 2021, Algorithm 1. `fedexp.methods.fedgen.aggregator` is the
    server's side.
    https://arxiv.org/abs/2105.10056

Update:
    The two further terms are used after the first round in which a client trained, in
    the first `epochs` epochs of a round. The loss of a step is then
    ``CE(model(x), y) + (B_gen / B) alpha_t CE(head(G(y')), y')``
    ``+ beta_t KL(softmax(head(G(y))) || softmax(model(x)))``. The symbols are:

    - x and y are the inputs and labels of a batch, and B is ``local.batch_size``.
    - G is the generator, and head is the head of the client's model. G also gets noise,
      which is left out of the formula.
    - y' are B_gen labels, uniform over the classes of which any participant so far has
      a sample.
    - ``alpha_t = max(floor, alpha decay^t)`` and ``beta_t = max(floor, beta decay^t)``
      in round t, from 0.

    No gradient flows through the first argument of the divergence KL. The paper has
    only the first of the two further terms, which corresponds to beta = 0. The
    published code has both terms. The generator is in evaluation mode and does not
    change.

Communication:
    Up: the trained model y_i and the class counts n_{i,c} (the numbers of client i's
    samples of each class c). Down: the global model w, the generator, and the classes
    of which any participant so far has a sample.

State:
    Clients: none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.build import require, require_not_negative
from fedexp.core.needs import Demand, Needs
from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx, Measured
from fedexp.core.trees import Tree
from fedexp.methods.fedgen import aggregator as fedgen


@dataclass(frozen=True)
class FedGenTrainer(fedgen.FeatureTrainer):
    """The client's side of FedGen.

    Args:
        alpha: Coefficient of the first further term in round 0, before any decay. The
            term itself is used only after a client has reported its classes.
        beta: Coefficient of the second further term in round 0, before any decay. The
            term itself is used only after a client has reported its classes.
        decay: Factor of both coefficients per round.
        floor: Lower bound of the coefficients after decay. If `alpha` or `beta` is 0,
            its coefficient stays 0.
        batch_size: Number B_gen of generated labels y' per step.
        epochs: Number of epochs at the start of a round that use the two terms.
    """

    alpha: float = 10.0
    beta: float = 10.0
    decay: float = 0.98
    floor: float = 1e-4
    batch_size: int = 32
    epochs: int = 20

    def __post_init__(self) -> None:
        require_not_negative(self, "alpha", "beta", "floor", "epochs")
        require(0 < self.decay <= 1, f"decay must be in (0, 1], got {self.decay}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")

    @property
    def needs(self) -> Needs:
        return Needs(
            (
                Demand(
                    "aggregator",
                    fedgen.FedGen,
                    "trains on the features of a generator that its server learns",
                ),
            )
        )

    def loss(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> Tensor | Measured:
        known = ctx.shared["labels"]["known"]
        if not len(known) or not (self.alpha or self.beta):
            return super().loss(net, params, buffers, batch, ctx)

        output = net(params, buffers, batch.x)
        loss = F.cross_entropy(output, batch.y)
        if ctx.epoch >= self.epochs:
            zero = torch.zeros_like(loss)
            return Measured(loss, {"generated": zero, "latent": zero})

        at = (
            (ctx.noise("drawn classes", (self.batch_size,)) * len(known))
            .long()
            .clamp(max=len(known) - 1)
        )
        drawn = known[at]
        generated = F.cross_entropy(
            self._head_of(drawn, "drawn", net, params, buffers, output, ctx), drawn
        )
        own = (
            self._head_of(batch.y, "own", net, params, buffers, output, ctx).detach().log_softmax(1)
        )
        # `kl_div` has no batching rule for torch.vmap
        latent = (own.exp() * (own - output.log_softmax(1))).sum(1).mean()

        generated = (
            self._coefficient(self.alpha, ctx)
            * self.batch_size
            / ctx.local_training.batch_size
            * generated
        )
        latent = self._coefficient(self.beta, ctx) * latent

        return Measured(loss + generated + latent, {"generated": generated, "latent": latent})

    def _coefficient(self, first: float, ctx: Ctx) -> float:
        return max(self.floor, first * self.decay**ctx.round) if first else 0.0

    def _head_of(
        self,
        y: Tensor,
        stream: str,
        net: Net,
        params: Tree,
        buffers: Tree,
        output: Tensor,
        ctx: Ctx,
    ) -> Tensor:
        """Generate features for classes y (b,) and apply the head to them.

        Returns:
            Logits of shape (b, classes).
        """
        generator = ctx.shared["generator"]
        hidden, inputs = generator["hidden.weight"].shape
        classes = output.shape[1]
        spec = fedgen.generator_spec(
            classes, inputs - classes, hidden, generator["output.weight"].shape[0]
        )
        eps = ctx.noise(f"{stream} features", (len(y), inputs - classes)).to(output)
        z = ctx.network(spec)(generator, ctx.shared["generator_buffers"], y, eps)
        return net.head(params, buffers, z)
