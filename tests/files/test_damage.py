"""Damage to files: a typed miss that says what and where, or the very same caches; never others."""

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockstore import CacheMiss, CorruptEntry, load_kv_cache, read_kv_header, save_kv_cache
from blockstore import files as files_
from blockstore.header import PREFIX_BYTES, decode_header
from blockstore.records import blocks_of, slots_of
from cache_cases import facts
from files.kit import GOLDEN, LOADABLE, MANIFEST, kv, tree

pytestmark = pytest.mark.mlx_lm
each_file = pytest.mark.parametrize("name", MANIFEST)
each_monolith = pytest.mark.parametrize("name", [name for name in LOADABLE if MANIFEST[name]["version"] < 5])
ROWS = [name for name in LOADABLE if MANIFEST[name]["version"] == 5]
PLACES = 50
HEADER_LENGTH, DATA_START, HEADER_HASH = 10, 14, 18


@pytest.fixture
def copy(tmp_path: Path, name: str) -> Path:
    """The file by itself; of v5 with its blocks beside it, which nobody changes."""
    shutil.copytree(GOLDEN / "v5" / "blocks", tmp_path / "blocks")
    return Path(shutil.copy(GOLDEN / name, tmp_path / "copy.mlxkv"))


def contents(path: Path) -> Any:
    loaded = load_kv_cache(path, verify=True)
    return loaded.tokens, [facts(cache) for cache in loaded.caches], loaded.meta.identity


# ---- whole files


@each_file
def test_a_file_that_ends_early(name: str, copy: Path) -> None:
    size = copy.stat().st_size
    places = {size * i // PLACES for i in range(PLACES)} | {size - 1, PREFIX_BYTES, PREFIX_BYTES - 1}
    for place in sorted(places, reverse=True):
        os.truncate(copy, place)
        for verify in (True, None):
            with pytest.raises(CacheMiss):
                load_kv_cache(copy, verify=verify)
    assert len(places) >= PLACES


@each_file
def test_bytes_behind_the_end_change_nothing(name: str, copy: Path) -> None:
    header = read_kv_header(copy)
    with copy.open("ab") as file:
        file.write(b"more")
    assert read_kv_header(copy) == header


@each_file
def test_every_byte_of_the_header_in_turn(name: str) -> None:
    data = bytearray((GOLDEN / name).read_bytes())
    size = MANIFEST[name]["headerBytes"]
    for place in range(PREFIX_BYTES + size):
        if MANIFEST[name]["version"] == 5 and DATA_START <= place < HEADER_HASH:
            continue  # says nothing in this version
        mask = 1 << place % 8
        data[place] ^= mask
        with pytest.raises(CacheMiss):
            decode_header(data, path=name, file_size=len(data))
        data[place] ^= mask


@pytest.mark.parametrize("name", ["v3-ssm.mlxkv", "v4-kv.mlxkv", "v5/kv.mlxkv"])
def test_every_byte_of_the_header_in_turn_when_loaded(name: str, copy: Path) -> None:
    data = copy.read_bytes()
    expected = contents(copy)
    for place in range(PREFIX_BYTES + MANIFEST[name]["headerBytes"]):
        with copy.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([data[place] ^ 0x11]), place)
            if name.startswith("v5") and DATA_START <= place < HEADER_HASH:
                assert contents(copy) == expected
            else:
                with pytest.raises(CacheMiss):
                    load_kv_cache(copy)
            os.pwrite(file.fileno(), data[place : place + 1], place)
    assert contents(copy) == expected


def extremes(value: int, bits: int) -> set[int]:
    most = (1 << bits) - 1
    near = {value + step for step in (-16384, -1, 1, 16384)}
    return {0, 1, PREFIX_BYTES, most, most >> 1, (most >> 1) + 1, *(n for n in near if 0 <= n <= most)} - {value}


