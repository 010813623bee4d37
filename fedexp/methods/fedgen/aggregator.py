"""FedGen's server: a generator of features, trained on the clients' heads.

`fedexp.methods.fedgen.trainer` is the client's side.

Reference:
    Zhu, Hong, Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated
    Learning, ICML 2021, Algorithm 1.
    https://arxiv.org/abs/2105.10056

Update:
    After local training the server averages the models as in FedAvg. Then it trains the
    generator ``z = G(y, eps)``, which makes features z from a class y and noise eps. y
    is uniform over the classes of which at least one participant has a sample. Each
    entry of eps is uniform on [0, 1) as in the code. The loss has two terms:

    - ``sum_k a_k(y) CE(head_k(z), y)``, averaged over the batch. CE is the
      cross-entropy. head_k is the head of client k's model, which maps features to
      logits. a_k(y) is the share of client k in the cohort's samples of class y, with
      one added to each count. The authors' code has the same weights, but applies them
      differently (see below). The paper uses the cross-entropy of the mean of the
      clients' logits instead.
    - ``diversity * exp(-mean_ij msd(eps_i, eps_j) mad(z_i, z_j))``. The mean is over
      all pairs of samples i and j of the batch. msd is the mean squared difference, and
      mad is the mean absolute difference.

    The server runs only the heads of the clients' models, on generated features.

Communication:
    Up: the trained model and the class counts. Down: the global model, the generator,
    and the classes of which any participant so far has a sample.

State:
    Server: the generator and its optimizer's state.

Differences from the authors' code:
    The code multiplies the cross-entropies (b,) of client k by weights of shape (b, 1).
    The product has shape (b, b). Its mean is the batch mean of a_k(y) times the batch
    mean of the cross-entropies. Here each sample has its own weight.

    For the class counts, the code counts the samples in a client's training batches.
    Here all samples of a client are counted. In the code, clients draw classes for the
    generator from those of all clients. Here they draw from the classes of the
    participants so far. The adversarial student term, which has weight 0 in the code,
    is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core import trees
from fedexp.core.aggregator import State
from fedexp.core.build import require, require_not_negative, require_positive
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.needs import Demand, Needs
from fedexp.core.net import Net
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.task import Metrics
from fedexp.core.trainer import Trainer
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights, by_spec
from fedexp.methods.bases.averaging import AveragingState
from fedexp.methods.bases.class_counts import ClassCounts, counts
from fedexp.methods.bases.server_trained import mean_loss, network, with_frozen
from fedexp.methods.fedavg import Mean
from fedexp.server_training.gradients import value_and_grad
from fedexp.server_training.optimizers import Adam, Optimizer
from fedexp.tasks.classification import Classification


class FeatureGenerator(nn.Module):
    """A network that maps classes and noise to features.

    Inputs are classes y (b,), int64, and noise eps (b, noise). The output has shape (b,
    features).
    """

    def __init__(self, *, classes: int, noise: int, hidden: int, features: int) -> None:
        super().__init__()
        self.classes = classes
        self.hidden = nn.Linear(classes + noise, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.output = nn.Linear(hidden, features)

    def forward(self, y: Tensor, eps: Tensor) -> Tensor:
        code = torch.cat([F.one_hot(y, self.classes).to(eps), eps], dim=-1)
        features: Tensor = self.output(torch.relu(self.norm(self.hidden(code))))
        return features


def generator_spec(classes: int, noise: int, hidden: int, features: int) -> ModelSpec:
    """Return the spec of a generator of features."""
    return ModelSpec(
        f"{__name__}.{FeatureGenerator.__name__}",
        (("classes", classes), ("features", features), ("hidden", hidden), ("noise", noise)),
    )


class FeatureTrainer(Trainer):
    """The base class of trainers that use the generator of `FedGen`."""


class FedGenState(AveragingState):
    """The state of FedAvg with the generator and its optimizer's state."""

    generator: Weights
    optimizer: State


