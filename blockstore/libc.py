"""Calls of the C library that Python does not offer, by capability: where one is missing, its hint is not given."""

import ctypes
from functools import cache
from typing import Any, Final

_SYNC_FILE_RANGE_WRITE: Final = 2


@cache
def library() -> Any:
    """The C library of this process; None where there is none to be had."""
    try:
        return ctypes.CDLL(None)
    except OSError:
        return None


def begin_writing(fd: int) -> None:
    """Let the system begin to write what is dirty of a file, and wait for nothing. A hint: nothing is durable by it."""
    call = getattr(library(), "sync_file_range", None)  # Linux
    if call is not None:
        start = whole = ctypes.c_int64(0)
        call(ctypes.c_int(fd), start, whole, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
