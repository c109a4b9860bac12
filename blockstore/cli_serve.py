"""The command that serves: mlx_lm.server over a store. It loads MLX; its help does not."""

import contextlib
import logging
import math
import os
import sys
from typing import Annotated, Final, NoReturn

import typer

from .cli_app import Json, Root
from .cli_exit import needing_mlx_lm
from .cli_limits import size_of
from .cli_run import running
from .errors import InvalidInput
from .store import Store

PASSED_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
EPILOG: Final = """\b
Every other argument goes to mlx_lm.server. What it takes:
  blockstore serve -- --help
"""


def serve(
    context: typer.Context,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="SIZE", help="Cap over the store, as `blockstore limits` has.")
    ] = None,
    queue_bytes: Annotated[
        str, typer.Option("--queue-bytes", metavar="SIZE", help="Memory for what waits to be written.")
    ] = "4G",
    keep_turns: Annotated[
        bool, typer.Option("--keep-turns", help="Keep every turn of a conversation, not only its last.")
    ] = False,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, help="How long requests may go on after SIGTERM.")
    ] = 30,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            "--checkpoint-every", metavar="TOKENS", min=0, help="How often a seeded answer is kept; 0: never."
        ),
    ] = 64,
    metrics_file: Annotated[
        str | None, typer.Option("--metrics-file", metavar="PATH", help="Write the metrics to a file, too.")
    ] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Serve a model with mlx_lm.server, and keep its prompt cache in the store.

    Takes every argument that mlx_lm.server takes. A restart goes on from what the store holds. Metrics at /metrics.
    """
    with running(context, root, as_json) as run:
        if {"-h", "--help"} & set(context.args):
            _print_help_of_mlx_lm()
        if not math.isfinite(grace):
            raise InvalidInput("not a number of seconds", field="--grace", found=str(grace))
        cap, queue = size_of(max_bytes, "--max-bytes"), size_of(queue_bytes, "--queue-bytes")
        _check_folder(metrics_file)
        with needing_mlx_lm("serve"):
            _refuse_ranks()
            # Before mlx-lm is imported: what is wrong with the store is said at once.
            with Store(run.root, read_only=False) as store:
                # Either way this looks at the index, which opening alone does not.
                _ = store.limits if cap is None else store.set_limits(max_bytes=cap)
                from . import serve as serving

                settings = serving.Settings(grace, metrics_file, queue or 0, not keep_turns, checkpoint_every)
                status = serving.serve(store, context.args, settings)
    _leave(status)


def _print_help_of_mlx_lm() -> NoReturn:
    with needing_mlx_lm("serve"):
        from mlx_lm import server

        sys.argv = ["blockstore serve", "--help"]
        server.main()
    raise typer.Exit


def _check_folder(path: str | None) -> None:
    if path is not None and not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK | os.X_OK):
        raise InvalidInput("no file can be made there", field="--metrics-file", found=path, hint="Make its directory.")


def _refuse_ranks() -> None:
    from kvcodecs.backend import mx

    ranks = mx.distributed.init().size()
    if ranks > 1:
        hint = "Serve on one machine, or without a store: python -m mlx_lm server."
        raise InvalidInput(
            "each rank holds a part of the state, which a store cannot tell apart", found=ranks, hint=hint
        )


def _leave(status: int) -> NoReturn:
    """End the process, not by Python's own end: threads, and those of mlx, would run or abort while their world goes.

    By now the store is closed, and nothing else has anything to lose.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
