"""Processes that take turns: each call of the file system and each transaction is a step; a seed says who goes on.

Several actors, each a thread of some process, run real stores over one root, but only one of them at a time: before
each step the turn may pass to another one. A process has its own descriptors and its own lock on the index, as real
ones have; only the LMDB handle is shared, since a process may map an index but once. Who waits for a lock is blocked
until somebody lets go of one. A process that is killed takes no further step: its threads unwind, whatever they call
raises, and then the kernel closes what it had open.
"""

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from blockstore import Store, locks
from blockstore.index_rows import split_digests
from fs_doubles import CHANGES, Call, Crash, Killed, separate_environments
from store_kit import damage

# Steps of which nobody else sees anything are not worth a turn: reading an open file, closing one, growing the index.
_STEPS = frozenset([*CHANGES, "open_read", "read_file", "size_of", "try_lock"]) - {"extend", "write_all", "write_at"}
_FREES = ("unlock", "close")
# Threads are used again: mlx keeps a stream for each that ever touched it.
_POOL = ThreadPoolExecutor(16, thread_name_prefix="actor")


class Actor:
    """One thread of a process, and what it is doing: for the onlooker to judge what happens meanwhile."""

    def __init__(self, process: "Process", script: Callable[["Actor"], None]) -> None:
        self.process = process
        self.script = script
        self.turn = threading.Semaphore(0)
        self.blocked = self.done = False
        self.doing: Any = None


class Process(Crash):
    """The file system as one process sees it. Dies at its `left`-th step, if it gets so far."""

    def __init__(self, scheduler: "Scheduler", left: int | None = None) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.left = left
        self.actors: list[Actor] = []
        self.store: Store | None = None

    def about_to(self, name: str, args: Sequence[Any]) -> None:
        if self.scheduler.current is None or self.dead:
            return
        if name in _STEPS and not self.described(name, args).path.endswith(".turn"):
            self.scheduler.step()
            if self.left is not None and not self.dead:
                self.left -= 1
                if self.left < 0:
                    self.arm(0)  # dies in this very call, in the middle of it if it writes
                    if name not in CHANGES:
                        self.dead = True

    def passed(self, name: str, args: Sequence[Any], result: Any) -> None:
        super().passed(name, args, result)
        if name in _FREES:
            self.scheduler.wake()
        self.scheduler.onlooker.saw(self.described(name, args))

    def names(self, path: str) -> Iterator[str]:
        """In an order that does not depend on the disk, so that a seed says what happens."""
        return iter(sorted(super().names(path)))

    def end(self) -> None:
        """Its last thread has ended."""
        if self.dead:
            self.bury(self.store)
        self.scheduler.wake()


