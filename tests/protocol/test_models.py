"""The protocol as designed never fails in its models, and each of its rules is needed: without it they fail."""

from collections.abc import Callable
from dataclasses import fields
from itertools import islice
from typing import Any

import pytest

from protocol import model_interleavings, model_power_cut

# Seeds that are tried; a broken rule shows within the first thousand or two.
DESIGNED, BROKEN, SOAK = 3_000, 10_000, 300_000
MODELS = [model_interleavings, model_power_cut]


def names_of(rules: type[Any]) -> list[str]:
    return [field.name for field in fields(rules)]


def faults(run: Callable[[int], str | None], seeds: range) -> list[tuple[int, str]]:
    """The first few seeds that fail, and how."""
    found = ((seed, fault) for seed in seeds if (fault := run(seed)) is not None)
    return list(islice(found, 3))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__.rpartition(".")[2])
def test_the_protocol_as_designed_never_fails(model: Any) -> None:
    assert faults(lambda seed: model.run(seed, model.Rules()), range(DESIGNED)) == []


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__.rpartition(".")[2])
def test_the_protocol_as_designed_never_fails_in_many_more_runs(model: Any) -> None:
    assert faults(lambda seed: model.run(seed, model.Rules()), range(DESIGNED, SOAK)) == []


@pytest.mark.parametrize("name", names_of(model_interleavings.Rules))
def test_each_rule_of_the_interleavings_is_needed(name: str) -> None:
    assert is_caught(model_interleavings, name)


@pytest.mark.parametrize("name", names_of(model_power_cut.Rules))
def test_each_rule_of_the_order_of_syncs_is_needed(name: str) -> None:
    assert is_caught(model_power_cut, name)


def is_caught(model: Any, name: str) -> bool:
    broken = model.Rules().without(name)
    return any(model.run(seed, broken) is not None for seed in range(BROKEN))
