"""How a file comes to be: as a stream, under another name, whole or not at all."""

import contextlib
import errno
import hashlib
import itertools
import os
import stat
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import kvcodecs
from blockstore import files, load_kv_cache, save_kv_cache, wyhash_many
from blockstore.errors import CacheMiss
from blockstore.fs import FileSystem
from blockstore.moving import cache_files
from cache_cases import facts
from files.kit import CHECKPOINT, attachments, kv, meta, tree
from fs_doubles import CHANGES, Crash, FailingAt, Killed, Recording

pytestmark = pytest.mark.mlx_lm
TOKENS = list(range(9))
OLD = list(range(7))
ABOUT = meta(attachments=attachments()[:1], generation_checkpoint=CHECKPOINT)
each_layout = pytest.mark.parametrize("layout", ["monolith", "rows"])
MIB = 1 << 20


def save(path: Path, tokens: Sequence[int], layout: str, **more: Any) -> files.SavedFile:
    """Six blocks, if it is to be rows."""
    return save_kv_cache(path, tokens, [kv(len(tokens))], ABOUT, layout=layout, block_bytes=300, **more)


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[FileSystem], None]:
    """Put a double in the file system's place."""

    def put(double: FileSystem) -> None:
        monkeypatch.setattr(files, "FileSystem", lambda: double)

    return put


# ---- memory


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def large(layers_: int, tensor_bytes: int) -> list[Any]:
    """Caches whose tensors are not contiguous: they have room for more tokens."""
    dim = tensor_bytes // (2 * 256 * 2)
    made = []
    for _ in range(layers_):
        cache = kvcodecs.KVCache()
        cache.update_and_fetch(*(mx.ones((1, 2, 256, dim), mx.bfloat16) for _ in range(2)))
        mx.eval(cache.state)
        made.append(cache)
    return made


