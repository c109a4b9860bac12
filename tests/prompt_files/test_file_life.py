"""From the first save to the last name that is deleted: what a file costs, and how long its entry stays."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

from blockstore import (
    CorruptEntry,
    EntryGone,
    Identity,
    IdentityMismatch,
    NotPermitted,
    Store,
    StoreFull,
    UnsupportedFormat,
    load_prompt_cache,
    pointers,
    save_prompt_cache,
)
from blockstore.fs import FileSystem
from cache_cases import feed
from store_kit import all_facts, assert_clean, assert_exact, block_names, block_path, flip

pytestmark = pytest.mark.mlx_lm

ROOT = Path(__file__).resolve().parents[2]
LAYERS, DIM, SPAN = 4, 16, 64
TOKEN_BYTES = LAYERS * 2 * DIM * 4  # one head, keys and values, float32


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store", durability="none") as store:
        yield store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "chats"
    path.mkdir()
    return path


def grown(caches: list[Any] | None, tokens: int, seed: int = 0) -> list[Any]:
    """Caches with so many tokens more; the same bytes for equal seeds and lengths."""
    caches = caches or [mlx_lm_cache.KVCache() for _ in range(LAYERS)]
    rng = np.random.default_rng([seed, caches[0].offset])
    for cache in caches:
        keys, values = (mx.array(rng.standard_normal((1, 1, tokens, DIM), np.float32)) for _ in range(2))
        mx.eval(cache.update_and_fetch(keys, values))
    return caches


def block_bytes(store: Store) -> int:
    return sum(path.stat().st_size for path in Path(store.root, "blocks").iterdir())


def pins(store: Store) -> dict[str, bool]:
    return {entry.entry_id: entry.pinned for entry in store.entries()}


def entry_of(path: Path) -> str:
    found = pointers.standing(FileSystem(), str(path))
    assert found is not None
    return found.entry_id


def assert_whole(store: Store) -> None:
    store.gc()
    assert_exact(store)
    assert_clean(store)


# ---- what a save writes


@pytest.mark.parametrize("name", ["chat", "another name"])
def test_a_grown_cache_writes_its_new_tokens_alone(name: str, store: Store, folder: Path) -> None:
    caches = grown(None, 1000)
    save_prompt_cache(folder / "chat", caches, store=store)
    before = block_bytes(store)
    assert before == 1000 * TOKEN_BYTES
    save_prompt_cache(folder / name, grown(caches, 30), store=store)
    assert 30 * TOKEN_BYTES <= block_bytes(store) - before <= (30 + SPAN - 1) * TOKEN_BYTES
    assert (folder / f"{name}.safetensors").stat().st_size < 1000
    assert all_facts(load_prompt_cache(folder / name)) == all_facts(caches)
    assert_whole(store)


def test_a_loaded_cache_goes_on_as_cheaply(store: Store, folder: Path) -> None:
    save_prompt_cache(folder / "chat", grown(None, 1000), store=store)
    before = block_bytes(store)
    caches = grown(load_prompt_cache(folder / "chat"), 30)
    save_prompt_cache(folder / "chat", caches, store=store)
    assert block_bytes(store) - before <= (30 + SPAN - 1) * TOKEN_BYTES
    assert all_facts(load_prompt_cache(folder / "chat")) == all_facts(caches)


def test_two_chats_share_their_beginning_and_a_copy_costs_no_block(store: Store, folder: Path) -> None:
    save_prompt_cache(folder / "prompt", grown(None, 640), store=store)
    before = block_names(store)
    save_prompt_cache(folder / "copy", load_prompt_cache(folder / "prompt"), store=store)
    assert block_names(store) == before
    for seed in (1, 2):
        size = block_bytes(store)
        save_prompt_cache(folder / f"chat {seed}", grown(grown(None, 640), 64, seed), store=store)
        assert block_bytes(store) - size == 64 * TOKEN_BYTES


def test_what_was_trimmed_and_went_elsewhere_is_looked_at_again(store: Store, folder: Path) -> None:
    """No tokens are known that would say so: nothing may be taken over from the entry that the caches remember."""
    caches = grown(None, 640)
    for seed in range(1, 4):
        save_prompt_cache(folder / "chat", caches, store=store)
        mlx_lm_cache.trim_prompt_cache(caches, 320)
        grown(caches, 320, seed)
    save_prompt_cache(folder / "chat", caches, store=store)
    assert all_facts(load_prompt_cache(folder / "chat")) == all_facts(caches)


# ---- replacing


def test_a_save_replaces_the_file_and_lets_the_former_entry_go(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    save_prompt_cache(path, grown(None, 100), {"turn": "1"}, store=store)
    first = entry_of(path)
    second_caches = grown(None, 100, seed=1)
    save_prompt_cache(path, second_caches, {"turn": "2"}, store=store)
    assert pins(store) == {first: False, entry_of(path): True}
    caches, metadata = load_prompt_cache(path, return_metadata=True)
    assert (all_facts(caches), metadata) == (all_facts(second_caches), {"turn": "2"})
    assert os.listdir(folder) == ["chat.safetensors"]
    assert os.listdir(Path(store.root, "files")) == [entry_of(path)]


def test_a_pointer_takes_the_place_of_a_whole_file_and_the_other_way_round(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    caches = grown(None, 10)
    mlx_lm_cache.save_prompt_cache(str(path), caches)
    save_prompt_cache(path, caches, store=store)
    first = entry_of(path)
    batch = [mlx_lm_cache.KVCache.merge([feed(mlx_lm_cache.KVCache(), 3)])]
    save_prompt_cache(path, batch, store=store)
    assert type(load_prompt_cache(path)[0]) is mlx_lm_cache.BatchKVCache
    assert pins(store) == {first: False}


FAILURES: dict[str, Callable[..., Any]] = {
    "save": lambda patch: patch.setattr(Store, "save", failing),
    "write": lambda patch: patch.setattr(FileSystem, "write_all", failing),
    "link": lambda patch: patch.setattr(os, "link", failing),
    "rename": lambda patch: patch.setattr(pointers.FileSystem, "rename", only_files(pointers.FileSystem.rename)),
}


def failing(*args: Any, **options: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


def only_files(rename: Callable[..., None]) -> Callable[..., None]:
    """Fail where a file takes its name; the store's own files keep theirs."""

    def replacement(fs: FileSystem, source: str, target: str) -> None:
        if target.endswith(".safetensors"):
            failing()
        rename(fs, source, target)

    return replacement


