"""Cases 10 and 13: files that a full disk or a crash has left short are never believed, and never mapped."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockstore import (
    CacheMiss,
    CorruptEntry,
    Meta,
    Store,
    StoreFull,
    files,
    load_kv_cache,
    save_kv_cache,
)
from cases.kit import (
    TOKENS,
    HalfWritten,
    assert_loads,
    assert_served,
    assert_sound,
    first_block,
    header_file,
    python,
    save,
)
from store_kit import all_facts, block_names, block_path, header_paths, lease_folders
from token_caches import plain, small_store

META = Meta("model", "config", "tokenizer", "")


# ---- 10

FULL = pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])


@FULL
def test_case_10_a_save_on_a_full_disk_publishes_nothing(error_number: int, tmp_path: Path) -> None:
    fs = HalfWritten(error_number)
    with small_store(tmp_path / "store", fs=fs) as store:
        save(store, [4, *TOKENS])
        standing, headers = block_names(store), set(header_paths(store))
        for k in range(200):
            fs.left = k
            try:
                saved = save(store)
            except StoreFull:
                fs.left = None
                assert (block_names(store), set(header_paths(store))) <= (standing | whole(store), headers)
                assert lease_folders(store) == []
            else:
                break
        fs.left = None
        assert k > 5
        assert_loads(store, saved.entry_id)
        assert_served(store, [4, *TOKENS])
        assert_sound(store)


def whole(store: Store) -> set[str]:
    """The names of the blocks that hold what their names say."""
    return {name for name in block_names(store) if store.rooms.blocks.is_whole(bytes.fromhex(name), size(store, name))}


def size(store: Store, name: str) -> int:
    return block_path(store, name).stat().st_size


@pytest.mark.parametrize("layout", ["monolith", "rows"])
@FULL
def test_case_10_a_file_on_a_full_disk_is_not_there(
    error_number: int, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = HalfWritten(error_number)
    monkeypatch.setattr(files, "FileSystem", lambda: fs)
    path = tmp_path / "a.mlxkv"
    for k in range(200):
        fs.left = k
        try:
            save_kv_cache(path, TOKENS, plain(TOKENS), META, layout=layout, block_bytes=300)
        except OSError:
            assert not [found for found in tmp_path.rglob("*") if found.name.endswith((".mlxkv", ".tmp"))]
        else:
            break
    assert k >= 2
    assert all_facts(load_kv_cache(path, verify=True).caches) == all_facts(plain(TOKENS))


SHORT: dict[str, Callable[[bytes], bytes]] = {
    "zero bytes": lambda data: b"", "half of it": lambda data: data[: len(data) // 2],
    "one byte less": lambda data: data[:-1], "one byte more": lambda data: data + b"x",
}  # fmt: skip


@pytest.mark.parametrize("known", [False, True], ids=["a stray file", "a block in use"])
@pytest.mark.parametrize("spoil", SHORT.values(), ids=SHORT)
def test_case_10_a_block_of_another_size_counts_as_absent_and_is_written_again(
    spoil: Callable[[bytes], bytes], known: bool, tmp_path: Path
) -> None:
    with small_store(tmp_path / "elsewhere") as other:
        save(other)
        blocks = {name: block_path(other, name).read_bytes() for name in block_names(other)}
    with small_store(tmp_path / "store") as store:
        if known:
            save(store, ns="older")
        for name, data in blocks.items():
            block_path(store, name).write_bytes(spoil(data))
        saved = save(store)
        assert saved.blocks_written == len(blocks)
        assert_loads(store, saved.entry_id)
        if known:
            assert_served(store, TOKENS, "older")
        assert_sound(store)


# ---- 13


@pytest.fixture(params=["nothing left", "one byte", "half", "one byte less"])
def cut(request: pytest.FixtureRequest) -> Callable[[int], int]:
    left: dict[str, Callable[[int], int]] = {
        "nothing left": lambda size: 0, "one byte": lambda size: 1,
        "half": lambda size: size // 2, "one byte less": lambda size: size - 1,
    }  # fmt: skip
    return left[request.param]


def cut_short(path: Path, cut: Callable[[int], int]) -> Path:
    os.truncate(path, cut(path.stat().st_size))
    return path


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("what", [first_block, header_file], ids=["block", "header"])
def test_case_13_a_truncated_file_of_a_store_is_a_miss(
    what: Callable[[Store, str], Path], verify: bool, cut: Callable[[int], int], tmp_path: Path
) -> None:
    with small_store(tmp_path / "store") as store:
        entry_id = save(store).entry_id
        path = cut_short(what(store, entry_id), cut)
        with pytest.raises(CorruptEntry) as caught:
            store.load(entry_id, verify=verify)
        assert caught.value.path == str(path)
        assert_loads(store, save(store).entry_id)


@pytest.mark.parametrize("layout", ["monolith", "rows"])
@pytest.mark.parametrize("verify", [None, True, False])
def test_case_13_a_truncated_file_is_a_miss(
    layout: Any, verify: bool | None, cut: Callable[[int], int], tmp_path: Path
) -> None:
    save_kv_cache(tmp_path / "a.mlxkv", TOKENS, plain(TOKENS), META, layout=layout)
    for path in [tmp_path / "a.mlxkv", *sorted((tmp_path / "blocks").glob("*"))[:1]]:
        data = path.read_bytes()
        cut_short(path, cut)
        with pytest.raises(CacheMiss):
            load_kv_cache(tmp_path / "a.mlxkv", verify=verify)
        path.write_bytes(data)
    assert all_facts(load_kv_cache(tmp_path / "a.mlxkv", verify=verify).caches) == all_facts(plain(TOKENS))


# A page that a map misses kills the process, so it is another process that looks. The end of the file is a margin
# that no page is in: a file that has lost only some of that is still whole.
INDEX = """
import os, sys
from blockstore import StoreBroken
from token_caches import small_store
root, pages = sys.argv[1], 0
path = os.path.join(root, "index", "data.mdb")
with open(path, "rb") as file:
    whole = file.read()

def outcome(size, look):
    with open(path, "r+b") as file:
        file.truncate(size)
        try:
            return look()
        except StoreBroken:
            return "broken"
        finally:
            file.truncate(0)
            file.write(whole)

def entries():
    with small_store(root) as store:
        return len(store.entries())

sizes = [0, 1, 100, 4095, 4096, 4097, 8191, 8192, 3 * 4096, *range(4 * 4096, 40 * 4096, 5 * 4096), len(whole) - 1]
found = {size: outcome(size, entries) for size in sizes}
assert set(found.values()) == {"broken", 3}, found
assert [found[size] for size in sizes] == sorted(found.values(), key=str, reverse=True), found
with small_store(root) as store:
    assert len(store.entries()) == 3
    assert outcome(8192, store.entries) == "broken"
print("alive")
"""


def test_case_13_a_truncated_index_is_broken_and_kills_nobody(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        for n in range(3):
            save(store, [n, *TOKENS])
    assert python(INDEX, tmp_path / "store") == "alive\n"
