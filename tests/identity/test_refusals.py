"""What is no model gets an error that names the path and the way on."""

import errno
import os
from pathlib import Path

import pytest

from blockstore.errors import InvalidInput
from blockstore.fs import FileSystem
from blockstore.identity import identity_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def refusal(model: str | Path, **options: str | Path) -> str:
    with pytest.raises(InvalidInput) as caught:
        identity_of(model, **options)  # type: ignore[arg-type]  # mypy takes the table for all options
    assert caught.value.path
    return str(caught.value)


def test_no_such_directory(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert f"no such directory (path {missing})" in refusal(missing)
    assert "no such directory" in refusal("a/b/c")


def test_an_empty_path_is_not_the_working_directory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    with pytest.raises(InvalidInput, match="no such directory"):
        identity_of("")


def test_a_file_is_no_model(model: Path) -> None:
    assert "not a directory" in refusal(model / "config.json")


def test_no_config(model: Path) -> None:
    (model / "config.json").unlink()
    text = refusal(model)
    assert "No such file" in text
    assert str(model / "config.json") in text
    assert "mlx_lm.load" in text


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b"3", b"\xff\xfe\xfd", b"[" * 100_000])
def test_a_config_that_is_no_object(model: Path, contents: bytes) -> None:
    (model / "config.json").write_bytes(contents)
    assert "JSON" in refusal(model)


def test_no_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    text = refusal(model)
    assert "no weights" in text
    assert "mlx_lm.convert" in text


def test_weights_whose_blob_is_gone(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("../gone")
    assert "model.safetensors" in refusal(model)


def test_something_else_in_the_place_of_a_file(model: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    assert "not a regular file" in refusal(model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read(model: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = FileSystem.open_read

    def refuse(self: FileSystem, path: str) -> int:
        if path.endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(self, path)

    monkeypatch.setattr(FileSystem, "open_read", refuse)
    text = refusal(model)
    assert "Permission denied" in text
    assert name in text


def test_code_under_a_name_that_is_no_text(model: Path) -> None:
    (model / "config.json").write_text('{"model_file": 3}')
    assert "model_file" in refusal(model)


def test_an_adapter_that_is_none(model: Path, tmp_path: Path) -> None:
    assert "no such adapter directory" in refusal(model, adapter_path=tmp_path / "missing")
    (tmp_path / "adapter").mkdir()
    assert "adapter_config.json" in refusal(model, adapter_path=tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "adapters.safetensors" in refusal(model, adapter_path=tmp_path / "adapter")
