"""The third model, which the code itself drives: real stores whose steps a seed interleaves, with deaths and damage.

An onlooker who sees every transaction judges each of them on the spot: what is published must be there, what is doomed
must be removed, superseded, evicted or bad, and no file goes that somebody still needs. Whoever loads gets the right
bytes or a clean miss. When all have ended, one collection leaves exactly what lives.
"""

import contextlib
import functools
import itertools
import os
import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import kvcodecs
from blockstore import CacheMiss, EntryGone, Store, StoreFull, admission, check, leases, preparing, probe
from blockstore.blocks import Blocks
from blockstore.environment import Environment
from blockstore.errors import BlockstoreError
from blockstore.index import Index
from blockstore.leases import Lease, Leases
from blockstore.ledger import Ledger
from blockstore.meta import Meta
from blockstore.rooms import Rooms
from store.scheduler import Actor, Content, Doing, Onlooker, Scheduler
from store_kit import (
    all_facts,
    assert_clean,
    assert_exact,
    disk_bytes,
    header_paths,
    repeatable,
)
from token_caches import MODELS, identity, small_store, usable

SCHEDULES, SOAK = 150, 6_000
UNLIMITED = 1 << 40
LONGEST = 500  # steps; few schedules take more


SHORT, LONG = tuple(range(12)), tuple(range(16))
CONTENTS = [
    Content(SHORT), Content(LONG), Content((*range(10), 90, 91, 92)), Content(tuple(range(50, 56))),
    Content(SHORT, "other"), Content(SHORT, model="hybrid"), Content(LONG, "other", "hybrid"),
]  # fmt: skip
STRAY = Content(tuple(range(70, 79)))  # an entry that only its header knows, as after the loss of an index


@functools.cache
def prepared(content: Content, pinned: bool = False) -> Any:
    """A snapshot, to be committed any number of times."""
    caches = MODELS[content.model](content.tokens)
    meta = Meta(model_id="model", config_fingerprint="config", tokenizer_hash="tokenizer", ns=content.ns)
    provider = kvcodecs.default_provider()
    return preparing.prepare(provider, content.tokens, caches, meta, span=4, block_bytes=1024, pinned=pinned)


@functools.cache
def facts_of(content: Content, count: int) -> list[object]:
    return all_facts(MODELS[content.model](content.tokens[:count]))


# ---- what the onlooker is told


@contextlib.contextmanager
def watched(onlooker: Onlooker) -> Iterator[None]:
    """Tell of every transaction that matters, from its inside: no other step comes before it is committed."""
    fulfil, doom, adopt, add_lease = Ledger.fulfil, Ledger.doom, Ledger.adopt, Ledger.add_lease
    condemn = Index.condemn

    def fulfilled(books: Ledger, lease_id: str, entry: Any, tokens: bytes) -> None:
        lease = books.lease(lease_id)
        fulfil(books, lease_id, entry, tokens)
        assert lease is not None
        assert onlooker.doing.content is not None
        onlooker.published(lease_id, onlooker.doing.content, lease.digests, entry.pinned)

    def doomed(books: Ledger, entry_id: str) -> bool:
        done = doom(books, entry_id)
        if done:
            onlooker.doomed(entry_id)
        return done

    def adopted(books: Ledger, entry_id: str, entry: Any, tokens: bytes, sizes: dict[bytes, int]) -> None:
        adopt(books, entry_id, entry, tokens, sizes)
        onlooker.adopted(entry_id, STRAY, b"".join(sizes))

    def leased(books: Ledger, lease_id: str, *args: Any) -> None:
        add_lease(books, lease_id, *args)
        assert onlooker.scheduler is not None
        onlooker.began[lease_id] = onlooker.scheduler.steps

    def condemned(index: Index, entry_id: str, seen: Any, bad: bytes | None, still_bad: Any) -> bool:
        done = condemn(index, entry_id, seen, bad, still_bad)
        if done and bad is not None and onlooker.is_bad(bad.hex()):
            onlooker.condemned.add(bad.hex())
        return done

    hooks = {"fulfil": fulfilled, "doom": doomed, "adopt": adopted, "add_lease": leased}
    with contextlib.ExitStack() as stack:
        for name, hook in hooks.items():
            stack.enter_context(mock.patch.object(Ledger, name, hook))
        stack.enter_context(mock.patch.object(Index, "condemn", condemned))
        yield


# ---- what actors do


