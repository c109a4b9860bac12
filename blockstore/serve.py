"""`blockstore serve`: mlx_lm.server, whose prompt cache stands on a store, and which stops in order.

What it says, how it parses its arguments, loads models, generates and answers are mlx-lm's. Three threads: the main one
waits to be told to stop, one accepts connections (and starts one for each), one, mlx-lm's, generates.
"""

import inspect
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
from mlx_lm import server as mlx_server
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from .checkpoints import Checkpoints
from .cli_exit import MissingPackage
from .cli_text import count
from .errors import BlockstoreError, InvalidInput, NotStored
from .extracted import viewed_extractions
from .identity import Identity, identity_of
from .prompt_cache import PersistentPromptCache, PromptCacheStats
from .resume import response_generator
from .serve_http import Listener, Requests, seconds_until
from .serve_metrics import MetricsFile, exposition
from .serve_signals import StopSignals
from .store import Store

_log: Final = logging.getLogger(__name__)
_METRICS_EVERY_S: Final = 5.0
# Of the grace, for the generation thread to come to its end: it looks every half second, or after a step.
_JOIN_S: Final = 2.0
# Whatever became of the requests, what they computed is worth that much waiting.
_LEAST_FLUSH_S: Final = 10.0
_ModelKey = tuple[str | None, str | None, str | None]


class Settings(msgspec.Struct, frozen=True):
    """What `blockstore serve` takes beside mlx_lm.server's arguments."""

    grace_s: float
    metrics_file: str | None
    queue_bytes: int
    supersede: bool
    checkpoint_every: int


def serve(store: Store, arguments: Sequence[str], settings: Settings) -> int:
    """Run mlx_lm.server with its `arguments` over `store` until a signal comes; the exit status. Main thread only.

    0: all is stored. 1: something could not be stored; the log says what. Raises SystemExit for bad arguments, OSError
    where the port is taken, MissingPackage for an mlx-lm that is not known.
    """
    _check_installed()
    server = _Server(store, settings)
    kept = mlx_server.run, sys.argv
    mlx_server.run, sys.argv = server.run, ["blockstore serve", *arguments]
    try:
        mlx_server.main()
    finally:
        mlx_server.run, sys.argv = kept
    return server.status


def _check_installed() -> None:
    """Raise MissingPackage unless the installed mlx-lm has what is used here, with the arguments that it is given."""
    wanted = {
        "main": (),
        "run": ("host", "port", "model_provider"),
        "ResponseGenerator": ("model_provider", "prompt_cache"),
        "APIHandler": ("response_generator",),
    }
    for name, arguments in wanted.items():
        found = getattr(mlx_server, name, None)
        if found is None or tuple(inspect.signature(found).parameters)[: len(arguments)] != arguments:
            hint = 'Install one that is known: pip install "mlx-lm>=0.31.3,<0.33".'
            raise MissingPackage(f"serve does not know this mlx-lm: mlx_lm.server.{name} is another", hint=hint)


