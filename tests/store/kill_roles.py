"""Roles over one store that die, stop or wait at named steps, and who starts them.

`python kill_roles.py` serves a Nursery: it imports once and forks a process for each role, so that a role starts
within milliseconds. The server never computes with mlx, so that its children may.
"""

import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from blockstore import CacheMiss, Store, prefixes
from blockstore.blocks import Blocks
from blockstore.fs import FileSystem
from blockstore.index import Index
from blockstore.leases import Leases
from blockstore.ledger import Ledger
from blockstore.rooms import Rooms
from store.process_roles import Tally, is_right, say
from token_caches import IDENTITY, identity, plain, small_store

SHARED = "shared"
KEPT = "kept"  # nobody removes from this one
PATIENCE_S = 60.0

# ---- named steps


class Step(NamedTuple):
    """The nth call of a method, or the moment before it; `about` is how the path ends that the call has to name."""

    owner: Any  # a class, or a module
    method: str
    before: bool = False
    nth: int = 1
    about: str = ""

    def on_reaching(self, act: Callable[[], None]) -> None:
        """From now on, act when this process comes to the step."""
        real, calls = getattr(self.owner, self.method), itertools.count(1)

        def stepped(*args: Any, **options: Any) -> Any:
            reached = self._is_about(args) and next(calls) == self.nth
            if reached and self.before:
                act()
            result = real(*args, **options)
            if reached and not self.before:
                act()
            return result

        setattr(self.owner, self.method, stepped)

    def _is_about(self, args: Sequence[Any]) -> bool:
        return not self.about or any(isinstance(arg, str) and arg.endswith(self.about) for arg in args)


