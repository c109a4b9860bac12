"""The error tree, by what a caller does about it (DESIGN: serve without, mend the input, free space, wait, repair).

Every error has a stable `code`, the facts as fields, and a `hint` that says how to go on.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class BlockstoreError(Exception):
    """The root. `facts` holds what is known: path, entry_id, digest, field, expected, found."""

    code: ClassVar[str] = "error"
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        self.facts: Mapping[str, object] = facts

    def __getattr__(self, name: str) -> object:
        if name in ("path", "entry_id", "digest", "field", "expected", "found"):
            return self.__dict__.get("facts", {}).get(name)
        raise AttributeError(name)

    def __str__(self) -> str:
        details = ", ".join(
            f"{name} {value!r}" if name in ("expected", "found") else f"{name} {value}"
            for name, value in self.facts.items()
            if value is not None
        )
        text = f"{self.message} ({details})" if details else self.message
        return f"{text}. {self.hint}" if self.hint else text


class CacheMiss(BlockstoreError):
    """What was asked for cannot be had; serve without it."""

    code = "miss"


class EntryGone(CacheMiss):
    """The entry was removed, replaced or evicted since it was found."""

    code = "entry-gone"
    default_hint = "Find again."


class CorruptEntry(CacheMiss):
    """A header or a block is missing, has the wrong size or the wrong bytes. A store drops such an entry by itself."""

    code = "corrupt"


class IdentityMismatch(CacheMiss):
    """The entry belongs to another model, tokenizer or geometry. `field`, `expected`, `found` say which."""

    code = "identity-mismatch"


class UnsupportedFormat(CacheMiss):
    """A version, kind or provider that this release does not read."""

    code = "unsupported-format"


class FileMissing(CacheMiss, FileNotFoundError, RuntimeError):
    """There is no such prompt cache file. A RuntimeError, too, which is what mlx raises for it."""

    code = "file-missing"


class InvalidInput(BlockstoreError, ValueError):
    """An argument that makes no sense; nothing was written."""

    code = "invalid-input"


class NotPermitted(BlockstoreError, PermissionError):
    """The store is there to be read only, or this process may not do what was asked. Nothing was changed."""

    code = "not-permitted"
    default_hint = "Ask the owner of the directory for the right to write there."


class StoreFull(BlockstoreError):
    """No room: the disk, the store's cap, or the index's address space. Nothing was committed."""

    code = "store-full"
    default_hint = "Remove entries and run `blockstore gc`, or raise max_bytes."


class StoreBusy(BlockstoreError):
    """Another process holds what this call needs; try again later."""

    code = "store-busy"


class NotStored(BlockstoreError):
    """What waited to be written did not all get into the store. `found` says what, and why."""

    code = "not-stored"
    default_hint = "What is still in memory can be inserted again."


class StoreBroken(BlockstoreError):
    """The index is unusable. The headers are the truth: nothing is lost that they still name."""

    code = "store-broken"
    default_hint = "Stop the programs that use the store and run `blockstore check --repair`."


class Cancelled(BlockstoreError):
    """The caller gave up while a file was being written or read; nothing of it is left."""

    code = "cancelled"
