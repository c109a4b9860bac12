"""Every case that this project promises has a test whose name says its number."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

# Concurrency, crashes, damage; quota and growth; write volume and memory; security and identity. Those between are
# about single kinds of caches, whose tests stand with the codecs and the models.
CASES = [*range(1, 31), *range(40, 44)]
NAME = re.compile(r"test_case_(\d\d)_(\w+)")


def promises_by_case() -> dict[int, list[str]]:
    found = defaultdict(list)
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            named = NAME.fullmatch(node.name) if isinstance(node, ast.FunctionDef) else None
            if named is not None:
                found[int(named[1])].append(named[2])
    return found


PROMISES = promises_by_case()


@pytest.mark.parametrize("number", CASES)
def test_the_case_has_a_test_that_says_what_is_promised(number: int) -> None:
    promises = PROMISES[number]
    assert promises
    assert [promise for promise in promises if promise.count("_") < 4] == [], "a promise is a sentence"


def test_no_test_names_a_case_that_there_is_not() -> None:
    assert set(PROMISES) <= set(range(1, 44))
