"""Cases 27 to 30: bytes that reach the disk, memory beside the arrays, and writes that cannot keep up."""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from blockstore import Attachment, GenerationCheckpoint, Store, StoreFull
from blockstore.index_rows import PRESENT
from blockstore.rooms import MARGINS
from cases.kit import BIG, TOKENS, assert_loads, assert_served, assert_sound, python, save
from fs_doubles import FailingAt, Recording
from kvcodecs.entry import leaves
from store_kit import block_names, block_path, block_rows, header_of, lease_folders
from token_caches import IDENTITY, MODELS, identity, recurrent, small_store

SPAN = 4


class Weighing(Recording):
    """Adds up the bytes that are written to new files; not the few digits that announce a save to others."""

    written = 0

    def write_new(self, path: str, parts: Sequence[bytes | memoryview], *, sync: bool = False) -> None:
        if os.path.basename(path) != "announced":
            self.written += sum(len(part) for part in parts)
        super().write_new(path, parts, sync=sync)


@pytest.fixture
def fs() -> Weighing:
    return Weighing()


@pytest.fixture
def store(tmp_path: Path, fs: Weighing) -> Iterator[Store]:
    with small_store(tmp_path / "store", span=SPAN, fs=fs) as opened:
        yield opened


# ---- 27

Model = Callable[[Sequence[int]], list[Any]]
# What a turn writes again however long the conversation is: a recurrent state, a ring of 8.
ONCE_A_TURN = {"plain": 0, "two layers": 0, "hybrid": 200, "windowed": 8 * 32}
NEW_TOKENS = 6


@pytest.mark.parametrize("name", MODELS)
def test_case_27_a_turn_writes_what_is_new_and_says_so(name: str, store: Store, fs: Weighing) -> None:
    model: Model = MODELS[name]
    conversation = list(range(40))
    first = store.save(conversation, model(conversation), IDENTITY)
    per_token = first.logical_bytes / len(conversation)
    for turn in range(12):
        conversation += range(100 * turn, 100 * turn + NEW_TOKENS)
        before = fs.written
        saved = store.save(conversation, model(conversation), IDENTITY)
        header = Path(saved.path).stat().st_size
        assert saved.written_bytes == fs.written - before
        assert saved.logical_bytes == saved.reused_bytes + saved.written_bytes - header
        new_bytes = saved.written_bytes - header
        assert 0 < new_bytes <= (NEW_TOKENS + 2 * SPAN) * per_token + ONCE_A_TURN[name]
    assert saved.logical_bytes > 5 * new_bytes
    assert_sound(store)


def test_case_27_saving_what_is_stored_writes_a_header_and_nothing_else(store: Store, fs: Weighing) -> None:
    save(store)
    for ns in ("", "other"):
        before = fs.written
        saved = save(store, ns=ns)
        assert saved.written_bytes == fs.written - before == Path(saved.path).stat().st_size
        assert (saved.blocks_written, saved.logical_bytes) == (0, saved.reused_bytes)


# ---- 28


def block_bytes(store: Store) -> int:
    return sum(block_path(store, name).stat().st_size for name in block_names(store))


def state_bytes(store: Store, entry_id: str) -> int:
    return sum(slot.bytes for entry in leaves(header_of(store, entry_id).caches) for slot in entry.tensors)


CHECKPOINT = GenerationCheckpoint("request", "adapter", 9, 3, 42, 7, False)
AGAIN: dict[str, Callable[[Store, Any], object]] = {
    "at the end of the prompt and of the reply": lambda store, state: [
        store.save(TOKENS, [state], identity(ns)) for ns in "ab"
    ],
    "saved over itself": lambda store, state: [store.save(TOKENS, [state], IDENTITY) for _ in range(3)],
    "in a checkpoint": lambda store, state: store.save(
        TOKENS, [state], identity("c"), generation_checkpoint=CHECKPOINT
    ),
    "in three layers": lambda store, state: store.save(TOKENS, [state, recurrent(TOKENS), state], identity("d")),
    "as an attachment": lambda store, state: store.save(
        TOKENS, [state], identity("e"), attachments=[Attachment("s", {}, (state[0], state[1]))]
    ),
}


