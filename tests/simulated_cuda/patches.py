"""Replacements of PyTorch functions that would answer from the real device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from tests.simulated_cuda.device import Call, SimulatedCuda, Transfer
from tests.simulated_cuda.modes import CallMode, KernelMode

_RealGenerator = torch.Generator
_RealAutocast = torch.autocast


@contextlib.contextmanager
def patched(device: SimulatedCuda) -> Iterator[None]:
    """Replace attributes of torch inside the block."""
    with contextlib.ExitStack() as stack:
        for owner, attributes in _replacements(device):
            for name, value in attributes.items():
                stack.enter_context(patch.object(owner, name, value))
        yield


def _replacements(device: SimulatedCuda) -> list[tuple[Any, dict[str, Any]]]:
    run_backward = torch.autograd._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        # The engine runs Python functions outside the mode.
        with CallMode(device):
            return run_backward(*args, **kwargs)

    autocast = _autocast(device)
    return [
        (Tensor, _tensor_attributes(device)),
        (torch.cuda, _cuda_functions(device)),
        (torch, {"Generator": _generator_class(device), "autocast": autocast}),
        (torch.amp, {"autocast": autocast}),
        (torch.amp.autocast_mode, {"autocast": autocast}),
        (torch.autograd, {"_engine_run_backward": run_in_mode}),
        (torch.autograd.graph, {"_engine_run_backward": run_in_mode}),
        (torch.autograd.Variable, {"_execution_engine": _Engine(device)}),
        (threading.Thread, {"run": _run_in_modes(device)}),
    ]


class _Engine:
    """Autograd's engine, which creates new tensors on the device of the roots.

    Args:
        device: The simulation.
    """

    def __init__(self, device: SimulatedCuda) -> None:
        self._device = device
        self._real = torch.autograd.Variable._execution_engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the real engine."""
        self._device.calls.append(Call(args[:1]))
        try:
            return self._real.run_backward(*args, **kwargs)
        finally:
            self._device.calls.pop()


def _run_in_modes(device: SimulatedCuda) -> Callable[[threading.Thread], None]:
    run = threading.Thread.run

    def run_in_modes(self: threading.Thread) -> None:
        with CallMode(device), KernelMode(device):
            run(self)

    return run_in_modes


class SimulatedGenerator(_RealGenerator):
    """A generator of a CUDA device. Its numbers are those of the CPU's generator."""

    _on: torch.device

    @property
    def device(self) -> torch.device:
        return self._on


def _generator_class(device: SimulatedCuda) -> type:
    class Kind(type(_RealGenerator)):
        """A metaclass that accepts every generator as an instance."""

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, _RealGenerator)

    class Generator(_RealGenerator, metaclass=Kind):
        """A `torch.Generator` that also creates generators of simulated devices."""

        def __new__(cls, device_: Any = "cpu", *, device: Any = None) -> Any:
            return make(device_ if device is None else device)

    def make(on: Any) -> torch.Generator:
        resolved = device.resolve(on)
        if resolved.type != "cuda":
            return _RealGenerator(device=resolved)
        generator = SimulatedGenerator()
        generator._on = resolved
        return generator

    return Generator


