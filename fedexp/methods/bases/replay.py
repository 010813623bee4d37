"""The base of data-free distillation with an image bank.

The bank is the growing set of synthetic images. Each epoch adds one batch of images.
Then the student trains on the whole bank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from fedexp.core.aggregator import State
from fedexp.core.build import require
from fedexp.core.data import Samples
from fedexp.core.env import Env
from fedexp.core.seeds import torch_generator
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.distillation.bank import Rounding, samples_of, stored
from fedexp.distillation.ensemble import TeacherEnsemble
from fedexp.distillation.views import View, Views
from fedexp.methods.bases.data_free import DataFree, DataFreeState, DistillationBatch
from fedexp.server_training.batches import batches, on_device


class BankState(TypedDict):
    """The state of a method with an image bank.

    Args:
        bank: One tree per batch of images, with the images ``x`` and labels ``y``.
        logits: The teachers' logits of each batch. They are stored only if the images
            are not augmented in distillation.
    """

    bank: list[Tree]
    logits: NotRequired[list[Tensor]]


@dataclass(frozen=True)
class Replay(DataFree):
    """The base of aggregators that distil from an image bank.

    Epoch e of a round (from 1) adds `b` images (a field of `DataFree`) to the bank.
    Then the student trains for one shuffled pass over the bank. After e epochs the bank
    has e b images. With `keep_bank` it also has the images of earlier rounds. The
    number of images in the bank is logged as ``bank``.

    The state's entry ``own`` is a `BankState`. Checkpoints store each batch of the bank
    once. If images are not augmented in distillation, the teachers run only once on
    each image, and their logits are stored in ``own``.

    Args:
        B: Images per distillation batch. The last batch of a pass may be smaller. A
            last batch of a single image is left out.
        views: Augmentation of the images in distillation,
            `fedexp.distillation.views.Views`.
        rounding: Rounding of pixels to 8 bits.
        keep_bank: Whether later rounds keep the bank. Otherwise every round starts with
            an empty bank.
    """

    B: int = 128
    views: Views = "clients"
    rounding: Rounding = "round"
    keep_bank: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.B >= 2, f"B must be at least 2, got {self.B}")

    def begin(self, own: State, env: Env) -> State:
        return BankState(bank=own["bank"] if self.keep_bank and own else [])

    def epoch(
        self, state: DataFreeState, ensemble: TeacherEnsemble, lr: float, env: Env
    ) -> tuple[DataFreeState, Metrics]:
        labels = self.labels(env)
        images, made, own = self.synthesise(labels, state["student"], ensemble, state["own"], env)
        bank = [*own["bank"], stored(images, labels, self.rounding)]
        samples = samples_of(bank, env.domain)
        own, distillation_batches = self.distillation_batches(
            {**own, "bank": bank}, samples, ensemble, env
        )
        state, trained = self.train_student({**state, "own": own}, distillation_batches, lr, env)
        return state, {**made, **trained, "bank": len(samples)}

    def synthetic_images(self, state: DataFreeState, env: Env) -> tuple[Tensor, Tensor]:
        bank = samples_of(state["own"]["bank"], env.domain)
        return bank.x, bank.y

    def labels(self, env: Env) -> Tensor:
        """Draw the labels y of the epoch's b images, uniformly over the classes.

        Returns:
            Sorted labels of shape (b,), int64.
        """
        random = torch_generator(env.seed, "labels", env.round, env.step)
        return (
            torch.randint(env.num_classes, (self.b,), generator=random).sort().values.to(env.device)
        )

    @abstractmethod
    def synthesise(
        self, labels: Tensor, student: Weights, ensemble: TeacherEnsemble, own: State, env: Env
    ) -> tuple[Tensor, Metrics, State]:
        """Make the epoch's images for `labels`.

        Returns:
            Images of shape (b, channels, H, W) in [0, 1], the values to log, and the
            method's state ``own`` after the synthesis.
        """

    def distillation_batches(
        self, own: State, samples: Samples, ensemble: TeacherEnsemble, env: Env
    ) -> tuple[State, Iterator[DistillationBatch]]:
        """Return the student's batches of one shuffled pass over the bank.

        Args:
            own: The method's state, with the bank and the logits computed so far.
            samples: The images and labels of the bank.
            ensemble: The teachers.
            env: The environment.

        Returns:
            The method's state, with the logits of the new images if they are stored,
            and the batches.
        """
        view = View.of(self.views, env, "distillation")
        if view.augment is not None:
            return own, (
                (x, ensemble_logits(ensemble, x)) for x, _ in self.inputs(samples, view, env)
            )

        known: list[Tensor] = own.get("logits", [])
        new = self.bank_inputs(own, len(known), env)
        known = [*known, *(ensemble_logits(ensemble, x) for x in new)]
        logits = torch.cat(known)
        return {**own, "logits": known}, (
            (x, logits[at]) for x, at in self.inputs(samples, view, env)
        )

    def bank_inputs(self, own: State, start: int, env: Env) -> Iterator[Tensor]:
        """Yield normalised images, one tensor per batch of the bank from `start` on."""
        for batch in own["bank"][start:]:
            yield samples_of([batch], env.domain).inputs(slice(None))

    def inputs(self, samples: Samples, view: View, env: Env) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one shuffled pass over the bank, transformed by `view`.

        Yields:
            The inputs, and the positions of their images in the bank.
        """
        order = batches(len(samples), self.B, env.seed, "distillation", env.round, env.step)
        for step, at in enumerate(on_device(order, samples.x.device)):
            # BatchNorm cannot compute the variance of a single image
            if len(at) > 1:
                yield view.augmented(samples.inputs(at), step), at


@torch.no_grad()
def ensemble_logits(ensemble: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return the ensemble's logits, without a gradient."""
    return ensemble(inputs)