class Scheduler:
    """One schedule: `switching` is how likely the turn passes on before a step; `events` happen before given steps."""

    def __init__(self, rng: random.Random, onlooker: "Onlooker", switching: float) -> None:
        self.rng, self.onlooker, self.switching = rng, onlooker, switching
        self.events: dict[int, Callable[[], None]] = {}
        self.processes: list[Process] = []
        self.current: Actor | None = None
        self.steps = 0
        self.errors: list[BaseException] = []
        self._ended = threading.Event()

    def process(self, *scripts: Callable[[Actor], None], left: int | None = None) -> Process:
        made = Process(self, left)
        made.actors = [Actor(made, script) for script in scripts]
        self.processes.append(made)
        return made

    @property
    def alive(self) -> list[Actor]:
        return [actor for process in self.processes for actor in process.actors if not actor.done]

    def run(self) -> None:
        """Let all of them run to their ends. Raises the first error of any."""
        for actor in self.alive:
            _POOL.submit(self._live, actor)
        self._begin_turn(self._chosen())
        assert self._ended.wait(60), "a schedule takes a part of a second"
        self.current = None
        if self.errors:
            raise self.errors[0]

    def step(self) -> None:
        """The current actor is about to do something: perhaps others first."""
        self.steps += 1
        happening = self.events.pop(self.steps, None)
        if happening is not None:
            self._happen(happening)
        self._pass_on()

    def _happen(self, event: Callable[[], None]) -> None:
        try:
            event()
        except BaseException as error:  # not the error of whoever is at it; raised again by run()
            self.errors.append(error)
            self._stop()

    def wait(self) -> None:
        """The current actor can do nothing until somebody wakes it."""
        me = self._me()
        me.blocked = True
        self._pass_on()
        if me.process.dead:
            raise Killed

    def wake(self) -> None:
        for actor in self.alive:
            actor.blocked = False

    def _me(self) -> Actor:
        assert self.current is not None, "only actors wait"
        return self.current

    def _live(self, actor: Actor) -> None:
        actor.turn.acquire()
        try:
            if not actor.process.dead:
                actor.script(actor)
                self._close_if_last(actor)
        except Killed:
            pass
        except BaseException as error:  # raised again by run()
            self.errors.append(error)
            self._stop()
        actor.done = True
        if all(other.done for other in actor.process.actors):
            actor.process.end()
        if self.alive:
            self._begin_turn(self._chosen())
        else:
            self._ended.set()

    def _close_if_last(self, actor: Actor) -> None:
        process = actor.process
        if process.store is not None and all(other.done for other in process.actors if other is not actor):
            process.store.close()

    def _pass_on(self) -> None:
        me, chosen = self._me(), self._chosen()
        if chosen is not me:
            self._begin_turn(chosen)
            me.turn.acquire()

    def _begin_turn(self, actor: Actor) -> None:
        self.current = actor
        actor.turn.release()

    def _chosen(self) -> Actor:
        """Threads of a killed process first: they are gone at once."""
        alive = self.alive
        ready = [actor for actor in alive if actor.process.dead] or [actor for actor in alive if not actor.blocked]
        if not ready:
            self.errors.append(AssertionError(f"step {self.steps}: everybody waits, for ever"))
            self._stop()
            ready = alive
        if self.current in ready and self.rng.random() >= self.switching:
            return self.current
        return self.rng.choice(ready)

    def _stop(self) -> None:
        for process in self.processes:
            process.dead = True

    # ---- what stands in for the real waiting

    @contextlib.contextmanager
    def in_charge(self) -> Iterator[None]:
        """Locks wait by passing the turn on, and every store stands for a process of its own."""
        clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: self.wait())
        mutexes = SimpleNamespace(RLock=lambda: _Mutex(self))
        with (
            mock.patch.object(locks, "time", clock),
            mock.patch.object(locks, "threading", mutexes),
            separate_environments(),
        ):
            yield