def _autocast(device: SimulatedCuda) -> type:
    class Autocast(_RealAutocast):
        """A `torch.autocast` that uses the CPU's list of operators for CUDA."""

        def __init__(
            self,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            if device_type == "cuda":
                device_type, dtype = "cpu", dtype or torch.float16
            super().__init__(device_type, dtype, enabled, cache_enabled)

    return Autocast


def _tensor_attributes(device: SimulatedCuda) -> dict[str, Any]:
    base = torch._C.TensorBase
    real_to, real_numpy, real_tolist = base.to, base.numpy, base.tolist
    real_deepcopy = Tensor.__deepcopy__

    def place(tensor: Tensor) -> torch.device:
        return device.storages.device(tensor)

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target, dtype, non_blocking, copy, more = _arguments_of_to(device, args, kwargs)
        here = place(self)
        if target is None or target == here:
            return real_to(self, dtype or self.dtype, copy=copy, **more)
        if "meta" in (target.type, here.type):
            return real_to(self, target, dtype or self.dtype, copy=copy, **more)
        device.calls.append(Transfer(target))
        try:
            with DisableTorchFunction():
                moved: Tensor = torch.ops.aten._to_copy.default(
                    self, dtype=dtype, non_blocking=non_blocking, **more
                )
            return moved
        finally:
            device.calls.pop()

    def numpy(self: Tensor, *, force: bool = False) -> Any:
        if device.is_simulated(self):
            if not force:
                message = (
                    f"can't convert {place(self)} device type tensor to numpy. "
                    "Use Tensor.cpu() to copy the tensor to host memory first."
                )
                device.refuse(message, TypeError)
            self = self.detach().cpu()
        device.check_host([self], "numpy")
        return real_numpy(self, force=force)

    def tolist(self: Tensor) -> Any:
        device.check_host([self], "tolist")
        if not device.is_simulated(self):
            return real_tolist(self)
        where = place(self)
        device.counter.add("tolist (d2h)", where.index, d2h=1, d2h_bytes=self.nbytes)
        device.synchronise("tolist (d2h)", where)
        with device.counter.paused():
            return real_tolist(self)

    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
        with device.counter.paused():
            copied: Tensor = real_deepcopy(self, memo)
        if device.is_simulated(self):
            device.place(copied, place(self))
            device.counter.add("deepcopy", place(self).index, launches=1)
        return copied

    def pin_memory(self: Tensor, *args: Any) -> Tensor:
        if device.is_simulated(self):
            device.refuse("cannot pin 'torch.cuda' tensors: only dense CPU tensors can be pinned")
        pinned = self.clone()
        device.storages.pin(pinned)
        return pinned

    def cuda(self: Tensor, on: Any = "cuda", non_blocking: bool = False, **kwargs: Any) -> Tensor:
        return to(self, kwargs.get("device", on), non_blocking=non_blocking)

    return {
        "device": property(place),
        "is_cuda": property(device.is_simulated),
        "is_cpu": property(lambda self: place(self).type == "cpu"),
        "get_device": lambda self: -1 if place(self).index is None else place(self).index,
        "to": to,
        "cpu": lambda self, memory_format=torch.preserve_format: to(self, "cpu"),
        "cuda": cuda,
        "type_as": to,
        "numpy": numpy,
        "tolist": tolist,
        "pin_memory": pin_memory,
        "is_pinned": lambda self, device_=None: device.storages.is_pinned(self),
        "__deepcopy__": deepcopy,
    }


def _arguments_of_to(
    simulated: SimulatedCuda, args: Any, kwargs: Any
) -> tuple[torch.device | None, torch.dtype | None, bool, bool, dict[str, Any]]:
    """Parse the three signatures of ``Tensor.to``.

    Returns:
        Device, dtype, `non_blocking`, `copy` and the remaining arguments.
    """
    rest, kwargs = list(args), dict(kwargs)
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    other = rest.pop(0) if rest and isinstance(rest[0], Tensor) else kwargs.pop("other", None)
    if other is not None:
        device, dtype = simulated.storages.device(other), other.dtype
    elif rest and isinstance(rest[0], torch.dtype):
        dtype = rest.pop(0)
    elif rest and not isinstance(rest[0], bool):
        device = rest.pop(0)
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype = rest.pop(0)
    non_blocking = rest.pop(0) if rest else kwargs.pop("non_blocking", False)
    copy = rest.pop(0) if rest else kwargs.pop("copy", False)
    resolved = None if device is None else simulated.resolve(device)
    return resolved, dtype, bool(non_blocking), bool(copy), kwargs


def _cuda_functions(device: SimulatedCuda) -> dict[str, Any]:
    storages, count = device.storages, len(device.storages.devices)
    generator_class = _generator_class(device)
    generators = tuple(generator_class(each) for each in storages.devices)

    def index(on: Any = None) -> int:
        resolved = device.resolve("cuda" if on is None else on)
        number: int = resolved.index
        return number

    def set_device(on: Any) -> None:
        device.current = index(on)

    @contextlib.contextmanager
    def use_device(on: Any) -> Iterator[None]:
        before = device.current
        set_device(on)
        try:
            yield
        finally:
            device.current = before

    def synchronize(on: Any = None) -> None:
        device.synchronise("cuda.synchronize", storages.devices[index(on)])

    def use(on: Any = None) -> int:
        """Count a question about a device as a use of it."""
        device.counter.use(index(on))
        return index(on)

    def manual_seed(seed: int) -> None:
        generators[device.current].manual_seed(seed)

    def reset_peak(on: Any = None) -> None:
        storages.peak[use(on)] = storages.used(index(on))

    properties = SimpleNamespace(
        name="Simulated CUDA",
        major=9,
        minor=0,
        total_memory=storages.capacity,
        multi_processor_count=132,
        warp_size=32,
        gcnArchName="",
        is_integrated=False,
    )

    class Event:
        """An event, or a stream. Waiting for it counts as a synchronisation."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._device = storages.devices[device.current]

        def synchronize(self) -> None:
            device.synchronise("cuda.Event.synchronize", self._device)

        def record(self, stream: Any = None) -> Event:
            return self

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Event) -> float:
            return 0.0

        def wait_stream(self, stream: Any) -> None:
            """Wait on the device, which the host does not notice."""

        wait = wait_event = wait_stream
        record_event = record

    def used(on: Any = None) -> int:
        return storages.used(index(on))

    return {
        "Event": Event,
        "Stream": Event,
        "current_device": lambda: device.current,
        "current_stream": lambda on=None: Event(),
        "default_generators": generators,
        "default_stream": lambda on=None: Event(),
        "device": use_device,
        "device_count": lambda: count,
        "empty_cache": lambda: None,
        "get_device_capability": lambda on=None: (9, 0) if use(on) >= 0 else None,
        "get_device_name": lambda on=None: f"Simulated CUDA {use(on)}",
        "get_device_properties": lambda on=None: properties if use(on) >= 0 else None,
        "get_rng_state": lambda on="cuda": generators[index(on)].get_state(),
        "init": lambda: None,
        "ipc_collect": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: use() >= 0,
        "is_initialized": lambda: True,
        "manual_seed": manual_seed,
        "manual_seed_all": lambda seed: [each.manual_seed(seed) for each in generators],
        "max_memory_allocated": lambda on=None: storages.peak[index(on)],
        "max_memory_reserved": lambda on=None: storages.peak[index(on)],
        "mem_get_info": lambda on=None: (storages.capacity - used(on), storages.capacity),
        "memory_allocated": used,
        "memory_reserved": used,
        "memory_stats": lambda on=None: {},
        "reset_peak_memory_stats": reset_peak,
        "seed_all": lambda: None,
        "set_device": set_device,
        "set_rng_state": lambda state, on="cuda": generators[index(on)].set_state(state),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": synchronize,
        "_lazy_init": lambda: None,
    }
