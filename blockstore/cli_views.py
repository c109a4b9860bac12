"""What each command prints: for people as lines, for programs as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from .cli_ids import short_digits
from .cli_text import age, count, facts, name, printable, size, table

if TYPE_CHECKING:
    from . import report
    from .check import Report
    from .collect import Plan
    from .limits import Limits
    from .listing import Entry, ModelStats, Stats
    from .moving import Imported
    from .space import Space

# A table of blocks can be long; --json has all of it.
_FIELD_LETTERS: Final = 60

# ---- stats


def deduplication_ratio(stats: Stats) -> float | None:
    """Logical bytes for each byte that blocks and headers take on the disk; None in an empty store."""
    return stats.logical_bytes / stats.block_bytes if stats.block_bytes and stats.logical_bytes else None


def stats_json(stats: Stats) -> Any:
    return {**msgspec.to_builtins(stats), "deduplication_ratio": deduplication_ratio(stats)}


def stats_lines(stats: Stats) -> list[str]:
    ratio = deduplication_ratio(stats)
    cap = f"{size(stats.max_bytes)}, {stats.physical_bytes / stats.max_bytes:.1%} used" if stats.max_bytes else "none"
    free = f", at least {size(stats.min_free_bytes)} stay free" if stats.min_free_bytes else ""
    unfinished = [(stats.unfinished_saves, "save"), (stats.unfinished_removals, "removal")]
    return facts(
        [
            ("store", printable(stats.root)),
            ("entries", f"{stats.entries:,}"),
            ("tokens", f"{stats.tokens:,}"),
            ("blocks", f"{stats.blocks:,} ({stats.dead_blocks:,} dead)"),
            ("logical size", f"{size(stats.logical_bytes)} (all tensors of all entries)"),
            ("physical size", f"{size(stats.physical_bytes)} (the directory on the disk)"),
            ("deduplication", f"{ratio:.2f} logical bytes for each stored one" if ratio is not None else "-"),
            ("cap", cap),
            ("free on disk", size(stats.free_bytes) + free),
            *([("age limit", _days(stats.max_age_s))] if stats.max_age_s else []),
            ("block hash", printable(stats.block_hash)),
            ("span", count(stats.span, "token")),
            ("durability", printable(stats.durability)),
            *[("unfinished", count(number, what)) for number, what in unfinished if number],
            *([("use", "for reading only")] if stats.read_only else []),
            *[("model", _model_line(model)) for model in stats.models],
        ]
    )


def _model_line(model: ModelStats) -> str:
    quota = f", {size(model.held_bytes or 0)} of a quota of {size(model.quota_bytes)}" if model.quota_bytes else ""
    return f"{name(model.model_id)}: {count(model.entries, 'entry', 'entries')}, {size(model.logical_bytes)}{quota}"


def _days(seconds: int) -> str:
    return f"{seconds / 86_400:g} days unused"


# ---- limits


def limits_json(limits: Limits) -> Any:
    return msgspec.structs.asdict(limits)


def limits_lines(limits: Limits) -> list[str]:
    def bytes_or_none(value: int) -> str:
        return size(value) if value else "none"

    return facts(
        [
            ("cap", bytes_or_none(limits.max_bytes)),
            ("left free on disk", bytes_or_none(limits.min_free_bytes)),
            ("age limit", _days(limits.max_age_s) if limits.max_age_s else "none"),
            *[(f"quota of {printable(model_id)}", size(quota)) for model_id, quota in sorted(limits.quotas.items())],
        ]
    )


# ---- ls


def entries_json(entries: Sequence[Entry], total: int) -> Any:
    return {"total": total, "entries": msgspec.to_builtins(entries)}


def entries_lines(entries: Sequence[Entry], every_id: Iterable[str], now_ms: int) -> list[str]:
    """A table of `entries`; ids are cut to what tells them apart among `every_id`."""
    ids = list(every_id)
    if not ids:
        return ["no entries"]
    digits = short_digits(ids)
    rows = [
        (
            entry.entry_id[:digits],
            name(entry.model_id),
            name(entry.ns),
            f"{entry.token_count:,}",
            size(entry.logical_bytes),
            age(entry.created_at_ms, now_ms),
            "yes" if entry.pinned else "-",
            printable(entry.kinds) or "-",
        )
        for entry in entries
    ]
    lines = table(
        ["ID", "MODEL", "NS", "TOKENS", "SIZE", "AGE", "PINNED", "KINDS"], rows, right=["TOKENS", "SIZE", "AGE"]
    )
    left_out = len(ids) - len(entries)
    return [*lines, f"and {count(left_out, 'more entry', 'more entries')}"] if left_out else lines


# ---- show


def description_json(found: report.Description, entry: Entry | None, space: Space | None) -> Any:
    own = {
        "entry_id": entry.entry_id if entry else None,
        "pinned": entry.pinned if entry else None,
        "space": {**msgspec.to_builtins(space), "removal_bytes": space.removal_bytes} if space else None,
    }
    return {**own, **msgspec.to_builtins(found)}


def description_lines(found: report.Description, entry: Entry | None, space: Space | None, now_ms: int) -> list[str]:
    lines = facts([*_entry_facts(entry), *_header_facts(found, now_ms), *_space_facts(space)])
    if found.caches:
        lines += ["", *table(["LAYERS", "KIND", "OFFSET", "FIELDS", "TENSORS"], _cache_rows(found), right=["OFFSET"])]
    for companion in found.attachments:
        lines += ["", f"attachment {printable(companion.schema)}: {_tensors(companion.tensors)}"]
    if found.groups:
        rows = [(f"{g.span:,}", f"{g.tensors:,}", f"{g.blocks:,}") for g in found.groups]
        titles = ["SPAN", "TENSORS", "BLOCKS"]
        lines += ["", *table(titles, rows, right=titles)]
    return lines


def _entry_facts(entry: Entry | None) -> list[tuple[str, str]]:
    return [("entry", entry.entry_id), ("pinned", "yes" if entry.pinned else "no")] if entry else []


def _header_facts(found: report.Description, now_ms: int) -> list[tuple[str, str]]:
    cut = f"{printable(found.block_hash)} blocks" if found.block_hash else "tensors in the file itself"
    blocks = f"{found.blocks:,} ({size(found.block_bytes)})" if found.block_hash else "-"
    return [
        ("file", printable(found.path)),
        ("format", f"version {found.format_version}, {cut}"),
        ("model", name(found.model_id)),
        ("configuration", name(found.config_fingerprint)),
        ("tokenizer", name(found.tokenizer_hash)),
        ("namespace", name(found.ns)),
        ("codec provider", name(found.codec_provider)),
        ("made with", name(_versions(found.made_with))),
        ("saved", _moment(found.created_at_ms, now_ms)),
        ("tokens", f"{found.token_count:,}"),
        ("shortens", _shortening(found)),
        ("caches", printable(found.kinds) or "-"),
        ("logical size", size(found.logical_bytes)),
        ("blocks", blocks),
        *([("checkpoint", "of a generation")] if found.has_generation_checkpoint else []),
    ]


def _versions(made_with: dict[str, str] | None) -> str | None:
    return None if made_with is None else ", ".join(f"{key} {value}" for key, value in made_with.items())


def _moment(then_ms: int, now_ms: int) -> str:
    try:
        text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(then_ms / 1000))
    except (OverflowError, ValueError, OSError):  # a year that no calendar has
        return f"{then_ms} ms after 1970"
    return f"{text} ({age(then_ms, now_ms)} ago)"


def _shortening(found: report.Description) -> str:
    if not found.shortens:
        return "no"
    return f"to {found.minimum_reusable:,} tokens or more" if found.minimum_reusable else "to any length"


def _space_facts(space: Space | None) -> list[tuple[str, str]]:
    if space is None:
        return []
    return [
        ("its own", f"{size(space.unique_bytes)} in {count(space.unique_blocks, 'block')}"),
        ("shared", f"{size(space.shared_bytes)} in {count(space.shared_blocks, 'block')}"),
        ("removing frees", f"{size(space.removal_bytes)} ({space.removal_bytes:,} bytes, the header included)"),
    ]


def _cache_rows(found: report.Description) -> Iterator[tuple[str, str, str, str, str]]:
    """One row for all layers that look alike, where the first of them stands."""
    places: dict[tuple[str, str, str, str], list[str]] = {}
    for place, cache in _leaves(found.caches):
        looks = (printable(cache.kind), f"{cache.offset:,}", _fields(cache), _tensors(cache.tensors))
        places.setdefault(looks, []).append(place)
    for looks, found_at in places.items():
        yield (_ranges(found_at), *looks)


def _leaves(caches: Sequence[report.Cache], before: str = "") -> list[tuple[str, report.Cache]]:
    """Every cache that holds tensors itself, with its place in the list: "3", or "3.1" inside a list."""
    found: list[tuple[str, report.Cache]] = []
    for number, cache in enumerate(caches):
        place = f"{before}{number}"
        found += _leaves(cache.children, f"{place}.") if cache.children else [(place, cache)]
    return found


def _fields(cache: report.Cache) -> str:
    shown = dict(cache.fields)
    if cache.minimum_reusable_offset is not None:
        shown["minimumReusableOffset"] = cache.minimum_reusable_offset
    return printable(" ".join(f"{key}={_value(value)}" for key, value in shown.items())) or "-"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _FIELD_LETTERS else text[:_FIELD_LETTERS] + "…"


def _tensors(tensors: Sequence[report.Tensor]) -> str:
    """Each tensor with its shape, the names of equal neighbours joined: "keys, values bfloat16 1×8×64×128"."""
    looks: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for tensor in tensors:
        looks.setdefault((tensor.dtype, tensor.shape), []).append(tensor.name)
    return "; ".join(
        f"{', '.join(names)} {dtype} {'×'.join(map(str, shape)) or 'scalar'}" for (dtype, shape), names in looks.items()
    ) or "-"  # fmt: skip


def _ranges(places: Sequence[str]) -> str:
    """The places 0, 1, 2, 3, 5 as "0-3, 5"; places inside lists stand for themselves."""
    runs: list[list[str]] = []
    for place in places:
        last = runs[-1][-1] if runs else ""
        if last.isdigit() and place.isdigit() and int(place) == int(last) + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# ---- gc


def plan_json(plan: Plan, *, dry_run: bool, full: bool) -> Any:
    summary = [
        {"what": what, "why": why, "count": number, "bytes": total} for (what, why), (number, total) in _by_kind(plan)
    ]
    return {
        "dry_run": dry_run,
        "full": full,
        "bytes": plan.bytes,
        "summary": summary,
        "items": msgspec.to_builtins(plan.items),
    }


def plan_lines(plan: Plan, *, dry_run: bool) -> list[str]:
    if not plan.items:
        return ["nothing to collect"]
    rows = [
        (printable(what), printable(why), f"{number:,}", size(total)) for (what, why), (number, total) in _by_kind(plan)
    ]
    verb = "would give back" if dry_run else "gave back"
    return [*table(["WHAT", "WHY", "COUNT", "SIZE"], rows, right=["COUNT", "SIZE"]), f"{verb} {size(plan.bytes)}"]


def _by_kind(plan: Plan) -> Iterable[tuple[tuple[str, str], tuple[int, int]]]:
    """(what, why) with how many there are and their bytes, in the order in which they were met."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for item in plan.items:
        number, total = totals.get((item.what, item.why), (0, 0))
        totals[item.what, item.why] = (number + 1, total + item.bytes)
    return totals.items()


