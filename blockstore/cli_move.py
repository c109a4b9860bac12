"""The commands that move: cache files into the store, entries out of it. These load MLX, the others do not."""

from enum import StrEnum
from types import ModuleType
from typing import Annotated

import typer

from . import cli_views as views
from .cli_app import Json, Root
from .cli_exit import Code, MissingPackage, failure, one_line, warn
from .cli_ids import choose
from .cli_run import Run, running
from .cli_text import printable
from .errors import BlockstoreError, CacheMiss, InvalidInput
from .store import Store

_Failures = dict[str, BlockstoreError | OSError]


class FileLayout(StrEnum):
    """What export writes."""

    MONOLITH = "monolith"
    ROWS = "rows"


def import_files(
    context: typer.Context,
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Cache files, or directories of them.")],
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Take cache files of any version into the store; they stay as they are.

    Directories are searched for *.mlxkv. A file that cannot be read is reported and passed over; one whose entry the
    store has already is left alone, so that a second run takes up where the first stopped.
    """
    with running(context, root, as_json) as run:
        moving = _moving()
        with Store(run.root) as store:
            _import(run, store, list(moving.cache_files(paths)))


def _import(run: Run, store: Store, files: list[str]) -> None:
    failed = _Failures()
    done = []
    with run.progress("importing") as progress:
        for number, path in enumerate(files):
            progress(number, len(files))
            try:
                done.append(store.import_file(path))
            except (CacheMiss, InvalidInput, OSError) as error:  # the file's fault; the store's would come again
                failed[path] = error
    run.show(
        lambda: {**views.import_json(done), "failed": [failure("path", *item) for item in failed.items()]},
        lambda: views.import_lines(done),
    )
    _report(failed, quiet=run.as_json)


def export_entries(
    context: typer.Context,
    entries: Annotated[list[str], typer.Argument(metavar="ENTRY...", help="Ids, or the first digits of them.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where the files go; made if it is not there.")],
    layout: Annotated[
        FileLayout, typer.Option("--layout", help="One file, or a header and its blocks/ beside it.")
    ] = FileLayout.MONOLITH,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Write entries as files that mlx-bun opens, each named by its entry's id."""
    with running(context, root, as_json) as run, run.open() as store:
        _moving()
        chosen, unknown = choose(store.entries(), entries)
        failed: _Failures = {**unknown}
        written: dict[str, str] = {}
        with run.progress("exporting") as progress:
            for number, entry_id in enumerate(chosen):
                progress(number, len(chosen))
                try:
                    written[entry_id] = store.export_entry(entry_id, folder, layout=layout.value)
                except (BlockstoreError, OSError) as error:
                    failed[entry_id] = error
        run.show(
            lambda: {
                "exported": [{"entry_id": one, "path": path} for one, path in written.items()],
                "failed": [failure("entry", *item) for item in failed.items()],
            },
            lambda: list(map(printable, written.values())) or ["nothing was exported"],
        )
        _report(failed, quiet=run.as_json)


def _moving() -> ModuleType:
    """The room that moves, which needs MLX."""
    try:
        from . import moving
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "mlx" and "libmlx" not in str(error):
            raise
        raise MissingPackage(str(error)) from error  # it says what to install
    return moving


def _report(failed: _Failures, *, quiet: bool) -> None:
    if failed and not quiet:
        for text, error in failed.items():
            facts = error.facts if isinstance(error, BlockstoreError) else {}
            message = error.message if isinstance(error, BlockstoreError) else error.strerror or str(error)
            warn(one_line(f"{text}: {message}", {k: v for k, v in facts.items() if k not in ("path", "entry_id")}))
    if failed:
        raise typer.Exit(Code.FOUND)
