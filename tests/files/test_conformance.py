"""Every cache in every state, kept in every way: equal when it comes back, shortened where it may be."""

from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

import kvcodecs
from blockstore import InvalidInput, Store, clone_kv_caches, load_kv_cache, save_kv_cache
from cache_cases import CASES, arrays_of, bits, continue_cache, facts, reload, token_count
from files.conformance import WAYS, Way
from files.kit import meta, plain_attachments
from kvcodecs.algebra import Snapshot, SnapshotContext
from kvcodecs.entry import HeaderEntry
from kvcodecs.geometry import list_shortens, minimum_reusable

pytestmark = pytest.mark.mlx_lm
STEPS = 4  # of tokens one by one, and of several


def continued(caches: list[Any]) -> list[Any]:
    return [bits(array) for i, cache in enumerate(caches) for array in continue_cache(cache, 1000 * i, STEPS)]


class Known:
    """What must be true of one case, found out once."""

    def __init__(self, build: Callable[[], list[Any]]) -> None:
        self.build = build
        self.caches = build()
        self.tokens = token_count(self.caches)
        self.facts = [facts(cache) for cache in self.caches]

    def snapshots(self) -> list[Snapshot]:
        return kvcodecs.default_provider().snapshot(self.caches, SnapshotContext(self.tokens))

    @cached_property
    def entries(self) -> list[HeaderEntry]:
        return [part.entry for part in self.snapshots()]

    @cached_property
    def continued(self) -> list[Any]:
        return continued(self.build())

    @cached_property
    def least(self) -> int:
        return max(1, *map(minimum_reusable, self.entries))

    @cached_property
    def shorter(self) -> dict[int, list[Any]]:
        """How the case goes on after it was trimmed to a length, for some lengths that it may be shortened to."""
        if not list_shortens(self.entries):
            return {}
        lengths = {self.least, self.tokens - 1}
        return {n: continued(self.trimmed(n)) for n in lengths if self.least <= n < self.tokens}

    def trimmed(self, length: int) -> list[Any]:
        caches = self.build()
        for one in caches:
            trim(one, length)
        return caches


def trim(one: Any, length: int) -> None:
    while hasattr(one, "storage"):
        one = one.storage()
    for child in getattr(one, "caches", ()):
        trim(child, length)
    if not hasattr(one, "caches") and one.offset > length:
        one.trim(one.offset - length)
        assert one.offset == length
    # Two of mlx-lm's classes take rows for tokens that trim leaves behind (one of them until 0.31).
    chunk = getattr(one, "chunk_size", 0)
    rows = {"ConcatenateKVCache": length, "ChunkedKVCache": chunk if length <= chunk else None}
    if type(one).__name__ in rows:
        one.keys, one.values = (side[..., : rows[type(one).__name__], :] for side in (one.keys, one.values))


@cache
def known(name: str) -> Known:
    return Known(CASES[name])


EMPTY = [name for name in CASES if all(entry.is_empty for entry in known(name).entries)]
FILLED = [name for name in CASES if name not in EMPTY]
each_case = pytest.mark.parametrize("name", FILLED)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    root = tmp_path_factory.mktemp("store")
    with Store(root, durability="none", span=4, block_bytes=1024) as store:
        yield store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture
def way(request: pytest.FixtureRequest, folder: Path, store: Store) -> Way:
    return WAYS[request.param](folder, store)


@each_case
def test_in_memory(name: str) -> None:
    case = known(name)
    loaded = reload(case.snapshots(), case.caches)
    assert [facts(one) for one in loaded] == case.facts
    assert continued(loaded) == case.continued


@pytest.mark.parametrize("way", WAYS, indirect=True)
@each_case
def test_it_comes_back_whole_and_shorter(name: str, way: Way) -> None:
    """One save for all of it: there are many cases."""
    case = known(name)
    way.save(case.caches, case.tokens)
    loaded = way.load(case.caches)
    assert [facts(one) for one in loaded.caches] == case.facts
    assert loaded.tokens == list(range(case.tokens))
    assert plain_attachments(loaded.attachments) == plain_attachments(way.attached)
    if not way.attached:
        assert continued(loaded.caches) == case.continued
        assert_shortened(case, way)
        assert_no_other_length(case, way)
    # Neither saving nor what was loaded changed these.
    assert [facts(one) for one in case.caches] == case.facts


def assert_shortened(case: Known, way: Way) -> None:
    for length, expected in case.shorter.items():
        loaded = way.load(case.caches, length)
        assert loaded.tokens == list(range(length))
        assert token_count(loaded.caches) == length
        assert continued(loaded.caches) == expected


def assert_no_other_length(case: Known, way: Way) -> None:
    for length in {case.least - 1, case.tokens - 1, case.tokens + 1} - set(case.shorter):
        with pytest.raises(InvalidInput, match="cannot be cut to that length"):
            way.load(case.caches, length)


def test_every_kind_that_may_be_shortened_was() -> None:
    """The tests above would pass if nothing ever were."""
    kinds = {known(name).entries[0].kind for name in FILLED if known(name).shorter}
    assert kinds == {
        "kv", "qkv", "rotating", "rotating-qkv", "chunked", "list", "turboquant", "mla", "mla-dsa", "mtp-mla", "paged",
    }  # fmt: skip


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("name", EMPTY)
def test_caches_that_hold_nothing_are_refused(name: str, way: Way) -> None:
    with pytest.raises(InvalidInput, match="every cache is empty"):
        way.save(CASES[name](), 1)


@each_case
def test_clones_are_independent(name: str) -> None:
    case = known(name)
    original = case.build()
    clone = clone_kv_caches(original)
    assert [facts(one) for one in clone] == case.facts
    own, other = ({id(array) for one in caches for array in arrays_of(one)} for caches in (original, clone))
    assert not own & other
    assert continued(clone) == case.continued
    assert [facts(one) for one in original] == case.facts


@each_case
def test_the_file_of_a_clone_is_the_file_of_the_original_and_needs_no_model(name: str, folder: Path) -> None:
    case = known(name)
    for path, caches in (("original", case.caches), ("clone", clone_kv_caches(case.caches))):
        save_kv_cache(folder / path, range(case.tokens), caches, meta(), sync=False)
    assert (folder / "original").read_bytes() == (folder / "clone").read_bytes()
    assert continued(load_kv_cache(folder / "clone").caches) == case.continued
