"""What went wrong once in somebody's hands, each with its whole kind."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import mlx.core as mx
import numpy as np
import pytest

import kvcodecs
from blockstore import CacheMiss, InvalidInput, Store, StoreBroken, StoreFull, buffers
from blockstore.check import check
from blockstore.fs import FileSystem
from blockstore.listing import Match
from token_caches import IDENTITY, identity, plain, small_store

TOKENS = list(range(30))


def checked(store: Store) -> Any:
    rooms = store.rooms
    return check(rooms.layout, rooms, deep=True, progress=lambda done, total: None)


def test_an_array_without_memory_is_an_error_not_a_buffer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MLX cannot allocate, numpy would take memory of its own, which is filled and thrown away."""
    monkeypatch.setattr(buffers.np, "asarray", lambda view: np.empty(view.shape, np.uint32))
    with pytest.raises(MemoryError):
        buffers.writable_views([mx.zeros((4,), dtype=mx.float32)])


# ---- a damaged index never serves another prompt


def test_a_match_is_compared_with_the_tokens_that_are_loaded(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        saved = store.save(TOKENS, plain(TOKENS), IDENTITY)
        match = store.find([*TOKENS[:20], 99, 98], IDENTITY)
        assert match is not None
        assert store.load(match).tokens == TOKENS[:20]
        other = store.find([7, 7, 7], IDENTITY)
        assert other is None
        wrong = Match(saved.entry_id, 3, 30, match.prefix)
        with pytest.raises(CacheMiss, match="does not begin with these tokens"):
            store.load(wrong)
        assert store.load(saved.entry_id).token_count == 30, "a wrong index condemns no entry"


@pytest.mark.parametrize(
    ("prompt", "limit"),
    [([*TOKENS, 7, 8], "entry"), (TOKENS, "prompt"), (TOKENS[:20], "prompt"), ([*TOKENS[:20], 99, 98], "tokens")],
)
def test_a_match_says_why_it_is_not_longer(tmp_path: Path, prompt: list[int], limit: str) -> None:
    """Case 37: "restored", yet less is reused than was hoped for."""
    with small_store(tmp_path / "s") as store:
        store.save(TOKENS, plain(TOKENS), IDENTITY)
        match = store.find(prompt, IDENTITY)
        assert match is not None
        assert match.limit == limit


@pytest.mark.parametrize("table", ["chains", "equal", "uses"])
def test_check_looks_at_what_find_goes_by(tmp_path: Path, table: str) -> None:
    with small_store(tmp_path / "s") as store:
        store.save(TOKENS, plain(TOKENS), IDENTITY)
        assert checked(store).is_clean
        with store.rooms.index.write() as books:
            for key, _ in list(books.txn.items(table)):
                books.txn.delete(table, key)
        assert {problem.severity for problem in checked(store).problems} == {"drift"}


def test_a_row_that_cannot_be_read_is_a_broken_store(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        saved = store.save(TOKENS, plain(TOKENS), IDENTITY)
        with store.rooms.index.write() as books:
            books.txn.put("entries", bytes.fromhex(saved.entry_id), b"\x93\x01\x02\x03")
        for call in (store.entries, store.stats, lambda: store.load(saved.entry_id)):
            with pytest.raises(StoreBroken):
                call()


def test_after_lmdb_met_a_bad_page_it_is_not_asked_again(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        env = store.rooms.index.env
        with pytest.raises(StoreBroken), env.read():
            raise lmdb.CorruptedError("a bad page")
        with pytest.raises(StoreBroken, match="a bad page"):
            store.stats()


# ---- choices and arguments


@pytest.mark.parametrize(
    "choice",
    [{"durability": "fulll"}, {"durability": 5}, {"block_bytes": 1e6}, {"block_bytes": 2000000.5}, {"span": True},
     {"span": 64.0}, {"span": "64"}, {"hash": "md5"}, {"max_bytes": 0}, {"max_bytes": 1.5}],
    ids=str,
)  # fmt: skip
def test_a_choice_that_makes_no_sense_makes_no_store(tmp_path: Path, choice: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Store(tmp_path / "s", **choice)
    Store(tmp_path / "s").close()


@pytest.mark.parametrize("tokens", [b"abcdefgh", bytearray(8), memoryview(bytes(8)), "abc"], ids=repr)
def test_bytes_and_text_are_no_tokens(tmp_path: Path, tokens: Any) -> None:
    with small_store(tmp_path / "s") as store:
        for call in (store.find, store.restore):
            with pytest.raises(InvalidInput):
                call(tokens, IDENTITY)
        with pytest.raises(InvalidInput):
            store.save(tokens, plain(TOKENS), IDENTITY)


@pytest.mark.parametrize("layout", ["segments", "rows"])
def test_blocks_that_no_load_would_take_are_not_written(tmp_path: Path, layout: str) -> None:
    with small_store(tmp_path / "s") as store:
        for size in ((32 << 20) + 1, 1 << 40):
            with pytest.raises(InvalidInput, match="block_bytes"):
                store.save(TOKENS, plain(TOKENS), IDENTITY, layout=layout, block_bytes=size)
        saved = store.save(TOKENS, plain(TOKENS), IDENTITY, layout=layout, block_bytes=32 << 20)
        store.load(saved.entry_id)


def test_arguments_of_the_wrong_type_are_named(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        saved = store.save(TOKENS, plain(TOKENS), IDENTITY)
        wrong: list[Any] = [
            lambda: store.load(None),
            lambda: store.load(saved.entry_id, length=1.5),
            lambda: store.entry(None),
            lambda: store.save(TOKENS, None, IDENTITY),
            lambda: store.save(TOKENS, plain(TOKENS)[0], IDENTITY),
            lambda: store.save(TOKENS, plain(TOKENS), "me"),
            *(
                lambda size=size: store.save(TOKENS, plain(TOKENS), IDENTITY, layout="rows", block_bytes=size)
                for size in (-5, 0, 2.5, True, "x")
            ),
        ]
        for call in wrong:
            with pytest.raises(InvalidInput):
                call()
    for call in (lambda: store.pin(saved.entry_id), store.__enter__):
        with pytest.raises(InvalidInput, match="closed"):
            call()
    roots: list[Any] = ["", b"bytes"]
    for root in roots:
        with pytest.raises(InvalidInput):
            Store(root)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_network_file_system_is_refused_with_a_hint(tmp_path: Path, kind: str) -> None:
    class Remote(FileSystem):
        def file_system_type(self, path: str) -> str:
            return kind

    with pytest.raises(InvalidInput, match="local disk"):
        Store(tmp_path / "s", fs=Remote())
    assert not (tmp_path / "s").exists()
    assert FileSystem().file_system_type(str(tmp_path / "not" / "yet" / "there")) != "nfs4"


# ---- space


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
DYING_SAVER = """
import os, sys
from blockstore import saving
from token_caches import IDENTITY, plain, small_store
saving._Saver._write_header = lambda self, data: os.kill(os.getpid(), 9)
store = small_store(sys.argv[1])
store.save(list(range(500, 1400)), plain(list(range(500, 1400))), IDENTITY)
"""


def test_what_a_dead_saver_holds_goes_before_anything_that_lives(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        kept = [store.save([n] * 40, plain([n] * 40), IDENTITY).entry_id for n in range(3)]
        done = subprocess.run([sys.executable, "-c", DYING_SAVER, str(tmp_path / "s")], check=False, env=ENVIRONMENT)
        assert done.returncode == -signal.SIGKILL
        assert store.stats().unfinished_saves == 1
        store.set_limits(max_bytes=store.stats().physical_bytes + 4096)
        more = list(range(2000, 2200))
        store.save(more, plain(more), IDENTITY)
        assert {entry.entry_id for entry in store.entries()} >= set(kept)


def test_what_can_never_fit_is_not_written_out_first(tmp_path: Path) -> None:
    written: list[int] = []

    class Counting(FileSystem):
        def write_new(self, path: str, parts: Any, *, sync: bool = False) -> None:
            written.append(sum(len(part) for part in parts))
            super().write_new(path, parts, sync=sync)

    caches = []
    for layer in range(4):
        caches.append(kvcodecs.KVCache())
        keys = mx.random.normal((1, 8, 4000, 64), key=mx.random.key(layer))
        caches[-1].update_and_fetch(keys, keys)
    size = sum(cache.nbytes for cache in caches)
    with Store(tmp_path / "s", max_bytes=8 << 20, fs=Counting()) as store:
        with pytest.raises(StoreFull):
            store.save(list(range(4000)), caches, IDENTITY)
        assert sum(written) < size / 2
        assert not list((tmp_path / "s" / "blocks").iterdir())


def test_a_pin_passes_to_the_entry_that_takes_the_place(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        store.save(TOKENS, plain(TOKENS), IDENTITY, pinned=True)
        store.save(TOKENS, plain(TOKENS), IDENTITY)
        assert [entry.pinned for entry in store.entries()] == [True]


def test_many_entries_that_do_not_fit_hide_no_shorter_one_that_does(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        store.save(TOKENS[:10], plain(TOKENS[:10]), IDENTITY)
        for n in range(40):
            tokens = [*TOKENS, 100 + n]
            store.save(tokens, plain(tokens, layers=2), IDENTITY)
        loaded = store.restore([*TOKENS, 5, 6], IDENTITY, plain([]))
        assert loaded is not None
        assert loaded.token_count == 10


# ---- something other than a file under a name of ours


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("what", ["block", "header", "lease"])
def test_a_directory_in_a_files_place_stops_nothing(tmp_path: Path, what: str, filled: bool) -> None:
    with small_store(tmp_path / "s") as store:
        saved = store.save(TOKENS, plain(TOKENS), IDENTITY)
        other = store.save(TOKENS[5:], plain(TOKENS[5:]), identity("other"))
        if what == "lease":
            place = tmp_path / "s" / "leases" / ("a" * 32) / "folder"
        else:
            first = store.rooms.index.digests(saved.entry_id)[0]
            place = Path(saved.path if what == "header" else store.rooms.blocks.path(first))
            place.unlink()
        place.mkdir(parents=True)
        if filled:
            (place / "x").write_text("x")
        if what != "lease":
            assert store.restore([*TOKENS, 1], IDENTITY) is None
        again = store.save(TOKENS, plain(TOKENS), IDENTITY)
        assert store.load(again.entry_id).token_count == 30
        store.remove(other.entry_id)
        store.gc(full=True)
        assert store.stats().dead_blocks == 0
        assert checked(store).problems == ()
        aside = [path for path in (tmp_path / "s" / "quarantine").iterdir() if path.is_dir()]
        assert len(aside) == 1, "moved, not deleted: it is not ours"


# ---- the command


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_finding(tmp_path: Path, closed: str) -> None:
    small_store(tmp_path / "s").close()
    command = f'"{sys.executable}" -m blockstore check --root "{tmp_path / "s"}" {closed}'
    assert subprocess.run(["sh", "-c", command], check=False, env=ENVIRONMENT).returncode in (0, 8, 141)
