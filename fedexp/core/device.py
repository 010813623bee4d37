"""Functions whose result depends on the device that a run computes on.

A device is a `torch.device`. Its kind is its `type`: ``cpu``, ``cuda``, ``mps`` or
``xpu``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from fedexp.core.errors import ConfigError

OutOfMemoryError = torch.OutOfMemoryError
"""The error that torch raises if a device has too little memory."""

_UNTESTED = ("mps", "xpu")
_SHARES_MEMORY = ("cpu", "mps")  # kinds of devices that use the main memory
# Kinds of devices on which convolutions are faster if tensors are channels last.
_CHANNELS_LAST_ON = ("cuda",)
# Training inputs are copied out of the data set in chunks. These are the bytes of a
# chunk. Larger chunks need fewer calls. On a CPU, a chunk must fit into the cache. On
# another device, it must fit into a small part of the memory.
_CHUNK_BYTES_ON_CPU = 1 << 22
_CHUNK_BYTES = 1 << 28
# Device types on which fedexp trains
_DEVICES = ("cpu", "cuda", "mps", "xpu")


def device_name(name: str) -> str:
    """Return the device's name. ``auto`` is ``cuda`` if available, else ``cpu``."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def check_device(name: str, dtype: str = "float32") -> None:
    """Refuse a device that torch cannot use, or that does not support `dtype`.

    Raises:
        ConfigError: The device is absent, or does not support the type.
    """
    problem = None
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        problem = str(error).splitlines()[0]
    else:
        if device.type not in _DEVICES:
            problem = "fedexp does not train on this kind of device"
        elif device.type == "cpu" and torch.device(name).index:
            problem = "the CPU has only one device"
    if problem is not None:
        raise ConfigError(
            f"device '{name}' cannot be used: {problem}",
            where="device",
            expected="auto | cpu | cuda | cuda:<index> | mps | xpu",
            do="set device=auto",
        )
    if dtype == "float64" and not has_float64(torch.device(name)):
        raise ConfigError(
            f"device '{name}' has no float64 numbers",
            where="dtype",
            expected="float32",
            got="float64",
            do="set dtype=float32, or device=cpu",
        )


def is_untested(device: torch.device) -> bool:
    """Return whether fedexp has never been run on this kind of device."""
    return device.type in _UNTESTED


def on_cpu(device: torch.device) -> bool:
    """Return whether the device is the CPU."""
    return device.type == "cpu"


def is_there(value: Tensor, device: torch.device) -> bool:
    """Return whether the tensor `value` is on `device`.

    A `device` without an index, such as ``cuda``, stands for all devices of its kind.
    """
    return value.device.type == device.type and device.index in (None, value.device.index)


def num_devices(device: str) -> int:
    """Return the number of devices that a run may use, or 0 on a CPU.

    A run with a device index, such as ``cuda:1``, uses only this device.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return 0
    return 1 if index else int(torch.get_device_module(kind).device_count())


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make `device` torch's current device in a ``with`` block, if it has an index.

    Torch runs calls that name no device on the current device. Outside the block, this
    is the first device.
    """
    if device.index is None or device.type in ("cpu", "mps"):
        yield
    else:
        with torch.get_device_module(device.type).device(device.index):
            yield


def synchronise(device: torch.device) -> None:
    """Wait for all work on the device."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


def hardware(device: torch.device) -> str | None:
    """Return the name of the device's hardware, or None if torch does not know it."""
    if device.type in _SHARES_MEMORY:
        return None
    return str(torch.get_device_module(device.type).get_device_name(device))


def total_memory(device: torch.device) -> int | None:
    """Return the device's own memory in bytes, or None if it uses the main memory."""
    if device.type in _SHARES_MEMORY:
        return None
    return int(torch.get_device_module(device.type).mem_get_info(device)[1])


def free_device_memory(device: torch.device) -> int | None:
    """Return the bytes of the device's own memory that this process may still allocate.

    None means that the device uses the main memory.
    """
    if device.type in _SHARES_MEMORY:
        return None
    module = torch.get_device_module(device.type)
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused)


def reset_device_peak(device: torch.device) -> None:
    """Start a new measurement of the peak memory, if the device has its own memory."""
    if device.type not in _SHARES_MEMORY:
        torch.get_device_module(device.type).reset_peak_memory_stats(device)


def device_peak(device: torch.device) -> int | None:
    """Return the peak number of bytes that tensors of this process had on the device.

    None means that the device uses the main memory.
    """
    if device.type in _SHARES_MEMORY:
        return None
    return int(torch.get_device_module(device.type).max_memory_allocated(device))


@cache
def chunk_bytes(device: torch.device) -> int:
    """Return the size of the chunks in which inputs are gathered and normalised."""
    if device.type == "cpu":
        return _CHUNK_BYTES_ON_CPU
    memory = total_memory(device)
    return _CHUNK_BYTES if memory is None else min(_CHUNK_BYTES, memory // 64)


def has_started_cuda() -> bool:
    """Return whether this process uses CUDA already.

    If so, the set of GPUs that it sees can no longer be changed.
    """
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


def profiler_activities(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    """Return the activities that torch's profiler records for work on the device."""
    kinds = torch.profiler.ProfilerActivity
    own = {"cuda": [kinds.CUDA], "xpu": [kinds.XPU]}
    return [kinds.CPU, *own.get(device.type, [])]


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to `device`.

    A copy to CUDA uses pinned memory and is asynchronous. Later kernels wait for it.
    """
    if device.type == "cuda":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def global_generator_states() -> tuple[bytes, ...]:
    """Return the states of the global generators of the CPU, and of GPUs in use."""
    # This function is called several times per client, so few calls are made here.
    states: tuple[bytes, ...] = (torch.default_generator.get_state().numpy().tobytes(),)
    for module in (torch.cuda, torch.xpu):
        if module.is_initialized():
            generators = module.default_generators
            states += tuple(each.get_state().numpy().tobytes() for each in generators)
    return states


def has_bf16(device: torch.device) -> bool:
    """Return whether the device computes in bfloat16 without an emulation."""
    if device.type != "cuda":
        return True
    with current(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def has_float64(device: torch.device) -> bool:
    """Return whether the device supports float64."""
    return device.type != "mps"


def wide(value: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU if its device does not support float64."""
    return value.double() if has_float64(value.device) else value.cpu().double()


def prefers_channels_last(device: str) -> bool:
    """Return whether convolutions on this device are faster if channels are last."""
    return device in _CHANNELS_LAST_ON


def may_gain_by_stacks(device: torch.device) -> bool:
    """Return whether several teachers may run faster as one stacked network.

    On a CPU they do not (`fedexp.distillation.stacking` explains why).
    """
    return device.type != "cpu"
