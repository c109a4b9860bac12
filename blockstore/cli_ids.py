"""Entry ids as people type them: the beginning is enough."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from .errors import BlockstoreError, EntryGone, InvalidInput
from .leases import ID_HEX_DIGITS
from .listing import Entry

# Shorter beginnings are more often a slip of the hand than a choice, and rm asks nobody.
LEAST_DIGITS: Final = 4
SHOWN_DIGITS: Final = 8
_HEX: Final = frozenset("0123456789abcdef")


def is_id_like(text: str) -> bool:
    """True for what can only be meant as an id; everything else is a path."""
    return bool(text) and set(text.lower()) <= _HEX


def resolve(entries: Sequence[Entry], text: str) -> Entry:
    """The one entry whose id begins with `text`. Raises EntryGone for none, InvalidInput for several or too few digits.

    A whole id is always unambiguous.
    """
    start = text.lower()
    if not is_id_like(start) or len(start) < LEAST_DIGITS:
        raise InvalidInput(f"an entry is named by its id, or by its first {LEAST_DIGITS} or more digits", found=text)
    found = [entry for entry in entries if entry.entry_id.startswith(start)]
    if not found:
        raise EntryGone("there is no such entry", entry_id=text, hint="`blockstore ls` lists what there is.")
    if len(found) > 1:
        ids = ", ".join(entry.entry_id for entry in found[:3])
        raise InvalidInput("several entries begin like that", entry_id=text, found=ids, hint="Give more digits.")
    return found[0]


def short_digits(ids: Iterable[str]) -> int:
    """How many digits tell all `ids` apart, at least SHOWN_DIGITS."""
    ordered = sorted(ids)
    shared = max((_common(one, after) for one, after in itertools.pairwise(ordered)), default=0)
    return min(max(shared + 1, SHOWN_DIGITS), ID_HEX_DIGITS)


def _common(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def choose(entries: Sequence[Entry], texts: Sequence[str]) -> tuple[dict[str, Entry], dict[str, BlockstoreError]]:
    """What `texts` name, each entry once, by id; and why some name nothing."""
    chosen: dict[str, Entry] = {}
    failed: dict[str, BlockstoreError] = {}
    for text in texts:
        try:
            entry = resolve(entries, text)
        except (EntryGone, InvalidInput) as error:
            failed[text] = error
        else:
            chosen[entry.entry_id] = entry
    return chosen, failed
