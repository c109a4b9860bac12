"""The commands that say what a store may take, and what stays."""

import math
import re
from fractions import Fraction
from typing import Annotated, Any, Final

import typer

from . import cli_views as views
from .cli_app import Json, Root
from .cli_exit import end_with, failure
from .cli_ids import choose
from .cli_run import running
from .errors import InvalidInput

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_DAY_S: Final = 86_400
_SIZE_HELP: Final = "as 200G, 512MiB or a number of bytes; 0 for none."


def limits(
    context: typer.Context,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="SIZE", help=f"Cap over the whole directory, {_SIZE_HELP}")
    ] = None,
    min_free: Annotated[
        str | None, typer.Option("--min-free", metavar="SIZE", help=f"What saves leave free on the disk, {_SIZE_HELP}")
    ] = None,
    max_age: Annotated[
        float | None,
        typer.Option("--max-age", metavar="DAYS", min=0, help="gc removes what nobody used for so long; 0 for none."),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option("--quota", metavar="MODEL=SIZE", help="The most that one model's entries may take; repeatable."),
    ] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Print the store's limits, changed by what is given.

    They are kept in the store, for all its users. Nothing goes at once: saves and gc keep to them.
    """
    with running(context, root, as_json) as run, run.open() as store:
        changes: dict[str, Any] = {
            "max_bytes": size_of(max_bytes, "--max-bytes"),
            "min_free_bytes": size_of(min_free, "--min-free"),
            "max_age_s": _seconds(max_age, "--max-age"),
            "quotas": dict(map(_quota, quota)) if quota else None,
        }
        changed = any(value is not None for value in changes.values())
        found = store.set_limits(**changes) if changed else store.limits
        run.show(lambda: views.limits_json(found), lambda: views.limits_lines(found))


def pin(
    context: typer.Context,
    entries: Annotated[list[str], typer.Argument(metavar="ENTRY...", help="Ids, or the first digits of them.")],
    off: Annotated[bool, typer.Option("--off", help="Let them be evicted again.")] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Keep entries from eviction and from the age limit."""
    with running(context, root, as_json) as run, run.open() as store:
        chosen, failed = choose(store.entries(), entries)
        for entry_id in chosen:
            store.pin(entry_id, pinned=not off)
        run.show(
            lambda: {
                "pinned": not off,
                "entries": list(chosen),
                "failed": [failure("entry", *item) for item in failed.items()],
            },
            lambda: [f"{'unpinned' if off else 'pinned'} {entry_id}" for entry_id in chosen] or ["nothing was changed"],
        )
        end_with(failed, as_json=run.as_json)


def size_of(text: str | None, option: str) -> int | None:
    """A size as people write it, in bytes; None where there is none. Raises InvalidInput."""
    if text is None:
        return None
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidInput("not a size", field=option, found=text, hint="Write 200G, 512MiB or a number of bytes.")
    return math.ceil(Fraction(found[1]) * _UNITS[found[2].upper()])  # up: what is little must not lift the limit


def _seconds(days: float | None, option: str) -> int | None:
    if days is None:
        return None
    seconds = days * _DAY_S
    if not math.isfinite(seconds):
        raise InvalidInput("not a number of days", field=option, found=str(days), hint="Write a number; 0 for none.")
    return max(round(seconds), 1) if seconds else 0  # as above


def _quota(text: str) -> tuple[str, int]:
    model_id, separator, size = text.rpartition("=")
    if not separator:
        raise InvalidInput("a quota names a model and a size", field="--quota", found=text, hint="Write MODEL=50G.")
    return model_id, size_of(size, "--quota") or 0
