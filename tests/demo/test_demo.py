"""The demo, with a model so small that it takes seconds; the second process is real."""

import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from blockstore import Identity, InvalidInput, Store, demo

pytestmark = pytest.mark.mlx_lm


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process reads the configuration from the model's directory, so it uses this one too."""
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    monkeypatch.setattr(demo, "_CONFIG", {**demo._CONFIG, **shape, "intermediate_size": 64})


def fill(root: Path) -> str:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 5, 8)), mx.ones((1, 1, 5, 8)))
    with Store(root) as store:
        return store.save([1, 2, 3, 4, 5], [cache], Identity("somebody's", None, None)).entry_id


def test_it_succeeds_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert demo.run() == 0
    told = capsys.readouterr()
    assert told.err == ""
    for fact in ("found 2,048 tokens", "equal, bit for bit", "times less", "times faster", "the store is empty"):
        assert fact in told.out
    assert list(tmp_path.iterdir()) == []
    assert told.out.isascii(), "piped output has neither colours nor rules"
    assert "\x1b" not in told.out


def test_a_store_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    entry_id = fill(tmp_path)
    with pytest.raises(InvalidInput, match="empty store"):
        demo.run(str(tmp_path))
    with Store(tmp_path) as store:
        assert [entry.entry_id for entry in store.entries()] == [entry_id]


def test_a_second_process_that_fails_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(arguments, 3, "", "no such luck")

    monkeypatch.setattr(demo, "_python", fails)
    assert demo.run(str(tmp_path / "store")) == 1
    told = capsys.readouterr()
    assert "the second process ended with 3" in told.err
    assert "no such luck" in told.err
    assert "succeeded" not in told.out


def test_other_logits_are_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process asks another follow-up than the second one does."""
    monkeypatch.setattr(demo, "_FOLLOW_UP", demo._FOLLOW_UP.replace("nine", "five"))
    assert demo.run(str(tmp_path / "store")) == 1
    assert "the logits differ at new token" in capsys.readouterr().err


@pytest.mark.parametrize("other", [1.0 + 2**-23, 1.0 - 2**-24])
def test_one_bit_is_a_difference(other: float) -> None:
    expected = mx.ones((1, 4, 3))
    demo._compare_bits(expected, mx.ones((1, 4, 3)))
    found = mx.array(expected)
    found[0, 2, 1] = other
    with pytest.raises(demo._Failed, match="at new token 2"):
        demo._compare_bits(expected, found)


def test_the_sign_of_zero_is_a_difference() -> None:
    with pytest.raises(demo._Failed):
        demo._compare_bits(mx.zeros((1, 2, 2)), -mx.zeros((1, 2, 2)))
