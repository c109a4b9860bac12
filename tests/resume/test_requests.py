"""Which requests have checkpoints, which one a checkpoint serves, and how long it stays."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from blockstore import Identity, InvalidInput, Store
from blockstore.checkpoints import Checkpoints, Request, random_key, set_random_key
from blockstore.resume import is_resumable, request_key
from resume.kit import NO_END, PROMPT, Server, arguments, checkpoints_in, identity_of, serving, tokens_of, uninterrupted

pytestmark = pytest.mark.mlx_lm
ARGS: dict[str, Any] = {"logit_bias": NO_END}

# ---- which requests have any


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": None},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logprobs": True},
        {"top_logprobs": 2},
        {"seed": 2**53},
    ],
    ids=str,
)
def test_what_cannot_be_resumed_has_no_checkpoint(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert is_resumable(arguments(**ARGS))
    args = arguments(**{**ARGS, **changed})
    assert not is_resumable(args)
    with serving(tmp_path / "store") as server:
        server.ask(args, leave_after=30)
    assert checkpoints_in(tmp_path / "store") == []
    assert server.checkpoints.stats.failures == 0


def test_with_a_draft_model_there_is_no_checkpoint(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as server:
        server.ask(arguments(max_tokens=2), "x")  # then the model is there
        server.generator.model_provider.draft_model = server.generator.model_provider.model
        server.ask(arguments(**ARGS, temperature=0.0), leave_after=30)
    assert checkpoints_in(tmp_path / "store") == []


def test_what_is_served_in_a_batch_has_no_checkpoint(tmp_path: Path) -> None:
    """Greedy, and without a seed: mlx-lm batches it where the model can be batched."""
    with serving(tmp_path / "store", is_batchable=True) as server:
        assert len(server.ask(arguments(**ARGS, temperature=0.0, seed=None)).tokens) == 48
    assert server.checkpoints.stats.stored == 0


# ---- which request one is good for

CHANGES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 8},
    "no seed": {"seed": None, "temperature": 0.0},
    "temperature": {"temperature": 1.4},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.1},
    "xtc": {"xtc_probability": 0.1},
    "xtc_threshold": {"xtc_threshold": 0.2},
    "logit_bias": {"logit_bias": {**NO_END, 3: 0.1}},
    "max_tokens": {"max_tokens": 49},
    "stop words": {"stop_words": ["zz"]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_request_has_another_key(change: str) -> None:
    settings, eos, prompt = Namespace(kv_bits=None), [95], [1, 2, 3]
    key = request_key(arguments(**ARGS), settings, eos, prompt)
    assert key == request_key(arguments(**ARGS), settings, eos, prompt)
    assert key != request_key(arguments(**{**ARGS, **CHANGES[change]}), settings, eos, prompt)


def test_settings_and_prompt_are_in_the_key_and_what_decides_no_token_is_not() -> None:
    args, settings = arguments(**ARGS), Namespace(kv_bits=None, host="here")
    key = request_key(args, settings, [95, 3], (1, 2, 3))
    assert key == request_key(args, Namespace(kv_bits=None, host="there"), [3, 95], [1, 2, 3])
    assert key == request_key(arguments(**ARGS, num_draft_tokens=9, top_logprobs=0), settings, [95, 3], [1, 2, 3])
    others = [
        request_key(args, Namespace(kv_bits=8), [95, 3], [1, 2, 3]),
        request_key(args, settings, [95], [1, 2, 3]),
        request_key(args, settings, [95, 3], [1, 2, 3, 4]),
    ]
    assert key not in others


def test_a_changed_request_begins_at_its_prompt(tmp_path: Path) -> None:
    other = arguments(**ARGS, top_k=20)
    expected = uninterrupted(tmp_path / "none", other)
    with serving(tmp_path / "store") as server:
        server.ask(arguments(**ARGS), leave_after=30)
    with serving(tmp_path / "store") as server:
        assert server.ask(other) == expected
        assert server.ask(arguments(**ARGS), PROMPT + "?").tokens != []
    assert server.checkpoints.stats.resumed == 0
    assert len(checkpoints_in(tmp_path / "store")) == 1


def test_namespaces_keep_their_checkpoints_apart() -> None:
    plain, spaced = (Request(Identity("m", "c", "t", ns), "k", (1,), 7, None).own_identity for ns in ("", "tenant"))
    assert (plain.ns, spaced.ns) == ("checkpoint/k", "tenant/checkpoint/k")
    assert plain.model_id == "m"


def test_no_prompt_is_served_from_a_checkpoint(tmp_path: Path) -> None:
    with serving(tmp_path / "store") as server:
        given = server.ask(arguments(**ARGS), leave_after=30).tokens
    with Store(tmp_path / "store") as store:
        (entry,) = store.entries()
        prompt = [*tokens_of(PROMPT), *given]
        assert entry.token_count < len(prompt)
        assert store.find(prompt, identity_of(("llama", None, None))) is None
        assert not entry.shortens


# ---- how long it stays


def finished(server: Server, args: Any) -> None:
    server.ask(args)


def failed(server: Server, args: Any) -> None:
    """The model breaks in the middle."""
    model, calls = server.generator.model_provider.model, []

    class Breaking:
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            calls.append(1)
            if len(calls) > 25:
                raise RuntimeError("out of memory")
            return model(*inputs, **named)

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    server.generator.model_provider.model = Breaking()
    with pytest.raises(RuntimeError, match="out of memory"):
        server.ask(args)
    server.generator.model_provider.model = model


ENDS: dict[str, tuple[Callable[[Server, Any], None], dict[str, Any]]] = {
    "length": (finished, {}),
    "length, right behind a checkpoint": (finished, {"max_tokens": 21}),
    "length, at a checkpoint": (finished, {"max_tokens": 20}),
    "end of the text": (finished, {"logit_bias": None}),
    "error": (failed, {}),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_done_leaves_no_checkpoint(tmp_path: Path, end: str) -> None:
    ending, changed = ENDS[end]
    with serving(tmp_path / "store") as server:
        server.ask(arguments(max_tokens=1))
        ending(server, arguments(**{**ARGS, **changed}))
    assert server.checkpoints.stats.stored > 0
    assert checkpoints_in(tmp_path / "store") == []
    assert server.checkpoints.stats.failures == 0
    with Store(tmp_path / "store") as store:
        store.gc()
        assert store.stats().blocks == 0


def test_what_ends_at_a_stop_word_leaves_no_checkpoint(tmp_path: Path) -> None:
    letters = dict.fromkeys(tokens_of("abcdefghijklmnopqrstuvwxyz"), 50.0)
    word = uninterrupted(tmp_path / "none", arguments(logit_bias=letters)).text[20:24]
    with serving(tmp_path / "store") as server:
        answer = server.ask(arguments(logit_bias=letters, stop_words=[word]))
    assert (answer.finish_reason, len(answer.tokens)) == ("stop", 24)
    assert server.checkpoints.stats.stored > 0
    assert checkpoints_in(tmp_path / "store") == []


def test_a_removal_waits_for_what_shares_the_blocks(tmp_path: Path) -> None:
    """What the prompt cache writes behind may take a checkpoint's blocks over, if they are still there."""
    held: list[int] = []

    def settle() -> None:
        held.append(len(checkpoints_in(tmp_path / "store")))
        raise OSError("the disk is slow")

    with serving(tmp_path / "store", settle=settle) as server:
        server.ask(arguments(**ARGS))
    assert held == [1]
    assert checkpoints_in(tmp_path / "store") == []
    assert server.checkpoints.stats.failures == 1


def test_every_is_a_number_of_tokens(tmp_path: Path) -> None:
    with Store(tmp_path) as store, pytest.raises(InvalidInput):
        Checkpoints(store, every=0)


# ---- the random stream


def test_the_random_stream_is_read_and_set() -> None:
    mx.random.seed(12345)
    mx.eval(mx.random.normal((3,)))
    key = random_key()
    following = mx.random.uniform(shape=(8,)).tolist()
    assert random_key() != key
    set_random_key(key)
    assert mx.random.uniform(shape=(8,)).tolist() == following
