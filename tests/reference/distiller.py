"""A server-side distiller that resembles DENSE (Zhang et al. 2022).

It has teachers of any architectures, a generator and a student. Step 0 trains the
clients once. Each later step is one epoch on the server:

1. A fresh generator and its noise learn images that the ensemble classifies with
   confidence.
2. The images are added to a bank.
3. The student is trained for one pass over the bank to match the ensemble.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core import trees
from fedexp.core.aggregator import Aggregator, State
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.kernel import StepNoise
from fedexp.core.net import Net
from fedexp.core.outcome import Outcome
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights
from fedexp.server_training.batches import batches
from fedexp.server_training.gradients import value_and_grad
from fedexp.server_training.optimizers import Adam, Optimizer, Sgd, cosine


class Generator(nn.Module):
    """A network that maps noise (b, noise) to images (b, *shape) in (0, 1)."""

    def __init__(self, *, noise: int, shape: tuple[int, ...], width: int = 32) -> None:
        super().__init__()
        self.shape = shape
        self.hidden = nn.Linear(noise, width)
        self.norm = nn.BatchNorm1d(width)
        self.output = nn.Linear(width, math.prod(shape))

    def forward(self, z: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm(self.hidden(z)), 0.2)
        return torch.sigmoid(self.output(h)).reshape(-1, *self.shape)


@dataclass(frozen=True)
class Distiller(Aggregator):
    """A one-shot aggregator whose student is the server's network.

    Args:
        epochs: Number of epochs on the server (T).
        images: Number of images that are generated per epoch (b).
        generator_steps: Number of steps of the generator per epoch (T_G).
        batch_size: Batch size of the student (B).
        temperature: Temperature of the distillation.
    """

    epochs: int = 4
    images: int = 128
    generator_steps: int = 15
    generator_lr: float = 1e-2
    noise: int = 16
    batch_size: int = 16
    student_lr: float = 0.1
    temperature: float = 2.0
    student: Optimizer = field(
        default_factory=lambda: Sgd(momentum=0.9, nesterov=True, weight_decay=1e-4)
    )
    generator: Optimizer = field(default_factory=lambda: Adam(betas=(0.5, 0.999)))

    def init(self, env: Env) -> State:
        if env.domain.pixel_range != (0.0, 1.0):
            raise ConfigError(
                "generated images need a range of pixels", where="dataset", expected="8-bit images"
            )
        student = Weights.init(
            env.initial_weights().spec, seed_of(env.seed, "student"), env.device, env.dtype
        )
        optimizer = self.student.init(student.params)
        return {"student": student, "optimizer": optimizer, "taken": 0, "teachers": [], "bank": []}

    def position(self, state: State, step: int) -> tuple[int, int]:
        return 0, step

    def done(self, state: State, env: Env) -> bool:
        return env.step > env.server_steps(self.epochs)

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        return (
            [env.job(c, env.initial_weights(c), {}) for c in env.sample()] if env.step == 0 else []
        )

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        if env.step == 0:
            return {**state, "teachers": [result.weights for result in results]}, {}
        ensemble = _Ensemble(state["teachers"])
        images, synthesis = self._generate(ensemble, env)
        bank = [*state["bank"], images]
        student, optimizer, taken, loss = self._distil(state, torch.cat(bank), ensemble, env)
        after = {**state, "student": student, "optimizer": optimizer, "taken": taken, "bank": bank}
        return after, {
            "generator/loss": synthesis,
            "student/loss": loss,
            "bank": sum(map(len, bank)),
        }

    def outcome(self, state: State) -> Outcome:
        return Outcome((state["student"],), "global")

    def _generate(self, ensemble: _Ensemble, env: Env) -> tuple[Tensor, float]:
        """Return images that the ensemble assigns to random labels, and the loss.

        The generator and its noise minimise the ensemble's cross-entropy for these
        labels.
        """
        random = torch_generator(env.seed, "synthesis", env.step)
        noise = torch.randn(self.images, self.noise, generator=random).to(env.device, env.dtype)
        labels = torch.randint(env.num_classes, (self.images,), generator=random).to(env.device)
        spec = ModelSpec(
            f"{__name__}.Generator", (("noise", self.noise), ("shape", env.input_shape))
        )
        fresh = Weights.init(spec, seed_of(env.seed, "generator", env.step), env.device, env.dtype)
        net, view = Net(spec, env.device, env.dtype), _view(env, "synthesis")
        learned = {**fresh.params, "z": noise}

        def images_of(learned: Tree) -> Tensor:
            return net({name: learned[name] for name in fresh.params}, fresh.buffers, learned["z"])

        net.train()
        state, loss = self.generator.init(learned), torch.zeros(())
        for step in range(self.generator_steps):

            def loss_of(learned: Tree, step: int = step) -> Tensor:
                return F.cross_entropy(ensemble(view(images_of(learned), step)), labels)

            loss, (grads,) = value_and_grad(loss_of, learned)
            learned, state = self.generator.step(learned, grads, state, self.generator_lr)
        with torch.no_grad():
            return images_of(learned), float(loss)

    def _distil(
        self, state: State, bank: Tensor, ensemble: _Ensemble, env: Env
    ) -> tuple[Weights, State, int, float]:
        """Train the student for one pass over the bank.

        Returns:
            The student, the state of its optimizer, the number of its steps so far and
            the mean loss.
        """
        student: Weights = state["student"]
        params, buffers, optimizer, taken = (
            student.params,
            trees.clone(student.buffers),
            state["optimizer"],
            state["taken"],
        )
        net, view = Net(student.spec, env.device, env.dtype), _view(env, "distillation")
        net.train()
        passes = range(1, env.server_steps(self.epochs) + 1)
        total = sum(math.ceil(self.images * epoch / self.batch_size) for epoch in passes)
        losses = []
        for step, at in enumerate(
            batches(len(bank), self.batch_size, env.seed, "student", env.step)
        ):
            inputs = view(bank[at.to(bank.device)], step)
            with torch.no_grad():
                target = F.log_softmax(ensemble(inputs) / self.temperature, 1)

            def loss_of(params: Tree, inputs: Tensor = inputs, target: Tensor = target) -> Tensor:
                q = F.log_softmax(net(params, buffers, inputs) / self.temperature, 1)
                return (
                    F.kl_div(q, target, log_target=True, reduction="batchmean")
                    * self.temperature**2
                )

            loss, (grads,) = value_and_grad(loss_of, params)
            params, optimizer = self.student.step(
                params, grads, optimizer, cosine(self.student_lr, taken, total)
            )
            taken += 1
            losses.append(loss)
        return (
            Weights(student.spec, params, buffers),
            optimizer,
            taken,
            float(torch.stack(losses).mean()),
        )


class _Ensemble:
    """An ensemble that returns the mean of the teachers' logits.

    The teachers are in evaluation mode. Teachers of one architecture share one network.
    """

    def __init__(self, teachers: list[Weights]) -> None:
        self._teachers = teachers
        first = next(iter(teachers[0].params.values()))
        self._nets = {
            spec: Net(spec, first.device, first.dtype) for spec in {t.spec: None for t in teachers}
        }
        for net in self._nets.values():
            net.train(False)

    def __call__(self, inputs: Tensor) -> Tensor:
        logits = [self._nets[t.spec](t.params, t.buffers, inputs) for t in self._teachers]
        return torch.stack(logits).mean(0)


def _view(env: Env, name: str) -> Callable[[Tensor, int], Tensor]:
    """Return a function that turns generated images into inputs of the networks.

    Like training batches of the clients, images are normalised and augmented. The
    second argument is the step, which selects the random numbers.
    """
    noise = StepNoise(seed_of(env.seed, name, env.step), env.device)

    def view(images: Tensor, step: int) -> Tensor:
        noise.step = step
        inputs = env.domain.normalise(images)
        return inputs if env.domain.augment is None else env.domain.augment(inputs, noise)

    return view
