"""Data-free distillation with an image bank: an epoch makes one batch of images, then the student sees the whole bank."""

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
    """The bank of synthetic images.

    Args:
        bank: One tree with ``x`` and ``y`` per batch of images.
        logits: The teachers' logits of each batch, if images are not augmented.
    """

    bank: list[Tree]
    logits: NotRequired[list[Tensor]]


@dataclass(frozen=True)
class Replay(DataFree):
    """Epoch e: synthesis of b images, which join the bank; one shuffled pass of distillation over its e b images.

    ``own`` holds the bank, a tree ``x``, ``y`` a batch, which is stored once. Logs ``bank``, a count of images,
    besides. Where distillation does not augment, the teachers see an image once: ``own`` holds D(x) of the bank's batches.

    Args:
        B: images of a distillation batch, the last one may be short, but not a single image.
        views: of the images in distillation, `fedexp.distillation.views.Views`.
        rounding: of pixels to 8 bits.
        keep_bank: in later rounds; false: it is emptied.
    """

    B: int = 128
    views: Views = "clients"
    rounding: Rounding = "round"
    keep_bank: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.B >= 2, f"B must be at least 2, got {self.B}")

    def begin(self, own: State, env: Env) -> State:
        bank: BankState = {"bank": own["bank"] if self.keep_bank and own else []}
        return bank

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
        """(b,) int64 y of the epoch's images, uniform over the classes, ascending."""
        random = torch_generator(env.seed, "labels", env.round, env.step)
        return (
            torch.randint(env.num_classes, (self.b,), generator=random).sort().values.to(env.device)
        )

    @abstractmethod
    def synthesise(
        self, labels: Tensor, student: Weights, ensemble: TeacherEnsemble, own: State, env: Env
    ) -> tuple[Tensor, Metrics, State]:
        """The epoch's images (b, c, H, W) in [0, 1] for `labels`, what to log, and ``own`` after it."""

    def distillation_batches(
        self, own: State, samples: Samples, ensemble: TeacherEnsemble, env: Env
    ) -> tuple[State, Iterator[DistillationBatch]]:
        """``own`` for the next epoch, and what the student sees in one shuffled pass over `samples`, the bank's."""
        view = View.of(self.views, env, "distillation")
        if view.augment is not None:
            return own, ((x, logits_of(ensemble, x)) for x, _ in self.inputs(samples, view, env))
        known: list[Tensor] = own.get("logits", [])
        new = [
            samples_of([batch], env.domain).inputs(slice(None))
            for batch in own["bank"][len(known) :]
        ]
        known = [*known, *(logits_of(ensemble, x) for x in new)]
        logits = torch.cat(known)
        return {**own, "logits": known}, (
            (x, logits[at]) for x, at in self.inputs(samples, view, env)
        )

    def inputs(self, samples: Samples, view: View, env: Env) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of one shuffled pass over the bank, through `view`, and the images' positions in it."""
        order = batches(len(samples), self.B, env.seed, "distillation", env.round, env.step)
        for step, at in enumerate(on_device(order, samples.x.device)):
            if len(at) > 1:  # BatchNorm has no variance of one
                yield view.augmented(samples.inputs(at), step), at


def logits_of(ensemble: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """The ensemble's logits, without a gradient."""
    with torch.no_grad():
        return ensemble(inputs)
