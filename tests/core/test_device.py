"""Tests of the functions that query devices.

`FakeModule` replaces torch's module of devices that this machine lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core import device as devices
from fedexp.core.errors import ConfigError
from fedexp.running import experiment
from fedexp.running.experiment import Experiment
from tests.world import CPU

CUDA_1 = torch.device("cuda:1")
PACKAGE = Path(__file__).resolve().parents[2] / "fedexp"


class FakeModule(SimpleNamespace):
    """A device module with two devices of 64 MiB each, which records its calls."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def device_count(self) -> int:
        return 2

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        self.calls.append(("memory", device))
        return 1000, 1 << 26

    def memory_reserved(self, device: torch.device) -> int:
        return 300

    def memory_allocated(self, device: torch.device) -> int:
        return 100

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(("synchronize", device))

    def get_device_name(self, device: torch.device) -> str:
        return f"card {device.index}"

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.calls.append(("enter", index))
        yield
        self.calls.append(("exit", index))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    module = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    return module


def test_a_device_with_an_index_is_the_only_one(fake: FakeModule) -> None:
    names = ["cpu", "cuda", "cuda:1", "xpu", "xpu:0"]
    assert [devices.num_devices(name) for name in names] == [0, 2, 1, 2, 1]


def test_questions_go_to_the_device_of_the_run(fake: FakeModule) -> None:
    devices.synchronise(CUDA_1)
    assert devices.hardware(CUDA_1) == "card 1"
    assert devices.free_device_memory(CUDA_1) == 1000 + 300 - 100
    assert fake.calls == [("synchronize", CUDA_1), ("memory", CUDA_1)]


def test_a_device_with_an_index_is_current_in_a_block(fake: FakeModule) -> None:
    with devices.current(CUDA_1):
        fake.calls.append(("inside", 0))
    with devices.current(torch.device("cuda")), devices.current(CPU):
        pass
    assert fake.calls == [("enter", 1), ("inside", 0), ("exit", 1)]


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert devices.hardware(CPU) is devices.total_memory(CPU) is devices.device_peak(CPU) is None
    assert devices.free_device_memory(CPU) is None


def test_a_chunk_is_a_64th_of_the_devices_memory_at_most(
    fake: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_on = devices.chunk_bytes.__wrapped__  # without the cache
    assert bytes_on(CPU) == 4 << 20
    assert bytes_on(CUDA_1) == 1 << 20
    monkeypatch.setattr(fake, "mem_get_info", lambda device: (0, 80 << 30))
    assert bytes_on(CUDA_1) == 256 << 20


def test_float64_goes_to_the_cpu_if_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.ones(2, device="meta")
    assert devices.wide(value).dtype == torch.float64 and devices.wide(value).is_meta
    monkeypatch.setattr(devices, "has_float64", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: torch.zeros(self.shape))
    assert devices.wide(value).dtype == torch.float64 and not devices.wide(value).is_meta
    with pytest.raises(ConfigError, match="no float64"):
        devices.check_device("cpu", "float64")


@pytest.mark.parametrize(("method", "refused"), [("krum", True), ("median", False)])
def test_a_method_that_computes_in_float64_is_refused_without_it(
    method: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose([f"method={method}", "device=cpu"])
    monkeypatch.setattr(experiment, "has_float64", lambda device: False)
    with pytest.raises(ConfigError, match="Krum computes in float64") if refused else nullcontext():
        Experiment.of(config)


def test_no_other_module_asks_for_the_kind_of_a_device() -> None:
    kinds = re.compile(
        r"torch\.(cuda|mps|xpu|accelerator)\b|is_cuda|\.type [!=]= \"(cpu|cuda|mps|xpu)\""
    )
    found = {p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py") if kinds.search(p.read_text())}
    assert found == {Path("core/device.py")}


def test_a_device_without_index_is_any_of_its_kind() -> None:
    value = torch.ones(1, device="meta")
    found = [devices.is_there(value, torch.device(name)) for name in ("meta", "cpu", "cuda:0")]
    assert found == [True, False, False]
    indexed = SimpleNamespace(device=torch.device("cuda:1"))
    names = ("cuda", "cuda:1", "cuda:0")
    found = [devices.is_there(indexed, torch.device(name)) for name in names]  # type: ignore[arg-type]
    assert found == [True, True, False]
