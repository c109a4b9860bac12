"""JSON as JavaScript's JSON.stringify prints it (FORMAT 2), so that a file read and written again keeps its bytes."""

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal

import msgspec

MAX_INTEGER = (1 << 53) - 1
MAX_DEPTH = 64


class _Unwritable(Exception):
    """Carries the path, innermost step first, out of the recursion."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.steps: list[str] = []


def encode(value: object) -> bytes:
    """The UTF-8 bytes of `value`: dict, list, tuple, str, int, float, bool or None. Keys keep their order.

    Raises ValueError, naming the path, for what JSON or JavaScript cannot hold: NaN, infinities, integers beyond
    2^53 - 1, lone surrogates, keys that are no strings, other types, and nesting deeper than MAX_DEPTH.
    """
    parts: list[str] = []
    try:
        _write(value, 0, parts)
    except _Unwritable as problem:
        path = "".join(reversed(problem.steps)).removeprefix(".") or "the value"
        raise ValueError(f"{path}: {problem}") from None
    return "".join(parts).encode()


def _write(value: object, depth: int, parts: list[str]) -> None:
    if isinstance(value, str):
        parts.append(_text(value))
    elif value is None or isinstance(value, bool):
        parts.append({None: "null", True: "true", False: "false"}[value])
    elif isinstance(value, int):
        parts.append(_integer(value))
    elif isinstance(value, float):
        parts.append(_number(value))
    elif isinstance(value, Mapping):
        _write_object(value, depth + 1, parts)
    elif isinstance(value, list | tuple):
        _write_array(value, depth + 1, parts)
    else:
        raise _Unwritable(f"{type(value).__name__} has no JSON form")


def _write_object(value: Mapping[object, object], depth: int, parts: list[str]) -> None:
    _check_depth(depth)
    separator = "{"
    for key, item in value.items():
        try:
            if not isinstance(key, str):
                raise _Unwritable("a key must be a string")
            parts += separator, _text(key), ":"
            _write(item, depth, parts)
        except _Unwritable as problem:
            problem.steps.append(f".{key!s}" if str(key).isidentifier() else f"[{key!r}]")
            raise
        separator = ","
    parts.append("}" if value else "{}")


def _write_array(value: Sequence[object], depth: int, parts: list[str]) -> None:
    _check_depth(depth)
    if _all_plain_integers(value):
        parts.append(msgspec.json.encode(value).decode("ascii"))
        return
    separator = "["
    for index, item in enumerate(value):
        parts.append(separator)
        try:
            _write(item, depth, parts)
        except _Unwritable as problem:
            problem.steps.append(f"[{index}]")
            raise
        separator = ","
    parts.append("]" if value else "[]")


def _all_plain_integers(value: Sequence[object]) -> bool:
    """True for lists of integers in range, which a compiled encoder prints the same way (100,000 tokens in 4 ms)."""
    if set(map(type, value)) != {int}:
        return False
    least, most = min(value), max(value)  # type: ignore[type-var]  # every element was just found to be an int
    return bool(least >= -MAX_INTEGER and most <= MAX_INTEGER)  # type: ignore[operator]  # for the same reason


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _Unwritable(f"nested deeper than {MAX_DEPTH}")


def _text(value: str) -> str:
    # The standard library escapes exactly what JavaScript escapes: quote, backslash and the controls below space.
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Unwritable("a lone surrogate has no UTF-8 form") from None
    return json.dumps(value, ensure_ascii=False)


def _integer(value: int) -> str:
    if not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise _Unwritable(f"integer of {value.bit_length()} bits; JavaScript keeps 53")
    return str(int(value))


def _number(value: float) -> str:
    """ECMAScript's Number::toString: the shortest digits, a plain decimal from 1e-6 up to 1e21, else an exponent."""
    if not math.isfinite(value):
        raise _Unwritable(f"{value} has no JSON form")
    if value == 0:
        return "0"
    sign = "-" if value < 0 else ""
    _, figures, exponent = Decimal(repr(abs(value))).normalize().as_tuple()
    assert isinstance(exponent, int), "finite decimals have an integer exponent"
    digits = "".join(map(str, figures))
    return sign + _place_point(digits, len(digits) + exponent)


def _place_point(digits: str, point: int) -> str:
    """Print 0.`digits` times 10 to the power of `point`."""
    if len(digits) <= point <= 21:
        return digits.ljust(point, "0")
    if 0 < point <= 21:
        return f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{digits[0]}{fraction}e{point - 1:+d}"
