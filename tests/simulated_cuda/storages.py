"""The tensors of simulated devices.

Every tensor is an ordinary CPU tensor. It is on a simulated device if its storage has a
tag. Views share the tag, because they share the storage.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef

CPU = torch.device("cpu")
_PURGE_EVERY = 512  # number of allocations
_real_device = torch._C.TensorBase.device.__get__


@dataclass(frozen=True)
class _Allocation:
    # The weak reference prevents another storage from getting the same address.
    reference: StorageWeakRef
    size: int
    device: torch.device


class Storages:
    """Tags of storages, and the memory of each device.

    Args:
        count: Number of devices.
        capacity: Bytes of each device.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self.devices = [torch.device("cuda", index) for index in range(count)]
        self.capacity = capacity
        self.peak = [0] * count
        self._used = [0] * count
        self._tags: dict[int, _Allocation] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._in_flight: dict[int, tuple[StorageWeakRef, bool]] = {}
        self._since_purge = 0
        self._lock = threading.RLock()

    def device(self, tensor: Tensor) -> torch.device:
        """Return the device on which the tensor appears to be."""
        inner = _unwrapped(tensor)
        allocation = self._tags.get(inner.untyped_storage()._cdata)
        if allocation is not None:
            return allocation.device
        with DisableTorchFunction():
            real: torch.device = _real_device(inner)
        return real

    def tag(self, tensor: Tensor, device: torch.device) -> bool:
        """Put a tensor's storage on a device, and return whether it is new there.

        Raises:
            torch.cuda.OutOfMemoryError: The device's memory does not suffice.
        """
        storage = tensor.untyped_storage()
        size, index = storage.nbytes(), device.index
        with self._lock:
            if storage._cdata in self._tags:
                return False
            self._since_purge += 1
            if self._since_purge > _PURGE_EVERY or self._used[index] + size > self.capacity:
                self.purge()
            if self._used[index] + size > self.capacity:
                raise torch.cuda.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size} bytes (simulated)"
                )
            self._tags[storage._cdata] = _Allocation(StorageWeakRef(storage), size, device)
            self._used[index] += size
            self.peak[index] = max(self.peak[index], self._used[index])
        return True

    def used(self, index: int) -> int:
        """Return the bytes of a device that live tensors hold."""
        self.purge()
        return self._used[index]

    def purge(self) -> None:
        """Forget the storages that no longer exist."""
        with self._lock:
            for key in [key for key, each in self._tags.items() if each.reference.expired()]:
                allocation = self._tags.pop(key)
                self._used[allocation.device.index] -= allocation.size
            for key in [key for key, each in self._pinned.items() if each.expired()]:
                del self._pinned[key]
            self._since_purge = 0

    def pin(self, tensor: Tensor) -> None:
        """Mark a host tensor's memory as pinned."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)

    def is_pinned(self, tensor: Tensor) -> bool:
        return _unwrapped(tensor).untyped_storage()._cdata in self._pinned

    def begin_copy(self, host: Tensor, *, writes: bool) -> None:
        """Record an asynchronous copy from or to a host tensor.

        Args:
            host: The tensor on the host.
            writes: Whether the copy writes to it.
        """
        storage = _unwrapped(host).untyped_storage()
        self._in_flight[storage._cdata] = StorageWeakRef(storage), writes

    def finish_copies(self) -> None:
        """Finish all asynchronous copies, as a synchronisation does."""
        self._in_flight.clear()

    def is_unsafe(self, host: Tensor, *, writes: bool) -> bool:
        """Return whether a use of a host tensor collides with an asynchronous copy.

        Args:
            host: The tensor on the host.
            writes: Whether the use writes to it.
        """
        if not self._in_flight:
            return False
        copy = self._in_flight.get(_unwrapped(host).untyped_storage()._cdata)
        return copy is not None and (copy[1] or writes)


def _unwrapped(tensor: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