@dataclass(frozen=True)
class FedGen(Mean):
    """The server's side of FedGen.

    Args:
        noise: Length of the generator's noise vector eps.
        hidden: Width of the generator's hidden layer.
        steps: Training steps of the generator per round.
        batch_size: Number of generated features per training step.
        optimizer: Optimizer of the generator. Its state lasts for the whole run.
        lr: Step size of the generator.
        lr_decay: Factor of `lr` after every round.
        diversity: Weight of the loss's second term, which makes features diverse
            (eta_div in the paper).
        ensemble: First term of the loss. ``losses``: the clients' cross-entropies,
            weighted by the clients' shares of the class's samples.
            ``logits``: the cross-entropy of the clients' mean logits, as in the paper.
    """

    noise: int = 64
    hidden: int = 512
    steps: int = 50
    batch_size: int = 32
    optimizer: Optimizer = field(default_factory=lambda: Adam(weight_decay=1e-2))
    lr: float = 3e-4
    lr_decay: float = 0.98
    diversity: float = 1.0
    ensemble: Literal["losses", "logits"] = "losses"

    def __post_init__(self) -> None:
        for name, least in (("noise", 1), ("hidden", 1), ("steps", 0), ("batch_size", 2)):
            require(
                getattr(self, name) >= least,
                f"{name} must be at least {least}, got {getattr(self, name)}",
            )
        require_positive(self, "lr", "lr_decay")
        require_not_negative(self, "diversity")

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(
            (
                Demand("task", Classification, "generates features of classes"),
                Demand(
                    "trainer",
                    FeatureTrainer,
                    "teaches a generator for clients that fit its features",
                ),
            ),
            class_counts=True,
        )

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        head_of(spec, input_shape)

    def init(self, env: Env) -> FedGenState:
        state = super().init(env)
        _, features = head_of(env.server_spec, env.input_shape)
        spec = generator_spec(env.num_classes, self.noise, self.hidden, features)
        fresh = Weights.init(spec, seed_of(env.seed, "generator"), env.device, env.dtype)
        no_classes = torch.zeros(0, dtype=torch.int64, device=env.device)
        return {
            **state,
            "shared": {**state["shared"], **_broadcast(fresh, no_classes)},
            "generator": fresh,
            "optimizer": self.optimizer.init(fresh.params),
        }

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        return [
            replace(job, probes=(ClassCounts(env.num_classes),)) for job in super().plan(state, env)
        ]

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        names, _ = head_of(env.server_spec, env.input_shape)
        heads: list[Tree] = []
        held: list[Tensor] = []

        def collect() -> Iterator[ClientResult]:
            for result in results:
                heads.append({name: result.weights.params[name] for name in names})
                held.append(counts([result])[0].to(env.device))
                yield result

        new, metrics = super().update(state, collect(), env)
        if not heads:
            return state, metrics
        newly = _classes_of(torch.stack(held))
        known = torch.unique(torch.cat([state["shared"]["labels"]["known"], newly]))
        generator, optimizer, metrics_of_generator = self._trained(
            state, heads, torch.stack(held), env
        )
        return {
            **new,
            "shared": {**new["shared"], **_broadcast(generator, known)},
            "generator": generator,
            "optimizer": optimizer,
        }, {**metrics, **metrics_of_generator}

    def _trained(
        self, state: State, heads: list[Tree], held: Tensor, env: Env
    ) -> tuple[Weights, State, Metrics]:
        """Train the generator for this round.

        Args:
            state: The state before the round.
            heads: Parameters of the clients' heads.
            held: Number of samples of each client and class, of shape (m, classes).
            env: The environment at this step.

        Returns:
            The generator, its optimizer's state, and its mean loss as a metric.
        """
        old, optimizer = state["generator"], state["optimizer"]
        classes = _classes_of(held)
        steps = env.server_steps(self.steps) if self.steps else 0
        params, buffers = old.params, trees.clone(old.buffers)
        losses: dict[int, Tensor] = {}
        net = network(old.spec, env.device, env.dtype).train()
        judge = network(env.server_spec, env.device, env.dtype).train(False)
        others: Weights = state["weights"]

        for step in range(steps):
            random = torch_generator(env.seed, "generator", env.round, step)
            y = classes[
                torch.randint(len(classes), (self.batch_size,), generator=random).to(env.device)
            ]
            eps = torch.rand(self.batch_size, self.noise, generator=random, dtype=env.dtype).to(
                env.device
            )

            def loss_of(params: Tree, y: Tensor = y, eps: Tensor = eps) -> Tensor:
                z = net(params, buffers, y, eps)
                logits = [
                    judge.head(with_frozen(others, head), others.buffers, z) for head in heads
                ]
                return self.loss(torch.stack(logits), y, held, eps, z)

            loss, (grads,) = value_and_grad(loss_of, params)
            params, optimizer = self.optimizer.step(
                params, grads, optimizer, self.lr * self.lr_decay**env.round
            )
            losses[step] = loss

        return Weights(old.spec, params, buffers), optimizer, mean_loss(losses, steps, env)

    def loss(self, logits: Tensor, y: Tensor, held: Tensor, eps: Tensor, z: Tensor) -> Tensor:
        """Compute the generator's loss.

        Args:
            logits: The clients' logits of the features z, of shape (m, b, classes).
            y: Classes for which z was generated, of shape (b,).
            held: Number of samples of each client and class, of shape (m, classes).
            eps: Noise from which z was generated, of shape (b, noise).
            z: Generated features, of shape (b, features).
        """
        if self.ensemble == "logits":
            fit = F.cross_entropy(logits.mean(0), y)
        else:
            shares = (held.to(z) + 1) / (held.to(z) + 1).sum(0)
            each = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="none")
            fit = (shares[:, y] * each.view(len(logits), -1)).sum(0).mean()
        if not self.diversity:
            return fit
        msd = (eps[:, None] - eps[None]).square().mean(2)
        mad = (z[:, None] - z[None]).abs().mean(2)
        return fit + self.diversity * (-(msd * mad).mean()).exp()


