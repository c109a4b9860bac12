"""A store lives through anything, beside a dict that says what it must hold: the state machine of DESIGN 8.

Saves, growth, loads, removals, collections, eviction, damage from outside, deaths at any change, reopening. After
every step: references are what the headers say, what is referred to is there and true but for known damage, and du
agrees with stats.
"""

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blockstore import CorruptEntry, InvalidInput, Store, StoreFull
from blockstore.environment import Environment
from blockstore.restoring import Loaded
from fs_doubles import Crash, Killed
from store_kit import (
    all_facts,
    assert_exact,
    block_names,
    block_path,
    block_rows,
    damage,
    disk_bytes,
    header_of,
    header_paths,
    is_bad,
    lease_folders,
    named_blocks,
    needed_blocks,
    repeatable,
    report_of,
    size_of,
)
from token_caches import MODELS, identity, small_store, usable

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=10)
MODEL = st.sampled_from(sorted(MODELS))
NS = st.sampled_from(["a", "b"])
PICK = st.integers(0, 1_000_000)
UNLIMITED = 1 << 40
WINDOW = 8  # of the ring in the model "windowed"
# A change further on than this is seldom reached; small numbers shrink well.
CHANGE = st.integers(0, 60)


@dataclass(frozen=True)
class Known:
    """An entry as the dict knows it. `used` orders the uses; `pinned` ones are never evicted."""

    tokens: tuple[int, ...]
    model: str
    ns: str
    used: int
    pinned: bool = False

    @property
    def shortens(self) -> bool:
        return self.model not in ("hybrid", "windowed") or (self.model == "windowed" and len(self.tokens) < WINDOW)

    def facts(self, length: int | None = None) -> list[object]:
        return all_facts(MODELS[self.model](self.tokens[:length]))


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp()
        self.repeatable = repeatable()
        self.known: dict[str, Known] = {}
        self.bad_blocks: set[str] = set()  # damaged by us, and not written again since
        self.bad_headers: set[str] = set()
        self.condemned: set[str] = set()  # bad blocks that a load has met
        self.uses = 0
        self.open()
        self.store.set_limits(max_bytes=UNLIMITED)

    def open(self) -> None:
        self.fs = Crash()
        self.store = small_store(os.path.join(self.root, "store"), fs=self.fs)

    def teardown(self) -> None:
        with self.repeatable, contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.root)
            try:
                self.finish()
            finally:
                self.store.close()

    # ---- the dict

    def next_use(self) -> int:
        self.uses += 1
        return self.uses

    def pick(self, number: int) -> str:
        return list(self.known)[number % len(self.known)]

    def note_saved(self, entry_id: str, known: Known) -> None:
        """An entry of equal identity and tokens gives way and leaves its pin; what could be seen to be bad is whole."""
        for other in self.equal_to(known):
            known = dataclasses.replace(known, pinned=known.pinned or self.known[other].pinned)
            self.forget(other)
        self.known[entry_id] = known
        for name in named_blocks(header_of(self.store, entry_id)) & self.bad_blocks:
            assert not is_bad(self.store, name) or (name in self.hidden and name not in self.condemned)

    def equal_to(self, known: Known) -> list[str]:
        return [key for key, other in self.known.items() if (other.tokens, other.ns) == (known.tokens, known.ns)]

    def forget(self, entry_id: str) -> None:
        del self.known[entry_id]
        self.bad_headers.discard(entry_id)

    def needs(self, entry_id: str, length: int) -> set[str]:
        header = header_of(self.store, entry_id)
        return named_blocks(header) if length == len(header.tokens) else needed_blocks(header, length)

    def loads(self, entry_id: str, length: int) -> bool:
        """Whether its first `length` tokens can be had: nothing that they need is damaged."""
        return entry_id not in self.bad_headers and not self.needs(entry_id, length) & self.bad_blocks

    # ---- saving

    @rule(tokens=TOKENS, model=MODEL, ns=NS, pinned=st.sampled_from([False, False, True]))
    def save(self, tokens: list[int], model: str, ns: str, pinned: bool = False) -> None:
        known = Known(tuple(tokens), model, ns, self.next_use(), pinned)
        saved = self.store.save(tokens, MODELS[model](tokens), identity(ns), pinned=pinned)
        assert saved.entry_id not in self.known
        self.note_saved(saved.entry_id, known)

    @precondition(lambda self: self.known)
    @rule(number=PICK, more=TOKENS)
    def extend(self, number: int, more: list[int]) -> None:
        old = self.known[self.pick(number)]
        self.save([*old.tokens, *more], old.model, old.ns)

    @precondition(lambda self: self.known)
    @rule(number=PICK)
    def save_again(self, number: int) -> None:
        old = self.known[self.pick(number)]
        known = Known(old.tokens, old.model, old.ns, self.next_use())
        saved = self.store.save(old.tokens, MODELS[old.model](old.tokens), identity(old.ns))
        assert saved.blocks_written == 0 or self.bad_blocks
        self.note_saved(saved.entry_id, known)

    # ---- finding and loading

    def prompt(self, number: int, keep: int, tail: Sequence[int]) -> tuple[list[int], str]:
        old = self.known[self.pick(number)]
        return [*old.tokens[: keep % (len(old.tokens) + 1)], *tail], old.ns

    def usable(self, prompt: Sequence[int], ns: str) -> dict[str, int]:
        same = {entry_id: known for entry_id, known in self.known.items() if known.ns == ns}
        found = {entry_id: usable(known.tokens, known.shortens, 0, prompt) for entry_id, known in same.items()}
        return {entry_id: length for entry_id, length in found.items() if length}

    @precondition(lambda self: self.known)
    @rule(number=PICK, keep=PICK, tail=TOKENS)
    def find(self, number: int, keep: int, tail: list[int]) -> None:
        prompt, ns = self.prompt(number, keep, tail)
        lengths = self.usable(prompt, ns)
        found = self.store.find(prompt, identity(ns))
        assert (found.length if found else 0) == max(lengths.values(), default=0)
        assert found is None or lengths[found.entry_id] == found.length

    @precondition(lambda self: self.known)
    @rule(number=PICK, verify=st.booleans())
    def load(self, number: int, verify: bool) -> None:
        entry_id = self.pick(number)
        known = self.known[entry_id]
        if self.loads(entry_id, len(known.tokens)):
            self.assert_loaded(self.store.load(entry_id, verify=verify), entry_id)
        else:
            self.load_damaged(entry_id, None)

    @precondition(lambda self: self.known)
    @rule(number=PICK, length=PICK)
    def load_short(self, number: int, length: int) -> None:
        entry_id = self.pick(number)
        known = self.known[entry_id]
        length = length % (len(known.tokens) + 1)
        if entry_id in self.bad_headers:
            self.load_damaged(entry_id, length)
        elif length == 0 or (length < len(known.tokens) and not known.shortens):
            with pytest.raises(InvalidInput):
                self.store.load(entry_id, length=length)
        elif self.loads(entry_id, length):
            self.assert_loaded(self.store.load(entry_id, length=length), entry_id)
        else:
            self.load_damaged(entry_id, length)

    def assert_loaded(self, loaded: Loaded, entry_id: str) -> None:
        known = self.known[entry_id]
        assert tuple(loaded.tokens) == known.tokens[: len(loaded.tokens)]
        assert all_facts(loaded.caches) == known.facts(len(loaded.tokens))
        self.known[entry_id] = dataclasses.replace(known, used=self.next_use())

    def load_damaged(self, entry_id: str, length: int | None) -> None:
        with pytest.raises(CorruptEntry) as caught:
            self.store.load(entry_id, length=length)
        self.condemned |= self.bad_blocks & {str(caught.value.digest)}
        self.forget(entry_id)

    @precondition(lambda self: self.known)
    @rule(number=PICK, keep=PICK, tail=TOKENS)
    def restore(self, number: int, keep: int, tail: list[int]) -> None:
        prompt, ns = self.prompt(number, keep, tail)
        lengths = self.usable(prompt, ns)
        best = max((length for key, length in lengths.items() if self.loads(key, length)), default=0)
        failing = {key for key, length in lengths.items() if length >= best and not self.loads(key, length)}
        loaded = self.store.restore(prompt, identity(ns))
        assert (loaded.token_count if loaded else 0) == best
        for entry_id in set(self.known) - {entry.entry_id for entry in self.store.entries()}:
            assert entry_id in failing, "a load that failed drops what it met, and nothing else"
            self.forget(entry_id)
        assert all(lengths[key] == best for key in failing & set(self.known)), "what was met first was dropped"
        if loaded is not None:
            self.assert_loaded(loaded, loaded.entry_id)

    # ---- removing and collecting

    @precondition(lambda self: self.known)
    @rule(number=PICK)
    def remove(self, number: int) -> None:
        entry_id = self.pick(number)
        self.store.remove(entry_id)
        self.forget(entry_id)

    @rule(full=st.booleans())
    def gc(self, full: bool) -> None:
        self.store.gc(full=full)
        if full:
            self.drop_headerless()
        assert lease_folders(self.store) == []
        assert self.store.gc(dry_run=True).items == ()
        self.assert_collected()

    def drop_headerless(self) -> None:
        """A full collection believes the headers: an entry whose header is gone goes, too."""
        for entry_id in self.bad_headers - set(header_paths(self.store)):
            self.forget(entry_id)

    def assert_collected(self) -> None:
        if not self.bad_headers and not self.bad_blocks:
            assert_exact(self.store)

    @rule(room=st.integers(2, 20_000), tokens=TOKENS, model=MODEL, ns=NS)
    def save_under_a_cap(self, room: int, tokens: list[int], model: str, ns: str) -> None:
        """Evicts what was used the longest ago, as many as it takes; nothing that is pinned."""
        index, before = self.store._rooms.index, dict(self.known)
        # Left out: how many pages LMDB takes is not ours to foresee.
        with mock.patch.object(Environment, "used_bytes", return_value=0):
            cap = index.total_bytes() + room // 2
            self.store.set_limits(max_bytes=cap)
            with contextlib.suppress(StoreFull):
                self.save(tokens, model, ns)
                assert index.total_bytes() <= cap
        self.store.set_limits(max_bytes=UNLIMITED)
        standing = {entry.entry_id for entry in self.store.entries()}
        gone = {entry_id for entry_id in self.known if entry_id not in standing}
        assert not any(self.known[entry_id].pinned for entry_id in gone)
        kept = [known.used for entry_id, known in before.items() if entry_id in standing and not known.pinned]
        assert max((self.known[entry_id].used for entry_id in gone), default=0) <= min(kept, default=UNLIMITED)
        for entry_id in gone:
            self.forget(entry_id)

    # ---- what goes wrong

    @precondition(lambda self: bool(block_names(self.store)))
    @rule(number=PICK, how=st.sampled_from(["flip", "truncate", "delete"]))
    def damage_block(self, number: int, how: str) -> None:
        names = sorted(block_names(self.store))
        name = names[number % len(names)]
        damage(block_path(self.store, name), how)
        self.bad_blocks.add(name)

    @precondition(lambda self: bool(set(self.known) - self.bad_headers))
    @rule(number=PICK, how=st.sampled_from(["flip", "truncate", "delete"]))
    def damage_header(self, number: int, how: str) -> None:
        whole = [entry_id for entry_id in self.known if entry_id not in self.bad_headers]
        entry_id = whole[number % len(whole)]
        damage(header_paths(self.store)[entry_id], how)
        self.bad_headers.add(entry_id)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @rule(k=CHANGE, tokens=TOKENS, model=MODEL, ns=NS)
    def die_saving(self, k: int, tokens: list[int], model: str, ns: str) -> None:
        known = Known(tuple(tokens), model, ns, self.next_use())
        prepared = self.store.prepare(tokens, MODELS[model](tokens), identity(ns))
        self.die(k, lambda store: store.commit(prepared))
        new = {entry.entry_id for entry in self.store.entries()} - set(self.known)
        assert len(new) <= 1
        for entry_id in new:
            self.note_saved(entry_id, known)

    @precondition(lambda self: self.known)
    @rule(k=CHANGE, number=PICK)
    def die_removing(self, k: int, number: int) -> None:
        entry_id = self.pick(number)
        self.die(k, lambda store: store.remove(entry_id))
        if entry_id not in {entry.entry_id for entry in self.store.entries()}:
            self.forget(entry_id)

    @rule(k=CHANGE, full=st.booleans())
    def die_collecting(self, k: int, full: bool) -> None:
        self.die(k, lambda store: store.gc(full=full))
        standing = {entry.entry_id for entry in self.store.entries()}
        for entry_id in self.bad_headers - set(header_paths(self.store)) - standing:
            self.forget(entry_id)

    def die(self, k: int, act: Callable[[Store], Any]) -> None:
        """Do it in a process that dies at the k-th change, if it gets so far; then open anew."""
        self.store.entries()  # writes the uses: they are lost otherwise, and with them the order of eviction
        self.fs.arm(k)
        try:
            act(self.store)
        except Killed:
            self.fs.bury(self.store)
            self.open()
        else:
            self.fs.disarm()

    # ---- after every step

    def forget_healed(self) -> None:
        self.bad_blocks = {name for name in self.bad_blocks if is_bad(self.store, name)}
        self.condemned &= self.bad_blocks
        rows = block_rows(self.store)
        # What no look at the size shows, and somebody still refers to.
        self.hidden = {
            name
            for name in self.bad_blocks
            if name in rows and rows[name].refs and size_of(block_path(self.store, name)) == rows[name].size
        }

    @invariant()
    def what_is_indexed_is_what_is_known(self) -> None:
        found = {entry.entry_id: entry.pinned for entry in self.store.entries()}
        assert found == {entry_id: known.pinned for entry_id, known in self.known.items()}

    @invariant()
    def what_is_referred_to_is_there_and_true(self) -> None:
        self.forget_healed()
        named = {name.hex() for entry_id in self.known for name in self.store._rooms.index.digests(entry_id)}
        assert {name for name in named if is_bad(self.store, name)} <= self.bad_blocks

    @invariant()
    def the_check_finds_the_damage_that_was_done_and_nothing_else(self) -> None:
        self.forget_healed()
        report = report_of(self.store)
        assert [problem for problem in report.problems if problem.severity == "drift"] == []
        damaged = {problem.name for problem in report.problems if problem.severity == "damage"}
        assert damaged <= self.bad_blocks | self.bad_headers
        named = {
            name for key in set(self.known) - self.bad_headers for name in named_blocks(header_of(self.store, key))
        }
        assert damaged >= self.bad_headers | (named & self.bad_blocks)

    @invariant()
    def stats_say_what_du_says(self) -> None:
        stats = self.store.stats()
        assert stats.physical_bytes == disk_bytes(self.store.root)
        assert stats.entries == len(self.known)

    def finish(self) -> None:
        """Everything that was committed and not removed loads bit for bit; then nothing is left of it."""
        self.forget_healed()
        for entry_id, known in list(self.known.items()):
            if self.loads(entry_id, len(known.tokens)):
                self.assert_loaded(self.store.load(entry_id), entry_id)
            else:
                self.load_damaged(entry_id, None)
        self.store.gc(full=True)
        assert set(header_paths(self.store)) == set(self.known)
        for entry_id in self.known:
            self.store.remove(entry_id)
        self.store.gc()
        assert block_names(self.store) == set()
        assert_exact(self.store)


TestStoreMachine = StoreMachine.TestCase  # a step takes some ten milliseconds, an example has dozens: fewer of them
TestStoreMachine.settings = settings(
    max_examples=max(settings().max_examples // 5, 30), stateful_step_count=max(settings().stateful_step_count // 2, 30)
)