@pytest.mark.parametrize("step", FAILURES)
def test_a_save_that_fails_leaves_the_former_file(
    step: str, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "chat.safetensors"
    caches = grown(None, 100)
    save_prompt_cache(path, caches, store=store)
    with monkeypatch.context() as patch:
        FAILURES[step](patch)
        with pytest.raises(OSError, match="Input/output error"):
            save_prompt_cache(path, grown(None, 100, seed=1), store=store)
    assert os.listdir(folder) == ["chat.safetensors"]
    assert all_facts(load_prompt_cache(path)) == all_facts(caches)
    # What is left of the failed save is evicted like anything else.
    save_prompt_cache(folder / "other", caches, store=store)
    assert {entry_id for entry_id, pinned in pins(store).items() if pinned} == {
        entry_of(path), entry_of(folder / "other.safetensors")
    }  # fmt: skip
    assert_whole(store)


def test_a_full_store_leaves_the_former_file(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    caches = grown(None, 100)
    save_prompt_cache(path, caches, store=store)
    store.set_limits(max_bytes=store.stats().physical_bytes + (64 << 10))
    with pytest.raises(StoreFull):
        save_prompt_cache(path, grown(None, 1000, seed=1), store=store)
    assert os.listdir(folder) == ["chat.safetensors"]
    assert all_facts(load_prompt_cache(path)) == all_facts(caches)


KILLED = f"""
import os, signal, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "codecs")!r}, {str(ROOT / "tests")!r}]
from blockstore import pointers, save_prompt_cache
from blockstore.fs import FileSystem
from blockstore.ledger import Ledger
from prompt_files.test_file_life import grown

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

step, root, path = sys.argv[1:]
if step == "before the pointer is written":
    pointers.fill = die
elif step == "before the pin":
    Ledger.pin = die
else:
    rename = FileSystem.rename
    FileSystem.rename = lambda fs, a, b: die() if b.endswith(".safetensors") else rename(fs, a, b)
save_prompt_cache(path, grown(None, 100, 1), store=root)
"""
STEPS = ["before the pointer is written", "before the pin", "before the file has its name"]


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_save_leaves_the_former_file_and_what_it_left_goes(step: str, store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    caches = grown(None, 100)
    save_prompt_cache(path, caches, store=store)
    first = entry_of(path)
    args = [sys.executable, "-c", KILLED, step, store.root, str(path)]
    done = subprocess.run(args, capture_output=True, check=False, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert entry_of(path) == first
    assert all_facts(load_prompt_cache(path)) == all_facts(caches)
    assert len(store.entries()) == 2
    (left,) = set(os.listdir(folder)) - {path.name}
    assert left.startswith(".chat.safetensors.")
    (folder / left).unlink()
    pointers.release(store.rooms)
    assert {entry_id for entry_id, pinned in pins(store).items() if pinned} == {first}
    assert_whole(store)


# ---- staying and going


def fill(store: Store, rounds: int = 6) -> None:
    """Save entries of another kind until the store has had to evict for them."""
    for seed in range(rounds):
        store.save(range(200), grown(None, 200, 100 + seed), Identity("m", "c", "t"))


def cap(store: Store) -> None:
    """Leave room for little more than what is there."""
    store.set_limits(max_bytes=store.stats().physical_bytes + 200 * TOKEN_BYTES * 2)


def test_a_file_that_stands_keeps_its_entry(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    caches = grown(None, 100)
    save_prompt_cache(path, caches, store=store)
    cap(store)
    store.set_limits(max_age_s=1)
    fill(store)
    pointers.release(store.rooms)
    store.gc(full=True)
    assert all_facts(load_prompt_cache(path)) == all_facts(caches)
    assert_whole(store)


def test_a_deleted_file_lets_its_entry_go_when_room_is_needed(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    save_prompt_cache(path, grown(None, 100), store=store)
    entry_id = entry_of(path)
    path.unlink()
    save_prompt_cache(folder / "other", grown(None, 100, 1), store=store)
    assert pins(store)[entry_id] is False
    cap(store)
    fill(store)
    assert entry_id not in pins(store)
    assert os.listdir(Path(store.root, "files")) == [entry_of(folder / "other.safetensors")]


@pytest.mark.parametrize("how", ["moved", "linked", "copied back"])
def test_a_file_that_goes_elsewhere_keeps_its_entry(how: str, store: Store, folder: Path, tmp_path: Path) -> None:
    path, now = folder / "chat.safetensors", tmp_path / "kept.safetensors"
    caches = grown(None, 100)
    save_prompt_cache(path, caches, store=store)
    entry_id = entry_of(path)
    if how == "moved":
        path.rename(now)
    elif how == "linked":
        os.link(path, now)
        save_prompt_cache(path, grown(None, 100, 1), store=store)
    else:  # as a backup is played back: under the old name, but not the file of then
        shutil.copy(path, now)
        path.unlink()
        shutil.copy(now, path)
    assert pointers.release(store.rooms) == []
    assert pins(store)[entry_id] is True
    assert all_facts(load_prompt_cache(now)) == all_facts(caches)
    for name in {path, now}:
        name.unlink(missing_ok=True)
    assert entry_id in pointers.release(store.rooms)


def test_a_copy_serves_as_long_as_the_store_has_room(store: Store, folder: Path) -> None:
    path, copy = folder / "chat.safetensors", folder / "copy.safetensors"
    save_prompt_cache(path, grown(None, 100), store=store)
    shutil.copy(path, copy)
    save_prompt_cache(copy, grown(None, 100, 1), store=store)  # which is no save over the original
    assert pins(store)[entry_of(path)] is True
    replaced = entry_of(copy)
    shutil.copy(path, copy)
    path.unlink()
    assert set(pointers.release(store.rooms)) == {entry_of(copy), replaced}
    cap(store)
    fill(store)
    with pytest.raises(EntryGone, match="in no store"):
        load_prompt_cache(copy)


@pytest.mark.parametrize("when", ["before it is noticed", "afterwards"])
def test_a_copy_that_is_loaded_takes_the_place_of_an_original_that_is_gone(
    when: str, store: Store, folder: Path
) -> None:
    path, copy = folder / "chat.safetensors", folder / "copy.safetensors"
    caches = grown(None, 100)
    save_prompt_cache(path, caches, store=store)
    shutil.copy(path, copy)
    load_prompt_cache(copy)
    path.unlink()
    if when == "afterwards":
        assert pointers.release(store.rooms) == [entry_of(copy)]
    load_prompt_cache(copy)
    assert pointers.release(store.rooms) == []
    cap(store)
    fill(store)
    assert all_facts(load_prompt_cache(copy)) == all_facts(caches)
    entry_id = entry_of(copy)
    copy.unlink()
    assert pointers.release(store.rooms) == [entry_id]


def test_a_file_that_mlx_lm_wrote_into_names_no_entry(store: Store, folder: Path) -> None:
    """It opens the file in place, and so writes into the store's link."""
    path = folder / "chat.safetensors"
    caches = grown(None, 100)
    save_prompt_cache(path, caches, store=store)
    entry_id = entry_of(path)
    mlx_lm_cache.save_prompt_cache(str(path), caches)
    assert pointers.release(store.rooms) == [entry_id]
    assert os.listdir(Path(store.root, "files")) == []
    assert all_facts(load_prompt_cache(path)) == all_facts(caches)


def test_a_file_that_was_touched_still_names_its_entry(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    save_prompt_cache(path, grown(None, 100), store=store)
    (entry,) = store.entries()
    assert path.stat().st_mtime_ns == entry.created_at_ms * 1_000_000  # which is why it is not read each time
    os.utime(path)
    assert pointers.release(store.rooms) == []
    assert pins(store) == {entry.entry_id: True}


def test_a_pointer_to_an_entry_that_is_no_files_does_not_pin_it(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    save_prompt_cache(path, grown(None, 100), store=store)
    other = store.save(range(100), grown(None, 100, 1), Identity("m", "c", "t")).entry_id
    rewritten(path, entry=other)
    assert len(load_prompt_cache(path)) == LAYERS
    assert pins(store)[other] is False


def test_letting_others_go_fails_no_save(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "chat.safetensors"
    save_prompt_cache(path, grown(None, 100), store=store)
    monkeypatch.setattr(pointers, "_let_go", failing)
    second = grown(None, 100, 1)
    save_prompt_cache(path, second, store=store)
    save_prompt_cache(folder / "other", second, store=store)
    assert all_facts(load_prompt_cache(path)) == all_facts(second)


def test_where_no_link_can_be_made_only_a_save_over_the_name_lets_go(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(*args: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", elsewhere)
    path, moved = folder / "chat.safetensors", folder / "moved.safetensors"
    save_prompt_cache(path, grown(None, 100), store=store)
    first = entry_of(path)
    save_prompt_cache(path, grown(None, 100, 1), store=store)
    second = entry_of(path)
    assert pins(store) == {first: False, second: True}
    path.rename(moved)
    assert pointers.release(store.rooms) == []
    save_prompt_cache(moved, grown(None, 100, 2), store=store)
    assert pins(store) == {first: False, second: True, entry_of(moved): True}


def test_the_command_gc_lets_go_of_what_was_deleted(store: Store, folder: Path) -> None:
    from typer.testing import CliRunner

    from blockstore.cli import app

    paths = [folder / f"{seed}.safetensors" for seed in range(2)]
    for seed, path in enumerate(paths):
        save_prompt_cache(path, grown(None, 100, seed), store=store)
    ids = [*map(entry_of, paths)]
    paths[0].unlink()
    for option, expected in (["--dry-run"], True), ([], False):
        result = CliRunner().invoke(app, ["--root", store.root, "gc", *option])
        assert result.exit_code == 0
        assert pins(store) == {ids[0]: expected, ids[1]: True}


# ---- loading


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_load_that_ends_after_its_file_has_gone_keeps_nothing(
    how: str, released: bool, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "chat.safetensors"
    caches = grown(None, 100)
    save_prompt_cache(path, caches, store=store)
    entry_id, keep = entry_of(path), pointers.keep

    def late(rooms: Any, *args: Any) -> None:
        if how == "replaced":
            save_prompt_cache(path, grown(None, 100, 1), store=store)
        else:
            path.unlink()
        if released:
            pointers.release(rooms)
        keep(rooms, *args)

    monkeypatch.setattr(pointers, "keep", late)
    assert all_facts(load_prompt_cache(path, store=store)) == all_facts(caches)
    pointers.release(store.rooms)
    assert pins(store)[entry_id] is False
    assert os.listdir(Path(store.root, "files")) == ([entry_of(path)] if how == "replaced" else [])


def test_a_load_pins_what_lost_its_pin(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    save_prompt_cache(path, grown(None, 100), store=store)
    store.pin(entry_of(path), pinned=False)  # as when an index was lost
    load_prompt_cache(path)
    assert pins(store) == {entry_of(path): True}


def test_a_store_that_was_moved_is_found_where_the_user_says(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere = folder / "chat.safetensors", tmp_path / "elsewhere"
    caches = grown(None, 100)
    save_prompt_cache(path, caches, store=store)
    store.close()
    shutil.move(store.root, elsewhere)
    monkeypatch.setenv("BLOCKSTORE_ROOT", str(tmp_path / "none"))
    with pytest.raises(EntryGone) as caught:
        load_prompt_cache(path)
    assert caught.value.expected == [store.root, str(tmp_path / "none")]
    assert "BLOCKSTORE_ROOT" in caught.value.hint
    assert not Path(store.root).exists()
    assert not (tmp_path / "none").exists()
    assert all_facts(load_prompt_cache(path, store=elsewhere)) == all_facts(caches)
    monkeypatch.setenv("BLOCKSTORE_ROOT", str(elsewhere))
    assert all_facts(load_prompt_cache(path)) == all_facts(caches)


def test_an_entry_that_was_removed_is_named(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    save_prompt_cache(path, grown(None, 100), store=store)
    entry_id = entry_of(path)
    store.remove(entry_id)
    with pytest.raises(EntryGone) as caught:
        load_prompt_cache(path, store=store)
    assert (caught.value.path, caught.value.entry_id) == (str(path), entry_id)
    save_prompt_cache(path, grown(None, 100), store=store)  # as the hint says
    assert len(load_prompt_cache(path)) == LAYERS


def test_a_damaged_block_is_never_handed_out(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    save_prompt_cache(path, grown(None, 100), store=store)
    flip(block_path(store, min(block_names(store))))
    with pytest.raises(CorruptEntry):
        load_prompt_cache(path)


def test_a_store_that_may_only_be_read(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    caches = grown(None, 100)
    save_prompt_cache(path, caches, store=store)
    store.pin(entry_of(path), pinned=False)
    with Store(store.root, read_only=True) as reader:
        assert all_facts(load_prompt_cache(path, store=reader)) == all_facts(caches)
        with pytest.raises(NotPermitted):
            save_prompt_cache(path, caches, store=reader)
    assert os.listdir(folder) == ["chat.safetensors"]
    assert pins(store) == {entry_of(path): False}


# ---- the pointer


def rewritten(path: Path, **changes: str | None) -> None:
    from blockstore.safetensors import encode, opened

    with opened(FileSystem(), str(path)) as (_, contents):
        merged: dict[str, str | None] = {**contents.metadata, **changes}
    path.write_bytes(encode({name: value for name, value in merged.items() if value is not None}))


DAMAGE: dict[str, Any] = {
    "a newer version": ({"version": "2"}, UnsupportedFormat),
    "no store": ({"store": None}, CorruptEntry),
    "a store that is no path": ({"store": "relative/root"}, CorruptEntry),
    "a store with a zero byte": ({"store": "file:///a%00b"}, CorruptEntry),
    "an entry that is no id": ({"entry": "../../../etc"}, CorruptEntry),
    "layers that are no JSON": ({"layers": "["}, CorruptEntry),
    "layers without end": ({"layers": "[" * 100_000}, CorruptEntry),
    "lists without end": ({"layers": "[" + '{"class":"CacheList","caches":[' * 100_000}, CorruptEntry),
    "another class": ({"layers": '[{"class":"os.system"}]'}, UnsupportedFormat),
    "arguments that the class does not take": ({"layers": '[{"class":"KVCache","args":{"size":1}}]'}, CorruptEntry),
    "a great many slots": ({"layers": '[{"class":"ArraysCache","args":{"size":99999999999}}]'}, CorruptEntry),
    "metadata that is no text": ({"metadata": '{"a":1}'}, CorruptEntry),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_pointer_is_not_trusted(what: str, store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    save_prompt_cache(path, grown(None, 100), store=store)
    changes, expected = DAMAGE[what]
    rewritten(path, **changes)
    with pytest.raises(expected):
        load_prompt_cache(path, store=store)
    save_prompt_cache(path, grown(None, 100), store=store)
    assert len(load_prompt_cache(path)) == LAYERS


def test_layers_of_another_number_or_kind_are_no_match(store: Store, folder: Path) -> None:
    path = folder / "chat.safetensors"
    save_prompt_cache(path, grown(None, 100), store=store)
    for layers in ('[{"class":"KVCache"}]', '[{"class":"ArraysCache","args":{"size":2}},{},{},{}]'):
        rewritten(path, layers=layers)
        with pytest.raises(IdentityMismatch):
            load_prompt_cache(path, store=store)
