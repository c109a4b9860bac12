"""The ways in which caches are kept: each saves a cache list and gives it back, whole or shorter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from blockstore import Attachment, Identity, Loaded, Store, load_kv_cache, save_kv_cache
from files.kit import attachments, meta


class Way(Protocol):
    """One way. `attached`: what it saves beside the caches, which then cannot be shortened."""

    attached: tuple[Attachment, ...]

    def save(self, caches: Sequence[Any], tokens: int) -> None: ...
    def load(self, model: Any = None, length: int | None = None) -> Loaded: ...


@dataclass
class File:
    """A file outside of a store, written again by each save. least_bytes: of a block; None for a monolith."""

    path: Path
    least_bytes: int | None = None
    attached: tuple[Attachment, ...] = ()

    def save(self, caches: Sequence[Any], tokens: int) -> None:
        about = meta(attachments=self.attached)
        if self.least_bytes is None:
            save_kv_cache(self.path, range(tokens), caches, about, sync=False)
        else:
            # Some dozens of blocks at most: a file each is what takes the time.
            size = max(self.least_bytes, 16 * tokens)
            save_kv_cache(self.path, range(tokens), caches, about, layout="rows", block_bytes=size, sync=False)

    def load(self, model: Any = None, length: int | None = None) -> Loaded:
        return load_kv_cache(self.path, model, length=length, verify=True)


@dataclass
class Segments:
    """An entry of a store, in segments of four tokens."""

    store: Store
    attached: tuple[Attachment, ...] = ()
    entry_id: str = field(default="", init=False)

    def save(self, caches: Sequence[Any], tokens: int) -> None:
        identity = Identity("model", None, None)
        self.entry_id = self.store.save(range(tokens), caches, identity, attachments=self.attached).entry_id

    def load(self, model: Any = None, length: int | None = None) -> Loaded:
        return self.store.load(self.entry_id, model, length=length)


WAYS: dict[str, Callable[[Path, Store], Way]] = {
    "v3": lambda folder, store: File(folder / "v3.mlxkv"),
    "v4, attachments": lambda folder, store: File(folder / "v4.mlxkv", attached=attachments()),
    "v5 rows, attachments": lambda folder, store: File(folder / "large.mlxkv", 1 << 20, attachments()),
    "v5 rows, tiny blocks": lambda folder, store: File(folder / "tiny.mlxkv", 97),
    "v5 segments": lambda folder, store: Segments(store),
}
