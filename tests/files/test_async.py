"""The twins for servers: what touches arrays runs inside the caller's step, all else on other threads."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

import kvcodecs
from blockstore import (
    CorruptEntry,
    Identity,
    IdentityMismatch,
    InvalidInput,
    files,
    load_kv_cache,
    load_kv_cache_async,
    monolith,
    preparing,
    restoring,
    save_kv_cache,
    save_kv_cache_async,
)
from blockstore.fs import FileSystem
from cache_cases import facts
from files.kit import attachments, kv, layers, meta, plain_attachments, tree

pytestmark = pytest.mark.mlx_lm
TOKENS = list(range(9))
OLD = list(range(7))
ABOUT = meta(attachments=attachments())
each_layout = pytest.mark.parametrize("layout", ["monolith", "rows"])
T = TypeVar("T")
MAIN = threading.get_ident()


class Step:
    """A server's exclusion domain: one step at a time, on the loop's thread. Keeps count of them."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.calls = 0
        self.running = False

    async def __call__(self, work: Callable[[], T]) -> T:
        async with self.lock:
            self.calls += 1
            self.running = True
            await asyncio.sleep(0)
            try:
                return work()
            finally:
                self.running = False


class Rejecting(Step):
    """Refuses the n-th step, before or after it did its work."""

    def __init__(self, at: int, error: BaseException, *, after: bool = False) -> None:
        super().__init__()
        self.at, self.error, self.after = at, error, after

    async def __call__(self, work: Callable[[], T]) -> T:
        if self.calls + 1 < self.at:
            return await super().__call__(work)
        if self.after:
            await super().__call__(work)
        raise self.error


class Domain:
    """Records on which thread, and whether inside the step, each thing was done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: Step) -> None:
        self.inside: dict[str, set[bool]] = {}
        self.threads: dict[str, set[int]] = {}
        for home, name in (
            (preparing, "prepare"),
            (restoring.Restore, "allocate"),
            (restoring.Restore, "loaded"),
            (monolith, "hash_all"),
            *((FileSystem, name) for name in ("create", "write_at", "write_all", "sync_fd", "rename")),
            *((FileSystem, name) for name in ("open_read", "read_into")),
        ):
            monkeypatch.setattr(home, name, self.watched(name, getattr(home, name), step))

    def watched(self, name: str, original: Callable[..., Any], step: Step) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.inside.setdefault(name, set()).add(step.running and threading.get_ident() == MAIN)
            self.threads.setdefault(name, set()).add(threading.get_ident())
            return original(*args, **options)

        return call


class Held:
    """Makes a call of the file system wait until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, home: Any = FileSystem) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        original = getattr(home, name)

        def held(*args: Any, **options: Any) -> Any:
            self.reached.set()
            assert self.released.wait(10)
            return original(*args, **options)

        monkeypatch.setattr(home, name, held)

    async def wait(self) -> None:
        while not self.reached.is_set():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    """No thread, no descriptor."""
    threads, opened = set(threading.enumerate()), len(os.listdir("/dev/fd"))
    yield
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/dev/fd")) == opened


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def saving_of(path: Path, tokens: list[int], layout: Any, **more: Any) -> Coroutine[Any, Any, files.SavedFile]:
    caches = layers(len(tokens))
    return save_kv_cache_async(path, tokens, caches, ABOUT, layout=layout, block_bytes=300, sync=False, **more)


def save(path: Path, tokens: list[int], layout: Any) -> None:
    save_kv_cache(path, tokens, layers(len(tokens)), ABOUT, layout=layout, block_bytes=300, sync=False)


def fresh() -> list[Any]:
    return [kvcodecs.KVCache(), kvcodecs.KVCache()]


def assert_holds(path: Path, tokens: list[int]) -> None:
    loaded = load_kv_cache(path, verify=True)
    assert loaded.tokens == tokens
    assert [facts(cache) for cache in loaded.caches] == [facts(cache) for cache in layers(len(tokens))]