@pytest.mark.parametrize(("count", "size", "limit"), [(128, MIB // 4, 16 * MIB), (1, 32 * MIB, 4 * MIB)])
def test_a_monolith_is_written_in_little_memory(
    count: int, size: int, limit: int, traced: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """64 MiB in many tensors, which are hashed side by side, and in two, each by itself."""
    if count == 1:  # a minute while memory is traced; its own memory is a few KiB
        monkeypatch.setattr(wyhash_many, "_plain", lambda state, words: None)
    caches = large(count, size)
    before, used = tracemalloc.get_traced_memory()[0], mx.get_active_memory()
    mx.reset_peak_memory()
    tracemalloc.reset_peak()
    saved = save_kv_cache(tmp_path / "a.mlxkv", range(256), caches, sync=False)
    assert saved.logical_bytes == 2 * count * size
    assert tracemalloc.get_traced_memory()[1] - before <= limit
    assert mx.get_peak_memory() - used <= MIB


def test_rows_are_written_in_little_memory(traced: None, tmp_path: Path) -> None:
    caches = large(128, MIB // 4)
    before, used = tracemalloc.get_traced_memory()[0], mx.get_active_memory()
    mx.reset_peak_memory()
    tracemalloc.reset_peak()
    save_kv_cache(tmp_path / "a.mlxkv", range(256), caches, layout="rows", sync=False)
    assert tracemalloc.get_traced_memory()[1] - before <= 16 * MIB
    assert mx.get_peak_memory() - used <= MIB


@pytest.mark.parametrize("verify", [False, True])
def test_a_monolith_is_read_in_little_memory_beyond_the_arrays(verify: bool, traced: None, tmp_path: Path) -> None:
    save_kv_cache(tmp_path / "a.mlxkv", range(256), large(128, MIB // 4), sync=False)
    before, used = tracemalloc.get_traced_memory()[0], mx.get_active_memory()
    mx.reset_peak_memory()
    tracemalloc.reset_peak()
    loaded = load_kv_cache(tmp_path / "a.mlxkv", verify=verify)
    arrays = sum(cache.nbytes for cache in loaded.caches)
    assert tracemalloc.get_traced_memory()[1] - before <= 20 * MIB
    assert mx.get_peak_memory() - used <= arrays + MIB


# ---- the order of things


def changes(fs: Recording) -> list[str]:
    """What was done to the disk, in order, repetitions dropped."""
    return [name for name, _ in itertools.groupby(call.name for call in fs.named(*CHANGES))]


def test_a_monolith_is_written_beside_its_place_header_last(stand_in: Any, tmp_path: Path) -> None:
    fs = Recording()
    stand_in(fs)
    path = tmp_path / "a.mlxkv"
    save(path, TOKENS, "monolith")
    assert changes(fs) == ["create", "write_at", "extend_fd", "sync_fd", "rename", "sync_dir", "sync_fd"]
    (rename,) = fs.named("rename")
    assert (Path(rename.path).parent, rename.target) == (tmp_path, str(path))
    assert Path(rename.path).name.startswith(".a.mlxkv.")
    assert rename.path.endswith(".tmp")
    written = fs.named("write_at")
    assert {call.path for call in written} == {rename.path}


def test_the_header_is_written_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offsets: list[int] = []

    class Watched(FileSystem):
        def write_at(self, fd: int, data: memoryview, offset: int) -> None:
            offsets.append(offset)
            super().write_at(fd, data, offset)

    monkeypatch.setattr(files, "FileSystem", Watched)
    save(tmp_path / "a.mlxkv", TOKENS, "monolith")
    *tensors, header = offsets
    assert header == 0
    assert tensors == sorted(tensors)
    assert tensors[0] == 16384


def test_blocks_are_durable_before_the_header_that_names_them(stand_in: Any, tmp_path: Path) -> None:
    fs = Recording()
    stand_in(fs)
    save(tmp_path / "a.mlxkv", TOKENS, "rows")
    renamed = [(index, call.target) for index, call in enumerate(fs.calls) if call.name == "rename"]
    *blocks, (header_at, header) = renamed
    assert header == str(tmp_path / "a.mlxkv")
    assert {Path(target).parent for _, target in blocks} == {tmp_path / "blocks"}
    for index, _ in renamed:
        temporary = fs.calls[index].path
        assert [call.name for call in fs.calls[:index] if call.path == temporary][-1] == "sync_fd"
    folders = [index for index, call in enumerate(fs.calls) if call.name == "sync_dir"]
    last_block = max(index for index, _ in blocks)
    paths = {fs.calls[index].path for index in folders if last_block < index < header_at}
    assert {str(tmp_path / "blocks"), str(tmp_path)} <= paths


@each_layout
def test_without_sync_nothing_waits_for_the_disk(layout: str, stand_in: Any, tmp_path: Path) -> None:
    fs = Recording()
    stand_in(fs)
    save(tmp_path / "a.mlxkv", TOKENS, layout, sync=False)
    assert fs.named("sync_fd", "sync_dir", "sync_file") == []
    assert load_kv_cache(tmp_path / "a.mlxkv", verify=True).tokens == TOKENS


class Watching(Recording):
    """Looks at a file before each change to the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.seen: list[bytes | None] = []

    def entered(self, name: str, args: Sequence[Any]) -> None:
        super().entered(name, args)
        if name in CHANGES:
            self.seen.append(self.path.read_bytes() if self.path.exists() else None)


@each_layout
@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_but_a_whole_file_stands_under_the_name(
    layout: str, replaced: bool, stand_in: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.mlxkv"
    if replaced:
        save(path, OLD, layout)
    old = path.read_bytes() if replaced else None
    fs = Watching(path)
    stand_in(fs)
    save(path, TOKENS, layout)
    new = path.read_bytes()
    assert [data for data, _ in itertools.groupby(fs.seen)] == [old, new]
    assert {name for name in os.listdir(tmp_path) if name.endswith(".tmp")} == set()


# ---- failures


def assert_one_of(path: Path, *allowed: Sequence[int] | None) -> None:
    """The file is whole and of the tokens allowed; None: there is none."""
    if not path.exists():
        assert None in allowed
        return
    loaded = load_kv_cache(path, verify=True)
    assert loaded.tokens in [list(tokens) for tokens in allowed if tokens is not None]
    assert [facts(cache) for cache in loaded.caches] == [facts(kv(len(loaded.tokens)))]


def assert_blocks_are_whole(folder: Path) -> None:
    for name, data in tree(folder / "blocks").items():
        assert hashlib.sha256(data).hexdigest() == name


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.name.endswith(".tmp")}


@each_layout
@pytest.mark.parametrize("replaced", [False, True])
def test_a_call_that_fails_leaves_nothing(
    layout: str, replaced: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    renamed = set()
    for k in itertools.count():
        path = tmp_path / str(k) / "a.mlxkv"
        path.parent.mkdir()
        if replaced:
            save(path, OLD, layout, sync=False)
        opened = descriptors()
        with monkeypatch.context() as patched:
            fs = FailingAt(errno.ENOSPC)
            patched.setattr(files, "FileSystem", lambda fs=fs: fs)
            fs.arm(k)
            caught = error_of(lambda path=path: save(path, TOKENS, layout))
        if not fs.failed:
            break
        assert caught == errno.ENOSPC
        # Last of all the directory is synced; the file has its name by then.
        after = itertools.dropwhile(lambda call, path=path: call.target != str(path), fs.calls)
        has_name = "sync_dir" in [call.name for call in after]
        renamed.add(has_name)
        assert_one_of(path, TOKENS if has_name else OLD if replaced else None)
        assert leftovers(tmp_path) == set()
        assert descriptors() == opened
        assert_blocks_are_whole(path.parent)
    assert renamed == {False, True}
    assert k > (8 if layout == "monolith" else 20)
    assert_one_of(path, TOKENS)


def error_of(work: Callable[[], object]) -> int | None:
    try:
        work()
    except OSError as error:
        return error.errno
    return None


@each_layout
def test_a_killed_writer_leaves_the_old_file_and_nothing_that_is_taken_for_one(
    layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, kinds = tmp_path / "a.mlxkv", set()
    for k in itertools.count():
        save(path, OLD, layout, sync=False)
        fs = Crash()
        fs.arm(k)
        with monkeypatch.context() as patched:
            patched.setattr(files, "FileSystem", lambda fs=fs: fs)
            with contextlib.suppress(Killed):
                save(path, TOKENS, layout)
        if not fs.dead:
            break
        fs.bury()
        kinds.add(bool(leftovers(tmp_path)))
        assert_one_of(path, OLD, TOKENS)
        assert_blocks_are_whole(tmp_path)
        assert list(cache_files([str(tmp_path)])) == [str(path)]
        save(path, TOKENS, layout, sync=False)  # what was left is in nobody's way
        assert_one_of(path, TOKENS)
    assert kinds == {False, True}


@each_layout
def test_a_disk_that_takes_no_change_any_more(layout: str, stand_in: Any, tmp_path: Path) -> None:
    """Not even the temporary can be removed: the old file stays, and what is left is not taken for one."""
    path = tmp_path / "a.mlxkv"
    save(path, OLD, layout)
    fs = FailingAt()
    stand_in(fs)
    for k in (2, 5):
        fs.arm(k, lasting=True)
        with pytest.raises(OSError, match="Input/output error"):
            save(path, TOKENS, layout)
    assert_one_of(path, OLD)
    assert list(cache_files([str(tmp_path)])) == [str(path)]


# ---- what stands in the way


def test_files_and_blocks_are_the_users_alone(tmp_path: Path) -> None:
    save(tmp_path / "a.mlxkv", TOKENS, "rows")
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()} == {0o600}
    assert stat.S_IMODE((tmp_path / "blocks").stat().st_mode) == 0o700


@each_layout
def test_a_link_is_replaced_and_not_followed(layout: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("untouched")
    (tmp_path / "a.mlxkv").symlink_to(other)
    save(tmp_path / "a.mlxkv", TOKENS, layout)
    assert other.read_text() == "untouched"
    assert not (tmp_path / "a.mlxkv").is_symlink()
    assert_one_of(tmp_path / "a.mlxkv", TOKENS)


@each_layout
def test_a_directory_is_not_replaced(layout: str, tmp_path: Path) -> None:
    (tmp_path / "a.mlxkv").mkdir()
    with pytest.raises(IsADirectoryError):
        save(tmp_path / "a.mlxkv", TOKENS, layout)
    assert leftovers(tmp_path) == set()


BAD_BLOCKS: dict[str, Callable[[Path], object]] = {
    "short": lambda block: block.write_bytes(block.read_bytes()[:-1]),
    "empty": lambda block: block.write_bytes(b""),
    "long": lambda block: block.write_bytes(block.read_bytes() + b"x"),
    "missing": lambda block: block.unlink(),
    "a link": lambda block: (block.unlink(), block.symlink_to(block.parent.parent / "a.mlxkv")),
}


@pytest.mark.parametrize("damage", BAD_BLOCKS.values(), ids=BAD_BLOCKS)
def test_a_block_of_another_size_is_written_again(damage: Callable[[Path], object], tmp_path: Path) -> None:
    first = save(tmp_path / "a.mlxkv", TOKENS, "rows")
    again = save(tmp_path / "a.mlxkv", TOKENS, "rows")
    header = (tmp_path / "a.mlxkv").stat().st_size
    assert again.written_bytes == header < first.written_bytes
    block = sorted((tmp_path / "blocks").iterdir())[0]
    size = block.stat().st_size
    damage(block)
    with pytest.raises(CacheMiss):
        load_kv_cache(tmp_path / "a.mlxkv")
    assert save(tmp_path / "a.mlxkv", TOKENS, "rows").written_bytes == header + size
    assert_one_of(tmp_path / "a.mlxkv", TOKENS)


def test_blocks_are_shared_with_the_files_that_stand_there(tmp_path: Path) -> None:
    """Rows of one head that grew: its full blocks are the same. Nothing that stands there is touched."""
    caches = {tokens: [kv(tokens)] for tokens in (40, 50)}
    save_kv_cache(tmp_path / "a.mlxkv", range(40), caches[40], layout="rows", block_bytes=320)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "blocks").iterdir()}
    saved = save_kv_cache(tmp_path / "b.mlxkv", range(50), caches[50], layout="rows", block_bytes=320)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert saved.written_bytes - (tmp_path / "b.mlxkv").stat().st_size == 4 * 10 * 8 * 4
    for name, tokens in (("a.mlxkv", 40), ("b.mlxkv", 50)):
        assert facts(load_kv_cache(tmp_path / name).caches[0]) == facts(caches[tokens][0])


@each_layout
def test_writers_of_one_name_do_not_disturb_each_other(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "a.mlxkv"
    provider = kvcodecs.default_provider()
    prepared = [files._prepare(range(n), [kv(n)], ABOUT, layout, 300, provider) for n in (7, 9) * 8]
    failed: list[BaseException] = []

    def write(one: Any) -> None:
        try:
            files._write(str(path), one, layout, False, threading.Event())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(one,)) for one in prepared]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert_one_of(path, OLD, TOKENS)
    assert leftovers(tmp_path) == set()
    assert_blocks_are_whole(tmp_path)
