"""Runs that the tests count, and the ceilings of their launches.

A ceiling is the number of launches of one local step of all clients together. It is
written by hand and may only be lowered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulated_cuda.pictures import pictures

CLIENTS = 4
# These are two run lengths in local steps. Both are within one epoch.
SHORT, LONG = 2, 4

_SMALL = [
    *(f"clients={CLIENTS}", "partition=iid", "local.batch_size=8"),
    *("limit.train=400", "limit.test=40", "limit.proxy=40", "limit.server_steps=2"),
]
_STACK = ["engine=vectorized", f"engine.stack={CLIENTS}"]
_VMAP = [*_STACK, "engine.kernel=vmap"]
_SERIAL = ["engine=serial"]
_GREY = pictures(1, 8, 8, 400)
_COLOUR = pictures(3, 16, 16, 160)


@dataclass(frozen=True)
class Case:
    """A run whose launches the tests count.

    Args:
        overrides: Its overrides.
        ceiling: Largest allowed number of kernel launches for one local step of all
            clients. None: steps are not counted, because the trainer is that of another
            case.
        share: The expected `stacked_share`.
        has_same_bits: Whether the result is bit-identical to that on the CPU.
            Convolutions have another memory layout on CUDA.
        rounds: Number of rounds.
    """

    overrides: Sequence[str]
    ceiling: float | None = None
    share: float = 1.0
    has_same_bits: bool = True
    rounds: int = 2

    def run(self, steps: int = LONG, device: str = "cuda:1") -> tuple[list[str], str]:
        """Return the overrides and the device of the run with `steps` local steps."""
        rounds = f"rounds={self.rounds}"
        return [*_SMALL, *self.overrides, rounds, f"local.steps={steps}"], device


UNET = [
    *("dataset=shapes_masks", "dataset.shape=[3,16,16]", "dataset.samples=160"),
    *("task=segmentation", "model=unet", "model.down=[[4],[4],[4]]", "model.up=[[4],[4]]"),
]
_JOINT = ["aggregator.joint.sweeps=80", "aggregator.joint.iterations=5"]

CASES = {
    # These cases test trainers on a stack of MLPs.
    "fedavg": Case([*_STACK, "method=fedavg"], 23),
    "fedavg serial": Case([*_SERIAL, "method=fedavg"], 60, share=0),
    "fedavg vmap": Case([*_VMAP, "method=fedavg"], 42),
    "scaffold": Case([*_STACK, "method=scaffold"], 27),
    "fedsam": Case([*_STACK, "method=fedsam"], 80),
    "moon": Case([*_VMAP, "method=moon"], 117),
    "feddyn": Case([*_STACK, "method=feddyn"], 27),
    "fedmrur": Case([*_VMAP, "method=fedmrur"], 192),
    "fedgen": Case([*_VMAP, "method=fedgen"], 98),
    "ldam": Case([*_VMAP, "method=ldam"], 58),
    "momentum, decay, clip": Case(
        [*_STACK, "local.momentum=0.9", "local.weight_decay=0.001", "local.clip=1"], 39
    ),
    # These cases test aggregators.
    "median": Case([*_STACK, "method=median"]),
    "fedcda": Case([*_STACK, "method=fedcda"]),
    "feddf": Case([*_STACK, "method=feddf"]),
    "ensemble": Case([*_STACK, "method=ensemble"], rounds=1),
    "average": Case([*_STACK, "method=average"], rounds=1),
    "pfnm": Case([*_STACK, "method=pfnm"], rounds=1),
    "gamf": Case([*_STACK, "method=gamf", *_JOINT], rounds=1),
    "ma_echo": Case([*_STACK, "method=ma_echo", "aggregator.T=3"], rounds=1),
    "dense": Case(
        [
            *(*_VMAP, *_COLOUR, "method=dense", "model=convnet_nafi", "aggregator.T_G=1"),
            *("aggregator.b=8", "aggregator.B=8", "aggregator.ngf=4", "local.batch_size=4"),
        ],
        has_same_bits=False,
        rounds=1,
    ),
    # These cases test networks and numerics.
    "cnn": Case([*_VMAP, *_GREY, "model=cnn_mnist"], 81, has_same_bits=False),
    "resnet": Case(
        [*_VMAP, *_COLOUR, "model=resnet18_bn_cifar", "model.width=4"],
        385,
        has_same_bits=False,
        rounds=1,
    ),
    "unet": Case([*_VMAP, *UNET], 156, has_same_bits=False, rounds=1),
    "cvae": Case([*_VMAP, "task=cvae", "model=cvae", "model.hidden=[16]"], 124),
    "bf16": Case([*_VMAP, *_GREY, "model=cnn_mnist", "precision=bf16"], 86, has_same_bits=False),
    "deterministic": Case([*_STACK, "method=scaffold", "deterministic=true"], 27),
    "deterministic matching": Case(
        [
            *_STACK,
            "method=ot_fusion",
            "deterministic=true",
            "aggregator.alignment.transform=median",
        ],
        rounds=1,
    ),
}