def _classes_of(held: Tensor) -> Tensor:
    """Return the classes of which a participant has a sample, of shape (k,), int64.

    `held` has the numbers of samples of each participant and class.
    """
    return (held > 0).any(0).nonzero()[:, 0]


def _broadcast(generator: Weights, known: Tensor) -> dict[str, Tree]:
    """Return the trees that clients receive besides the model.

    Args:
        generator: The generator.
        known: Classes of which any participant so far has a sample, of shape (k,),
            int64.
    """
    return {
        "generator": generator.params,
        "generator_buffers": generator.buffers,
        "labels": {"known": known},
    }


@by_spec
def head_of(spec: ModelSpec, input_shape: tuple[int, ...]) -> tuple[tuple[str, ...], int]:
    """Return the names of the head's parameters, and its number of input features.

    The head is the part of the network after the penultimate features.

    Raises:
        ConfigError: The network has no head whose inputs are feature vectors.
    """
    cpu = torch.device("cpu")
    net = Net(spec, cpu, torch.float32).train(False)
    weights = Weights.init(spec, seed_of("head"), cpu, torch.float32)

    with torch.no_grad():
        features = net.observe(
            weights.params, weights.buffers, torch.zeros(1, *input_shape), features=True
        ).features

    assert features is not None
    if features.dim() != 2:
        raise ConfigError(
            "the network's penultimate features are maps, but the generator makes vectors",
            where="model",
            expected="features of shape (batch, numbers)",
            got=f"{tuple(features.shape)} of {spec.arch}",
            do="choose a model whose head is a linear layer",
        )

    leaves = {name: value.requires_grad_() for name, value in weights.params.items()}
    total = net.head(leaves, weights.buffers, features).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return tuple(
        name for name, grad in zip(leaves, grads, strict=True) if grad is not None
    ), features.shape[1]
