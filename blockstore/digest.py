"""Digests of blocks: blake3 by default, sha256 by choice when a store is created."""

import hashlib
import re
from collections.abc import Callable
from typing import Final, Protocol

from blake3 import blake3

DIGEST_BYTES: Final = 32
_HEX: Final = re.compile("[0-9a-f]{64}")


class Hasher(Protocol):
    def update(self, data: memoryview, /) -> object: ...
    def digest(self) -> bytes: ...


# One thread a hasher: blocks are digested side by side, each by one thread of the pool.
HASHERS: Final[dict[str, Callable[[], Hasher]]] = {"blake3": blake3, "sha256": hashlib.sha256}


def digest(name: str, data: memoryview | bytes) -> bytes:
    """The 32-byte digest of `data` under the hash `name`. Releases the interpreter lock for large data."""
    hasher = HASHERS[name]()
    hasher.update(memoryview(data))
    return hasher.digest()


def is_digest(name: str) -> bool:
    """True for exactly 64 lower-case hex digits: the only names that blocks have."""
    return _HEX.fullmatch(name) is not None
