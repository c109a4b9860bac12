"""How a command ends: the exit codes, and every failure as one message, its facts and what to do about it."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, Final, TextIO

import typer

from .cli_text import printable
from .errors import (
    BlockstoreError,
    CacheMiss,
    Cancelled,
    InvalidInput,
    NotPermitted,
    NotStored,
    StoreBroken,
    StoreBusy,
    StoreFull,
)
from .fs import is_full


class Code(IntEnum):
    """Exit codes of the command; never renumbered."""

    OK = 0
    FOUND = 1
    USAGE = 2
    INPUT = 3
    BUSY = 4
    BROKEN = 5
    FULL = 6
    MISS = 7
    SYSTEM = 8
    MISSING_PACKAGE = 9
    INTERRUPTED = 130
    CLOSED_PIPE = 141


MEANINGS: Final[Mapping[Code, str]] = {
    Code.OK: "done",
    Code.FOUND: "check or gc found something wrong, or rm, import, export or serve could not do all that was asked",
    Code.USAGE: "the command line makes no sense",
    Code.INPUT: "there is no store, or an argument makes no sense",
    Code.BUSY: "another process holds the store",
    Code.BROKEN: "the store's index or configuration is unusable",
    Code.FULL: "no room on the disk, in the quota or under the store's cap",
    Code.MISS: "the entry or file is gone, corrupt or of an unsupported format",
    Code.SYSTEM: "the operating system refused (permissions, input/output)",
    Code.MISSING_PACKAGE: "a package that the command needs is not installed",
    Code.INTERRUPTED: "interrupted",
    Code.CLOSED_PIPE: "nobody reads the output any more",
}
_KINDS: Final[tuple[tuple[type[BlockstoreError], Code], ...]] = (
    (InvalidInput, Code.INPUT),
    (StoreBusy, Code.BUSY),
    (NotStored, Code.FOUND),
    (StoreBroken, Code.BROKEN),
    (StoreFull, Code.FULL),
    (CacheMiss, Code.MISS),
    (NotPermitted, Code.SYSTEM),
    (Cancelled, Code.INTERRUPTED),
)

_MODEL_PACKAGES: Final = ("mlx", "mlx_lm", "transformers")


class MissingPackage(BlockstoreError):
    """A command needs a package that is not there."""

    code = "missing-package"


def code_of(error: BlockstoreError | OSError) -> Code:
    """The exit code for an error."""
    if isinstance(error, MissingPackage):
        return Code.MISSING_PACKAGE
    if isinstance(error, BlockstoreError):
        return next((code for kind, code in _KINDS if isinstance(error, kind)), Code.SYSTEM)
    return Code.FULL if is_full(error) else Code.SYSTEM


@contextmanager
def ending(*, as_json: bool) -> Iterator[None]:
    """Turn every foreseen failure inside into a message and an exit code; what is left over is a bug and shows."""
    try:
        yield
    except BrokenPipeError:
        raise typer.Exit(Code.CLOSED_PIPE) from None
    except KeyboardInterrupt:
        _tell("interrupted", "interrupted", "", {}, as_json=as_json)
        raise typer.Exit(Code.INTERRUPTED) from None
    except BlockstoreError as error:
        _tell(error.code, error.message, error.hint, error.facts, as_json=as_json)
        raise typer.Exit(code_of(error)) from error
    except OSError as error:
        facts = {"path": error.filename, "errno": error.errno}
        _tell("os-error", error.strerror or str(error), "", facts, as_json=as_json)
        raise typer.Exit(code_of(error)) from error


@contextmanager
def needing_mlx_lm(what: str) -> Iterator[None]:
    """Around imports: where mlx, mlx-lm or what it stands on is missing, name the command that installs it."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _MODEL_PACKAGES and "libmlx" not in str(error):
            raise
        extras = "mlx-lm" if sys.platform == "darwin" else "cpu,mlx-lm"
        hint = f'Install what is missing: pip install "mlx-blockstore[{extras}]"'
        raise MissingPackage(f"{what} needs mlx and mlx-lm: {error}", hint=hint) from error


def warn(text: str) -> None:
    """One line on stderr."""
    with suppress(OSError):  # nobody is left to tell
        print(f"blockstore: {printable(text)}", file=sys.stderr, flush=True)


def write(stream: TextIO, text: str) -> None:
    """Write and flush; a stream that fails is not written to again, not at the end of the process either."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise


def as_json_text(value: Any) -> str:
    """JSON in ASCII: no byte of it means anything to a terminal."""
    return json.dumps(value, indent=1, default=_as_text) + "\n"


def one_line(message: str, facts: Mapping[str, object]) -> str:
    """A message with its facts behind it."""
    known = ", ".join(f"{key} {_shown(value)}" for key, value in facts.items() if value is not None)
    return printable(f"{message} ({known})" if known else message)


def failure(what: str, text: str, error: BlockstoreError | OSError) -> dict[str, Any]:
    """One failure of several, for JSON: what was asked for, and why it could not be done."""
    code, message = (error.code, error.message) if isinstance(error, BlockstoreError) else ("os-error", str(error))
    return {what: text, "code": code, "message": message, "exit_code": code_of(error)}


def end_with(failed: Mapping[str, BlockstoreError], *, as_json: bool) -> None:
    """Name each failure, unless the JSON has, and end the command; go on where nothing failed."""
    if not as_json:
        for error in failed.values():
            warn(one_line(error.message, error.facts))
    if failed:
        raise typer.Exit(Code.FOUND)


def _tell(code: str, message: str, hint: str, facts: Mapping[str, object], *, as_json: bool) -> None:
    if as_json:
        error = {"code": code, "message": message, "hint": hint, "facts": dict(facts)}
        with suppress(OSError):
            write(sys.stdout, as_json_text({"error": error}))
        return
    warn(one_line(message, facts))
    if hint:
        with suppress(OSError):
            print(printable(hint), file=sys.stderr, flush=True)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _as_text(value: object) -> object:
    return os.fsdecode(value) if isinstance(value, bytes) else str(value)