@pytest.mark.parametrize("save_again", AGAIN.values(), ids=AGAIN)
def test_case_28_a_recurrent_state_is_stored_once(save_again: Callable[[Store, Any], object], store: Store) -> None:
    state = recurrent(TOKENS)
    first = store.save(TOKENS, [state], IDENTITY)
    assert block_bytes(store) == state_bytes(store, first.entry_id) > 0
    once = block_names(store)
    save_again(store, state)
    assert block_names(store) == once


# ---- 29

# 96 MiB of arrays, more than one save may hold beside them, measured by the process itself: the most that it ever had
# in memory, against what it had before. One round of each comes first, for what is loaded and pooled once.
MEMORY = """
import os, sys
import mlx.core as mx
import kvcodecs
from blockstore import Identity, Store

def caches(tokens, seed):
    made = []
    for layer in range(6):
        cache = kvcodecs.KVCache()
        keys = mx.random.normal((1, 8, tokens, 128), key=mx.random.key(seed + layer)).astype(mx.bfloat16)
        mx.eval(cache.update_and_fetch(keys, keys))
        made.append(cache)
    return made

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

def peak_over(act):
    mx.clear_cache()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    kept = act()
    return status("VmHWM") - before, kept

me = Identity("m", "c", "t", "")
with Store(sys.argv[1], durability="none", max_bytes=1 << 34) as store:
    store.load(store.save(range(64), caches(64, 90), me).entry_id)
    tokens = 4096
    live = caches(tokens, 1)
    size = sum(cache.nbytes for cache in live)
    assert size >= 96 << 20, size
    saving, saved = peak_over(lambda: store.save(range(tokens), live, me))
    unverified, _ = peak_over(lambda: store.load(saved.entry_id, verify=False) and None)
    loading, loaded = peak_over(lambda: store.load(saved.entry_id))
    assert loaded.token_count == tokens
    print(saving >> 20, (unverified - size) >> 20, (loading - size) >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets a process reset its own peak")
def test_case_29_saving_and_loading_take_less_than_64_mib_beside_the_arrays(tmp_path: Path) -> None:
    beside = [int(part) for part in python(MEMORY, tmp_path / "store").split()]
    assert len(beside) == 3
    assert max(beside) < 64, dict(zip(("save", "load unverified", "load"), beside, strict=True))


# ---- 30


class Slow(Recording):
    """A disk that cannot keep up: counts how many blocks wait for it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = self.most = 0
        self._counting = threading.Lock()

    def write_new(self, path: str, parts: Any, *, sync: bool = False) -> None:
        with self._counting:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
        time.sleep(0.002)
        super().write_new(path, parts, sync=sync)
        with self._counting:
            self.waiting -= 1


def assert_what_is_recorded_is_there(store: Store) -> None:
    for name, row in block_rows(store).items():
        if row.state == PRESENT:
            assert os.path.getsize(block_path(store, name)) == row.size


def test_case_30_a_slow_disk_holds_the_save_back_and_nothing_is_dropped(tmp_path: Path) -> None:
    fs = Slow()
    with small_store(tmp_path / "store", fs=fs) as store:
        saved = save(store, BIG)
        assert (fs.waiting, 1 <= fs.most <= MARGINS.threads) == (0, True)
        assert saved.blocks_written == len(block_names(store)) > 10 * MARGINS.threads
        assert_what_is_recorded_is_there(store)
        assert_loads(store, saved.entry_id, BIG)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("error_number", [errno.EIO, errno.ENOSPC, errno.EMFILE], ids=["EIO", "ENOSPC", "EMFILE"])
def test_case_30_a_write_that_fails_is_seen_by_the_caller_and_recorded_nowhere(
    error_number: int, lasting: bool, tmp_path: Path
) -> None:
    fs, before = FailingAt(error_number), set(threading.enumerate())
    with small_store(tmp_path / "store", fs=fs) as store:
        save(store)
        for k in range(0, 90, 7):
            fs.arm(k, lasting=lasting)
            with pytest.raises(StoreFull if error_number == errno.ENOSPC else OSError):
                save(store, BIG)
            fs.disarm()
            assert [entry.token_count for entry in store.entries()] == [len(TOKENS)]
            assert_what_is_recorded_is_there(store)
            assert set(threading.enumerate()) <= before, "no writer is left at work"
        store.gc()
        assert lease_folders(store) == []
        save(store, BIG)
        assert_served(store, BIG)
        assert_sound(store)