# ---- check


def report_json(found: Report, *, repaired: bool) -> Any:
    return {"clean": found.is_clean, "repaired": repaired, **msgspec.to_builtins(found)}


def report_lines(found: Report, *, repaired: bool) -> list[str]:
    lines = [f"looked at {count(found.headers, 'header')} and {count(found.blocks, 'block')}"]
    if found.problems:
        rows = [tuple(map(printable, (p.severity, p.what, p.name, p.why))) for p in found.problems]
        lines += table(["SEVERITY", "WHAT", "NAME", "WHY"], rows)
    lines += [f"repaired: {printable(text)}" for text in found.repairs]
    return [*lines, _verdict(found, repaired)]


def _verdict(found: Report, repaired: bool) -> str:
    if repaired:
        return "the store is whole" if found.is_clean else "the store is whole again, without what was damaged"
    if found.is_clean:
        return "the store is whole" + ("; `blockstore gc --full` takes the leftovers" if found.problems else "")
    return "the store has problems: stop the programs that use it and run `blockstore check --repair`"


# ---- rm


def removal_lines(removed: Sequence[Entry], space: Space, *, dry_run: bool) -> list[str]:
    did = "would remove" if dry_run else "removed"
    lines = [
        f"{did} {entry.entry_id}  {name(entry.model_id)}, {count(entry.token_count, 'token')}" for entry in removed
    ]
    if not removed:
        return ["nothing to remove"] if dry_run else ["nothing was removed"]
    verb = "would become" if dry_run else "became"
    hint = "" if dry_run else ": run `blockstore gc` to give them back"
    return [*lines, f"{count(len(removed), 'entry', 'entries')}; {size(space.unique_bytes)} {verb} collectable{hint}"]


# ---- import


def import_json(done: Sequence[Imported]) -> dict[str, Any]:
    return {"files": [msgspec.to_builtins(one) for one in done]}


def import_lines(done: Sequence[Imported]) -> list[str]:
    new = [one.saved for one in done if one.saved]
    logical, written = sum(one.logical_bytes for one in new), sum(one.written_bytes for one in new)
    lines = [f"imported {count(len(new), 'file', 'files')}: {size(logical)} of tensors, {size(written)} written"]
    present = sum(one.outcome == "present" for one in done)
    if present:
        lines.append(f"{count(present, 'file was', 'files were')} there already")
    lines += [
        f"passed over {printable(one.path)}: entry {one.entry_id} has the same identity and tokens, and is as new"
        for one in done
        if one.outcome == "superseded"
    ]
    return lines
