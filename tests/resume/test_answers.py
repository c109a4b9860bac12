"""A generation that was interrupted goes on to the very text that it would have had."""

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from blockstore import Store
from models.families import FAMILIES
from resume.kit import EVERY, NO_END, PROMPT, arguments, checkpoints_in, serving, tokens_of, uninterrupted

pytestmark = pytest.mark.mlx_lm
IS_OLD = tuple(map(int, mlx_lm.__version__.split(".")[:2])) < (0, 32)

SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "seed": None},
    "greedy with a seed": {"temperature": 0.0},
    "temperature": {},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 12},
    "min_p": {"min_p": 0.05},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    "all of them": {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "xtc_probability": 0.3, "xtc_threshold": 0.05},
    "logit bias": {"logit_bias": {5: 3.0, 40: -2.0}},
    "another seed": {"seed": 2**40 + 3},
}
MODELS = [
    "llama", "llama, some layers sliding", "gemma3_text, windows full", "qwen3_next", "deepseek_v32", "falcon_h1",
    "mamba2", "llama4, chunks dropped", "deepseek_v41",
]  # fmt: skip


def interrupted_and_resumed(root: Path, args: Any, name: str, leave_after: int, **settings: Any) -> None:
    """Ask, leave, ask again in another life: the same answer, and not all of it was computed again."""
    expected = uninterrupted(root / "none", args, name, **settings)
    with serving(root / "store", name, **settings) as server:
        part = server.ask(args, leave_after=leave_after)
    assert part.tokens == expected.tokens[:leave_after]
    assert server.checkpoints.stats.stored > 0
    (held,) = checkpoints_in(root / "store")
    with serving(root / "store", name, **settings) as server:
        answer = server.ask(args)
    assert (answer.tokens, answer.text) == (expected.tokens, expected.text)
    assert answer.finish_reason == expected.finish_reason
    stats = server.checkpoints.stats
    assert (stats.resumed, stats.tokens_resumed, stats.failures) == (1, held - len(PROMPT) + 1, 0)
    assert checkpoints_in(root / "store") == []


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_goes_on(tmp_path: Path, sampler: str) -> None:
    if IS_OLD and "xtc_probability" in SAMPLERS[sampler]:
        pytest.skip("its server cannot sample with xtc")
    args = arguments(**{"logit_bias": NO_END, **SAMPLERS[sampler]})
    interrupted_and_resumed(tmp_path, args, "llama", random.randint(2 * EVERY, 40))


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_cache_goes_on(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    if not family.is_known or (IS_OLD and family.since > (0, 31)):
        pytest.skip(f"this mlx-lm does not run {name}")
    interrupted_and_resumed(tmp_path, arguments(logit_bias=NO_END), name, random.randint(2 * EVERY, 40))


@pytest.mark.skipif(IS_OLD, reason="its server does not quantize caches")
@pytest.mark.parametrize("start", [0, len(PROMPT) + 8, len(PROMPT) + 30])
def test_caches_that_are_quantized_on_the_way_go_on(tmp_path: Path, start: int) -> None:
    args = arguments(logit_bias=NO_END)
    interrupted_and_resumed(tmp_path, args, "llama, quantized KV", 24, quantized_kv_start=start)


def test_text_is_whole_where_a_character_was_cut(tmp_path: Path) -> None:
    """Some bytes of a character were generated before, some after."""
    args = arguments(logit_bias={**NO_END, **dict.fromkeys(tokens_of("漢字かな語"), 6.0)}, max_tokens=40)
    expected = uninterrupted(tmp_path / "none", args)
    assert any(len(character.encode()) > 2 and character != "\ufffd" for character in expected.text)
    inside = [count for count, part in enumerate(expected.parts, 1) if part == "" and count > 2]
    assert len(inside) > 3
    for leave_after in random.sample(inside, 4):
        root = tmp_path / str(leave_after)
        with serving(root, every=1) as server:
            server.ask(args, leave_after=leave_after)
        with serving(root, every=1) as server:
            assert server.ask(args).parts == expected.parts
        assert server.checkpoints.stats.resumed == 1


def test_a_generation_is_interrupted_again_and_again(tmp_path: Path) -> None:
    args = arguments(logit_bias=NO_END, max_tokens=80)
    expected = uninterrupted(tmp_path / "none", args)
    begun = 0
    for leave_after in (20, 40, 41, 60):
        with serving(tmp_path / "store") as server:
            assert server.ask(args, leave_after=leave_after).tokens == expected.tokens[:leave_after]
        assert len(checkpoints_in(tmp_path / "store")) == 1
        begun += server.checkpoints.stats.resumed
    with serving(tmp_path / "store") as server:
        assert server.ask(args) == replace(expected, cached_tokens=len(PROMPT) - 1)
    assert begun == 3
    assert checkpoints_in(tmp_path / "store") == []


def test_who_leaves_while_tokens_are_replayed_leaves_no_caches(tmp_path: Path) -> None:
    """They would hold more than what was given out, and serve a later prompt with it."""
    args = arguments(logit_bias=NO_END)
    expected = uninterrupted(tmp_path / "none", args)
    with serving(tmp_path / "store") as server:
        server.ask(args, leave_after=30)
    with serving(tmp_path / "store") as server:
        assert server.ask(args, leave_after=4).tokens == expected.tokens[:4]
        assert len(server.prompt_cache) == 0
        assert server.ask(args).tokens == expected.tokens
    assert server.checkpoints.stats.resumed == 2
    assert len(server.prompt_cache) == 1


def test_the_prompt_cache_gets_what_the_answer_holds(tmp_path: Path) -> None:
    """The next turn goes on from the resumed answer as from one that was never interrupted."""
    words = dict.fromkeys(tokens_of("abcdefghijklmnopqrstuvwxyz"), 50.0)
    args, more = arguments(logit_bias=words, max_tokens=30), arguments(logit_bias=NO_END, seed=8)
    with serving(tmp_path / "none", every=None) as server:
        turn = f"{PROMPT}{server.ask(args).text}?"
        expected = server.ask(more, turn)
    with serving(tmp_path / "store") as server:
        server.ask(args, leave_after=22)
    with serving(tmp_path / "store") as server:
        server.ask(args)
        assert server.ask(more, turn) == expected
    assert expected.cached_tokens == len(PROMPT) + 30


def test_prompt_caches_and_checkpoints_share_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checkpoint wrote is taken over by the answer's entry before the checkpoint goes, though that is slow."""
    commit = Store.commit

    def commit_slowly(self: Store, prepared: Any) -> Any:
        if prepared.generation_checkpoint is None:
            time.sleep(0.3)
        return commit(self, prepared)

    monkeypatch.setattr(Store, "commit", commit_slowly)
    letters = dict.fromkeys(tokens_of("abcdefghijklmnopqrstuvwxyz"), 50.0)
    args, more = arguments(logit_bias=letters, max_tokens=150), arguments(logit_bias=NO_END, seed=8)
    with serving(tmp_path / "none", every=None) as server:
        expected = server.ask(args)
        turn = f"{PROMPT}{expected.text}?"
        later = server.ask(more, turn)
    with serving(tmp_path / "store", remembers=True) as server:
        server.ask(args, leave_after=22)
    with serving(tmp_path / "store", remembers=True) as server:
        assert server.ask(args).tokens == expected.tokens
    assert server.checkpoints.stats.resumed == 1
    assert (server.prompt_cache.stats.stored, server.prompt_cache.stats.failures) == (1, 0)
    assert checkpoints_in(tmp_path / "store") == []
    with serving(tmp_path / "store", remembers=True) as server:
        assert server.ask(more, turn) == later
    assert server.prompt_cache.stats.tokens_restored == len(PROMPT) + 150
