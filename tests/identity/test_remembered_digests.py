"""Weights are digested once: the memory is used while a file is the same, and never when it is not."""

import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest
from blake3 import blake3

from blockstore import identity as module
from blockstore.digest import Hasher
from blockstore.errors import InvalidInput
from blockstore.fs import FileSystem
from blockstore.identity import Identity, identity_of

SHARDS = 2
NAMES = [f"model-{number}.safetensors" for number in range(SHARDS)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in NAMES:
        (folder / name).write_bytes(name.encode())
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "digests" / "fingerprints.json"


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files a few milliseconds old count as settled, so that no test sleeps for seconds."""
    monkeypatch.setattr(module, "_SETTLED_NS", -1_000_000_000)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each file that was read for its digest."""
    done: list[int] = []
    feed = module._feed

    def counting(hasher: Hasher, fd: int) -> None:
        done.append(os.fstat(fd).st_ino)
        feed(hasher, fd)

    monkeypatch.setattr(module, "_feed", counting)
    return done


def find(model: Path, memory: Path) -> Identity:
    return identity_of(model, cache_dir=memory.parent)


def test_a_second_look_reads_no_weights(model: Path, memory: Path, reads: list[int]) -> None:
    first = find(model, memory)
    assert len(reads) == SHARDS
    assert find(model, memory) == first
    assert len(reads) == SHARDS


def test_what_is_remembered_is_the_blake3_of_each_file(model: Path, memory: Path) -> None:
    find(model, memory)
    found = json.loads(memory.read_bytes())
    assert found["format"] == 1
    assert sorted(found["digests"].values()) == sorted(blake3(name.encode()).hexdigest() for name in NAMES)
    status = (model / NAMES[0]).stat()
    key = f"{status.st_dev}.{status.st_ino}.{status.st_size}.{status.st_mtime_ns}.{status.st_ctime_ns}"
    assert found["digests"][key] == blake3(NAMES[0].encode()).hexdigest()


def test_the_memory_is_private_and_leaves_no_temporary(model: Path, memory: Path) -> None:
    find(model, memory)
    assert stat.S_IMODE(memory.stat().st_mode) == 0o600
    assert stat.S_IMODE(memory.parent.stat().st_mode) == 0o700
    assert os.listdir(memory.parent) == [memory.name]


def test_the_users_cache_directory_is_the_default(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    identity_of(model)
    assert (tmp_path / "xdg" / "mlx-blockstore" / "fingerprints.json").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    identity_of(model)
    assert (tmp_path / "home" / ".cache" / "mlx-blockstore" / "fingerprints.json").exists()


def test_other_contents_of_equal_size_and_time_are_noticed(model: Path, memory: Path, reads: list[int]) -> None:
    before = find(model, memory)
    path = model / NAMES[0]
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    time.sleep(0.02)  # the kernel's clock for file times ticks every 1 to 10 ms
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=times)
    assert find(model, memory) != before
    assert len(reads) == SHARDS + 1


def test_a_touched_file_is_read_again_and_is_the_same(model: Path, memory: Path, reads: list[int]) -> None:
    before = find(model, memory)
    os.utime(model / NAMES[1], ns=(5, 5))
    assert find(model, memory) == before
    assert len(reads) == SHARDS + 1


def test_a_moved_model_is_not_read_again(model: Path, memory: Path, reads: list[int]) -> None:
    before = find(model, memory)
    moved = find(model.rename(model.with_name("renamed")), memory)
    assert moved.config_fingerprint == before.config_fingerprint
    assert len(reads) == SHARDS


def test_a_file_that_changed_just_now_is_not_remembered(
    model: Path, memory: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLED_NS", 2_000_000_000)
    first = find(model, memory)
    assert not memory.exists()
    assert find(model, memory) == first
    assert len(reads) == 2 * SHARDS


DAMAGE = {
    "empty": b"",
    "cut": b'{"format": 1, "dig',
    "another format": b'{"format": 2, "digests": {}}',
    "further fields": b'{"format": 1, "digests": {}, "more": 1}',
    "no digest": b'{"format": 1, "digests": {"1.2.3.4.5": "abc"}}',
    "a digest and a line": b'{"format": 1, "digests": {"1.2.3.4.5": "' + b"0" * 64 + b'\\n"}}',
    "not UTF-8": b'{"format": 1, "digests": {"\xff": ""}}',
    "a list": b"[1, 2]",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("contents", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_or_foreign_memory_is_written_anew(
    model: Path, memory: Path, reads: list[int], contents: bytes
) -> None:
    before = find(model, memory)
    memory.write_bytes(contents)
    assert find(model, memory) == before
    assert len(reads) == 2 * SHARDS
    assert len(json.loads(memory.read_bytes())["digests"]) == SHARDS


def test_a_memory_that_cannot_be_written_costs_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = identity_of(model, cache_dir=tmp_path / "writable")
    (tmp_path / "file").write_text("")
    assert identity_of(model, cache_dir=tmp_path / "file") == expected
    assert "cannot be remembered" in caplog.text


def test_a_failed_rename_leaves_no_temporary(model: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FileSystem, source: str, target: str) -> None:
        raise OSError(5, "Input/output error", target)

    monkeypatch.setattr(FileSystem, "rename", fail)
    find(model, memory)
    assert os.listdir(memory.parent) == []


def test_the_memory_keeps_the_newest(model: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MEMORY_LIMIT_FILES", 3)
    for number in range(4):
        (model / NAMES[0]).write_bytes(b"a longer one each time" * number)
        find(model, memory)
    digests = list(json.loads(memory.read_bytes())["digests"].values())
    assert len(digests) == 3
    assert digests[-1] == blake3((model / NAMES[0]).read_bytes()).hexdigest()


def test_writers_at_once_leave_a_sound_memory(tmp_path: Path, memory: Path) -> None:
    models = []
    for number in range(4):
        folder = tmp_path / f"model-{number}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights" * number)
        models.append(folder)
    threads = [threading.Thread(target=find, args=(folder, memory)) for folder in models for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = json.loads(memory.read_bytes())["digests"]
    assert set(found.values()) <= {blake3((folder / "model.safetensors").read_bytes()).hexdigest() for folder in models}
    assert found
    assert os.listdir(memory.parent) == [memory.name]


# ---- files that change under the reader


def change_while_reading(monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> None:
    """Let somebody append to `path` during each of the first `times` readings of it."""
    feed, left = module._feed, [times]

    def changing(hasher: Hasher, fd: int) -> None:
        if os.path.samestat(os.fstat(fd), path.stat()) and left[0]:
            left[0] -= 1
            with path.open("ab") as file:
                file.write(b"more")
        feed(hasher, fd)

    monkeypatch.setattr(module, "_feed", changing)


def test_a_file_that_changes_while_it_is_read_is_read_again(
    model: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_while_reading(monkeypatch, model / NAMES[0], 1)
    found = find(model, memory)
    memory.unlink()
    assert find(model, memory) == found
    assert (model / NAMES[0]).read_bytes().endswith(b"more")


def test_a_file_that_keeps_changing_is_refused(model: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_while_reading(monkeypatch, model / NAMES[0], 100)
    with pytest.raises(InvalidInput, match="changes while it is read") as caught:
        find(model, memory)
    assert caught.value.path == str(model / NAMES[0])
