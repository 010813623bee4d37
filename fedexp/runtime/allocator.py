"""A setting of the C library's memory allocator.

Each training step creates and frees tensors. The setting decides whether the process
keeps their memory or gives it back to the system.
"""

from __future__ import annotations

import ctypes
import functools

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # <malloc.h>
_KEPT = 1 << 29  # bytes of free memory at the end of the heap that the process keeps
_LARGEST = 1 << 25  # bytes, the largest threshold that glibc accepts


@functools.cache
def keep_freed_memory() -> bool:
    """Reuse freed memory instead of giving it back to the system.

    Memory that is given back must be requested again for the next tensor, and the
    system then clears it page by page. With glibc's defaults, stacked training (of
    several clients as one model) spends half of its time on page faults.

    Returns:
        False if there is no glibc, or if glibc refuses a setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    wanted = ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, 1 << 24))
    return all([mallopt(option, value) for option, value in wanted])
