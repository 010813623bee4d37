"""Memory that processes share.

Values with tensors are passed through this memory and not through a pipe.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from fedexp.core.device import on_cpu

_ALIGN = 64  # bytes, as torch aligns its memory, so that kernels take the same path
_GROWTH = 1 << 20  # bytes. The size of a segment is a multiple of it.
_MOST_VIEWS = 8192  # maximum number of cached views per segment
_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}

# The place of a tensor in a segment: offset in bytes, shape, strides, index of the
# dtype in `_DTYPES`, and whether the packed tensor was on an accelerator.
Place = tuple[int, tuple[int, ...], tuple[int, ...], int, bool]


class Segment:
    """A segment of anonymous shared memory.

    The segment has no name. It can grow but never shrinks. It is freed when no process
    holds it any more. A process that multiprocessing starts can get it as an argument.

    Args:
        fd: File descriptor of a segment that another process made, or None to create a
            new segment.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _anonymous_file() if fd is None else fd
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._views: dict[Place, Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pass the file descriptor to the process that is being started."""
        return _inherited, (reduction.DupFd(self.fd),)

    @property
    def closed(self) -> bool:
        return self.fd < 0

    def reserve(self, size: int) -> None:
        """Make room for `size` bytes. Views of the smaller segment stay valid.

        Raises:
            ValueError: The segment is closed.
        """
        if self.closed:
            raise ValueError("the segment is closed")
        if size > len(self._bytes):
            if size > os.fstat(self.fd).st_size:
                os.ftruncate(self.fd, -(-(size + size // 4) // _GROWTH) * _GROWTH)
            self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            self._views = {}

    def view(self, place: Place) -> Tensor:
        """Return the tensor at `place`, without a copy."""
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
        """Release the segment unless it is closed already.

        Tensors that are views of the segment keep their memory.
        """
        if self.closed:
            return
        fd, self.fd = self.fd, -1  # another file may soon have this number
        os.close(fd)
        self._views, self._bytes, self._map = {}, torch.empty(0, dtype=torch.uint8), None


def pack(
    value: Any,
    segment: Segment,
    at: int = 0,
    constants: Mapping[int, int] | None = None,
    move_tensors: bool = False,
) -> tuple[int, int]:
    """Write `value` into `segment` from byte `at` on.

    The tensors are written one after the other, with their strides. The rest is
    pickled.

    Args:
        value: Value to write.
        segment: Segment to write into.
        at: Offset of the first byte, which is rounded up to a multiple of 64.
        constants: Numbers of the objects that the reader already has, by the object's
            ``id``. None if the reader has no objects.
        move_tensors: Whether the CPU tensors of `value` are changed in place to use the
            memory of the segment. Their old memory is then free.

    Returns:
        Offset and length of the pickled part in bytes, which `unpack` needs.
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
                if move_tensors and on_cpu(tensor.device):
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
    """Return the value that `pack` wrote.

    A tensor that occurred several times in the packed value is one tensor again.

    Args:
        segment: Segment to read from.
        extent: Value that `pack` returned.
        device: Device for tensors that were on an accelerator.
        constants: Objects in the order of the numbers that `pack` was given.
        copy: Whether CPU tensors are copied. Otherwise they are views of the segment.
    """
    return _Unpickler(segment, segment.read(*extent), device, constants, copy).load()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, at: int, constants: Mapping[int, int]) -> None:
        super().__init__(buffer, protocol=5)
        self.end = -(-at // _ALIGN) * _ALIGN
        self.constants = constants
        self.places: dict[int, Place] = {}
        # The tensors are stored to keep them alive, because an id is valid only as long
        # as its object exists.
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            place = self.places.get(id(value))
            if place is None:
                like = value if value.is_contiguous() else torch.empty_like(value, device="meta")
                place = (
                    self.end,
                    tuple(value.shape),
                    like.stride(),
                    _NUMBER[value.dtype],
                    not on_cpu(value.device),
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


def _inherited(fd: Any) -> Segment:
    """Return the segment in the process that was started with its file descriptor."""
    return Segment(fd.detach())


def _anonymous_file() -> int:
    """Return a file descriptor of memory without a name.

    `memfd_create` is used if available, because /dev/shm does not limit its size.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedexp", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
