"""FedBE: Bayesian model ensemble.

Reference:
    Chen & Chao, FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning,
    ICLR 2021, Algorithm 1.
    https://arxiv.org/abs/2009.01974

Update:
    The teachers are the models y_i of the m clients, their mean, and M models sampled
    from a distribution over models. The mean of the teachers' probabilities is
    sharpened and distilled into the mean model on unlabelled proxy data. The student's
    weights are averaged over steps (SWA). Proxy data are not augmented, so every
    teacher runs only once per sample.

    The paper has two distributions. One is a diagonal Gaussian. Its mean and variance
    are those of the y_i, weighted by the clients' weights p_i. The other is a Dirichlet
    mixture ``sum_i s_i y_i``. Its shares s_i are proportional to ``p_i r_i``, with the
    vector r drawn from Dir(alpha). Sampled models have the buffers of the mean model.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Server, within a round: the targets and the running average of the student.

Differences from the paper:
    Three parts follow the authors' code instead:

    1. The Gaussian of ``distribution=directions`` is over the directions
       d_i = u_i / ||u_i|| of the clients' updates u_i, separately for each tensor. Its
       mean is the mean of the d_i. Its standard deviation is 0.1 times that of the d_i.
       A sampled direction is multiplied by the mean norm of the u_i and added to the
       round's global model.
    2. The loss is the mean over batch and classes. It is therefore the mean divergence
       divided by the number of classes.
    3. Sharpening uses the temperature T = 0.5 as an exponent. Each probability q
       becomes ``q^(1 / T)``, and the results are renormalised.

Differences from the authors' code:
    The code computes BatchNorm statistics from batches of 1024 samples. Here these
    batches have `batch_size` samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core import trees
from fedexp.core.aggregator import State
from fedexp.core.build import require, require_not_negative, require_positive
from fedexp.core.env import Env
from fedexp.core.jobs import ClientResult
from fedexp.core.kernel import StepNoise
from fedexp.core.net import Net
from fedexp.core.seeds import numpy_generator, seed_of, torch_generator
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.distillation.losses import kl
from fedexp.methods.bases.distilling import Distilling
from fedexp.methods.bases.server_trained import network, proxy_of, with_frozen
from fedexp.server_training.forward import logits_of, recomputed_statistics
from fedexp.server_training.optimizers import Optimizer, Sgd

# Lower bound of the directions' variance, as in the authors' code
_SMALLEST_VARIANCE = 1e-5
# Factor of the directions' standard deviation, as in the authors' code
_SPREAD = 0.1


@dataclass(frozen=True)
class FedBE(Distilling):
    """The aggregator of FedBE.

    Args:
        distribution: Distribution over models: ``directions`` (the Gaussian of the
            authors' code), ``gaussian`` or ``dirichlet``.
        samples: Number of sampled models (M).
        alpha: Concentration of the Dirichlet distribution.
        temperature: Temperature T of the sharpening. 1 means no sharpening.
        swa_start: Optimizer steps at the start of a round whose students do not enter
            the average. If no student enters it, the last one is the round's model.
        swa_every: After these first steps, the student enters the average whenever the
            number of steps is a multiple of this number.
    """

    optimizer: Optimizer = field(default_factory=lambda: Sgd(momentum=0.9, weight_decay=1e-5))
    lr: float = 1e-3
    distribution: Literal["directions", "gaussian", "dirichlet"] = "directions"
    samples: int = 10
    alpha: float = 1.0
    temperature: float = 0.5
    swa_start: int = 500
    swa_every: int = 25

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self, "samples", "swa_start")
        require_positive(self, "alpha", "temperature")
        require(self.swa_every >= 1, f"swa_every must be at least 1, got {self.swa_every}")

    def collect(
        self, results: Iterable[ClientResult], start: Weights, collected: State, env: Env
    ) -> Iterator[ClientResult]:
        for result in results:
            collected["models"].append(result.weights)
            collected["p"].append(self.weight(result.num_examples))
            yield result

    def targets(self, collected: State, start: Weights, mean: Weights, env: Env) -> State:
        models, p = collected["models"], torch.tensor(collected["p"], dtype=torch.float64)
        net = network(env.server_spec, env.device, env.dtype).train(False)
        log_probs = partial(_log_probs, net=net, env=env)
        log_mean = torch.logaddexp(log_probs(mean), log_probs(models[0]))
        for teacher in (*models[1:], *self.drawn(models, p / p.sum(), start, mean, env)):
            log_mean = torch.logaddexp(log_mean, log_probs(teacher))
        return {"target": F.log_softmax(log_mean / self.temperature, 1), "averaged": None}

    def drawn(
        self, models: list[Weights], p: Tensor, start: Weights, mean: Weights, env: Env
    ) -> Iterator[Weights]:
        """Iterate over the M sampled models.

        Args:
            models: Models of the clients.
            p: Weights p_i of `models`, of shape (m,), float64. They sum to 1.
            start: The global model that the clients received.
            mean: The mean of the clients' models.
            env: The environment at this step.
        """
        live = {
            name: torch.stack([model.params[name] for model in models]) for name in mean.trainable
        }
        centre, spread = self._gaussian(live, p, start)

        for number in range(self.samples):
            names = (env.seed, "drawn models", env.round, number)
            if self.distribution == "dirichlet":
                shares = (
                    torch.from_numpy(numpy_generator(*names).dirichlet([self.alpha] * len(p))) * p
                )
                params = {
                    name: _over_models(shares / shares.sum(), value) for name, value in live.items()
                }
            else:
                random = torch_generator(*names)
                noise = {
                    name: torch.randn(value.shape, generator=random, dtype=value.dtype)
                    for name, value in centre.items()
                }
                noise = trees.on_device(noise, env.device)
                params = trees.add(trees.mul(noise, spread), centre)

            yield Weights(mean.spec, with_frozen(mean, params), mean.buffers)

    def _gaussian(self, live: Tree, p: Tensor, start: Weights) -> tuple[Tree, Tree]:
        """Return the means and standard deviations of the Gaussian over models.

        For the Dirichlet distribution both trees are empty.

        Args:
            live: The trained parameters of the m clients' models, stacked to (m, ...).
            p: Weights of these models, of shape (m,).
            start: The global model that the clients received.
        """
        if self.distribution == "dirichlet":
            return {}, {}

        centre, spread = {}, {}
        for name, value in live.items():
            if self.distribution == "gaussian":
                centre[name] = _over_models(p, value)
                spread[name] = _over_models(p, (value - centre[name]).square()).sqrt()
                continue
            update = value - start.params[name]

            norms = torch.linalg.vector_norm(update.reshape(len(update), -1), dim=1)
            tiny = torch.finfo(norms.dtype).tiny
            directions = update / norms.clamp(min=tiny).reshape(-1, *[1] * (update.dim() - 1))
            variance = directions.var(0, correction=0).clamp(min=_SMALLEST_VARIANCE)
            centre[name] = start.params[name] + norms.mean() * directions.mean(0)
            spread[name] = norms.mean() * _SPREAD * variance.sqrt()

        return centre, spread

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return kl(target, logits).mean() / logits.shape[1]

    def after_step(self, work: State, live: Tree, step: int) -> State:
        steps_taken = step + 1
        if steps_taken <= self.swa_start or steps_taken % self.swa_every:
            return work
        old = work["averaged"] or {"sum": trees.zeros_like(live), "count": 0}
        return {**work, "averaged": {"sum": trees.add(old["sum"], live), "count": old["count"] + 1}}

    def end(self, weights: Weights, work: State, env: Env) -> Weights:
        averaged = work["averaged"]
        if averaged is None:
            return weights
        live = trees.scale(averaged["sum"], 1 / averaged["count"])
        student = Weights(weights.spec, with_frozen(weights, live), weights.buffers)
        net = network(env.server_spec, env.device, env.dtype)
        net.set_noise(StepNoise(seed_of(env.seed, "server", env.round, "statistics"), env.device))
        recomputed = recomputed_statistics(net, student, proxy_of(env), self.batch_size)
        net.set_noise(None)
        return recomputed


def _log_probs(weights: Weights, *, net: Net, env: Env) -> Tensor:
    """Return the log-probabilities (n, classes) of the proxy samples."""
    return F.log_softmax(logits_of(net, weights, proxy_of(env)), 1)


def _over_models(shares: Tensor, values: Tensor) -> Tensor:
    """Return the mean of `values` (m, ...) with weights `shares` (m,)."""
    mean: Tensor = torch.tensordot(shares.to(values), values, 1)
    return mean
