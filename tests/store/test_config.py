"""Where a store can stand, and what its store.json may say."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockstore import BlockstoreError, InvalidInput, NotPermitted, Store, StoreBroken, UnsupportedFormat
from blockstore.fs import FileSystem
from token_caches import small_store

# ---- roots


def pipe(place: Path) -> Path:
    place.mkdir()
    os.mkfifo(place / "store.json")
    return place / "store.json"


def loop(place: Path) -> Path:
    place.symlink_to(place)
    return place


def dangling(place: Path) -> Path:
    place.symlink_to(place.with_name("nowhere"))
    return place


def file(place: Path) -> Path:
    place.write_text("mine")
    return place


WRONG: dict[str, Callable[[Path], Path]] = {"a file": file, "a link to nothing": dangling, "a link to itself": loop}


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("below", ["", "x", "x/y"])
@pytest.mark.parametrize("what", WRONG)
def test_where_no_directory_can_be_no_store_is_looked_for_or_made(
    tmp_path: Path, what: str, below: str, create: bool
) -> None:
    wrong = WRONG[what](tmp_path / "place")
    before = os.lstat(wrong)
    with pytest.raises(InvalidInput) as error:
        small_store(wrong / below, create=create)
    assert (error.value.path, "directory" in error.value.hint) == (str(wrong), True)
    assert os.lstat(wrong).st_ino == before.st_ino
    assert os.listdir(tmp_path) == ["place"]


def test_a_link_to_a_directory_is_a_root(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    small_store(tmp_path / "link").close()
    assert (tmp_path / "real" / "store.json").exists()


def test_a_pipe_in_the_place_of_store_json_is_named(tmp_path: Path) -> None:
    wrong = pipe(tmp_path / "store")
    with pytest.raises(InvalidInput) as error:
        small_store(tmp_path / "store")
    assert error.value.path == str(wrong)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOENT, InvalidInput), (errno.ENOTDIR, InvalidInput), (errno.EACCES, NotPermitted)],
    ids=["ENOENT", "ENOTDIR", "EACCES"],
)
def test_where_the_system_makes_no_directory_the_path_is_named(
    tmp_path: Path, number: int, kind: type[BlockstoreError]
) -> None:
    """As under /proc."""

    class Elsewhere(FileSystem):
        def make_dir(self, path: str) -> bool:
            raise OSError(number, os.strerror(number), path)

    with pytest.raises(kind) as refused:
        small_store(tmp_path / "store", fs=Elsewhere())
    assert refused.value.path == str(tmp_path / "store")


# ---- store.json


@pytest.fixture
def config(tmp_path: Path) -> Path:
    small_store(tmp_path / "store", max_bytes=1 << 30, hash="sha256").close()
    return tmp_path / "store" / "store.json"


def change(config: Path, **changes: Any) -> dict[str, Any]:
    """What stood there before."""
    before: dict[str, Any] = json.loads(config.read_text())
    config.write_text(json.dumps({**before, **changes}))
    return before


BAD: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"limits": {"maxBytes": -5, "maxAgeS": 7}}, "max_bytes", {"limits": {"maxAgeS": 7}}),
    ({"limits": {"maxBytes": 1 << 70}}, "max_bytes", {"limits": {}}),
    ({"limits": {"maxBytes": "x", "minFreeBytes": 3}}, "limits.maxBytes", {"limits": {"minFreeBytes": 3}}),
    ({"limits": {"quotas": {"org/m": -1}}}, "org/m", {"limits": {}}),
    ({"limits": []}, "limits", {"limits": {}}),
    ({"format": 0}, "no such format", {}),
    ({"format": "1"}, "format", {}),
    ({"blockHash": "md5"}, "unknown block hash", {"blockHash": "blake3"}),
    ({"span": 3}, "span", {"span": 64}),
]


@pytest.mark.parametrize(("changes", "named", "mended"), BAD, ids=json.dumps)
def test_what_store_json_may_not_say_is_named_with_the_text_to_write(
    config: Path, changes: dict[str, Any], named: str, mended: dict[str, Any]
) -> None:
    before = change(config, **changes)
    with pytest.raises(StoreBroken) as error:
        small_store(config.parent)
    assert named in str(error.value)
    assert error.value.path == str(config)
    text = error.value.hint.removeprefix("Write it again: ")
    assert json.loads(text) == {**before, **mended}, "all that could be used is kept"
    config.write_text(text)
    Store(config.parent).close()


TEXTS = ["", "{}", "[]", "nul", "[" * 5000, '{"x": ' + "[" * 5000, "\udcff"]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text[:9]))
def test_a_text_that_is_no_configuration_has_the_same_hint_as_a_missing_one(config: Path, text: str) -> None:
    config.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StoreBroken) as broken:
        small_store(config.parent)
    (config.parent / "blocks" / ("a" * 64)).touch()
    config.unlink()
    with pytest.raises(StoreBroken) as missing:
        small_store(config.parent)
    assert broken.value.hint == missing.value.hint
    config.write_text(missing.value.hint.removeprefix("Write it again: "))
    Store(config.parent).close()


@pytest.mark.parametrize("changes", [{"format": 2}, {"format": 2, "span": "many"}])
def test_a_newer_release_is_named_as_such(config: Path, changes: dict[str, Any]) -> None:
    change(config, **changes)
    with pytest.raises(UnsupportedFormat, match="newer release"):
        small_store(config.parent)


def test_what_a_later_release_added_stays_when_limits_change(config: Path) -> None:
    change(config, color="blue", limits={"maxBytes": 1 << 30, "maxWeight": 3})
    with Store(config.parent) as store:
        store.set_limits(max_bytes=0, max_age_s=60)
    found = json.loads(config.read_text())
    assert (found["color"], found["limits"]) == ("blue", {"maxWeight": 3, "maxAgeS": 60})
    assert found["blockHash"] == "sha256"
    with Store(config.parent) as store:
        assert store.limits.max_age_s == 60
