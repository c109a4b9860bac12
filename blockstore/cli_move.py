"""The commands that move: cache files into the store, entries out of it. These load MLX, the others do not."""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from . import cli_views as views
from .cli_app import Json, Root
from .cli_exit import Code, MissingPackage, failure, one_line, warn
from .cli_ids import choose
from .cli_prompt import Described, is_prompt_cache
from .cli_run import Run, running
from .cli_text import printable
from .errors import BlockstoreError, CacheMiss, InvalidInput
from .store import Store

if TYPE_CHECKING:
    from .moving import Imported

_Option = partial(typer.Option, show_default=False)
_Failures = dict[str, BlockstoreError | OSError]


class FileLayout(StrEnum):
    """What export writes."""

    MONOLITH = "monolith"
    ROWS = "rows"


def import_files(
    context: typer.Context,
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Cache files, or directories of them.")],
    tokens: Annotated[
        str | None, _Option("--tokens", metavar="FILE", help="What it encodes: a JSON list of ids, or an .npy file.")
    ] = None,
    model: Annotated[
        str | None,
        _Option("--model", metavar="DIR", help="Whose it is: what mlx_lm.load takes, a hub id or a directory."),
    ] = None,
    adapter_path: Annotated[
        str | None, _Option("--adapter-path", metavar="DIR", help="The adapter it was used with.")
    ] = None,
    kv_bits: Annotated[int | None, _Option("--kv-bits", metavar="N", help="As given to mlx-lm's generation.")] = None,
    kv_group_size: Annotated[int | None, _Option("--kv-group-size", metavar="N", help="As given there.")] = None,
    quantized_kv_start: Annotated[
        int | None, _Option("--quantized-kv-start", metavar="N", help="As given there.")
    ] = None,
    model_id: Annotated[
        str | None, _Option("--model-id", metavar="TEXT", help="The identity's field, as it is.")
    ] = None,
    config_fingerprint: Annotated[
        str | None, _Option("--config-fingerprint", metavar="TEXT", help="The identity's field, as it is.")
    ] = None,
    tokenizer_hash: Annotated[
        str | None, _Option("--tokenizer-hash", metavar="TEXT", help="The identity's field, as it is.")
    ] = None,
    ns: Annotated[str | None, _Option("--ns", metavar="TEXT", help="The identity's namespace.")] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Take cache files of any version, or a prompt cache file of mlx-lm's, into the store; they stay as they are.

    Directories are searched for *.mlxkv. A file that cannot be read is reported and passed over; one whose entry the
    store has already is left alone, so that a second run takes up where the first stopped. A .safetensors file says
    neither whose it is nor which tokens it encodes: the options do.
    """
    described = Described(
        tokens, model, adapter_path, kv_bits, kv_group_size, quantized_kv_start,
        {"model_id": model_id, "config_fingerprint": config_fingerprint, "tokenizer_hash": tokenizer_hash, "ns": ns},
    )  # fmt: skip
    with running(context, root, as_json) as run:
        moving = _moving()
        files = list(moving.cache_files(paths))
        take = described.taker(files)
        with Store(run.root) as store:
            _import(run, store, files, take)


def _import(run: Run, store: Store, files: list[str], take_prompt_cache: "Callable[[Store, str], Imported]") -> None:
    failed = _Failures()
    done = []
    with run.progress("importing") as progress:
        for number, path in enumerate(files):
            progress(number, len(files))
            try:
                done.append(take_prompt_cache(store, path) if is_prompt_cache(path) else store.import_file(path))
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
