"""The modes that intercept every torch function and every operator."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated_cuda.device import Call, SimulatedCuda, Transfer
from tests.simulated_cuda.operators import (
    COPIES,
    CUBLAS,
    INDEXING,
    NOT_FOR_INTEGERS,
    TAKES_CPU_SCALAR,
    Operator,
    is_dense,
    launches,
    nondeterministic,
    operator,
    synchronisations,
    tensors_in,
)
from tests.simulated_cuda.storages import CPU

_CONSTRUCTORS = {torch.tensor, torch.as_tensor, torch.asarray, torch._C.TensorBase.new_tensor}
# `one_hot` runs these operators on the CPU to check the range of its classes.
_RANGE_CHECKS = {"aminmax", "min", "max", "_local_scalar_dense"}


class CallMode(TorchFunctionMode):
    """A mode that records the running Python call and places its new tensors.

    It replaces ``device="cuda"`` by the CPU. C++ functions create tensors by
    ``at::zeros(..., self.options())``, which name the real device. These tensors are
    placed according to the arguments of the call.
    """

    def __init__(self, device: SimulatedCuda) -> None:
        super().__init__()
        self._cuda = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None:
            device = self._cuda.resolve(device)
            if device.type == "cuda":
                kwargs["device"] = CPU
        if kwargs.get("pin_memory") and (device is None or device.type == "cpu"):
            kwargs["pin_memory"] = False
            pinned = self.__torch_function__(func, types, args, kwargs)
            self._cuda.storages.pin(pinned)
            return pinned
        if func in _CONSTRUCTORS:
            return self._construct(func, args, kwargs, device)

        call = Call(
            (args, kwargs), device, kwargs.get("generator"), not _knows_classes(func, args, kwargs)
        )
        self._cuda.calls.append(call)
        try:
            return func(*args, **kwargs)
        finally:
            self._cuda.calls.pop()

    def _construct(
        self, func: Callable[..., Any], args: Any, kwargs: Any, device: torch.device | None
    ) -> Any:
        """Create a tensor from numbers, an array or a tensor."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        is_method = func is torch._C.TensorBase.new_tensor
        if first is not None and func in (torch.as_tensor, torch.asarray):
            return first.to(device=device, dtype=kwargs.get("dtype"))
        if device is None:
            device = CPU if first is None else self._cuda.storages.device(first)
        elements = list(tensors_in(args[1:] if is_method else args))
        for tensor in elements:
            if self._cuda.is_simulated(tensor):
                self._cuda.synchronise("tensor(elements)", self._cuda.storages.device(tensor))

        made = func(*args, **kwargs)
        if device.type == "cuda" and not self._cuda.is_simulated(made):
            source = torch.empty_like(made, device="meta")
            self._cuda.place(made, device)
            self._cuda.counter.add(
                f"{func.__name__} (h2d)", device.index, h2d=1, h2d_bytes=source.nbytes
            )
            self._cuda.synchronise(f"{func.__name__} (h2d)", device)
        return made