class Play:
    """One schedule: who takes part, what they do, what happens to them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.root = str(root)
        self.onlooker = Onlooker(self.root, capped=self.rng.random() < 0.25)
        self.scheduler = Scheduler(self.rng, self.onlooker, self.rng.choice([0.03, 0.1, 0.3, 1.0]))
        self.onlooker.scheduler = self.scheduler
        self.has_stray = self.rng.random() < 0.3
        self.spared: set[str] = set()
        self.harms = self.rng.choice([0, 0, 1, 2])

    def run(self) -> None:
        with self.surroundings():
            self.begin()
            with self.scheduler.in_charge(), watched(self.onlooker):
                self.cast()
                self.scheduler.run()
                self.end()

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        numbers = itertools.count()
        ids = SimpleNamespace(token_hex=lambda size: sha256(b"%d %d" % (self.seed, next(numbers))).hexdigest()[:32])
        with (
            repeatable(),
            # Ids follow from the seed too, and no other schedule in this store has the same.
            mock.patch.object(leases, "secrets", ids),
            # A second process that walks the index takes most of a second.
            mock.patch.object(probe, "survey", return_value={}),
            # How many pages LMDB takes is not ours to foresee.
            mock.patch.object(Environment, "used_bytes", return_value=0),
        ):
            yield

    def begin(self) -> None:
        """A store with two entries, perhaps a header that no row knows, perhaps a cap that leaves room for little."""
        with small_store(self.root) as store:
            if self.has_stray:
                self.onlooker.stray = stray_in(store)
                self.spared = set(os.listdir(Path(self.root, "blocks")))
            for content in self.rng.sample(CONTENTS[:4], 2):
                entry_id = store.commit(prepared(content)).entry_id
                digests = b"".join(store._rooms.index.digests(entry_id))
                self.onlooker.published(entry_id, content, digests, pinned=False)
            if self.onlooker.capped:
                room = self.rng.randint(5, 12) * store._rooms.index.on_disk(1)
                store.set_limits(max_bytes=admission.used_bytes(store._rooms) + room)

    def cast(self) -> None:
        others = [self.loads, self.restores, self.removes, self.collects, self.collects_fully, self.checks, self.looks]
        roles = [[self.saves, self.loads], [self.saves], *([role] for role in self.rng.sample(others, 4))]
        for role in roles:
            left = self.rng.randint(1, 250) if self.rng.random() < 0.35 else None
            process = self.scheduler.process(*role, left=left)
            process.store = small_store(self.root, fs=process)
        for _ in range(self.harms):
            self.scheduler.events[self.rng.randint(1, LONGEST)] = self.harm

    def harm(self) -> None:
        """Damage a block or a header from outside."""
        blocks = sorted(set(os.listdir(Path(self.root, "blocks"))) - self.spared)
        headers = sorted(key for key in self.onlooker.live if self.onlooker.header_path(key) is not None)
        if not blocks and not headers:
            return
        name = self.rng.choice([*blocks, *headers])
        path = self.onlooker.path(name) if name in blocks else self.onlooker.header_path(name)
        assert path is not None
        self.onlooker.harm(name, path, self.rng.choice(["flip", "truncate", "delete"]))

    def saves(self, actor: Actor) -> None:
        for _ in range(self.rng.randint(1, 3)):
            content, pinned = self.rng.choice(CONTENTS), self.rng.random() < 0.1
            actor.doing = Doing("save", content)
            try:
                saved = store_of(actor).commit(prepared(content, pinned))
            except StoreFull:
                self.onlooker.judge(self.onlooker.capped, "says that there is no room")
            else:
                self.onlooker.judge(saved.entry_id in self.onlooker.contents, "says that it saved, and has not")

    def loads(self, actor: Actor) -> None:
        for _ in range(self.rng.randint(1, 3)):
            actor.doing = Doing("load")
            entries = store_of(actor).entries()
            if entries:
                self.load(store_of(actor), self.rng.choice(entries).entry_id)

    def load(self, store: Store, entry_id: str) -> None:
        lives = entry_id in self.onlooker.live
        try:
            loaded = store.load(entry_id)
        except CacheMiss as error:
            lost = lives and entry_id in self.onlooker.live and self.onlooker.untouched(entry_id)
            self.onlooker.judge(not lost, f"an entry that lives does not load: {error}")
        else:
            self.onlooker.judge(
                all_facts(loaded.caches) == facts_of(self.onlooker.contents[entry_id], loaded.token_count),
                "got wrong bytes",
            )

    def restores(self, actor: Actor) -> None:
        for _ in range(self.rng.randint(1, 3)):
            actor.doing = Doing("load")
            wanted = self.rng.choice(CONTENTS)
            prompt = [*wanted.tokens, 1]
            before = set(self.onlooker.live)
            loaded = store_of(actor).restore(prompt, identity(wanted.ns))
            stable = [key for key in before & self.onlooker.live.keys() if self.onlooker.untouched(key)]
            least = max((self.usable(key, prompt, wanted.ns) for key in stable), default=0)
            count = loaded.token_count if loaded is not None else 0
            self.onlooker.judge(count >= least, f"restores {count} tokens of {least} that were there")
            if loaded is not None:
                right = facts_of(self.onlooker.contents[str(loaded.entry_id)], count)
                self.onlooker.judge(all_facts(loaded.caches) == right, "got wrong bytes")

    def usable(self, entry_id: str, prompt: list[int], ns: str) -> int:
        content = self.onlooker.live[entry_id]
        return usable(content.tokens, content.model == "plain", 0, prompt) if content.ns == ns else 0

    def removes(self, actor: Actor) -> None:
        store = store_of(actor)
        for _ in range(self.rng.randint(1, 3)):
            actor.doing = Doing("look")
            entries = store.entries()
            if not entries:
                continue
            entry_id = self.rng.choice(entries).entry_id
            actor.doing = Doing("remove", entry_id=entry_id)
            with contextlib.suppress(EntryGone):
                if self.rng.random() < 0.3:
                    store.pin(entry_id)
                    self.onlooker.pinned.add(entry_id)
                    continue
                store.remove(entry_id)
            self.onlooker.judge(entry_id not in self.onlooker.live, f"says that {entry_id} is gone")

    def collects(self, actor: Actor) -> None:
        for _ in range(self.rng.randint(1, 3)):
            actor.doing = Doing("collect")
            store_of(actor).gc()

    def collects_fully(self, actor: Actor) -> None:
        actor.doing = Doing("full")
        store_of(actor).gc(full=True)

    def checks(self, actor: Actor) -> None:
        actor.doing = Doing("check")
        store = store_of(actor)
        report = check.check(store._layout, store._rooms, deep=True, progress=lambda done, total: None)
        wrong = [problem for problem in report.problems if problem.severity != "leftover"]
        strange = [problem for problem in wrong if problem.name != self.onlooker.stray]
        self.onlooker.judge(strange == [] or self.harms > 0, f"finds what is not there: {strange}")

    def looks(self, actor: Actor) -> None:
        actor.doing = Doing("look")
        store_of(actor).stats()
        store_of(actor).gc(dry_run=True, full=self.rng.random() < 0.5)

    # ---- when all have ended

    def end(self) -> None:
        onlooker = self.onlooker
        assert onlooker.faults == []
        last = Actor(self.scheduler.process(), lambda actor: None)
        self.scheduler.current = last
        with small_store(self.root) as store:
            assert {entry.entry_id for entry in store.entries()} == set(onlooker.live)
            last.doing = Doing("load")
            for entry_id in list(onlooker.live):
                self.load(store, entry_id)
                assert entry_id in onlooker.live or not onlooker.untouched(entry_id)
            last.doing = Doing("full" if onlooker.stray else "collect")
            store.gc(full=bool(onlooker.stray))
            assert onlooker.faults == []
            assert {entry.entry_id for entry in store.entries()} == set(onlooker.live)
            assert onlooker.stray in ["", *onlooker.contents]
            assert_exact(store)
            assert_clean(store)
            assert store.stats().physical_bytes == disk_bytes(store.root)
            for entry_id in list(onlooker.live):
                last.doing = Doing("remove", entry_id=entry_id)
                store.remove(entry_id)
            store.gc()
            assert os.listdir(Path(self.root, "blocks")) == []
            store.set_limits(max_bytes=UNLIMITED)
        self.scheduler.current = None


def store_of(actor: Actor) -> Store:
    assert actor.process.store is not None
    return actor.process.store


def stray_in(store: Store) -> str:
    """Save an entry and let the index forget it."""
    entry_id = store.commit(prepared(STRAY)).entry_id
    paths = [header_paths(store)[entry_id], *Path(store.root, "blocks").iterdir()]
    kept = [(path, path.read_bytes()) for path in paths]
    store.remove(entry_id)
    store.gc()
    for path, data in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return entry_id


def play(root: Path, seeds: range) -> None:
    """Every schedule begins with the empty store that the one before has left."""
    small_store(root, max_bytes=UNLIMITED).close()
    for seed in seeds:
        try:
            Play(root, seed).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.slow
def test_whatever_the_order_of_steps_nothing_is_lost_and_nothing_wrong(tmp_path: Path) -> None:
    play(tmp_path / "store", range(SCHEDULES))


def read_unverified(blocks: Blocks, digest: bytes, buffer: memoryview, *, verify: bool) -> None:
    READ(blocks, digest, buffer, verify=False)


def lock_unasked(leases: Leases, folder: str) -> Lease | None:
    try:
        fd = leases._fs.open_lock(os.path.join(folder, "lock"))
    except FileNotFoundError:
        return None
    return Lease(leases._fs, folder, fd, leases._aside)


READ = Blocks.read
# Rules of the protocol, each broken in the code, and found within the first schedules.
BROKEN: dict[str, tuple[type, str, Any]] = {
    "a hit is believed without a look at its size": (Blocks, "has", lambda *args: True),
    "the header of a dead saver stays": (Rooms, "unlink_header", lambda *args: False),
    "a digest is not compared": (Blocks, "read", read_unverified),
    "a living saver is reaped": (Leases, "_lock", lock_unasked),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found(rule: str, tmp_path: Path) -> None:
    with mock.patch.object(*BROKEN[rule]), pytest.raises((AssertionError, BlockstoreError, OSError)):
        play(tmp_path / "store", range(SCHEDULES))


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_whatever_the_order_of_steps_in_many_more_schedules(part: int, tmp_path: Path) -> None:
    size = SOAK // 10
    play(tmp_path / "store", range(SCHEDULES + part * size, SCHEDULES + (part + 1) * size))
