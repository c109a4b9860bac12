"""Whatever is wrong with a checkpoint costs the checkpoint, never the request."""

import logging
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from blockstore import Attachment, EntryGone, GenerationCheckpoint, Store, StoreFull
from blockstore.checkpoints import SCHEMA, Generation
from resume.kit import NO_END, PROMPT, Answer, arguments, checkpoints_in, serving, uninterrupted

pytestmark = pytest.mark.mlx_lm
ARGS = arguments(logit_bias=NO_END)
generate_module: Any = import_module("mlx_lm.generate")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    return uninterrupted(tmp_path_factory.mktemp("none") / "store", ARGS)


def interrupted(root: Path) -> None:
    with serving(root) as server:
        server.ask(ARGS, leave_after=33)


def tokens_and_text(answer: Answer) -> tuple[list[int], str, str | None]:
    return answer.tokens, answer.text, answer.finish_reason


# ---- what is stored is not what it should be


def flip_a_block(root: Path) -> None:
    path = max((root / "blocks").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove_the_blocks(root: Path) -> None:
    for path in (root / "blocks").iterdir():
        path.unlink()


def cut_the_header(root: Path) -> None:
    (path,) = (root / "entries").glob("*/*")
    path.write_bytes(path.read_bytes()[:-40])


def remove_the_header(root: Path) -> None:
    (path,) = (root / "entries").glob("*/*")
    path.unlink()


def resaved(**changed: Any) -> Callable[[Path], None]:
    """An entry of the same identity, which holds something else: a token, of the checkpoint, or as attachments."""

    def save(root: Path) -> None:
        with Store(root) as store:
            (entry,) = store.entries()
            loaded = store.load(entry.entry_id)
            meta = loaded.meta
            checkpoint: Any = meta.generation_checkpoint
            fields = {name: getattr(checkpoint, name) for name in GenerationCheckpoint.__struct_fields__}
            kept = {name: changed[name] for name in changed if name in fields}
            store.remove(entry.entry_id)
            store.save(
                [changed.get("first_token", loaded.tokens[0]), *loaded.tokens[1:]], loaded.caches, meta.identity,
                attachments=changed.get("attachments", meta.attachments),
                generation_checkpoint=changed.get("checkpoint", GenerationCheckpoint(**{**fields, **kept})),
            )  # fmt: skip

    return save


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of a block": flip_a_block,
    "no blocks": remove_the_blocks,
    "a header cut off": cut_the_header,
    "no header": remove_the_header,
    "another key": resaved(key="0" * 64),
    "another prompt": resaved(first_token=0),
    "another prompt's length": resaved(original_prompt_tokens=len(PROMPT) - 1),
    "another count": resaved(generated_tokens=3),
    "no checkpoint": resaved(checkpoint=None),
    "no random state": resaved(attachments=()),
    "a random state of another schema": resaved(attachments=(Attachment("other", {"key": [1, 2]}),)),
    "a random state of one word": resaved(attachments=(Attachment(SCHEMA, {"key": [1]}),)),
    "a random state of text": resaved(attachments=(Attachment(SCHEMA, {"key": ["1", "2"]}),)),
    "a random state that is none": resaved(attachments=(Attachment(SCHEMA, {"key": [-1, 2]}),)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_checkpoint_is_no_checkpoint(tmp_path: Path, damage: str, expected: Answer) -> None:
    interrupted(tmp_path / "store")
    DAMAGES[damage](tmp_path / "store")
    with serving(tmp_path / "store") as server:
        assert tokens_and_text(server.ask(ARGS)) == tokens_and_text(expected)
    assert server.checkpoints.stats.resumed == 0
    assert server.checkpoints.stats.failures > 0
    assert checkpoints_in(tmp_path / "store") == []


def test_a_checkpoint_that_the_model_does_not_take_is_none(tmp_path: Path, expected: Answer) -> None:
    """The first step fails; nothing has been given out, and the answer begins at the prompt in caches of its own."""
    interrupted(tmp_path / "store")
    with serving(tmp_path / "store") as server:
        load = server.store.load

        def load_narrow(*args: Any, **named: Any) -> Any:
            loaded = load(*args, **named)
            for cache in loaded.caches:
                cache.keys, cache.values = cache.keys[..., :8], cache.values[..., :8]
            return loaded

        server.store.load = load_narrow  # type: ignore[method-assign]  # what a bad checkpoint would give
        answer = server.ask(ARGS, on_token=lambda count: server.checkpoints.flush(60))
        assert tokens_and_text(answer) == tokens_and_text(expected)
    stats = server.checkpoints.stats
    assert (stats.resumed, stats.failures, stats.stored) == (0, 1, 9)
    assert checkpoints_in(tmp_path / "store") == []


# ---- the store fails


@pytest.mark.parametrize("call", ["prepare", "commit", "remove", "load", "rooms"])
def test_a_store_that_fails_is_done_without(
    tmp_path: Path, call: str, expected: Answer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **named: Any) -> Any:
        raise OSError("the disk is on fire")

    interrupted(tmp_path / "store")
    with monkeypatch.context() as patch, serving(tmp_path / "store") as server:
        patch.setattr(Store, call, property(fail) if call == "rooms" else fail)
        with caplog.at_level(logging.ERROR, "blockstore"):
            assert tokens_and_text(server.ask(ARGS)) == tokens_and_text(expected)
            assert server.ask(arguments(logit_bias=NO_END, seed=8)).finish_reason == "length"
            server.stop()
    said = [record for record in caplog.records if "the disk is on fire" in record.getMessage()]
    assert len(said) == 1
    assert server.checkpoints.stats.failures >= 1


def test_after_a_failed_save_there_is_no_further_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would cost the generation as much as one that succeeds."""
    calls = []

    def commit(self: Store, prepared: Any) -> Any:
        calls.append(prepared)
        raise StoreFull("no room")

    monkeypatch.setattr(Store, "commit", commit)
    with serving(tmp_path / "store", every=1) as server:
        server.ask(ARGS)
        assert server.checkpoints.flush(60)
        first = len(calls)
        server.ask(arguments(logit_bias=NO_END, seed=8))
    assert 1 <= first <= 2  # one may have been under way
    assert first < len(calls) <= 2 * first + 1


def test_what_goes_on_when_a_server_stops_takes_no_more(tmp_path: Path, expected: Answer) -> None:
    with serving(tmp_path / "store") as server:
        assert server.checkpoints.close(60)
        assert server.ask(ARGS).tokens == expected.tokens
    assert (server.checkpoints.stats.stored, server.checkpoints.stats.failures) == (0, 0)


def test_where_history_is_lost_the_next_one_is_taken_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Answer
) -> None:
    commit, calls = Store.commit, []

    def commit_later(self: Store, prepared: Any) -> Any:
        calls.append(prepared)
        if len(calls) == 2:
            raise EntryGone("what the caches continue is gone")
        return commit(self, prepared)

    monkeypatch.setattr(Store, "commit", commit_later)
    with serving(tmp_path / "store") as server:
        answer = server.ask(ARGS, on_token=lambda count: server.checkpoints.flush(60))
    assert answer.tokens == expected.tokens
    assert len(calls) == 9
    assert server.checkpoints.stats.stored == 8
    assert server.checkpoints.stats.failures == 0


def test_the_longest_of_two_serves_and_both_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Answer
) -> None:
    """A kill between the newer one's commit and the older one's removal leaves both."""
    with monkeypatch.context() as patch:
        patch.setattr(Generation, "_remove", lambda self, entry_ids: None)
        for leave_after in (20, 40):
            with serving(tmp_path / "store") as server:
                server.ask(ARGS, leave_after=leave_after)
    held = checkpoints_in(tmp_path / "store")
    assert len(held) > 1
    with serving(tmp_path / "store") as server:
        assert server.ask(ARGS).tokens == expected.tokens
    assert server.checkpoints.stats.tokens_resumed == max(held) - len(PROMPT) + 1
    assert checkpoints_in(tmp_path / "store") == []


# ---- the hook


def test_generate_step_is_replaced_for_its_own_thread_and_time_alone(tmp_path: Path) -> None:
    original = generate_module.generate_step
    seen: list[Any] = []

    def look() -> None:
        seen.append((generate_module.generate_step, generate_module.generate_step(None, None, prompt_cache=[]).gi_code))

    def elsewhere(count: int) -> None:
        if count == 10:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()

    with serving(tmp_path / "store") as server:
        server.ask(ARGS, on_token=elsewhere)
    ((during, code),) = seen
    assert during is not original
    assert code is original.__code__
    assert generate_module.generate_step is original
