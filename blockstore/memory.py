"""What the platform can do for large memory that is about to be filled."""

import ctypes
import mmap
from functools import cache
from typing import Any, Final

import numpy as np

from .libc import library

_ADVICE: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)
_SAMPLES: Final = 4
# The least size of free memory, as a power of two pages, that is reported to the host; huge where nobody wants to know.
_REPORTING: Final = "/sys/module/page_reporting/parameters/page_reporting_order"
_NO_ORDER: Final = 64


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
    """The C library, where it has both calls and huge pages are of use."""
    found = library()
    return found if hasattr(found, "madvise") and hasattr(found, "mincore") and not _is_taken_back() else None


def _is_taken_back() -> bool:
    """Whether this is a virtual machine whose host takes back free memory.

    It does so in large pieces: a huge page is mostly one that the host must find again, and that costs more than the
    faults it saves. What was given back in small pieces is still there.
    """
    try:
        with open(_REPORTING, encoding="ascii") as file:
            return int(file.read()) < _NO_ORDER
    except (OSError, ValueError):
        return False
