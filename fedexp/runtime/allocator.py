"""How the C library's allocator treats the tensors that every training step makes and drops."""

from __future__ import annotations

import ctypes
import functools

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # <malloc.h>
_KEPT = 1 << 29  # bytes of free memory at the heap's end that stay with the process
_LARGEST = 1 << 25  # bytes; the largest threshold that glibc takes


@functools.cache
def keep_freed_memory() -> bool:
    """Reuse freed memory instead of giving it back to the system, which has to clear every page of the next tensor.

    With glibc's defaults, stacked training spends half of its time on page faults. Returns False where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    wanted = ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, 1 << 24))
    return all([mallopt(option, value) for option, value in wanted])
