"""Our JSON against JavaScript's own."""

import json
import math
import re
import shutil
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore.jsontext import MAX_DEPTH, MAX_INTEGER, encode

NODE = shutil.which("node")
PRINT_EACH_LINE = """
const lines = require("fs").readFileSync(0, "utf8").split("\\n");
for (const line of lines) if (line) console.log(JSON.stringify(JSON.parse(line)));
"""
# JavaScript moves keys that look like array indexes to the front; no key of the format does.
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda key: not re.fullmatch("[0-9]+", key))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = (
    st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.builds(lambda digits, power: float(f"{digits}e{power}"), st.integers(1, 10**17), st.integers(-40, 10))
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (-0.0, "0"), (1.0, "1"), (-1.5, "-1.5"), (0.1, "0.1"), (100.0, "100"), (1e20, "1" + "0" * 20),
        (1e21, "1e+21"), (1.5e21, "1.5e+21"), (123456789012345680000.0, "123456789012345680000"), (1e-6, "0.000001"),
        (1e-7, "1e-7"), (1.25e-7, "1.25e-7"), (5e-324, "5e-324"), (1.7976931348623157e308, "1.7976931348623157e+308"),
        (MAX_INTEGER, "9007199254740991"), (-MAX_INTEGER, "-9007199254740991"), (2.0**53, "9007199254740992"),
        (True, "true"), (False, "false"), (None, "null"), ([], "[]"), ((), "[]"), ({}, "{}"),
        ([1, 2, 3], "[1,2,3]"), ((1, True, 2.5), "[1,true,2.5]"), ([[], [1], {}], "[[],[1],{}]"),
        ({"a": 1, "b": [None]}, '{"a":1,"b":[null]}'), ("é✓😀\u2028\x7f", '"é✓😀\u2028\x7f"'),
        ('"\\/\b\f\n\r\t\x00\x1f', '"\\"\\\\/\\b\\f\\n\\r\\t\\u0000\\u001f"'),
    ],
)  # fmt: skip
def test_known_forms(value: object, text: str) -> None:
    assert encode(value).decode() == text


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (math.nan, "the value"), ({"a": [1, math.inf]}, "a[1]"), ({"a": {"b c": -math.inf}}, "a['b c']"),
        ([0, 2**53], "[1]"), ([-(2**53)], "[0]"), ({"a": [{"b": "\ud800"}]}, "a[0].b"), ({"\udfff": 1}, "['\\udfff']"),
        ({"a": {1: 2}}, "a[1]"), ({"x": b"bytes"}, "x"), ([1, {2}], "[1]"),
    ],
)  # fmt: skip
def test_what_has_no_form_is_refused_by_path(value: object, path: str) -> None:
    with pytest.raises(ValueError, match=re.escape(path) + ": "):
        encode(value)


def test_depth_is_limited() -> None:
    def nest(depth: int) -> object:
        return [nest(depth - 1)] if depth else 1

    assert encode(nest(MAX_DEPTH)) == b"[" * MAX_DEPTH + b"1" + b"]" * MAX_DEPTH
    with pytest.raises(ValueError, match="deeper"):
        encode(nest(MAX_DEPTH + 1))
    itself: list[object] = []
    itself.append(itself)
    with pytest.raises(ValueError, match="deeper"):
        encode(itself)


@given(st.lists(st.integers(-MAX_INTEGER, MAX_INTEGER)))
def test_the_fast_path_for_integers_equals_the_slow_one(values: list[int]) -> None:
    assert encode(values) == b"[" + b",".join(encode(value) for value in values) + b"]"


@given(VALUES)
def test_what_is_written_reads_back(value: Any) -> None:
    assert json.loads(encode(value), parse_int=number) == value


def number(text: str) -> int | float:
    """As JavaScript reads it: beyond 53 bits every number is a double."""
    return int(text) if abs(int(text)) <= MAX_INTEGER else float(text)


def collect_values(count: int) -> list[Any]:
    """Many values from the strategy, for one start of node."""
    values: list[Any] = []

    @given(st.lists(VALUES, min_size=10, max_size=20))
    def collect(found: list[Any]) -> None:
        values.extend(found)

    collect()
    assert len(values) >= count
    return values


@pytest.mark.skipif(NODE is None, reason="node is not installed: there is no JSON.stringify to compare with")
def test_equals_json_stringify() -> None:
    values = collect_values(400)
    assert NODE is not None
    lines = "\n".join(json.dumps(value) for value in values)
    done = subprocess.run([NODE, "-e", PRINT_EACH_LINE], input=lines, capture_output=True, text=True, check=True)
    expected = done.stdout.split("\n")[:-1]
    assert [encode(value).decode() for value in values] == expected
