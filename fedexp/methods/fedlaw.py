"""FedLAW: learned aggregation weights.

Reference:
    Li et al., Revisiting Weighted Aggregation in Federated Learning with Neural
    Networks, ICML 2023.
    https://arxiv.org/abs/2302.10911

Update:
    The global model is ``w = gamma sum_i lambda_i y_i``, where y_i are the trained
    models of the m clients. On labelled proxy data the server learns the weights
    lambda_i, which sum to one, and the shrinking factor gamma.

    Autograd does not differentiate this sum. Let q be the gradient of the loss at w,
    computed by one ordinary backward pass, and let ``d_i = <q, y_i>``. The gradient of
    the loss with respect to lambda and gamma is the gradient of
    ``gamma sum_i lambda_i d_i`` with constant d_i. A step therefore needs one forward
    and backward pass of the network, and two products with the matrix of the models:
    one for w and one for d.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Server, within a round: the (m, D) matrix of the m clients' models with D trained
    parameters.

Differences from the authors' code:
    As in the code, the server trains with the network in training mode, which changes
    BatchNorm's running statistics. In the code these statistics never leave the server.
    Here they start in every round from the mean of the clients' statistics. The code's
    StepLR halves the step size every 20 epochs. StepLR is left out, because it has no
    effect on a training of 20 epochs. With ``learn=swa``, the step size of x falls in
    every step, and the average contains every epoch of the second half of x's epochs.
    In the code, the step size of x follows a cosine over 100 epochs, so it hardly
    changes in the first six. It then rises towards 0.05. The code's average begins one
    epoch later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.aggregator import State
from fedexp.core.build import require, require_positive
from fedexp.core.env import Env
from fedexp.core.jobs import ClientResult
from fedexp.core.kernel import StepNoise
from fedexp.core.needs import Needs
from fedexp.core.net import Net
from fedexp.core.seeds import seed_of
from fedexp.core.task import Batch, Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.methods.bases.server_trained import (
    Part,
    ServerTrained,
    mean_loss,
    proxy_of,
    with_frozen,
)
from fedexp.server_training.gradients import value_and_grad
from fedexp.server_training.optimizers import Adam, Optimizer, cosine


@dataclass(frozen=True)
class FedLAW(ServerTrained):
    """The aggregator of FedLAW.

    The learned mixture of the clients' models replaces the result of the server
    optimizer. Therefore a server optimizer that changes the update is refused.

    Args:
        form: Parametrisation of lambda and gamma by the learned numbers x_1 ... x_m and
            z. ``exp``: lambda = softmax(x) and gamma = exp(z). They start at x_i =
            log p_i, where p_i are the clients' weights, and z = 0. ``quad``: lambda_i =
            x_i^2 / sum_j x_j^2 and gamma = z^2. They start at x_i = 1 / sqrt(m) and
            z = 1.
        learn: ``jointly``: x and z are learned in all epochs. ``swa``: x is learned in
            the first half of the epochs and z in the remaining ones. The step size of x
            falls to 0 by a cosine schedule. The final x is the mean of x over the
            second half of its epochs (SWA, Izmailov et al. 2018).
        optimizer: Optimizer of x and z. x and z have separate optimizer states, which
            are initialised in every round.
        lr: Step size of the optimizer.
    """

    form: Literal["exp", "quad"] = "exp"
    learn: Literal["jointly", "swa"] = "jointly"
    optimizer: Optimizer = field(default_factory=lambda: Adam(betas=(0.5, 0.999)))
    lr: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "lr")
        require(
            self.learn != "swa" or self.steps is not None or self.epochs != 1,
            "learn=swa learns x in the first half of the epochs: set epochs=2 or more",
        )

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(proxy_labels=True)

    def uses_server_step(self, rounds: int) -> bool:
        return 0 in (self.steps, self.epochs)  # then nothing is learned

    def collect(
        self, results: Iterable[ClientResult], start: Weights, collected: State, env: Env
    ) -> Iterator[ClientResult]:
        for result in results:
            collected["models"].append(_vector(result.weights.trainable))
            collected["p"].append(self.weight(result.num_examples))
            yield result

    def begin(self, collected: State, start: Weights, mean: Weights, env: Env) -> State:
        models = torch.stack(collected["models"])
        p = torch.tensor(collected["p"], dtype=models.dtype, device=models.device)
        x = (p / p.sum()).log() if self.form == "exp" else torch.full_like(p, len(p) ** -0.5)
        z = torch.zeros_like(p[0]) if self.form == "exp" else torch.ones_like(p[0])
        return {
            "models": models,
            "scalars": {"x": x, "z": z},
            "optimizers": {"x": self.optimizer.init({"x": x}), "z": self.optimizer.init({"z": z})},
            "averaged": None,
        }

    def mixing(self, scalars: Tree) -> tuple[Tensor, Tensor]:
        """Compute lambda and gamma from the learned numbers.

        Args:
            scalars: x of shape (m,) and the scalar z.

        Returns:
            lambda of shape (m,), and the scalar gamma.
        """
        x, z = scalars["x"], scalars["z"]
        return (
            (x.softmax(0), z.exp())
            if self.form == "exp"
            else (x.square() / x.square().sum(), z.square())
        )

    def mixed(self, scalars: Tree, models: Tensor) -> Tensor:
        """Return the mixed model ``w = gamma sum_i lambda_i y_i``, of shape (D,).

        Args:
            scalars: x of shape (m,) and the scalar z, which give lambda and gamma.
            models: The clients' models y_i, of shape (m, D).
        """
        shares, gamma = self.mixing(scalars)
        return (gamma * shares) @ models

    def gradients(self, scalars: Tree, models: Tensor, q: Tensor) -> Tree:
        """Compute the gradient of the loss with respect to x and z.

        Args:
            scalars: x of shape (m,) and z, a scalar.
            models: The clients' models, of shape (m, D).
            q: Gradient of the loss at the mixed model w, of shape (D,).
        """
        d = models @ q

        def along(scalars: Tree) -> Tensor:
            shares, gamma = self.mixing(scalars)
            return gamma * (shares @ d)

        return value_and_grad(along, scalars)[1][0]

    def train(
        self, weights: Weights, work: State, net: Net, parts: Iterator[Part], env: Env
    ) -> tuple[Weights, State, Metrics]:
        like, buffers = weights.trainable, trees.clone(weights.buffers)
        models, scalars, optimizers = work["models"], work["scalars"], dict(work["optimizers"])
        proxy = proxy_of(env)
        losses: dict[int, Tensor] = {}
        epochs = -(-self.total(env) // self.pass_length(env))
        half = epochs // 2 if self.learn == "swa" else 0
        learned = ("x", "z") if self.learn == "jointly" else ("x",) if env.step <= half else ("z",)
        noise = StepNoise(seed_of(env.seed, "server", env.round, "loss"), env.device)

        for step, index, inputs in parts:
            noise.step = step

            def loss_of(
                live: Tree, batch: Batch = Batch(inputs, proxy.y.index_select(0, index))
            ) -> Tensor:
                return env.task.loss(net, with_frozen(weights, live), buffers, batch, noise)

            loss, (q,) = value_and_grad(loss_of, _tree(self.mixed(scalars, models), like))
            grads = self.gradients(scalars, models, _vector(q))
            lr = (
                cosine(self.lr, step, half * self.pass_length(env))
                if learned == ("x",)
                else self.lr
            )
            for name in learned:
                one, state = {name: scalars[name]}, optimizers[name]
                one, optimizers[name] = self.optimizer.step(one, {name: grads[name]}, state, lr)
                scalars = {**scalars, **one}
            losses[step] = loss

        averaged = work["averaged"]
        if learned == ("x",) and env.step > half // 2:
            total = averaged["sum"] + scalars["x"] if averaged else scalars["x"]
            averaged = {"sum": total, "count": averaged["count"] + 1 if averaged else 1}
            if env.step == half:
                scalars = {**scalars, "x": averaged["sum"] / averaged["count"]}

        params = with_frozen(weights, _tree(self.mixed(scalars, models), like))
        work = {**work, "scalars": scalars, "optimizers": optimizers, "averaged": averaged}
        shares, gamma = self.mixing(scalars)

        return (
            Weights(weights.spec, params, buffers),
            work,
            {
                "server/gamma": float(gamma),
                "server/lambda_max": float(shares.max()),
                **mean_loss(losses, self.total(env), env),
            },
        )


def _vector(tree: Tree) -> Tensor:
    return torch.cat([value.reshape(-1) for value in tree.values()])


def _tree(vector: Tensor, like: Tree) -> Tree:
    """Return `vector` as a tree like `like`, the inverse of `_vector`."""
    parts = torch.split(vector, [value.numel() for value in like.values()])
    return {
        name: part.view(value.shape)
        for (name, value), part in zip(like.items(), parts, strict=True)
    }
