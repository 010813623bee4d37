"""The number of host reads per epoch does not depend on the number of server steps.

Thus the server's training can queue its steps on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedexp.core.aggregator import State
from fedexp.core.jobs import ClientResult
from fedexp.core.runner import run
from fedexp.data.augment import Augment
from fedexp.engines.serial import Serial
from tests.methods.distilled_world import small_world
from tests.methods.server_world import models_near
from tests.world import make_data, make_world

MOVED = {Tensor.to, Tensor.cpu, Tensor.cuda, torch.tensor, torch.as_tensor, torch.from_numpy}


class Operations(TorchDispatchMode):
    """A counter of operations that make the host wait for the device.

    The host needs their result or the result's shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        waits = bool(
            {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        )
        if func.overloadpacket in (
            torch.ops.aten.index,
            torch.ops.aten.index_put,
            torch.ops.aten.index_put_,
        ):
            waits = any(at is not None and at.dtype in (torch.bool, torch.uint8) for at in args[1])
        self.count += waits
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """A counter of host reads that are not operations.

    These are conversions to lists or arrays, and moves to a named device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.moves = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.count += func in (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu)
        named = any(
            isinstance(value, str | torch.device) for value in (*args, *(kwargs or {}).values())
        )
        self.moves += func in MOVED and (named or func is not Tensor.to)
        return func(*args, **(kwargs or {}))


def reads(work: Callable[[], object]) -> tuple[int, int]:
    """Return how often `work` reads values on the host and how often it moves a tensor.

    Moves are between host and device.
    """
    with Calls() as calls, Operations() as operations:
        work()
    return calls.count + operations.count, calls.moves


@pytest.mark.parametrize("read", [
    lambda x: x[0].item(), lambda x: float(x[0]), lambda x: bool(x[0] > 1), lambda x: x.tolist(), lambda x: x.numpy(),
    lambda x: x.nonzero(), lambda x: x[x > 1], lambda x: torch.equal(x, x), lambda x: x.unique(),
])  # fmt: skip
def test_a_read_is_seen(read: Callable[[Tensor], object]) -> None:
    x = torch.ones(3)
    assert reads(lambda: read(x))[0] >= 1
    assert reads(lambda: [torch.where(x > 1, 0.0, x)[x.long()].sum(), x.to(torch.float64)]) == (
        0,
        0,
    )


def epoch(method: str, steps: int, *keys: str) -> tuple[int, int]:
    """Return the reads and moves of the second epoch, in which the bank has one batch.

    The student takes `steps` steps.
    """
    world = small_world(method, "aggregator.b=12", "aggregator.T=2", *keys)
    *_, begun = itertools.islice(run(world.aggregator, world.env, Serial(), world.data), 2)
    logged: list[dict[str, float]] = []
    found = reads(
        lambda: logged.append(world.aggregator.update(begun.after.state, [], world.env.at(0, 2))[1])
    )
    assert logged[0]["distillation/steps"] == steps
    return found


GENERATOR = ("aggregator.nz=4", "aggregator.ngf=3")
DENSE = (*GENERATOR, "aggregator.lambda_1=0.3", "aggregator.lambda_2=2")
CLIPPED = ("aggregator.generator.clip=0.1", "aggregator.student.clip=0.1")


@pytest.mark.parametrize(("method", "key", "keys"), [
    ("dense", "T_G", DENSE),
    ("dense", "T_G", (*DENSE, *CLIPPED, "aggregator.at_once=1")),
    ("dense", "T_G", (*DENSE, "aggregator.synthesis_views=crop_flip", "aggregator.views=crop_flip")),
    ("co_boosting", "T_G", (*GENERATOR, "aggregator.lambda_bn=0.3")),
    ("fed_adi", "N_inv", ("aggregator.w_2=0.1",)),
    ("fed_adi", "N_inv", ("aggregator.views=authors", "aggregator.tv=l1")),
], ids=["dense", "dense-clipped-in-parts", "dense-augmented", "co_boosting", "fed_adi", "fed_adi-augmented"])  # fmt: skip
def test_an_epoch_with_a_bank_reads_as_often_however_many_steps_make_images_and_teach(
    method: str, key: str, keys: tuple[str, ...]
) -> None:
    """An epoch reads equally often for any number of steps.

    In the second run, the steps on images, the student's steps and the steps of
    Co-Boosting's weights are three times as many.
    """
    few = epoch(method, 2, *keys, f"aggregator.{key}=2", "aggregator.B=12")
    many = epoch(method, 6, *keys, f"aggregator.{key}=6", "aggregator.B=4")
    assert few[0] == many[0] > 0
    # The noise and offsets of views are drawn on the device of the images.
    if not any("views" in key for key in keys):
        assert few == many


def test_joint_training_reads_as_often_however_many_steps_it_has() -> None:
    few, many = (
        epoch("fed_dafl", n, *GENERATOR, *CLIPPED, f"aggregator.iterations={n}") for n in (2, 6)
    )
    assert few == many and few[0] > 0


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("method", ["feddf_matched", "feddf_paper"])
def test_a_pass_over_proxy_data_reads_as_often_however_many_batches_it_has(
    method: str, augment: bool
) -> None:
    found = []
    for batch_size, steps in ((30, 2), (10, 6)):  # there are 58 samples
        world = make_world(f"method={method}", "rounds=1", data=make_data(images=True))
        aggregator = replace(world.aggregator, batch_size=batch_size, augment=augment)  # type: ignore[call-arg]
        domain = replace(world.env.domain, augment=Augment(crop_padding=1))
        env = replace(world.env, proxy=world.data.train, domain=domain)
        models = models_near(env.initial_weights(), 3)
        results = [ClientResult(c, model, 9, 1, {}, None, {}) for c, model in enumerate(models)]
        state, _ = aggregator.update(aggregator.init(env), results, env)
        after: list[State] = []
        found.append(reads(lambda: after.append(aggregator.update(state, [], env.at(0, 1))[0])))  # noqa: B023
        assert after[0]["work"]["taken"] == steps
    few, many = found
    assert few[0] == many[0] > 0 and (augment or few == many)
