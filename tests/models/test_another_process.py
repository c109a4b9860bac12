"""Real mlx-lm models: what a second process restores goes on exactly as if the first had never stopped."""

import json
import traceback
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import pytest

from blockstore import Store
from models.conversation import ANSWER_TOKENS, FURTHER_TOKENS, Conversation, identity_of, questions, system_prompt
from models.families import FAMILIES, Family
from models.processes import run_module

pytestmark = pytest.mark.mlx_lm
MLX_LM = version("mlx-lm")


@dataclass
class Told:
    """What the first process saw of one family, in memory."""

    prompts: dict[str, list[int]]
    logits: dict[str, mx.array]
    classes: list[str]
    without_history: mx.array
    reusable_alone: int


@dataclass
class Exchange:
    told: dict[str, Told | str]
    report: dict[str, Any]
    logits: dict[str, mx.array]

    def first(self, name: str) -> Told:
        told = self.told[name]
        if isinstance(told, str):
            pytest.fail(told)
        return told

    def second(self, name: str, title: str) -> dict[str, Any]:
        self.first(name)
        found: dict[str, Any] = self.report[name]
        assert "error" not in found, found["error"]
        return found[title]


# ---- the first process


def converse(store: Store, name: str, family: Family) -> Told:
    model = family.build()
    system = [token for chunk in system_prompt(family) for token in chunk]
    first, second = questions(family)

    talk = Conversation(family, model, family.make_caches(model))
    talk.feed_system_prompt()
    if not family.shortens:
        # What cannot be cut serves a second question only if it was saved where the system prompt ended.
        store.save(talk.tokens, talk.caches, identity_of(name))
    talk.feed(first)
    talk.answer(ANSWER_TOKENS)
    store.save(talk.tokens, talk.caches, identity_of(name))
    store.save(talk.tokens, talk.caches, identity_of(name, ns="alone"))
    alone = store.find([*system, *second], identity_of(name, ns="alone"))

    saved_at, whole = len(talk.logits), [*talk.tokens, talk.next_token()]
    talk.answer(1 + FURTHER_TOKENS)
    other = Conversation(family, model, family.make_caches(model))
    other.feed_system_prompt()
    other.feed(second)
    other.answer(FURTHER_TOKENS)
    fresh = Conversation(family, model, family.make_caches(model))
    fresh.feed(whole[-1:])
    return Told(
        prompts={"whole": whole, "other": [*system, *second]},
        logits={
            "whole": talk.logits_since(saved_at),
            "other": other.logits_since(len(family.system_chunks)),
        },
        classes=[type(cache).__name__ for cache in talk.caches],
        without_history=fresh.logits_since(0),
        reusable_alone=alone.length if alone else 0,
    )


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    """Every family's conversation in this process, then one other process that takes all of them up."""
    folder = tmp_path_factory.mktemp("exchange")
    told: dict[str, Told | str] = {}
    with Store(folder / "store", durability="none") as store:
        for name, family in FAMILIES.items():
            if why_not(family):
                continue
            try:
                told[name] = converse(store, name, family)
            except Exception:  # one family's failure is that family's: its tests raise it
                told[name] = traceback.format_exc()
    jobs = {name: item.prompts for name, item in told.items() if isinstance(item, Told)}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_module("models.other_process", folder, timeout_s=240)
    logits = mx.load(str(folder / "logits.safetensors"))
    assert isinstance(logits, dict)
    return Exchange(told, json.loads((folder / "report.json").read_text()), logits)


# ---- what is compared


def why_not(family: Family) -> str:
    """Why the installed mlx-lm cannot run a family; empty if it can."""
    if not family.is_known:
        return f"mlx-lm {MLX_LM} has no {family.module}"
    if tuple(map(int, MLX_LM.split(".")[:2])) < family.since:
        return f"mlx-lm {MLX_LM} fails there by itself: {family.why_since}"
    return ""


def known(names: list[str]) -> list[Any]:
    reasons = [(name, why_not(FAMILIES[name])) for name in names]
    return [pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why)) for name, why in reasons]


def same_bits(one: mx.array, other: mx.array) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return bool(mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)))


each_family = pytest.mark.parametrize("name", known(list(FAMILIES)))


@each_family
def test_a_conversation_goes_on(exchange: Exchange, name: str) -> None:
    told, found = exchange.first(name), exchange.second(name, "whole")
    assert found["tokens"] == told.prompts["whole"][:-1]
    assert same_bits(exchange.logits[f"{name}/whole"], told.logits["whole"])


@each_family
def test_another_question_behind_the_same_system_prompt(exchange: Exchange, name: str) -> None:
    told, found = exchange.first(name), exchange.second(name, "other")
    assert found["tokens"] == told.prompts["other"][: sum(FAMILIES[name].system_chunks)]
    assert same_bits(exchange.logits[f"{name}/other"], told.logits["other"])


@each_family
def test_the_caches_are_of_the_same_classes(exchange: Exchange, name: str) -> None:
    told, found = exchange.first(name), exchange.second(name, "whole")
    assert found["classes"] == told.classes
    assert set(told.classes) == set(FAMILIES[name].cache_classes)


@each_family
def test_a_whole_conversation_alone_serves_another_question_only_if_it_shortens(exchange: Exchange, name: str) -> None:
    family = FAMILIES[name]
    expected = sum(family.system_chunks) if family.shortens else 0
    assert exchange.first(name).reusable_alone == expected


@each_family
def test_the_comparison_could_fail(exchange: Exchange, name: str) -> None:
    """The logits are numbers, they vary from token to token, and they depend on what the caches hold."""
    told = exchange.first(name)
    whole = told.logits["whole"]
    assert bool(mx.all(mx.isfinite(whole)))
    assert not same_bits(whole[0], whole[1])
    assert not same_bits(whole[0], told.without_history[0])
