"""What the platform can do for large memory that is about to be filled."""

import ctypes
import mmap
from functools import cache
from typing import Any, Final

import numpy as np

_ADVICE: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)


def ask_for_huge_pages(memory: np.ndarray[Any, Any]) -> None:
    """Let the kernel back untouched memory with huge pages: one fault instead of hundreds. A hint, no more.

    Only whole pages of the memory are named, so that nobody else's is.
    """
    advise = _madvise()
    if advise is None or _ADVICE is None:
        return
    start = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), ctypes.c_int(_ADVICE))


@cache
def _madvise() -> Any:
    try:
        return ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
