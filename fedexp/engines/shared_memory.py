"""Memory that processes share, and values whose tensors travel through it instead of through a pipe."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGN = 64  # as torch allocates, so that kernels take the same path
_GROWTH = 1 << 20
_MOST_VIEWS = 8192
_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}

Place = tuple[
    int, tuple[int, ...], tuple[int, ...], int, bool
]  # offset, shape, strides, dtype, on an accelerator?


class Segment:
    """Anonymous shared memory: it has no name, grows, never shrinks, and is gone with the last process that holds it.

    Args:
        fd: of a segment that another process made; None makes a new one.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _anonymous_file() if fd is None else fd
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._views: dict[Place, Tensor] = {}

    @property
    def closed(self) -> bool:
        return self.fd < 0

    def reserve(self, size: int) -> None:
        """Make room for `size` bytes; views of the smaller segment stay valid. A closed one has none: ValueError."""
        if self.closed:
            raise ValueError("the segment is closed")
        if size > len(self._bytes):
            if size > os.fstat(self.fd).st_size:
                os.ftruncate(self.fd, -(-(size + size // 4) // _GROWTH) * _GROWTH)
            self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            self._views = {}

    def view(self, place: Place) -> Tensor:
        """The tensor that lies at `place`; no copy."""
        found = self._views.get(place)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views = {}
            offset, shape, strides, number, _ = place
            found = torch.empty(0, dtype=_DTYPES[number])
            found.set_(self._bytes.untyped_storage(), offset // found.itemsize, shape, strides)
            self._views[place] = found
        return found

    def write(self, offset: int, content: bytes) -> None:
        self.reserve(offset + len(content))
        assert self._map is not None
        self._map[offset : offset + len(content)] = content

    def read(self, offset: int, length: int) -> bytes:
        self.reserve(offset + length)
        assert self._map is not None
        return self._map[offset : offset + length]

    def close(self) -> None:
        """Let go, once; tensors that still look at it keep their memory."""
        if self.closed:
            return
        fd, self.fd = self.fd, -1  # the number is soon another file's
        os.close(fd)
        self._views, self._bytes, self._map = {}, torch.empty(0, dtype=torch.uint8), None


def pack(
    value: Any,
    segment: Segment,
    at: int = 0,
    constants: Mapping[int, int] | None = None,
    move_tensors: bool = False,
) -> tuple[int, int]:
    """Write `value` into `segment` from byte `at` on: its tensors as they lie, one after the other, the rest pickled.

    Args:
        constants: numbers, by ``id``, of objects that the reader holds already.
        adopt: let the tensors that lie on the CPU be the ones in the segment from now on, so that there is no second copy.

    Returns:
        where the pickled part lies (offset, length): what `unpack` needs.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, at, constants or {})
    pickler.dump(value)
    content = buffer.getvalue()
    segment.reserve(pickler.end + len(content))
    if pickler.tensors:
        with torch.no_grad():
            views = [segment.view(place) for place in pickler.places.values()]
            torch._foreach_copy_(views, pickler.tensors)
            for tensor, view in zip(pickler.tensors, views, strict=True):
                if move_tensors and tensor.device.type == "cpu":
                    tensor.set_(
                        view.untyped_storage(), view.storage_offset(), view.shape, view.stride()
                    )
    segment.write(pickler.end, content)
    return pickler.end, len(content)


def unpack(
    segment: Segment,
    extent: tuple[int, int],
    device: torch.device,
    constants: Sequence[Any] = (),
    copy: bool = False,
) -> Any:
    """The value that `pack` wrote; a tensor that stood in several places is one tensor again.

    Args:
        extent: what `pack` returned.
        device: where tensors go that lay on an accelerator.
        constants: objects by the numbers that `pack` was given.
        copy: tensors of their own, instead of views of the segment.
    """
    return _Unpickler(segment, segment.read(*extent), device, constants, copy).load()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, at: int, constants: Mapping[int, int]) -> None:
        super().__init__(buffer, protocol=5)
        self.end = at
        self.constants = constants
        self.places: dict[int, Place] = {}
        self.tensors: list[
            Tensor
        ] = []  # kept: an id means something only as long as its object lives

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            place = self.places.get(id(value))
            if place is None:
                dense = value.is_contiguous()
                strides = (
                    value.stride() if dense else torch.empty_like(value, device="meta").stride()
                )
                place = (
                    self.end,
                    tuple(value.shape),
                    strides,
                    _NUMBER[value.dtype],
                    value.device.type != "cpu",
                )
                self.places[id(value)] = place
                self.tensors.append(value)
                self.end = -(-(self.end + value.numel() * value.itemsize) // _ALIGN) * _ALIGN
            return place
        return self.constants.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        segment: Segment,
        content: bytes,
        device: torch.device,
        constants: Sequence[Any],
        copy: bool,
    ) -> None:
        super().__init__(io.BytesIO(content))
        self.segment, self.device, self.constants, self.copy = segment, device, constants, copy
        self.tensors: dict[Place, Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return self.constants[pid]
        found = self.tensors.get(pid)
        if found is None:
            found = self.segment.view(pid)
            if pid[-1]:
                found = found.to(self.device, copy=True)
            elif self.copy:
                found = found.clone()
            self.tensors[pid] = found
        return found


def _anonymous_file() -> int:
    """A file descriptor of memory without a name. `memfd_create` is not bound by the size of /dev/shm."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedexp", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
