"""What the platform can do for large memory that is about to be filled."""

import ctypes
import mmap
from functools import cache
from typing import Any, Final

import numpy as np

_ADVICE: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)
_SAMPLES: Final = 4


def ask_for_huge_pages(memory: np.ndarray[Any, Any]) -> None:
    """Let the kernel back untouched memory with huge pages: one fault instead of hundreds. A hint, no more.

    Memory that was used before has its pages: there the advice would only make the kernel look for larger ones. Only
    whole pages of the memory are named, so that nobody else's is.
    """
    calls = _calls()
    if calls is None or _ADVICE is None:
        return
    start = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0 and not _is_touched(calls.mincore, start, size):
        calls.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(_ADVICE))


def _is_touched(mincore: Any, start: int, size: int) -> bool:
    """Whether any of a few pages, spread over the memory, is there."""
    flag = ctypes.c_ubyte()
    for number in range(1, _SAMPLES + 1):
        page = start + size * number // (_SAMPLES + 1) // mmap.PAGESIZE * mmap.PAGESIZE
        failed = mincore(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(flag))
        if failed or flag.value & 1:
            return True
    return False


@cache
def _calls() -> Any:
    """The C library, where it has both calls."""
    try:
        library = ctypes.CDLL(None)
    except OSError:
        return None
    return library if hasattr(library, "madvise") and hasattr(library, "mincore") else None
