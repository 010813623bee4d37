"""The base of data-free distillation whose images come from a generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor

from fedexp.core.aggregator import State
from fedexp.core.build import require_positive
from fedexp.core.env import Env
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.weights import ModelSpec, Weights
from fedexp.distillation.generator import generator_spec
from fedexp.distillation.pictures import generated
from fedexp.distillation.synthesis import Synthesis, Terms, generated_by, synthesise
from fedexp.methods.bases.data_free import DataFree, DataFreeState
from fedexp.server_training.optimizers import Adam, Optimizer


class GeneratorState(TypedDict):
    """The state of a method with one generator: generator and optimizer's state."""

    generator: Weights
    optimizer: State


@dataclass(frozen=True)
class Generating(DataFree):
    """The base of aggregators that train a generator of images.

    By default one generator is trained during the whole run. The state's entry ``own``
    is then a `GeneratorState`.

    Args:
        lr_generator: Step size of the generator.
        generator: Optimizer of the generator.
        nz: Length of the noise (`fedexp.distillation.generator.Generator`).
        ngf: Width of the generator (`fedexp.distillation.generator.Generator`).
    """

    lr_generator: float = 1e-3
    generator: Optimizer = field(default_factory=Adam)
    nz: int = 256
    ngf: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "lr_generator", "nz", "ngf")

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        generator_spec(input_shape, self.nz, self.ngf)

    def begin(self, own: State, env: Env) -> State:
        if own:
            return own
        generator = self.new_generator(env)
        return GeneratorState(generator=generator, optimizer=self.generator.init(generator.params))

    def synthetic_images(self, state: DataFreeState, env: Env) -> tuple[Tensor, Tensor]:
        return generated(state["own"]["generator"], state["student"], self.nz, env)

    def new_generator(self, env: Env, *names: Any) -> Weights:
        """Initialise a generator from a seed that depends on the run and on `names`."""
        spec = generator_spec(env.input_shape, self.nz, self.ngf)
        return Weights.init(spec, seed_of(env.seed, "generator", *names), env.device, env.dtype)

    def new_noise(self, env: Env, *sizes: int) -> Tensor:
        """Draw the epoch's noise z, the generator's input, from N(0, I).

        Returns:
            Noise of shape ``(*sizes, nz)``.
        """
        random = torch_generator(env.seed, "z", env.round, env.step)
        return torch.randn(*sizes, self.nz, generator=random).to(env.device, env.dtype)

    def optimised_images(
        self, terms_of: Callable[[Tensor, int], Terms], z: Tensor, steps: int, env: Env
    ) -> Synthesis:
        """Train a new generator for this epoch, and optimise its noise z with it.

        Args:
            terms_of: Function of the images and the step number. It returns the scalar
                ``loss`` and the terms of this loss.
            z: Noise of shape (b, nz) before the first step.
            steps: Number of steps.
            env: The environment.
        """
        generator = self.new_generator(env, env.round, env.step)
        learned = {**generator.params, "z": z}
        return synthesise(
            learned,
            self.generator.init(learned),
            generated_by(generator, self.precision),
            terms_of,
            self.generator,
            self.lr_generator,
            steps,
            unclipped={"z"},
        )
