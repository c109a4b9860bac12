"""Text for a terminal: sizes, ages, aligned tables, and nothing that the terminal would obey."""

from collections.abc import Iterable, Sequence
from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES: Final = ((86_400 * 2, 86_400, "d"), (3_600 * 2, 3_600, "h"), (120, 60, "min"), (0, 1, "s"))
_GAP: Final = "  "


def printable(text: str) -> str:
    """`text` with everything that is not plainly visible written as an escape: it may come from a stranger's file."""
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def name(text: str | None) -> str:
    """A field of an identity: a dash where it is absent, quotes where it is empty."""
    return "-" if text is None else printable(text) or '""'


def size(count: int) -> str:
    """Bytes with three digits: "512 B", "1.50 MiB", "20.0 GiB"."""
    value, unit = float(count), 0
    # From 999.5 on three digits would round up to a thousand.
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{count} B"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def age(then_ms: int, now_ms: int) -> str:
    """The time since `then_ms` in its largest unit; what lies in the future is new."""
    seconds = max(now_ms - then_ms, 0) // 1000
    unit, short = next((unit, short) for least, unit, short in _AGES if seconds >= least)
    return f"{seconds // unit:,} {short}"


def count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> list[str]:
    """Lines of aligned columns under `head`; the columns named in `right` are aligned to the right."""
    lines = [list(head), *map(list, rows)]
    flush_right = [title in set(right) for title in head]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    return [
        _GAP.join(_pad(cell, width, at_right) for cell, width, at_right in zip(line, widths, flush_right, strict=True))
        .rstrip()
        for line in lines
    ]  # fmt: skip


def facts(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of a name and a value, the values aligned."""
    found = list(pairs)
    width = max((_width(label) for label, _ in found), default=0)
    return [f"{_pad(label, width, False)}{_GAP}{value}" for label, value in found]


def _pad(cell: str, width: int, at_right: bool) -> str:
    fill = " " * (width - _width(cell))
    return fill + cell if at_right else cell + fill


def _width(cell: str) -> int:
    """Columns that a terminal gives to `cell`."""
    if cell.isascii():
        return len(cell)
    import unicodedata  # a shared library that an English listing does without

    return sum(0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF") for char in cell)
