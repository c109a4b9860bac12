"""Numbers of a server for Prometheus, in its text format 0.0.4."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from .errors import BlockstoreError
from .store import Store

if TYPE_CHECKING:
    from .checkpoints import CheckpointStats
    from .prompt_cache import PromptCacheStats

_log: Final = logging.getLogger(__name__)
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class _Family(NamedTuple):
    """One metric: its values by their label, or one value without."""

    name: str
    kind: str
    help: str
    values: dict[str, float]


def exposition(stats: "PromptCacheStats", checkpoints: "CheckpointStats | None", requests: int, store: Store) -> str:
    """The text: of the prompt cache, of the requests under way, and of the store, whose directory is not walked.

    checkpoints: None where none are taken.
    """
    families = [*_cache_families(stats), _gauge("requests_in_flight", "Generations under way.", requests)]
    families += [] if checkpoints is None else _checkpoint_families(checkpoints)
    lines: list[str] = []
    for family in [*families, *_store_families(store)]:
        lines += _lines(family)
    return "\n".join([*lines, ""])


def _cache_families(stats: "PromptCacheStats") -> Iterator[_Family]:
    yield _counter(
        "prompt_cache_hits", "Prompts of which a part was reused, by where it was.",
        {'source="memory"': stats.hits_memory, 'source="store"': stats.hits_store},
    )  # fmt: skip
    yield _counter("prompt_cache_misses", "Prompts of which nothing was reused.", {"": stats.misses})
    yield _counter(
        "reused_tokens", "Prompt tokens that were not computed again, by where their state was.",
        {'source="memory"': stats.tokens_from_memory, 'source="store"': stats.tokens_restored},
    )  # fmt: skip
    yield _counter("restored_bytes", "State read from the store.", {"": stats.bytes_restored})
    yield _gauge("last_restore_seconds", "How long the last restore took.", stats.last_restore_s)
    yield _gauge("memory_entries", "Prompts whose state is kept in memory.", stats.entries)
    yield _gauge("memory_bytes", "State kept in memory.", stats.nbytes)
    yield _gauge("pending_entries", "Entries that wait to be stored.", stats.pending_count)
    yield _gauge("pending_bytes", "State that waits to be stored.", stats.pending_bytes)
    yield _counter(
        "saves", "What became of entries that were to be stored.",
        {'outcome="stored"': stats.stored, 'outcome="dropped"': stats.dropped, 'outcome="failed"': stats.failed},
    )  # fmt: skip
    yield _counter("store_failures", "Calls of the store that failed; each cost a miss.", {"": stats.failures})


def _checkpoint_families(stats: "CheckpointStats") -> Iterator[_Family]:
    yield _counter("checkpoints", "Checkpoints of generations that were stored.", {"": stats.stored})
    yield _counter("resumed_generations", "Generations that went on from a checkpoint.", {"": stats.resumed})
    yield _counter("resumed_tokens", "Tokens that these did not compute again.", {"": stats.tokens_resumed})
    yield _counter("checkpoint_failures", "What went wrong; each cost a checkpoint.", {"": stats.failures})


def _store_families(store: Store) -> Iterator[_Family]:
    try:
        index = store.rooms.index
        counts, total, limits = index.counts(), index.total_bytes(), index.limits()
        free = store.rooms.fs.free_bytes(store.root)[0]
    except (BlockstoreError, OSError) as error:
        _log.debug("the store cannot be asked: %s", error)
        yield _gauge("store_up", "Whether the store can be used.", 0)
        return
    yield _gauge("store_up", "Whether the store can be used.", 1)
    yield _gauge("store_entries", "Entries in the store, of all its users.", counts["entries"])
    yield _gauge("store_blocks", "Blocks in the store.", counts["blocks"])
    yield _gauge("store_dead_blocks", "Blocks that no entry refers to.", counts["dead"])
    yield _gauge("store_bytes", "What blocks and headers take on the disk.", total)
    yield _gauge("store_max_bytes", "The cap over the store's directory; 0 for none.", limits.max_bytes)
    yield _gauge("disk_free_bytes", "What is free on the store's disk.", free)


def _counter(name: str, text: str, values: dict[str, float]) -> _Family:
    return _Family(f"blockstore_{name}_total", "counter", text, values)


def _gauge(name: str, text: str, value: float) -> _Family:
    return _Family(f"blockstore_{name}", "gauge", text, {"": value})


def _lines(family: _Family) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help}"
    yield f"# TYPE {family.name} {family.kind}"
    for label, value in family.values.items():
        yield f"{family.name}{{{label}}} {value}" if label else f"{family.name} {value}"


class MetricsFile:
    """A file for node_exporter's textfile collector, replaced as a whole. path: None for no file."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._failed = False

    def write(self, text: str) -> None:
        """Replace the file; where that fails, say so once."""
        if self._path is None:
            return
        temporary = f"{self._path}.{os.getpid()}"  # whose name ends otherwise: the collector reads *.prom
        try:
            try:
                with open(temporary, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(temporary, self._path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            (_log.debug if self._failed else _log.error)("the metrics cannot be written: %s", error)
            self._failed = True
        else:
            self._failed = False