class _Mutex:
    """A mutex among the threads of one process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False

    def __enter__(self) -> None:
        while self._held:
            self._scheduler.wait()
        self._held = True

    def __exit__(self, *exception: object) -> None:
        self._held = False
        self._scheduler.wake()


# ---- the onlooker


class Content(NamedTuple):
    """What an entry holds; those of equal tokens and namespace replace one another."""

    tokens: tuple[int, ...]
    ns: str = ""
    model: str = "plain"

    def equals(self, other: "Content") -> bool:
        return (self.tokens, self.ns) == (other.tokens, other.ns)


class Doing(NamedTuple):
    """What an actor is about."""

    what: str
    content: Content | None = None
    entry_id: str = ""


class Onlooker:
    """Knows what lives and what was damaged, and judges each change as it happens."""

    def __init__(self, root: str, capped: bool) -> None:
        self.root, self.capped = root, capped
        self.scheduler: Scheduler | None = None
        self.live: dict[str, Content] = {}
        self.contents: dict[str, Content] = {}  # of all that ever lived
        self.blocks: dict[str, list[str]] = {}
        self.headers: dict[str, bytes] = {}
        self.pinned: set[str] = set()
        self.placed: set[tuple[str, str]] = set()  # (lease, block)
        self.began: dict[str, int] = {}
        self.damaged: dict[str, tuple[int, bool]] = {}  # block or entry: since when, and whether its size shows it
        self.ever_damaged: set[str] = set()
        self.condemned: set[str] = set()
        self.faults: list[str] = []
        self.stray = ""

    @property
    def doing(self) -> Doing:
        actor = self.scheduler.current if self.scheduler is not None else None
        return actor.doing if actor is not None and actor.doing is not None else Doing("nothing")

    def judge(self, right: bool, fault: str) -> None:
        if not right:
            step = self.scheduler.steps if self.scheduler is not None else 0
            self.faults.append(f"step {step}, {self.doing.what}: {fault}")

    # ---- files

    def saw(self, call: Call) -> None:
        name = os.path.basename(call.path)
        if call.places_block:
            name = os.path.basename(call.target)
            self.placed.add((os.path.basename(os.path.dirname(call.path)), name))
            self.damaged.pop(name, None)
            self.condemned.discard(name)
        elif call.name == "unlink" and call.within("blocks"):
            needed = [key for key in self.live if name in self.blocks[key]]
            self.judge(not needed or name in self.damaged, f"unlinks block {name[:8]}, which {needed} need")
        elif call.name == "unlink" and name.endswith(".mlxkv"):
            self.judge(name.removesuffix(".mlxkv") not in self.live, f"unlinks the header of {name}, which lives")

    def harm(self, name: str, path: Path, how: str) -> None:
        damage(path, how)
        assert self.scheduler is not None
        self.ever_damaged.add(name)
        self.damaged.setdefault(name, (self.scheduler.steps, how != "flip"))

    def path(self, name: str) -> Path:
        return Path(self.root, "blocks", name)

    def is_whole(self, entry_id: str) -> bool:
        path = self.header_path(entry_id)
        same = path is not None and path.read_bytes() == self.headers[entry_id]
        return same and not any(self.is_bad(name) for name in self.blocks[entry_id])

    def is_bad(self, name: str) -> bool:
        return name in self.damaged or not self.path(name).exists()

    def header_path(self, entry_id: str) -> Path | None:
        return next(Path(self.root, "entries").glob(f"*/{entry_id}.mlxkv"), None)

    def untouched(self, entry_id: str) -> bool:
        """Nothing of it was ever damaged; what was may have been healed since, but somebody may have met it before."""
        return not self.ever_damaged & {entry_id, *self.blocks[entry_id]}

    # ---- transactions

    def published(self, entry_id: str, content: Content, digests: bytes, pinned: bool) -> None:
        self.live[entry_id] = self.contents[entry_id] = content
        self.blocks[entry_id] = names = [name.hex() for name in split_digests(digests)]
        if pinned:
            self.pinned.add(entry_id)
        header = self.header_path(entry_id)
        self.judge(header is not None, f"publishes {entry_id} without a header")
        self.headers[entry_id] = header.read_bytes() if header is not None else b""
        for name in names:
            self.judge_block(entry_id, name)

    def judge_block(self, lease: str, name: str) -> None:
        """A saver answers for what it placed itself and for what could be seen or was known, not for hidden damage."""
        if (lease, name) in self.placed:
            return
        since, visible = self.damaged.get(name, (None, False))
        self.judge(name not in self.condemned, f"publishes over block {name[:8]}, which is known to be bad")
        if since is None:
            self.judge(self.path(name).exists(), f"publishes over block {name[:8]}, which is not there")
        else:
            self.judge(not visible or since >= self.began.get(lease, 0), f"builds on {name[:8]}, long gone")

    def doomed(self, entry_id: str) -> None:
        content, doing = self.live.get(entry_id), self.doing
        self.judge(content is not None, f"dooms {entry_id}, which does not live")
        if content is None:
            return
        right = {
            "remove": doing.entry_id == entry_id,
            "save": (doing.content is not None and content.equals(doing.content))
            or (self.capped and entry_id not in self.pinned),
            "load": not self.is_whole(entry_id),
            "full": self.header_path(entry_id) is None,
        }
        self.judge(right.get(doing.what, False), f"dooms {entry_id}, {content}")
        del self.live[entry_id]

    def adopted(self, entry_id: str, content: Content, digests: bytes) -> None:
        self.judge(entry_id == self.stray and self.doing.what == "full", f"adopts {entry_id}")
        self.published(entry_id, content, digests, pinned=False)
