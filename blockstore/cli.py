"""The command: look at a store, remove from it, collect, check, repair.

Nothing here imports mlx or numpy, but for the demo, and rich only where a bar is drawn.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from . import cli_views as views
from .cli_app import DryRun, Json, Root, app
from .cli_exit import Code, end_with, failure, needing_mlx_lm
from .cli_ids import choose, is_id_like, resolve
from .cli_limits import limits, pin
from .cli_move import export_entries, import_files
from .cli_run import Options, Run, options_before, running
from .cli_serve import EPILOG, PASSED_ON, serve
from .errors import BlockstoreError, EntryGone, InvalidInput, NotPermitted, StoreBroken
from .fs import FileSystem
from .layout import FILES_NAME, Layout, find_layout
from .listing import Entry
from .space import Space
from .space import space as space_of
from .store import Store

# What reads headers is imported by the commands that do: it is a good part of the time of those that do not.
if TYPE_CHECKING:
    from . import report
    from .check import Report
    from .collect import Progress
    from .records import Header


def main() -> None:
    """The console script."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # A model's name must not stop a listing where the terminal's encoding lacks a letter.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="blockstore")
    except KeyboardInterrupt:
        sys.exit(Code.INTERRUPTED)


def _open_standard_streams() -> None:
    """Give closed standard streams a descriptor: the next file to be opened must not become one of them."""
    for fd, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_RDWR)
                if null != fd:
                    os.dup2(null, fd)
                    os.close(null)
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115  # for as long as the process


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib import metadata

    try:
        version = metadata.version("mlx-blockstore")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    typer.echo(f"blockstore {version}")
    raise typer.Exit(Code.OK)


@app.callback()
def _before(
    context: typer.Context,
    root: Root = None,
    as_json: Json = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    context.obj = Options(root, as_json)


@app.command()
def stats(context: typer.Context, root: Root = None, as_json: Json = False) -> None:
    """Print how much the store holds, shares and may take."""
    with running(context, root, as_json) as run, run.open() as store:
        found = store.stats()
        run.show(lambda: views.stats_json(found), lambda: views.stats_lines(found))


@app.command()
def ls(
    context: typer.Context,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=0, help="Print only the N used last.", show_default=False)
    ] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """List the entries, the one used last first."""
    with running(context, root, as_json) as run, run.open() as store:
        found = store.entries()
        shown = found[:limit]
        run.show(
            lambda: views.entries_json(shown, len(found)),
            lambda: views.entries_lines(shown, [entry.entry_id for entry in found], _now_ms()),
        )


