"""The simulated device behaves as CUDA does in small cases."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core import trees
from tests.simulated_cuda.counts import Count, Rows
from tests.simulated_cuda.device import SimulatedCuda, simulate

CUDA_0, CUDA_1 = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    # Layers draw their parameters from the global generator.
    with torch.random.fork_rng(devices=[]), simulate() as simulated:
        yield simulated


@pytest.fixture
def counted(device: SimulatedCuda) -> Callable[[Callable[[], Any]], Count]:
    """Return a function that calls its argument and returns what was counted."""

    def count(work: Callable[[], Any]) -> Count:
        device.counter.reset()
        work()
        return device.counter.rows().total()

    return count


@pytest.fixture
def refused(device: SimulatedCuda) -> Callable[[str, Callable[[], Any]], None]:
    """Return a function that checks that its argument raises what CUDA raises."""

    def check(message: str, work: Callable[[], Any]) -> None:
        with pytest.raises((RuntimeError, TypeError), match=message):
            work()
        assert message in device.violations.pop()

    return check


# Placement


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_new_tensors_are_on_the_named_device(name: str) -> None:
    there = CUDA_0 if name == "cuda" else CUDA_1
    x = torch.zeros(3, device=name)

    for tensor in (
        x,
        x[1:],
        x + 1,
        x.data,
        x.double(),
        x.to(torch.float64),
        x.to(torch.float64).to(name),
        x.new_zeros(2),
        x.new_tensor([1.0]),
        torch.zeros_like(x),
        torch.ones_like(torch.zeros(2), device=name),
        torch.arange(3, device=x.device),
        torch.tensor([1, 2], device=name),
        x.clone(),
        torch.as_tensor(np.ones(2), device=name),
        torch.as_tensor(x),
        torch.asarray(torch.ones(2), device=name),
        torch.from_numpy(np.ones(2)).to(x),
        torch.ones(2).type_as(x),
        torch.ones(2).cuda(name),
        x.cpu().to(name),
        copy.deepcopy(x),
        nn.Parameter(x),
        nn.Linear(3, 4).to(name).weight,
    ):
        assert tensor.device == there
        assert tensor.is_cuda
        assert not tensor.is_cpu
        assert tensor.get_device() == there.index
    assert x.to(name) is x
    with torch.device(name):
        assert torch.empty(3).device == there


@pytest.mark.usefixtures("device")
def test_tensors_of_the_host_stay_there() -> None:
    x = torch.zeros(3, device="cuda")

    for tensor in (torch.zeros(3), x.cpu(), x.to("cpu"), x.new_zeros(2, device="cpu")):
        assert tensor.is_cpu
        assert not tensor.is_cuda
        assert tensor.get_device() == -1
    with torch.device("meta"):
        assert torch.empty(3).is_meta
    assert torch.ones(3).copy_(x).is_cpu
    assert x.to("meta").is_meta
    assert torch.zeros_like(x, device="meta").is_meta
    assert torch.zeros_like(x, device="cpu").is_cpu
    assert torch.empty_like(x.to("meta"), device="cuda").is_cuda


def test_absent_device_is_refused(device: SimulatedCuda) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:2")
    assert torch.cuda.device_count() == 2


@pytest.mark.usefixtures("device")
def test_cuda_without_index_is_the_current_device() -> None:
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        assert torch.zeros(1, device="cuda").device == CUDA_1
        assert torch.Generator("cuda").device == CUDA_1
    assert torch.zeros(1, device="cuda").device == CUDA_0
    torch.cuda.set_device("cuda:1")
    assert torch.zeros(1).cuda().device == CUDA_1


def test_simulation_ends_with_the_block() -> None:
    attributes = ("device", "to", "numpy", "__deepcopy__", "is_cuda")
    before = [vars(Tensor).get(name) for name in attributes]
    run, generator = threading.Thread.run, torch.Generator

    with simulate():
        assert torch.cuda.is_available()

    assert [vars(Tensor).get(name) for name in attributes] == before
    assert (threading.Thread.run, torch.Generator) == (run, generator)
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_tags_end_with_their_storages(device: SimulatedCuda) -> None:
    for _ in range(3000):
        assert torch.zeros(5, device="cuda").is_cuda
        assert not torch.zeros(5).is_cuda
        torch.zeros(5).pin_memory()
    assert len(device.storages._tags) < 1000
    assert len(device.storages._pinned) < 1000


@pytest.mark.usefixtures("device")
def test_threads_are_simulated() -> None:
    x = torch.ones(3, device="cuda")

    with ThreadPoolExecutor(2) as pool:
        assert all(y.is_cuda for y in pool.map(lambda number: x + number, range(3)))


# Errors


def test_mixed_devices_are_refused(refused: Callable[[str, Callable[[], Any]], None]) -> None:
    x, on_cpu, y = (torch.ones(3, 3, device=name) for name in ("cuda", "cpu", "cuda:1"))
    position = torch.tensor([1])

    for other in (on_cpu, y):
        for work in (
            lambda other=other: x + other,
            lambda other=other: x @ other,
            lambda other=other: torch.cat([x, other]),
            lambda other=other: other.add_(x),
            lambda other=other: F.linear(x, other),
            lambda other=other: torch._foreach_add([x], [other]),
            lambda other=other: torch.where(other > 0, x, x),
            lambda other=other: torch.stack([x.sum(), other.sum()]),
            lambda other=other: other.sum().mul_(x.sum()),
        ):
            refused("same device", work)
    refused("cuda:0 and cuda:1", lambda: x + y)
    refused("cuda:0 and cuda:1", lambda: x * y.sum())
    refused("cuda:0 and cpu", lambda: x + on_cpu)
    refused("same device", lambda: x.index_select(0, position))
    refused("same device", lambda: on_cpu[position.to("cuda")])
    refused("same device", lambda: x[position.to("cuda:1")])
    refused("same device", lambda: torch.vmap(lambda row: row + torch.ones(3))(x))


@pytest.mark.usefixtures("device")
def test_mixtures_that_cuda_accepts() -> None:
    x, on_cpu, y = (torch.ones(3, 3, device=name) for name in ("cuda", "cpu", "cuda:1"))

    assert (x * torch.tensor(2.0)).device == CUDA_0
    assert (torch.tensor(2.0) * y).device == CUDA_1
    assert x[torch.tensor([0, 2])].is_cuda
    assert x.clamp(torch.tensor(0.0)).is_cuda
    x[torch.tensor([1])] = torch.tensor(1.0)
    x[0] = torch.ones(3)
    torch._foreach_mul_([x], torch.tensor(2.0))
    x.copy_(on_cpu)
    y.copy_(x)
    torch._foreach_copy_([x], [on_cpu])


def test_wrong_generator_is_refused(refused: Callable[[str, Callable[[], Any]], None]) -> None:
    of_cpu, of_0, of_1 = (torch.Generator(device=name) for name in ("cpu", "cuda", "cuda:1"))

    refused("generator", lambda: torch.rand(3, device="cuda", generator=of_cpu))
    refused("generator", lambda: torch.rand(3, device="cuda", generator=of_1))
    refused("generator", lambda: torch.rand(3, generator=of_0))
    refused("generator", lambda: torch.zeros(3, device="cuda").normal_(generator=of_cpu))
    assert torch.rand(3, device="cuda:1", generator=of_1).device == CUDA_1
    assert torch.zeros(3).normal_(generator=of_cpu).is_cpu
    assert isinstance(of_1, torch.Generator)


def test_numpy_of_a_device_is_refused(refused: Callable[[str, Callable[[], Any]], None]) -> None:
    x = torch.ones(3, device="cuda:1")

    refused("can't convert cuda:1", x.numpy)
    refused("can't convert", lambda: np.asarray(x))
    refused("cannot pin", x.pin_memory)
    assert x.numpy(force=True).sum() == 3


def test_unsupported_calls_are_refused(refused: Callable[[str, Callable[[], Any]], None]) -> None:
    x = torch.eye(3, device="cuda")

    refused("not implemented for 'torch.int64'", lambda: x.long() @ x.long())
    refused("driver", lambda: torch.linalg.lstsq(x, x, driver="gelsd"))
    assert torch.linalg.lstsq(x, x, driver="gels").solution.is_cuda


def test_wrong_gradients_of_cuda_are_refused(
    refused: Callable[[str, Callable[[], Any]], None],
) -> None:
    def gradient(layout: torch.memory_format, padding: int) -> Tensor:
        x = torch.ones(1, 2, 4, 4, device="cuda").contiguous(memory_format=layout)
        x.requires_grad_()
        pooled = nn.functional.avg_pool2d(x, 2, stride=1, padding=padding)
        return torch.autograd.grad(pooled.sum(), x)[0]

    refused("avg_pool2d_backward is wrong", lambda: gradient(torch.channels_last, 1))
    gradient(torch.channels_last, 0)
    gradient(torch.contiguous_format, 1)


def test_nondeterministic_calls_are_refused(
    refused: Callable[[str, Callable[[], Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, on_cpu = torch.eye(3, device="cuda"), torch.eye(3)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(True)
    try:
        refused("cumsum", lambda: x.cumsum(0))
        refused("kthvalue", lambda: x.kthvalue(1))
        refused("median", lambda: x.median(0))
        refused("bincount", lambda: x[0].long().bincount(x[0]))
        refused("CUBLAS_WORKSPACE_CONFIG", lambda: x @ x)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        assert (x @ x).is_cuda
        assert x.long().cumsum(0).is_cuda
        assert on_cpu.cumsum(0).is_cpu
    finally:
        torch.use_deterministic_algorithms(False)


# Synchronisations and copies


@pytest.mark.parametrize(
    ("work", "syncs"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: float(x[0]), 1),
        (lambda x: bool(x.sum() > 0), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.numpy(force=True), 1),
        (lambda x: x[x > 1], 1),
        (lambda x: x.index_put_((x > 1,), torch.tensor(0.0)), 0),
        (lambda x: x.index_put_((x > 1,), torch.tensor(1.0, device="cpu"), True), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: torch.tensor([1.0], device=x.device), 1),
        (lambda x: torch.tensor([x[0], 1.0]), 1),
        (lambda x: x.new_tensor([1.0]), 1),
        (lambda x: x[torch.tensor([1])], 1),
        (lambda x: x.masked_fill(x > 1, 0.0), 0),
        (lambda x: x.repeat_interleave(x.long()), 1),
        (lambda x: x.repeat_interleave(x.long(), output_size=6), 0),
        (lambda x: F.one_hot(x.long(), 5), 0),
        (lambda x: torch.ones(3).to(x.device), 1),
        (lambda x: torch.ones(4).copy_(x), 1),
        (lambda x: x + 1, 0),
        (lambda x: x.to("cuda:1"), 0),
        (lambda x: torch.cuda.synchronize(), 1),
        (lambda x: torch.cuda.Event().synchronize(), 1),
        (lambda x: torch.cuda.current_stream().synchronize(), 1),
    ],
)
def test_synchronisations(
    counted: Callable[[Callable[[], Any]], Count], work: Callable[[Tensor], Any], syncs: int
) -> None:
    x = torch.arange(4.0, device="cuda")

    assert counted(lambda: work(x)).syncs == syncs


def test_copies_are_counted_in_both_directions(
    counted: Callable[[Callable[[], Any]], Count],
) -> None:
    x, on_cpu = torch.arange(4.0, device="cuda"), torch.ones(5)

    def numbers(work: Callable[[], Any]) -> tuple[float, ...]:
        count = counted(work)
        return count.h2d, count.h2d_bytes, count.d2h, count.d2h_bytes, count.launches

    assert numbers(lambda: on_cpu.to("cuda")) == (1, 20, 0, 0, 0)
    assert numbers(x.cpu) == (0, 0, 1, 16, 0)
    assert numbers(lambda: x.sum().item()) == (0, 0, 1, 4, 1)
    assert numbers(x.tolist) == (0, 0, 1, 16, 0)
    assert numbers(lambda: torch.tensor([1.0, 2.0], device="cuda")) == (1, 8, 0, 0, 0)
    assert numbers(lambda: torch._foreach_copy_([x, x], [x.cpu(), x.cpu()])) == (2, 32, 2, 32, 0)
    assert numbers(lambda: x[torch.tensor([1])]) == (1, 8, 0, 0, 1)
    # A change of type or layout is a kernel on the device.
    assert numbers(lambda: x.to("cpu", torch.float64)) == (0, 0, 1, 16, 1)
    assert numbers(x[::2].cpu) == (0, 0, 1, 8, 1)
    assert numbers(lambda: torch.ones(4, dtype=torch.float64).copy_(x)) == (0, 0, 1, 16, 1)
    square = torch.ones(2, 2)
    assert numbers(lambda: square.copy_(x.view(2, 2))) == (0, 0, 1, 16, 0)
    assert numbers(lambda: square[:, 0].copy_(x[:2])) == (0, 0, 1, 8, 1)
    assert numbers(lambda: square[0].copy_(x[::2])) == (0, 0, 1, 8, 1)
    # This is a copy between two devices.
    assert numbers(lambda: x.to("cuda:1")) == (0, 0, 0, 0, 1)


def test_only_pinned_memory_is_copied_asynchronously(
    counted: Callable[[Callable[[], Any]], Count],
) -> None:
    x, pageable, pinned = torch.ones(3, device="cuda"), torch.ones(3), torch.ones(3).pin_memory()

    assert pinned.is_pinned()
    assert not pageable.is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not x.cpu().is_pinned()
    assert counted(lambda: pinned.to("cuda", non_blocking=True)).syncs == 0
    assert counted(lambda: pinned.to("cuda")).syncs == 1
    assert counted(lambda: pageable.to("cuda", non_blocking=True)).syncs == 1
    assert counted(lambda: x.copy_(pinned, non_blocking=True)).syncs == 0
    assert counted(lambda: x.copy_(pageable, non_blocking=True)).syncs == 1
    assert counted(lambda: pageable.copy_(x, non_blocking=True)).syncs == 1
    # PyTorch pins the result of `to`.
    assert counted(lambda: x.to("cpu", non_blocking=True)).syncs == 0


def test_reading_an_unfinished_copy_is_refused(
    device: SimulatedCuda, refused: Callable[[str, Callable[[], Any]], None]
) -> None:
    x = torch.ones(3, device="cuda")
    copies = [
        lambda: x.to("cpu", non_blocking=True),
        lambda: torch.zeros(3).pin_memory().copy_(x, non_blocking=True),
        lambda: torch._foreach_copy_([torch.zeros(3).pin_memory()], [x], True)[0],
    ]

    for copy_down in copies:
        copied = copy_down()
        for read in (
            lambda copied=copied: copied + 1,
            lambda copied=copied: copied[1:].sum(),
            lambda copied=copied: copied.add_(1),
            lambda copied=copied: copied.tolist(),
            lambda copied=copied: copied.numpy(),
            lambda copied=copied: copied[0].item(),
            lambda copied=copied: torch.tensor([copied[0], 1.0]),
            lambda copied=copied: copied.to("cuda"),
        ):
            refused("before a synchronisation", read)
        torch.cuda.synchronize()
        assert copied.tolist() == [1, 1, 1]
    assert not device.violations


def test_every_synchronisation_finishes_copies(device: SimulatedCuda) -> None:
    x = torch.ones(3, device="cuda")

    for wait in (
        lambda: x.sum().item(),
        x.cpu,
        x.nonzero,
        lambda: torch.cuda.Event().synchronize(),
    ):
        copied = x.to("cpu", non_blocking=True)
        wait()
        assert copied.sum() == 3
    assert not device.violations


def test_writing_to_the_source_of_an_unfinished_copy_is_refused(
    refused: Callable[[str, Callable[[], Any]], None],
) -> None:
    pinned = torch.zeros(3).pin_memory()

    on_device = pinned.to("cuda", non_blocking=True)
    assert pinned.sum() == 0
    refused("is written before a synchronisation", lambda: pinned.add_(1))
    assert on_device.sum().item() == 0
    pinned.add_(1)


# Kernels


@pytest.mark.parametrize(
    ("work", "launches"),
    [
        (lambda x: x + 1, 1),
        (lambda x: x.add_(1), 1),
        (lambda x: x.view(2, 2).t()[0].detach(), 0),
        (lambda x: torch.empty(3, device="cuda"), 0),
        (lambda x: torch.zeros(3, device="cuda"), 1),
        (lambda x: torch.zeros(0, device="cuda"), 0),
        (lambda x: x.double(), 1),
        (lambda x: x.sort(), 4),
        (lambda x: x.index_add(0, torch.zeros_like(x, dtype=torch.long), x), 1 + 2),
        (lambda x: x.index_add_(0, x.long(), x + 1), 1 + 1 + 2),
        (lambda x: x[x > 1], 1 + 1 + 4),
        (lambda x: F.mse_loss(x, x), 2),
        (copy.deepcopy, 1),
        (lambda x: F.one_hot(x.long(), 5), 1 + 1 + 2),
    ],
)
def test_launches(
    counted: Callable[[Callable[[], Any]], Count],
    work: Callable[[Tensor], Any],
    launches: int,
) -> None:
    x = torch.arange(4.0, device="cuda")

    assert counted(lambda: work(x)).launches == launches


def test_cpu_kernels_are_counted(counted: Callable[[Callable[[], Any]], Count]) -> None:
    x, on_device = torch.ones(3), torch.ones(3, device="cuda")

    assert counted(lambda: x + 1) == Count(cpu_kernels=1)
    assert counted(x[1:].detach) == Count()
    assert counted(x.double) == Count(cpu_kernels=1)
    assert counted(lambda: on_device + 1) == Count(launches=1)


def test_foreach_splits_long_lists(counted: Callable[[Callable[[], Any]], Count]) -> None:
    tensors = [torch.ones(10, 10, device="cuda") for _ in range(200)]
    transposed = [torch.ones(10, 10, device="cuda").t() for _ in range(200)]
    mixed = [*tensors[:-1], tensors[-1].double()]
    large = [torch.ones(65536 * 300, device="cuda", dtype=torch.int8) for _ in range(2)]

    # One launch takes 64 tensors of two lists, or 48 tensors of three lists.
    assert counted(lambda: torch._foreach_add_(tensors, tensors)).launches == 4
    assert counted(lambda: torch._foreach_add(tensors, tensors)).launches == 5
    assert counted(lambda: torch._foreach_mul_(tensors, 2.0)).launches == 2
    # There are 320 chunks.
    assert counted(lambda: torch._foreach_add_(large, 1)).launches == 2
    # These calls take the slow path, with one launch per tensor.
    assert counted(lambda: torch._foreach_add_(tensors, transposed)).launches == 200
    assert counted(lambda: torch._foreach_add_(mixed, 1.0)).launches == 200
    assert counted(lambda: torch._foreach_norm(tensors)).launches == 2 + 2


def test_optimizer_step_is_one_launch(counted: Callable[[Callable[[], Any]], Count]) -> None:
    params = [torch.ones(10, 10, device="cuda", requires_grad=True) for _ in range(8)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=True)

    assert counted(optimizer.step).launches == 1


def test_convolution_backward_launches_one_kernel_per_gradient(
    counted: Callable[[Callable[[], Any]], Count],
) -> None:
    conv = nn.Conv2d(1, 2, 3).to("cuda")
    x = torch.ones(2, 1, 8, 8, device="cuda")
    of_weights = conv(x).sum()
    of_all = conv(x.requires_grad_()).sum()

    first = counted(lambda: torch.autograd.grad(of_weights, list(conv.parameters()))).launches
    second = counted(lambda: torch.autograd.grad(of_all, [x, *conv.parameters()])).launches

    assert second == first + 1


def test_counts_are_attributed_to_phases(device: SimulatedCuda) -> None:
    x = torch.ones(3, device="cuda")
    device.counter.reset()

    with device.counter.phase("outer"):
        x.add_(1)
        with device.counter.phase("inner"):
            x.add_(1)
    x.add_(1)
    with device.counter.paused():
        x.add_(1)

    assert device.counter.rows().total().launches == 3
    assert device.counter.rows().total("outer").launches == 2
    assert device.counter.rows().total("outer/inner").launches == 1
    assert device.counter.rows().total("other") == Count()
    assert [line.split()[-1] for line in device.counter.rows().by_line("outer/inner")] == ["add_"]


def test_counts_name_the_line_of_fedexp(device: SimulatedCuda) -> None:
    x = torch.ones(3, device="cuda")
    device.counter.reset()
    with device.counter.phase("a"):
        trees.clone({"x": x})
    with device.counter.phase("b"):
        torch.add(x, 1)
    rows = device.counter.rows()

    assert rows.total(file="core/trees.py:") == rows.total("a") == Count(launches=1)
    assert rows.total("b", operator="add") == Count(launches=1)
    assert [line.partition(":")[0] for line in rows.by_line("a")] == ["core/trees.py"]
    assert list(rows.by_line("b")) == ["elsewhere add"]
    assert Rows.of_plain(rows.plain()).plain() == rows.plain()
    assert len(rows.plain()) == 2


def test_counts_are_vectors() -> None:
    a, b = Count(launches=3, syncs=1), Count(launches=1)

    assert a + b == Count(launches=4, syncs=1)
    assert a - b == Count(launches=2, syncs=1)
    assert a * 0.5 == Count(launches=1.5, syncs=0.5)


def test_uses_are_counted_by_device(device: SimulatedCuda) -> None:
    x = torch.empty(3, device="cuda:1")
    assert device.counter.uses == {1: 1}
    with device.counter.paused():
        torch.empty(3, device="cuda")
    assert device.counter.uses == {1: 1}
    (x + 1).sum().item()
    assert set(device.counter.uses) == {1}

    torch.cuda.get_device_name()
    assert set(device.counter.uses) == {0, 1}
    device.counter.reset()
    torch.cuda.synchronize()
    assert set(device.counter.uses) == {0}


# Memory


def test_memory_is_that_of_live_tensors() -> None:
    with simulate(capacity=4000):
        x = torch.zeros(500, device="cuda")
        del x
        y = torch.zeros(600, device="cuda")
        on_other = torch.zeros(900, device="cuda:1")

        assert torch.cuda.memory_allocated() == y.nbytes
        assert torch.cuda.memory_allocated(1) == on_other.nbytes
        assert torch.cuda.mem_get_info() == (1600, 4000)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.zeros(500, device="cuda")
        assert torch.cuda.max_memory_allocated() >= y.nbytes
        del y
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        assert torch.zeros(900, device="cuda").is_cuda


# Autograd and functorch


def test_gradients_are_on_the_device(device: SimulatedCuda) -> None:
    w = torch.ones(4, 3, device="cuda:1", requires_grad=True)
    x = torch.ones(2, 3, device="cuda:1")
    unused = torch.zeros(2, device="cuda:1", requires_grad=True)
    loss = F.cross_entropy(x @ w.T, torch.tensor([1, 2], device="cuda:1"))

    grads = torch.autograd.grad(loss, [w, unused], allow_unused=True, materialize_grads=True)
    (w[0, 1:] ** 2).sum().backward()

    assert not device.calls
    assert torch.autograd.Variable._execution_engine.is_checkpoint_valid()
    assert [grad.device for grad in grads] == [CUDA_1, CUDA_1]
    assert w.grad is not None
    assert w.grad.device == CUDA_1


@pytest.mark.usefixtures("device")
def test_functions_of_autograd_run_on_the_device() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert grad.is_cuda
            return grad * torch.full((), 2.0, device=grad.device)

    x = torch.ones(3, device="cuda", requires_grad=True)
    Twice.apply(x).sum().backward()

    assert x.grad is not None
    assert x.grad.is_cuda


@pytest.mark.usefixtures("device")
def test_vmap_of_gradients_is_on_the_device() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3)).to(
        "cuda"
    )
    params = {k: v.detach().expand(5, *v.shape).clone() for k, v in net.named_parameters()}
    buffers = {k: v.detach().expand(5, *v.shape).clone() for k, v in net.named_buffers()}
    x = torch.ones(5, 4, 1, 8, 8, device="cuda")
    y = torch.zeros(5, 4, dtype=torch.long, device="cuda")

    def loss(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
        assert x.device == CUDA_0
        output = torch.func.functional_call(net, (params, buffers), (x,))
        return F.cross_entropy(output, y) + torch.zeros((), device=x.device) + x.new_zeros(())

    grads = torch.func.vmap(torch.func.grad(loss))(params, buffers, x, y)

    assert all(grad.is_cuda for grad in grads.values())
    assert torch.func.vmap(lambda row: row.to("cuda").cpu())(x).is_cpu


@pytest.mark.usefixtures("device")
def test_autocast_of_cuda_rounds() -> None:
    x = torch.ones(3, 3, device="cuda")

    with torch.autocast("cuda", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32