def without_blocks(folder: Path) -> dict[str, bytes]:
    """Blocks that were written before a failure stay: each is whole."""
    return {name: data for name, data in tree(folder).items() if not name.startswith("blocks/")}


# ---- preparing


@each_layout
@pytest.mark.parametrize("with_step", [False, True])
def test_it_saves_what_its_twin_saves(layout: str, with_step: bool, tmp_path: Path) -> None:
    save(tmp_path / "a.mlxkv", TOKENS, layout)
    saved = run(saving_of(tmp_path / "b.mlxkv", TOKENS, layout, run_step=Step() if with_step else None))
    assert (tmp_path / "a.mlxkv").read_bytes() == (tmp_path / "b.mlxkv").read_bytes()
    assert (saved.path, saved.layout, saved.token_count) == (str(tmp_path / "b.mlxkv"), layout, 9)


@each_layout
def test_the_snapshot_is_taken_inside_the_step_and_the_rest_elsewhere(
    layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = Step()
    domain = Domain(monkeypatch, step)
    run(saving_of(tmp_path / "a.mlxkv", TOKENS, layout, run_step=step))
    assert step.calls == 1
    assert domain.inside.pop("prepare") == {True}
    assert domain.threads.pop("prepare") == {MAIN}
    done = {"create", "rename", *(["hash_all", "write_at"] if layout == "monolith" else ["write_all"])}
    assert done <= domain.inside.keys()
    assert set().union(*domain.inside.values()) == {False}
    assert MAIN not in set().union(*domain.threads.values())


@each_layout
@pytest.mark.parametrize("after", [False, True], ids=["at once", "after the work"])
@pytest.mark.parametrize("error", [RuntimeError("no"), asyncio.CancelledError()], ids=["raises", "cancelled"])
def test_a_step_that_does_not_succeed_begins_nothing(
    layout: str, error: BaseException, after: bool, tmp_path: Path
) -> None:
    save(tmp_path / "a.mlxkv", OLD, layout)
    before = tree(tmp_path)
    with pytest.raises(type(error)):
        run(saving_of(tmp_path / "a.mlxkv", TOKENS, layout, run_step=Rejecting(1, error, after=after)))
    assert tree(tmp_path) == before


@each_layout
def test_cancelled_while_it_waits_for_the_step(layout: str, tmp_path: Path) -> None:
    async def main() -> None:
        step = Step()
        async with step.lock:
            task = asyncio.create_task(saving_of(tmp_path / "a.mlxkv", TOKENS, layout, run_step=step))
            await asyncio.sleep(0.01)
            task.cancel()
            await cancelled(task)
        assert step.calls == 0

    run(main())
    assert tree(tmp_path) == {}


async def cancelled(task: "asyncio.Task[Any]") -> None:
    with pytest.raises(asyncio.CancelledError):
        await task


HOLDS = {
    "monolith": ["create", "write_at", "extend_fd"],
    "rows": ["make_dir", "create", "write_all"],
}


@pytest.mark.parametrize(("layout", "held"), [(layout, name) for layout, names in HOLDS.items() for name in names])
@pytest.mark.parametrize("times", [1, 2])
def test_cancelled_while_it_writes(
    layout: str, held: str, times: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The caller waits until the writer has cleared up, however often it is told."""
    path = tmp_path / "a.mlxkv"
    save(path, OLD, layout)
    before = without_blocks(tmp_path)

    async def main() -> None:
        task = asyncio.create_task(saving_of(path, TOKENS, layout))
        await hold.wait()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        hold.released.set()
        await cancelled(task)

    with monkeypatch.context() as patched:
        hold = Held(patched, held)
        run(main())
    written = without_blocks(tmp_path)
    if held == "extend_fd":  # the last call before the name: too late to stop
        assert_holds(path, TOKENS)
        assert written.keys() == before.keys()
    else:
        assert written == before
    assert_holds(path, TOKENS if held == "extend_fd" else OLD)


def test_cancelled_while_it_hashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hashing gigabytes takes long; nothing is written after it."""
    calls = []
    monkeypatch.setattr(FileSystem, "create", lambda *args: calls.append(args))
    hold = Held(monkeypatch, "hash_all", monolith)

    async def main() -> None:
        task = asyncio.create_task(saving_of(tmp_path / "a.mlxkv", TOKENS, "monolith"))
        await hold.wait()
        task.cancel()
        await asyncio.sleep(0.01)
        hold.released.set()
        await cancelled(task)

    run(main())
    assert (calls, tree(tmp_path)) == ([], {})


@each_layout
def test_a_timeout_is_a_cancellation(layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hold = Held(monkeypatch, "create")

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.1, hold.released.set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(saving_of(tmp_path / "a.mlxkv", TOKENS, layout), 0.03)

    run(main())
    assert without_blocks(tmp_path) == {}


@each_layout
def test_a_failed_write_is_raised(layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    save(tmp_path / "a.mlxkv", OLD, layout)
    before = without_blocks(tmp_path)
    monkeypatch.setattr(FileSystem, "write_at" if layout == "monolith" else "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        run(saving_of(tmp_path / "a.mlxkv", TOKENS, layout))
    assert without_blocks(tmp_path) == before


def test_what_cannot_be_saved_is_told_from_inside_the_step(tmp_path: Path) -> None:
    step = Step()
    with pytest.raises(InvalidInput):
        run(save_kv_cache_async(tmp_path / "a.mlxkv", TOKENS, layers(5), run_step=step))
    assert (step.calls, step.running, tree(tmp_path)) == (1, False, {})


@each_layout
def test_the_caches_may_go_on_as_soon_as_the_step_has_ended(
    layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caches = layers(9)
    hold = Held(monkeypatch, "create")

    async def main() -> None:
        task = asyncio.create_task(
            save_kv_cache_async(tmp_path / "a.mlxkv", TOKENS, caches, layout=layout, run_step=Step())
        )
        await hold.wait()
        for cache in caches:  # in place: a step takes back a token and writes two others
            cache.trim(1)
            cache.update_and_fetch(*(kv(2, seed=7).keys[:, :, :2] for _ in range(2)))
        hold.released.set()
        await task

    run(main())
    assert_holds(tmp_path / "a.mlxkv", TOKENS)


@each_layout
def test_several_at_once(layout: str, tmp_path: Path) -> None:
    async def main() -> None:
        step = Step()
        await asyncio.gather(
            *(saving_of(tmp_path / f"{n}.mlxkv", [*range(n)], layout, run_step=step) for n in (3, 5, 9))
        )
        loaded = await asyncio.gather(*(load_kv_cache_async(tmp_path / f"{n}.mlxkv", run_step=step) for n in (3, 5, 9)))
        assert [one.token_count for one in loaded] == [3, 5, 9]
        assert step.calls == 3 + 2 * 3

    run(main())
    for n in (3, 5, 9):
        assert_holds(tmp_path / f"{n}.mlxkv", [*range(n)])


# ---- loading


@each_layout
@pytest.mark.parametrize("with_step", [False, True])
def test_it_loads_what_its_twin_loads(layout: str, with_step: bool, tmp_path: Path) -> None:
    save(tmp_path / "a.mlxkv", TOKENS, layout)
    step = Step() if with_step else None
    loaded = run(load_kv_cache_async(tmp_path / "a.mlxkv", fresh(), ABOUT, run_step=step, verify=True))
    assert loaded.tokens == TOKENS
    assert [facts(cache) for cache in loaded.caches] == [facts(cache) for cache in layers(9)]
    assert plain_attachments(loaded.attachments) == plain_attachments(attachments())


@each_layout
def test_arrays_are_made_inside_the_step_and_filled_elsewhere(
    layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(tmp_path / "a.mlxkv", TOKENS, layout)
    step = Step()
    domain = Domain(monkeypatch, step)
    reads: list[int] = []
    fill = files._Load.fill
    monkeypatch.setattr(files._Load, "fill", lambda *args: (reads.append(threading.get_ident()), fill(*args)))
    run(load_kv_cache_async(tmp_path / "a.mlxkv", run_step=step))
    assert step.calls == 2
    assert (domain.inside["allocate"], domain.inside["loaded"]) == ({True}, {True})
    assert MAIN not in domain.threads["open_read"] | set(reads)
    assert len(reads) == 1


@each_layout
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["at once", "after the work"])
@pytest.mark.parametrize("error", [RuntimeError("no"), asyncio.CancelledError()], ids=["raises", "cancelled"])
def test_a_step_that_does_not_succeed_leaves_nothing_open(
    layout: str, at: int, after: bool, error: BaseException, tmp_path: Path
) -> None:
    save(tmp_path / "a.mlxkv", TOKENS, layout)
    with pytest.raises(type(error)):
        run(load_kv_cache_async(tmp_path / "a.mlxkv", run_step=Rejecting(at, error, after=after)))


@each_layout
@pytest.mark.parametrize("held", ["open_read", "read_into"])
def test_cancelled_while_it_reads(layout: str, held: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save(tmp_path / "a.mlxkv", TOKENS, layout)
    hold = Held(monkeypatch, held)

    async def main() -> None:
        task = asyncio.create_task(load_kv_cache_async(tmp_path / "a.mlxkv"))
        await hold.wait()
        task.cancel()
        await asyncio.sleep(0.01)
        hold.released.set()
        await cancelled(task)

    run(main())


def test_what_does_not_fit_needs_no_step(tmp_path: Path) -> None:
    save(tmp_path / "a.mlxkv", TOKENS, "monolith")
    for expect, error in ((Identity("other", None, None), IdentityMismatch), (3, InvalidInput)):
        step = Step()
        with pytest.raises(error):
            run(load_kv_cache_async(tmp_path / "a.mlxkv", expect=expect, run_step=step))
        assert step.calls == 0
    with pytest.raises(FileNotFoundError):
        run(load_kv_cache_async(tmp_path / "none.mlxkv"))
    with pytest.raises(IdentityMismatch, match="layers"):
        run(load_kv_cache_async(tmp_path / "a.mlxkv", fresh()[:1]))


def test_damage_is_told(tmp_path: Path) -> None:
    save(tmp_path / "a.mlxkv", TOKENS, "rows")
    next((tmp_path / "blocks").iterdir()).write_bytes(b"")
    with pytest.raises(CorruptEntry):
        run(load_kv_cache_async(tmp_path / "a.mlxkv"))


# ---- the loop

WORK = [
    ("monolith", monolith, "hash_all"),
    ("monolith", FileSystem, "create"),
    ("monolith", FileSystem, "rename"),
    ("rows", FileSystem, "make_dir"),
    ("rows", FileSystem, "create"),
    ("rows", FileSystem, "rename"),
]


@pytest.mark.parametrize(("layout", "home", "name"), WORK, ids=[f"{layout} {name}" for layout, _, name in WORK])
def test_the_loop_goes_on_while_a_file_is_written(
    layout: str, home: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hold = Held(monkeypatch, name, home)
    run(let_go_by_the_loop(hold, saving_of(tmp_path / "a.mlxkv", TOKENS, layout)))
    assert_holds(tmp_path / "a.mlxkv", TOKENS)


@each_layout
@pytest.mark.parametrize(("home", "name"), [(FileSystem, "open_read"), (files._Load, "fill")])
def test_the_loop_goes_on_while_a_file_is_read(
    layout: str, home: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(tmp_path / "a.mlxkv", TOKENS, layout)
    hold = Held(monkeypatch, name, home)
    run(let_go_by_the_loop(hold, load_kv_cache_async(tmp_path / "a.mlxkv")))


async def let_go_by_the_loop(hold: Held, work: Coroutine[Any, Any, Any]) -> None:
    """A held call on the loop's own thread would wait in vain."""
    task = asyncio.create_task(work)
    await hold.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    hold.released.set()
    await task
