"""What every command shares: where the store is, how results are printed, a progress bar for who watches."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import typer

from .cli_exit import as_json_text, ending, write
from .errors import InvalidInput
from .layout import DEFAULT_ROOT, ROOT_VARIABLE
from .store import Store

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Options(msgspec.Struct, frozen=True):
    """The options that stand before the command as well as behind it."""

    root: str | None = None
    as_json: bool = False


class Run(msgspec.Struct, frozen=True):
    """One run of a command: the store's root, and whether people or programs read the result."""

    root: str
    as_json: bool

    def open(self) -> Store:
        """The store, which must exist. Raises InvalidInput and what Store raises."""
        return Store(self.root, create=False)

    def show(self, value: Callable[[], Any], lines: Callable[[], Iterable[str]]) -> None:
        """Print the result in the one form or the other."""
        write(sys.stdout, as_json_text(value()) if self.as_json else "".join(f"{line}\n" for line in lines()))

    def progress(self, title: str) -> "Bar":
        return Bar(title, wanted=not self.as_json and sys.stderr.isatty())


@contextmanager
def running(context: typer.Context, root: str | None, as_json: bool) -> Iterator[Run]:
    """The run of a command; every failure inside ends it with a message and an exit code.

    root and as_json are what stood behind the command; what stood before it, then the environment, stands in.
    """
    before = options_before(context)
    as_json = as_json or before.as_json
    with ending(as_json=as_json):
        yield Run(_root_of(root, before.root), as_json)


def options_before(context: typer.Context) -> Options:
    """What stood before the command."""
    return context.obj if isinstance(context.obj, Options) else Options()


def _root_of(*given: str | None) -> str:
    root = next((text for text in given if text is not None), os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT)
    if not root:
        raise InvalidInput("--root is empty", hint="Name the directory of the store.")
    return os.path.abspath(os.path.expanduser(root))


class Bar:
    """A progress callback, (done, total), that draws a bar on stderr from its first call on, if it is wanted."""

    def __init__(self, title: str, *, wanted: bool) -> None:
        self._title = title
        self._wanted = wanted
        self._drawn: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn is not None:
            self._drawn[0].stop()

    def __call__(self, done: int, total: int) -> None:
        if not self._wanted:
            return
        if self._drawn is None:
            self._drawn = self._draw()
        bar, task = self._drawn
        bar.update(task, completed=done, total=total)

    def _draw(self) -> "tuple[Progress, TaskID]":
        # Half of the time of a short command would go into importing it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.start()
        return bar, bar.add_task(self._title, total=None)