@each_file
@pytest.mark.parametrize(("place", "form"), [(HEADER_LENGTH, "<I"), (DATA_START, "<I"), (HEADER_HASH, "<Q")])
def test_numbers_of_the_prefix_at_their_extremes(name: str, place: int, form: str, copy: Path) -> None:
    data = bytearray(copy.read_bytes())
    (value,) = struct.unpack_from(form, data, place)
    header = read_kv_header(copy)
    for number in extremes(value, 8 * struct.calcsize(form)):
        struct.pack_into(form, data, place, number)
        copy.write_bytes(data)
        if MANIFEST[name]["version"] == 5 and place == DATA_START:
            assert read_kv_header(copy) == header
        else:
            with pytest.raises(CacheMiss):
                load_kv_cache(copy)


# ---- tensors of a monolith


@each_monolith
def test_any_byte_of_a_tensor(name: str, copy: Path) -> None:
    expected = contents(copy)
    start, data = MANIFEST[name]["dataStart"], copy.read_bytes()
    with copy.open("r+b") as file:
        for number, slot in enumerate(slots_of(read_kv_header(copy))):
            for place in {start + slot.off + slot.bytes * i // 4 for i in range(4) if slot.bytes}:
                os.pwrite(file.fileno(), bytes([data[place] ^ 0x80]), place)
                with pytest.raises(CorruptEntry, match="bytes of its hash") as caught:
                    load_kv_cache(copy, verify=True)
                assert (caught.value.field, caught.value.path) == (f"tensor {number}", str(copy))
                assert caught.value.expected == slot.hash
                os.pwrite(file.fileno(), data[place : place + 1], place)
    assert contents(copy) == expected


@each_monolith
def test_bytes_between_tensors_say_nothing(name: str, copy: Path) -> None:
    expected, header = contents(copy), read_kv_header(copy)
    data = bytearray(b"\xff" * copy.stat().st_size)
    original = copy.read_bytes()
    kept = [(0, PREFIX_BYTES + MANIFEST[name]["headerBytes"])]
    start = MANIFEST[name]["dataStart"]
    kept += [(start + slot.off, start + slot.off + slot.bytes) for slot in slots_of(header)]
    for first, last in kept:
        data[first:last] = original[first:last]
    copy.write_bytes(data)
    assert contents(copy) == expected


@pytest.mark.parametrize("name", ["v4-qkv.mlxkv"])
@settings(max_examples=60)
@given(edits=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4))
def test_any_bytes_anywhere(name: str, edits: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Most of the file is empty space: places count the bytes that say something."""
    path = tmp_path_factory.getbasetemp() / "edited.mlxkv"
    data = bytearray((GOLDEN / name).read_bytes())
    start = MANIFEST[name]["dataStart"]
    slots = list(slots_of(read_kv_header(GOLDEN / name)))
    places = [*range(PREFIX_BYTES + MANIFEST[name]["headerBytes"])]
    places += [start + slot.off + i for slot in slots for i in range(slot.bytes)]
    for place, mask in edits:
        data[places[place % len(places)]] ^= mask
    path.write_bytes(data)
    try:
        found = contents(path)
    except CacheMiss:
        return
    assert found == contents(GOLDEN / name)  # edits that undo each other


# ---- blocks


def replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_a_copy(path: Path) -> None:
    """The right bytes, but not here."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "one byte short": lambda path: replace(path, path.read_bytes()[:-1]),
    "empty": lambda path: replace(path, b""),
    "one byte long": lambda path: replace(path, path.read_bytes() + b"\0"),
    "a bit flipped": lambda path: replace(path, path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "zeros": lambda path: replace(path, bytes(path.stat().st_size)),
    "a link": link_to_a_copy,
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "a pipe": make_pipe,
    "a folder": make_folder,
}
SAME_SIZE = {"a bit flipped", "zeros"}


@pytest.fixture(params=ROWS)
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A v5 file with blocks of its own."""
    path = Path(shutil.copy(GOLDEN / request.param, tmp_path / "copy.mlxkv"))
    (tmp_path / "blocks").mkdir()
    for digest, _ in blocks_of(read_kv_header(path)):
        shutil.copy(GOLDEN / "v5" / "blocks" / digest, tmp_path / "blocks" / digest)
    return path


def some_blocks(path: Path) -> Iterator[Path]:
    """The first, the last and some between, by their order in the file."""
    names = list(dict.fromkeys(digest for digest, _ in blocks_of(read_kv_header(path))))
    for i in sorted({0, len(names) - 1, *range(0, len(names), max(1, len(names) // 3))}):
        yield path.parent / "blocks" / names[i]


def test_any_block_in_any_way(rows: Path) -> None:
    expected = contents(rows)
    for block in some_blocks(rows):
        data = block.read_bytes()
        for what, damage in DAMAGE.items():
            damage(block)
            assert_missed(rows, block, verify=None)
            if what not in SAME_SIZE:
                assert_missed(rows, block, verify=False)
            mend(block, data)
    assert contents(rows) == expected


def assert_missed(path: Path, block: Path, *, verify: bool | None) -> None:
    with pytest.raises(CorruptEntry) as caught:
        load_kv_cache(path, verify=verify)
    assert (caught.value.digest, caught.value.path) == (block.name, str(block))


def mend(block: Path, data: bytes) -> None:
    if block.is_dir():
        block.rmdir()
    else:
        block.unlink(missing_ok=True)
    block.write_bytes(data)


def test_blocks_that_changed_places(rows: Path) -> None:
    sizes: dict[int, list[Path]] = {}
    for block in sorted((rows.parent / "blocks").iterdir()):
        sizes.setdefault(block.stat().st_size, []).append(block)
    one, other = next(alike for alike in sizes.values() if len(alike) > 1)[:2]
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    with pytest.raises(CorruptEntry):
        load_kv_cache(rows)


def test_the_folder_of_blocks_is_gone(rows: Path) -> None:
    shutil.rmtree(rows.parent / "blocks")
    with pytest.raises(CorruptEntry, match="a block is missing"):
        load_kv_cache(rows)


def test_a_failed_load_changes_no_file(rows: Path) -> None:
    """Outside of a store nothing is dropped: the file is somebody's."""
    next(some_blocks(rows)).unlink()
    before = tree(rows.parent)
    with pytest.raises(CorruptEntry):
        load_kv_cache(rows)
    assert tree(rows.parent) == before


def test_a_shorter_load_needs_no_later_block(tmp_path: Path) -> None:
    """Rows of one head each, 32 bytes a token, in blocks of ten tokens."""
    path = tmp_path / "a.mlxkv"
    save_kv_cache(path, range(40), [kv(40)], layout="rows", block_bytes=320)
    for slot in read_kv_header(path).caches[0].tensors:
        blocks = [block.hash for block in slot.blocks or ()]
        for name in [*blocks[1:4], *blocks[5:8]]:
            (tmp_path / "blocks" / name).unlink()
    with pytest.raises(CorruptEntry):
        load_kv_cache(path, length=11)
    loaded = load_kv_cache(path, length=10)
    expected = kv(40)
    expected.trim(30)
    assert [facts(cache) for cache in loaded.caches] == [facts(expected)]


# ---- another file takes the name meanwhile


@pytest.mark.parametrize("layout", ["monolith", "rows"])
@pytest.mark.parametrize("step", ["allocate", "fill"])
def test_header_and_tensors_are_of_one_file(
    layout: Any, step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, other = tmp_path / "a.mlxkv", tmp_path / "b.mlxkv"
    save_kv_cache(path, range(9), [kv(9, seed=1)], layout=layout)
    save_kv_cache(other, range(9), [kv(9, seed=2)], layout=layout)
    original = getattr(files_._Load, step)

    def replaced(self: Any, *args: Any) -> Any:
        other.replace(path)
        return original(self, *args)

    monkeypatch.setattr(files_._Load, step, replaced)
    loaded = load_kv_cache(path)
    assert [facts(cache) for cache in loaded.caches] == [facts(kv(9, seed=1))]


def test_a_file_that_shrinks_while_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "a.mlxkv"
    save_kv_cache(path, range(9), [kv(9)])
    original = files_._Load.fill

    def shrunk(self: Any, verify: bool | None) -> None:
        os.truncate(path, path.stat().st_size - 1)
        original(self, verify)

    monkeypatch.setattr(files_._Load, "fill", shrunk)
    with pytest.raises(CorruptEntry, match="the file ended early"):
        load_kv_cache(path)