@app.command()
def show(
    context: typer.Context,
    entry: Annotated[
        str, typer.Argument(metavar="ENTRY", help="The first digits of an entry's id, or the path of a .mlxkv file.")
    ],
    tokens: Annotated[bool, typer.Option("--tokens", help="Print the token ids, too.")] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Describe an entry or a file.

    What removing the entry would give back is known before it is done. A .mlxkv file may stand anywhere.
    """
    from . import report

    with running(context, root, as_json) as run:
        if not is_id_like(entry):
            header = _header_of_file(entry)
            _show(run, header, report.describe(header, entry), None, None, tokens=tokens)
            return
        with run.open() as store:
            found = resolve(store.entries(), entry)
            path, header = report.read_entry(store.rooms, found.entry_id)
            space = space_of(store.rooms, [found.entry_id])
        _show(run, header, report.describe(header, path), found, space, tokens=tokens)


def _header_of_file(path: str) -> "Header":
    from .header_files import read_header

    try:
        return read_header(FileSystem(), path)
    except (FileNotFoundError, NotADirectoryError):
        hint = "An id has only the digits 0-9 and a-f; anything else is taken for a path."
        raise InvalidInput("there is no such file, and this is no entry id", path=path, hint=hint) from None


def _show(
    run: Run,
    header: "Header",
    found: "report.Description",
    entry: Entry | None,
    space: Space | None,
    *,
    tokens: bool,
) -> None:
    ids = header.tokens
    run.show(
        lambda: {**views.description_json(found, entry, space), **({"tokens": ids} if tokens else {})},
        lambda: [
            *views.description_lines(found, entry, space, _now_ms()),
            *(["", " ".join(map(str, ids))] if tokens else []),
        ],
    )


@app.command()
def rm(
    context: typer.Context,
    entries: Annotated[list[str], typer.Argument(metavar="ENTRY...", help="Ids, or the first digits of them.")],
    dry_run: DryRun = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Remove entries. Their space comes back with the next gc."""
    with running(context, root, as_json) as run, run.open() as store:
        chosen, failed = choose(store.entries(), entries)
        space = space_of(store.rooms, chosen)
        removed = list(chosen) if dry_run else [one for one in chosen if _remove(store, one, failed)]
        run.show(
            lambda: {
                "dry_run": dry_run,
                "removed": removed,
                "collectable_bytes": space.unique_bytes,
                "failed": [failure("entry", *item) for item in failed.items()],
            },
            lambda: views.removal_lines([chosen[one] for one in removed], space, dry_run=dry_run),
        )
        end_with(failed, as_json=run.as_json)


def _remove(store: Store, entry_id: str, failed: dict[str, BlockstoreError]) -> bool:
    try:
        store.remove(entry_id)
    except EntryGone as error:  # another process was faster
        failed[entry_id] = error
        return False
    return True


@app.command()
def gc(
    context: typer.Context,
    dry_run: DryRun = False,
    full: Annotated[
        bool, typer.Option("--full", help="Also compare every header with the index, and sweep files nobody knows.")
    ] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Collect what nothing refers to, while others use the store."""
    with running(context, root, as_json) as run, run.open() as store:
        if not dry_run:
            _release_files(store)
        with run.progress("collecting") as progress:
            plan = store.gc(dry_run=dry_run, full=full, progress=progress)
        run.show(
            lambda: views.plan_json(plan, dry_run=dry_run, full=full), lambda: views.plan_lines(plan, dry_run=dry_run)
        )
        if plan.count("sweep"):  # an unreadable header stopped it
            raise typer.Exit(Code.FOUND)


def _release_files(store: Store) -> None:
    """Let entries go whose prompt cache file is gone; they lose their pin, and nothing else."""
    rooms = store.rooms
    if not rooms.fs.exists(os.path.join(rooms.layout.root, FILES_NAME)):
        return
    from .pointers import release

    release(rooms)


@app.command("check")
def check_(
    context: typer.Context,
    deep: Annotated[bool, typer.Option("--deep", help="Read every block and compare its digest.")] = False,
    mend: Annotated[
        bool,
        typer.Option("--repair", help="Rebuild the index, set aside what is damaged. Nobody may have the store open."),
    ] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Look for damage; with --repair, mend it.

    Every header, block and row of the index is compared with the others. Leftovers of a crash are no damage.
    """
    with running(context, root, as_json) as run:
        with run.progress("repairing" if mend else "checking") as progress:
            found = (_repair if mend else _check)(run, deep, progress)
        run.show(lambda: views.report_json(found, repaired=mend), lambda: views.report_lines(found, repaired=mend))
        if not found.is_clean:
            raise typer.Exit(Code.FOUND)


def _check(run: Run, deep: bool, progress: "Progress") -> "Report":
    from .check import check

    with _permitted(run.root):
        try:
            with run.open() as store:
                return check(store.rooms.layout, store.rooms, deep=deep, progress=progress)
        except StoreBroken:  # the index went bad under our hands; where it is store.json, this raises it again
            return check(_layout(run), None, deep=deep, progress=progress)


def _repair(run: Run, deep: bool, progress: "Progress") -> "Report":
    from .check import repair

    with _permitted(run.root):
        found = repair(_layout(run), deep=deep, progress=progress)
        with run.open() as store:
            store.entries()  # a repair that helped nothing must not say that it did
    return found


@contextlib.contextmanager
def _permitted(root: str) -> Iterator[None]:
    """Name a lack of rights as such, wherever it was met: it is no damage."""
    try:
        yield
    except PermissionError as error:
        if isinstance(error, NotPermitted):
            raise
        hint = "Ask the owner of the directory for the right to use it."
        raise NotPermitted("a part of the store may not be used", path=error.filename or root, hint=hint) from error


def _layout(run: Run) -> Layout:
    found = find_layout(FileSystem(), run.root)
    if found is None:
        raise InvalidInput("there is no store here", path=run.root, hint="Name the root of a store.")
    return found


app.command()(pin)
app.command()(limits)
app.command("import")(import_files)
app.command("export")(export_entries)
app.command(context_settings=PASSED_ON, epilog=EPILOG)(serve)


@app.command()
def demo(
    context: typer.Context,
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="DIR", help="Where to put the demo's store; else a temporary directory."),
    ] = None,
) -> None:
    """Save, share, restore and collect a small model's caches. Needs mlx and mlx-lm."""
    before = options_before(context)
    # The environment's root is left alone: the demo empties the store that it uses.
    with running(context, root, before.as_json):
        code = _run_demo(root if root is not None else before.root)
    raise typer.Exit(code)


def _run_demo(root: str | None) -> int:
    with needing_mlx_lm("the demo"):
        from .demo import run

        return run(root)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