class _Models:
    """What the prompt cache asks of the model that is loaded. On the generation thread."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        # Older releases quantize no caches, and have no such arguments.
        names = ("kv_bits", "kv_group_size", "quantized_kv_start")
        self._scheme: dict[str, Any] = {name: getattr(provider.cli_args, name, None) for name in names}

    def identity(self, key: _ModelKey) -> Identity:
        model, adapter, draft = key
        if model is None:
            raise InvalidInput("the model has no path")
        found = identity_of(model, adapter_path=adapter, **self._scheme)
        # With a draft model the caches of both are one list.
        return found if draft is None else replace(found, ns=f"draft {identity_of(draft).config_fingerprint}")

    def prototypes(self, key: _ModelKey) -> Iterator[list[Any]]:
        if self._provider.model_key != key:
            raise InvalidInput("another model is loaded", expected=key, found=self._provider.model_key)
        yield self._new_caches()
        if self._scheme["kv_bits"] is not None:
            quantized = self._new_caches()
            maybe_quantize_kv_cache(quantized, 0, self._scheme["kv_group_size"], self._scheme["kv_bits"])
            yield quantized

    def _new_caches(self) -> list[Any]:
        draft = self._provider.draft_model
        return [*make_prompt_cache(self._provider.model), *([] if draft is None else make_prompt_cache(draft))]


def _generator_kind(checkpoints: Checkpoints | None, models: _Models) -> Any:
    """The class of what generates."""
    base: Any = mlx_server.ResponseGenerator
    if checkpoints is not None:
        base = response_generator(checkpoints, models.identity)

    def tokenize(self: Any, *args: Any) -> Any:
        found = base._tokenize(self, *args)
        if not found[0]:  # in a batch, mlx-lm's generation thread would die of it
            raise ValueError("the prompt is empty")
        return found

    return type(base.__name__, (base,), {"_tokenize": tokenize, "__doc__": base.__doc__})


class _Server:
    """One run. status: what the process is to leave with, once run() has returned."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.status = 0
        self._store = store
        self._settings = settings
        self._requests = Requests()
        self._file = MetricsFile(settings.metrics_file)

    def run(self, host: str, port: int, provider: Any, *_: object) -> None:
        """What stands in the place of mlx_lm.server.run."""
        models = _Models(provider)
        cache = self._new_cache(provider.cli_args, models)
        checkpoints = self._new_checkpoints(cache)
        metrics = partial(self._metrics, cache, checkpoints)
        connections = Listener(host, port, self._requests, metrics)
        with StopSignals() as signals, connections as listener, viewed_extractions():
            # On a thread of its own, that runs from now on.
            generator = _generator_kind(checkpoints, models)(provider, cache)
            try:
                listener.start(generator)
                _log.info("blockstore serves at http://%s:%s, store %s", host, listener.server_port, self._store.root)
                self._wait(signals, listener, generator, metrics)
            finally:
                self._stop(listener, generator, cache, checkpoints)
                self._file.write(metrics())

    def _new_cache(self, arguments: Any, models: _Models) -> PersistentPromptCache:
        most = {} if arguments.prompt_cache_bytes is None else {"max_bytes": arguments.prompt_cache_bytes}
        return PersistentPromptCache(
            self._store,
            identity=models.identity,
            prototypes=models.prototypes,
            max_size=arguments.prompt_cache_size,
            queue_bytes=self._settings.queue_bytes,
            supersede=self._settings.supersede,
            leave_one=True,
            **most,
        )

    def _new_checkpoints(self, cache: PersistentPromptCache) -> Checkpoints | None:
        """None where none are wanted. What a request leaves behind goes when its answer is stored as well."""
        every = self._settings.checkpoint_every
        return Checkpoints(self._store, every=every, settle=cache.settle) if every else None

    def _metrics(self, cache: PersistentPromptCache, checkpoints: Checkpoints | None) -> str:
        taken = None if checkpoints is None else checkpoints.stats
        return exposition(cache.stats, taken, self._requests.count, self._store)

    def _wait(self, signals: StopSignals, listener: Listener, generator: Any, metrics: Any) -> None:
        # Its thread may die of a request; each one from then on would be told so.
        while listener.is_running and generator._generation_thread.is_alive():
            self._file.write(metrics())
            if name := signals.wait(_METRICS_EVERY_S):
                _log.info(
                    "%s: stopping; %s under way, at most %g s for them. Once more ends it at once.",
                    name, count(self._requests.count, "request"), self._settings.grace_s,
                )  # fmt: skip
                return
        what = "nothing is generated" if listener.is_running else "no connections are accepted"
        _log.error("%s any more: stopping", what)
        self.status = 1

    def _stop(
        self, listener: Listener, generator: Any, cache: PersistentPromptCache, checkpoints: Checkpoints | None
    ) -> None:
        """Refuse what comes, let finish what is under way, end the generation thread, write what is pending."""
        end = time.monotonic() + self._settings.grace_s
        listener.stop()
        left = self._requests.wait(seconds_until(end) - min(_JOIN_S, self._settings.grace_s / 4))
        if left:
            _log.warning("%s cut off: the grace is over", count(left, "request"))
        # Its join() takes no time limit: this thread may outlive us.
        joiner = threading.Thread(target=generator.stop_and_join, name="blockstore-join", daemon=True)
        joiner.start()
        joiner.join(seconds_until(end))
        try:
            until = time.monotonic() + max(seconds_until(end), _LEAST_FLUSH_S)
            self._write(cache, checkpoints, until, ended=not joiner.is_alive())
        except BlockstoreError as error:
            _log.error("not everything was stored: %s", error)
            self.status = 1
        _log.info("%s", _summary(cache.stats))

    def _write(
        self, cache: PersistentPromptCache, checkpoints: Checkpoints | None, until: float, *, ended: bool
    ) -> None:
        """Write what is pending. Where the generation thread has not ended, what failed is not tried again."""
        if ended:
            cache.flush(seconds_until(until))
        else:
            _log.warning("the generation goes on; what it computes from now on is lost")
        in_time = checkpoints is None or checkpoints.close(seconds_until(until))
        if not cache.close(seconds_until(until)) or not in_time:
            raise NotStored("not all was written in time")


def _summary(stats: PromptCacheStats) -> str:
    hits = stats.hits_memory + stats.hits_store
    return (
        f"stored {count(stats.stored, 'entry', 'entries')}, dropped {stats.dropped:,}, failed {stats.failed:,}; "
        f"reused {count(stats.tokens_restored, 'token')} from the store and {stats.tokens_from_memory:,} from memory, "
        f"for {hits:,} of {count(hits + stats.misses, 'prompt')}"
    )