STEPS: dict[str, dict[str, Step]] = {
    "read": {"inside find": Step(prefixes, "longest"), "inside load": Step(Blocks, "read")},
    "write": {
        "lease taken": Step(Leases, "take"),
        "blocks staged": Step(Index, "reserve", before=True),
        "inside reserve": Step(Ledger, "add_lease"),
        "reserved": Step(Index, "reserve"),
        **{f"block {nth} placed": Step(Blocks, "publish", nth=nth) for nth in range(1, 5)},
        "header due": Step(FileSystem, "rename", before=True, about=".mlxkv"),
        "header placed": Step(FileSystem, "rename", about=".mlxkv"),
        "inside publish": Step(Ledger, "fulfil"),
        "published": Step(Index, "publish"),
        "replaced header unlinked": Step(FileSystem, "discard", about=".mlxkv"),
        "lease emptied": Step(FileSystem, "remove_dir", before=True),
    },
    "remove": {
        "inside doom": Step(Ledger, "doom"),
        "doomed": Step(Index, "doom"),
        "removed header unlinked": Step(FileSystem, "discard", about=".mlxkv"),
        "inside forget": Step(Ledger, "forget_doomed"),
        "forgotten": Step(Index, "forget_doomed"),
    },
    "collect": {
        "inside reap": Step(Rooms, "unlink_header"),
        "reaped": Step(Index, "reap"),
        "dead block unlinked": Step(Blocks, "unlink"),
        "inside collect": Step(Ledger, "bury"),
        "collected": Step(Index, "collect"),
    },
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


ACTS: dict[str, Callable[[], None]] = {"die": die, "stop": stop}

# ---- the roles


@dataclass
class Work:
    """What a role works with. It ends once ROOT.stop exists."""

    store: Store
    seed: int
    rng: random.Random
    tally: Tally

    def rounds(self) -> Iterator[int]:
        for number in itertools.count():
            if os.path.exists(self.store.root + ".stop"):
                return
            yield number


def some_tokens(rng: random.Random) -> list[int]:
    """One of a few hundred lists with few different beginnings, so that everybody meets the same blocks."""
    return [rng.randrange(2)] * rng.randint(1, 20) + [rng.randrange(2)] * rng.randint(0, 9)


def write(work: Work) -> None:
    """Save all the time; the first list is this writer's own, and every third is saved again."""
    said, ns, tokens = set[tuple[str, tuple[int, ...]]](), KEPT, [1000 + work.seed] * 20
    for _ in work.rounds():
        saved = work.store.save(tokens, plain(tokens, 2), identity(ns))
        work.tally.add(saves=1, written_bytes=saved.written_bytes)
        if (ns, tuple(tokens)) not in said:
            said.add((ns, tuple(tokens)))
            say(saved=tokens, ns=ns)
        if work.rng.random() > 0.3:
            ns, tokens = work.rng.choice([SHARED, KEPT]), some_tokens(work.rng)


def read(work: Work) -> None:
    """Every value that is served follows from the tokens, which are the prompt's."""
    for _ in work.rounds():
        prompt = [*some_tokens(work.rng), 7]
        loaded = work.store.restore(prompt, identity(work.rng.choice([SHARED, KEPT])))
        work.tally.add(loads=1, hits=loaded is not None)
        if loaded is not None:
            assert list(loaded.tokens) == prompt[: len(loaded.tokens)]
            assert is_right(loaded.caches, list(loaded.tokens)), loaded.tokens


def remove(work: Work) -> None:
    for _ in work.rounds():
        shared = [entry.entry_id for entry in work.store.entries() if entry.ns == SHARED]
        if len(shared) < 4:
            tokens = some_tokens(work.rng)
            work.store.save(tokens, plain(tokens, 2), identity(SHARED))
        else:
            with contextlib.suppress(CacheMiss):  # replaced in between
                remove_one(work, work.rng.choice(shared))
        time.sleep(0.01)


def remove_one(work: Work, entry_id: str) -> None:
    say(removing=list(work.store.load(entry_id).tokens), ns=SHARED)
    work.store.remove(entry_id)
    work.tally.add(removals=1)


def collect(work: Work) -> None:
    for number in work.rounds():
        if number % 4 == 0:
            leave_dead_blocks(work.store, number)
            leave_dead_lease(work.store)
        work.store.gc(full=number % 20 == 19)
        work.tally.add(collections=1)
        time.sleep(0.01)


def leave_dead_blocks(store: Store, number: int) -> None:
    tokens = [500 + number] * 12
    store.remove(store.save(tokens, plain(tokens, 2), identity("brief")).entry_id)


def leave_dead_lease(store: Store) -> None:
    """As a saver leaves it that dies when it has reserved a block."""
    rooms = store.rooms
    lease = rooms.leases.take()
    rooms.index.reserve(lease.id, rooms.relative_header("0" * 32, lease.id), {secrets.token_bytes(32): 100})
    lease.forget()


def crowd(work: Work) -> None:
    """Look without a pause, on threads whose looks overlap: at every moment somebody looks. And load."""
    tokens = [7] * 30
    with ThreadPoolExecutor(3) as pool:
        lasting = [pool.submit(look_long, work) for _ in range(3)]
        for number in work.rounds():
            match = work.store.find([*tokens, 1], IDENTITY)
            assert match is not None
            assert is_right(work.store.load(match).caches, tokens)
            if number == 0:
                say(found=len(tokens))
        assert [look.result() for look in lasting] == [None] * 3


def look_long(work: Work) -> None:
    """As those who look at a large store."""
    for _ in work.rounds():
        with work.store.rooms.index.env.read():
            time.sleep(0.003)


ROLES: dict[str, Callable[[Work], None]] = {
    "write": write, "read": read, "remove": remove, "collect": collect, "crowd": crowd,
}  # fmt: skip

# ---- the server


def serve() -> None:
    """Answer one request a line, until there are no more; then end every child that is left."""
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "role" in request:
            answer: object = fork(request)
            children.add(int(str(answer)))
        elif "signal" in request:
            answer = os.kill(request["pid"], request["signal"])
        else:
            answer = state(request["pid"])
            children -= {request["pid"]} if isinstance(answer, int) else set()
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def state(pid: int) -> str | int:
    """An exit code, "stopped", or "same": nothing has changed since it was asked for last."""
    found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
    if not found:
        return "same"
    return "stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)


def fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            live(request)
            code = 0
        except BaseException:  # told by the log and the exit code, whatever it is
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def live(request: dict[str, Any]) -> None:
    """Be a role, in a forked child."""
    base = Path(request["base"])
    log = os.open(base.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tally = Tally(base.with_suffix(".tally"))
    role, seed = request["role"], request["seed"]
    if request["step"]:
        STEPS[role][request["step"]].on_reaching(ACTS[request["act"]])
    with small_store(request["root"]) as store:
        ROLES[role](Work(store, seed, random.Random(seed), tally))


# ---- who asks it


@dataclass(frozen=True)
class Child:
    pid: int
    role: str
    base: Path

    @property
    def log(self) -> str:
        return self.base.with_suffix(".log").read_text() if self.base.with_suffix(".log").exists() else ""


class Nursery:
    """Starts roles over the store at `root`, with a server of its own; nothing of it outlives the block."""

    def __init__(self, root: Path, *prefix: str) -> None:
        self.root = root
        self.folder = Path(f"{root}.said")
        self.folder.mkdir(exist_ok=True)
        self._end = Path(f"{root}.stop")
        surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [*prefix, sys.executable, __file__]
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=surroundings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self.server:  # closes the pipes and waits
            pass

    def start(self, role: str, *, step: str = "", act: str = "die") -> Child:
        seed = next(_SEEDS)
        base = self.folder / f"{role}-{seed}"
        pid = self._ask(role=role, root=str(self.root), seed=seed, base=str(base), step=step, act=act)
        return Child(pid, role, base)

    def send(self, child: Child, number: int) -> None:
        self._ask(pid=child.pid, signal=number)

    def kill(self, child: Child) -> None:
        self.send(child, signal.SIGKILL)
        self.wait(child, -signal.SIGKILL)

    def wait(self, child: Child, wanted: str | int, seconds: float = PATIENCE_S) -> None:
        assert self.came_to(child, wanted, seconds), f"{child.role} is not {wanted!r}: {child.log[-3000:]}"

    def came_to(self, child: Child, wanted: str | int, seconds: float) -> bool:
        """Whether the child ends with this code, or is stopped, in time. It must not end otherwise."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self._ask(pid=child.pid)
            if found == wanted:
                return True
            assert found == "same", f"{child.role} is {found!r} instead of {wanted!r}: {child.log[-3000:]}"
            time.sleep(0.005)
        return False

    def await_word(self, child: Child) -> None:
        """Until the child has said something: it is at work then."""
        deadline = time.monotonic() + PATIENCE_S
        while "\n" not in child.log:
            assert time.monotonic() < deadline, f"{child.role} says nothing"
            time.sleep(0.005)

    def end(self, children: Sequence[Child]) -> None:
        """Let the roles finish; each must end well."""
        self._end.touch()
        for child in children:
            self.wait(child, 0)
        self._end.unlink()

    def said(self, verb: str) -> set[tuple[str, tuple[int, ...]]]:
        """(ns, tokens) of all lines with `verb`; a line that death cut short is no line."""
        found = set()
        for log in self.folder.glob("*.log"):
            for line in log.read_bytes().split(b"\n")[:-1]:
                facts = json.loads(line)
                if verb in facts:
                    found.add((facts["ns"], tuple(facts[verb])))
        return found

    def _ask(self, **request: object) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        return json.loads(self.server.stdout.readline())


_SEEDS = itertools.count(1)

if __name__ == "__main__":
    serve()