class KernelMode(TorchDispatchMode):
    """A mode that refuses what CUDA refuses, places operators' outputs, and counts."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because torch otherwise imports its compiler for a second."""
        return False

    def __init__(self, device: SimulatedCuda) -> None:
        super().__init__()
        self._cuda = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = operator(func)
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        devices = [self._cuda.storages.device(tensor) for tensor in tensors]
        self._cuda.check_host(tensors, op, args)
        if op.name == "_to_copy":
            return self._to_copy(func, args, kwargs)
        if len(set(devices)) > 1:
            self._check_mixture(op, args, tensors)
        device = self._device(op, tensors, devices)
        self._check_generator(op, device)
        if op.name in COPIES and len(set(devices)) > 1:
            return self._copy(func, op, args, kwargs)
        if device.type == "cuda":
            self._check_support(op, args, kwargs)

        out = func(*args, **kwargs)
        if device.type == "cuda":
            self._cuda.place(out, device)
        self._count(op, args, kwargs, out, device)
        return out

    def _device(
        self, op: Operator, tensors: Sequence[Tensor], devices: Sequence[torch.device]
    ) -> torch.device:
        """Return the device on which an operator computes.

        The operator's argument ``device`` is not used, because it is the real device.
        """
        call = self._cuda.calls[-1] if self._cuda.calls else Call(())
        if not tensors:
            return call.device or self._cuda.device_of(call.args)
        if op.name.startswith("new_") or op.name.endswith("_like"):
            return call.device or devices[0]
        return next((device for device in devices if device.type == "cuda"), devices[0])

    def _count(self, op: Operator, args: Any, kwargs: Any, out: Any, device: torch.device) -> None:
        if self._cuda.counter.is_paused:
            return
        if self._cuda.calls and not self._cuda.calls[-1].counts_checks and op.name in _RANGE_CHECKS:
            return
        kernels = launches(op, args, out)
        if device.type == "cpu":
            if kernels:
                self._cuda.counter.add(op.name, cpu_kernels=1)
            return
        if device.type != "cuda":
            return

        if kernels:
            self._cuda.counter.add(op.name, device.index, launches=kernels)
        if op.name == "_local_scalar_dense":
            size = args[0].element_size()
            self._cuda.counter.add(op.name, device.index, d2h=1, d2h_bytes=size)
            self._cuda.synchronise(op.name, device)
        elif times := synchronisations(op, args, kwargs):
            self._cuda.synchronise(op.name, device, times)

    def _to_copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Under vmap, a wrapped number is a Python number here.
        if not isinstance(args[0], Tensor):
            return func(torch.tensor(args[0]), **kwargs)
        source, call = args[0], self._cuda.calls[-1] if self._cuda.calls else None
        here = self._cuda.storages.device(source)
        there = call.device if isinstance(call, Transfer) else here
        non_blocking = bool(kwargs.get("non_blocking", False))

        out = func(*args, **kwargs)
        if "meta" in (out.device.type, here.type):
            return out
        if there.type == "cuda":
            self._cuda.place(out, there)
        elif here.type == "cuda" and non_blocking:
            # PyTorch allocates pinned memory for such a copy.
            self._cuda.storages.pin(out)
        self._cuda.copy(source, out, "to", non_blocking=non_blocking)
        device = here if here.type == "cuda" else there
        if device.type == "cpu":
            self._cuda.counter.add("_to_copy", cpu_kernels=1)
        elif out.numel() and (here == there or out.dtype != source.dtype or not is_dense(source)):
            self._cuda.counter.add("_to_copy", device.index, launches=1)
        return out

    def _copy(self, func: Any, op: Operator, args: Any, kwargs: Any) -> Any:
        """Run an operator that copies into given tensors."""
        targets, sources = args[0], args[1] if len(args) > 1 else kwargs["src"]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        out = func(*args, **kwargs)
        for target, source in zip(tensors_in(targets), tensors_in(sources), strict=True):
            self._cuda.copy(source, target, op.name, non_blocking=non_blocking)
            if target.dtype != source.dtype or not (is_dense(source) and is_dense(target)):
                device = self._cuda.device_of((target, source))
                self._cuda.counter.add(op.name, device.index, launches=1)
        return out

    def _check_mixture(self, op: Operator, args: Any, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors of several devices, except where CUDA accepts CPU tensors."""
        if op.name in COPIES or op.name in ("is_same_size", "_has_compatible_shallow_copy_type"):
            return
        device = self._cuda.device_of(tensors)
        wrong = [t for t in tensors if self._cuda.storages.device(t) != device]
        on_cpu = [t for t in wrong if not self._cuda.is_simulated(t)]
        if op.name in INDEXING and self._cuda.is_simulated(args[0]):
            indices = [t for t in on_cpu if any(t is index for index in args[1])]
            for index in indices:
                self._cuda.counter.add("index", device.index, h2d=1, h2d_bytes=index.nbytes)
                self._cuda.synchronise("index (h2d)", device)
            accepted = [*indices, *(t for t in on_cpu if t.numel() == 1)]
        elif op.is_pointwise or op.name in TAKES_CPU_SCALAR:
            outputs = op.outputs_among(args)
            scalars = [t for t in on_cpu if t.dim() == 0]
            accepted = [t for t in scalars if not any(t is output for output in outputs)]
        else:
            accepted = []

        refused = [t for t in wrong if not any(t is each for each in accepted)]
        if refused:
            others = sorted({str(self._cuda.storages.device(t)) for t in refused})
            self._cuda.refuse(
                "Expected all tensors to be on the same device, but found at least two "
                f"devices, {device} and {others[0]}! ({op.full}, shapes there: "
                f"{', '.join(str(tuple(t.shape)) for t in refused)})"
            )

    def _check_generator(self, op: Operator, device: torch.device) -> None:
        """Refuse a generator of another device."""
        generator = self._cuda.calls[-1].generator if self._cuda.calls else None
        if generator is None or not op.takes_generator:
            return
        if generator.device != device and device.type in ("cpu", "cuda"):
            self._cuda.refuse(
                f"Expected a '{device}' device type for generator but found '{generator.device}'"
            )

    def _check_support(self, op: Operator, args: Any, kwargs: Any) -> None:
        """Refuse calls that CUDA does not implement."""
        first = next(tensors_in(args), None)
        if first is None:
            return
        is_number = first.dtype.is_floating_point or first.dtype.is_complex
        if op.name in NOT_FOR_INTEGERS and not is_number:
            self._cuda.refuse(f"\"{op.name}_cuda\" not implemented for '{first.dtype}'")
        if op.name == "linalg_lstsq" and kwargs.get("driver") not in (None, "gels"):
            self._cuda.refuse("linalg.lstsq: `driver` should be one of (gels) on CUDA")
        if op.name == "avg_pool2d_backward" and any(args[4]) and _is_channels_last(args[1]):
            self._cuda.refuse(
                "CUDA's avg_pool2d_backward is wrong with padding and a channels-last input: "
                "https://github.com/pytorch/pytorch/issues/188344"
            )
        if not torch.are_deterministic_algorithms_enabled():
            return

        if (name := nondeterministic(op, args)) is not None:
            self._cuda.refuse(f"{name} does not have a deterministic implementation")
        if op.name in CUBLAS and not _is_cublas_deterministic():
            self._cuda.refuse(f"{op.full} needs CUBLAS_WORKSPACE_CONFIG=:4096:8")


def _knows_classes(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether a call is `one_hot` with a given number of classes."""
    if func is not torch._C._nn.one_hot:
        return False
    num_classes: int = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    return num_classes != -1


def _is_channels_last(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _is_cublas_deterministic() -> bool:
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
