"""The world of model_interleavings: a directory and an index, the atomic steps on them, and an onlooker.

Each method of World but the onlooker's is one atomic step, or part of a transaction, named as in model_interleavings.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace

ABSENT, WRITING, PRESENT = "absent", "writing", "present"
GOOD, BAD = "good", "bad"
BLOCKS = "abcdef"
STRAY, STRAY_BLOCKS = "stray", ("x", "y")  # an entry that only its header knows, as after the loss of an index


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol; True is as designed."""

    ids_are_never_reused: bool = True
    blocks_are_reserved_before_they_are_placed: bool = True
    hits_are_looked_at: bool = True
    hits_are_judged_again_when_published: bool = True
    headers_stand_before_the_index_names_them: bool = True
    equal_entries_give_way: bool = True
    the_index_goes_before_the_header: bool = True
    doomed_entries_are_remembered: bool = True
    condemning_judges_again: bool = True
    condemned_blocks_are_not_believed: bool = True
    only_free_leases_are_reaped: bool = True
    reaping_unlinks_the_header: bool = True
    row_and_file_go_in_one_step: bool = True
    full_leaves_leased_headers_alone: bool = True
    full_judges_what_is_true_now: bool = True
    orphans_go_in_the_step_that_sees_no_row: bool = True
    unreadable_headers_stop_the_sweep: bool = True

    def without(self, name: str) -> "Rules":
        return replace(self, **{name: False})


@dataclass
class Row:
    refs: int
    state: str


@dataclass(frozen=True)
class Entry:
    """What a header says: which tokens, in which blocks."""

    tokens: int
    blocks: tuple[str, ...]


class Fault(Exception):
    """The world is wrong."""


class World:
    """The directory, the index, and what an onlooker knows who sees everything."""

    def __init__(self, rng: random.Random, rules: Rules) -> None:
        self.rng, self.rules = rng, rules
        self.files: dict[str, str] = {}
        self.headers: dict[str, Entry] = {}
        self.unreadable: set[str] = set()
        self.rows: dict[str, Row] = {}
        self.entries: dict[str, Entry] = {}
        self.doomed: set[str] = set()
        self.leases: dict[str, Entry] = {}
        self.headers_of: dict[str, str] = {}  # by lease: the header that it will publish
        self.held: set[str] = set()
        self.step = self.last_id = 0
        # the onlooker's
        self.promised: dict[str, Entry] = {}
        self.damaged: dict[str, int] = {}  # block -> when; until it is written again
        self.known_bad: set[str] = set()
        self.headerless: set[str] = set()

    # ---- savers

    def new_id(self) -> str:
        self.last_id += 1
        return f"id{self.last_id}"

    def reserve(self, lease: str, header: str, entry: Entry) -> set[str]:
        """One transaction: the lease's row, and one reference a block. Returns the hits."""
        hits = set()
        for name in entry.blocks:
            row = self.rows.setdefault(name, Row(0, WRITING))
            if row.state == PRESENT and row.refs:
                hits.add(name)
            else:
                row.state = WRITING
            row.refs += 1
        self.leases[lease], self.headers_of[lease] = entry, header
        return hits

    def has(self, name: str) -> bool:
        """What a look at the size says: a flipped bit does not show."""
        return name in self.files

    def place(self, name: str) -> None:
        self.files[name] = GOOD
        self.damaged.pop(name, None)
        self.known_bad.discard(name)

    def write_header(self, header: str, entry: Entry) -> None:
        self.headers[header] = entry

    def publish(self, lease: str, entry_id: str, hits: set[str], since: int) -> tuple[list[str], list[str]]:
        """One transaction: the entry stands, or hits that were lost must be placed first. (lost, superseded)"""
        if lease not in self.leases:
            raise Fault(f"the lease of a living saver is gone: {lease}")
        entry = self.leases[lease]
        if self.rules.hits_are_judged_again_when_published:
            lost = [name for name in entry.blocks if name in hits and self.rows[name].state != PRESENT]
            if lost:
                for name in lost:
                    self.rows[name].state = WRITING
                return lost, []
        for name in entry.blocks:
            self.judge_published(name, name in hits, since)
            self.rows[name].state = PRESENT
        equal = [key for key, other in self.entries.items() if other.tokens == entry.tokens]
        superseded = equal if self.rules.equal_entries_give_way else []
        for key in superseded:
            self.doom(key)
        self.entries[entry_id] = self.promised[entry_id] = entry
        del self.leases[lease]
        return [], superseded

    def judge_published(self, name: str, hit: bool, since: int) -> None:
        """The onlooker: a save must not build on what was already known to be bad, or could be seen to be gone.

        For a block that it placed itself it answers, whatever was done to that since.
        """
        if not hit:
            self.known_bad.discard(name)
        elif self.files.get(name) != GOOD:
            if name in self.known_bad:
                raise Fault(f"published over a block that is known to be bad: {name}")
            if name not in self.files and self.damaged.get(name, since) < since:
                raise Fault(f"published over a block that had long been gone: {name}")

    # ---- removing

    def unrefer(self, entry: Entry) -> None:
        for name in entry.blocks:
            self.rows[name].refs -= 1

    def doom(self, entry_id: str) -> None:
        """Part of a transaction: the entry leaves the index."""
        self.unrefer(self.entries.pop(entry_id))
        self.promised.pop(entry_id, None)
        if self.rules.doomed_entries_are_remembered:
            self.doomed.add(entry_id)

    def condemn(self, entry_id: str, seen: Entry, bad: str) -> bool:
        """One transaction: judge again, then doom, and believe the bad block no longer. `bad` may be "header"."""
        if self.entries.get(entry_id) != seen and self.rules.condemning_judges_again:
            return False
        still_bad = entry_id not in self.headers if bad == "header" else self.files.get(bad) != GOOD
        if not still_bad and self.rules.condemning_judges_again:
            return False
        if still_bad and bad in self.rows:
            self.known_bad.add(bad)
            if self.rules.condemned_blocks_are_not_believed and self.rows[bad].state == PRESENT:
                self.rows[bad].state = ABSENT
        if entry_id in self.entries:
            if not still_bad and self.is_whole(self.entries[entry_id]):
                raise Fault(f"a load that failed drops an entry that is whole again: {entry_id}")
            self.doom(entry_id)
        return True

    def is_whole(self, entry: Entry) -> bool:
        return all(self.files.get(name) == GOOD for name in entry.blocks)

    # ---- collecting

    def reap(self, lease: str) -> None:
        """One transaction: undo what a lease holds."""
        if lease in self.leases:
            if self.rules.reaping_unlinks_the_header:
                self.headers.pop(self.headers_of[lease], None)
            self.unrefer(self.leases.pop(lease))

    def dead(self) -> list[str]:
        return [name for name, row in sorted(self.rows.items()) if row.refs == 0]

    def judge(self, header: str, indexed: bool, standing: Entry | None) -> None:
        """One transaction of the full collection: bring one header and its entry together."""
        if indexed:
            if standing is None and header in self.entries:
                self.doom(header)
            return
        leased = (
            {self.headers_of[lease] for lease in self.leases} if self.rules.full_leaves_leased_headers_alone else ()
        )
        if standing is None or header in self.doomed or header in leased or header in self.unreadable:
            return
        equal = any(other.tokens == standing.tokens for other in self.entries.values())
        if equal or not self.is_whole(standing):
            self.doomed.add(header)
            return
        for name in standing.blocks:
            row = self.rows.setdefault(name, Row(0, PRESENT))
            row.refs, row.state = row.refs + 1, PRESENT
        self.entries[header] = self.promised[header] = standing

    # ---- the onlooker

    def check(self) -> None:
        """After every step."""
        for entry_id, entry in self.promised.items():
            if self.entries.get(entry_id) != entry:
                raise Fault(f"an entry that nobody removed has vanished: {entry_id}")
        for entry_id, entry in self.entries.items():
            for name in entry.blocks:
                if self.files.get(name) != GOOD and name not in self.damaged:
                    raise Fault(f"lost: block {name} of {entry_id}")
        if len({entry.tokens for entry in self.entries.values()}) < len(self.entries):
            raise Fault("two entries of equal tokens")
        if {name: row.refs for name, row in self.rows.items() if row.refs} != self.counted():
            raise Fault("references are not what entries and leases say")
        for header, entry in self.headers.items():
            if (
                header == STRAY
                and header not in self.entries
                and header not in self.doomed
                and not self.is_whole(entry)
            ):
                raise Fault("lost: a block of an entry that only its header knows")

    def counted(self) -> dict[str, int]:
        counted: Counter[str] = Counter()
        for entry in (*self.entries.values(), *self.leases.values()):
            counted.update(entry.blocks)
        return dict(counted)

    def check_collected(self) -> None:
        """When everybody is gone and one collector has finished. What no row ever named is not its business."""
        self.check()
        if set(self.headers) - set(self.entries) - {STRAY}:
            raise Fault("a header without an entry is left")
        if set(self.entries) - set(self.headers) - self.headerless:
            raise Fault("an entry without its header is left")
        if any(self.headers.get(key, entry) != entry for key, entry in self.entries.items()):
            raise Fault("a header and the index name different blocks")
        if self.leases or self.doomed or set(self.rows) != set(self.counted()):
            raise Fault("rows are left that nobody needs")

    def check_fully_collected(self) -> None:
        """After a full collection, too: headers, entries, rows and files agree."""
        self.check()
        if set(self.headers) != set(self.entries) or set(self.rows) != set(self.counted()):
            raise Fault("headers, entries and rows disagree")
        if set(self.files) - set(self.rows):
            raise Fault("files are left that nobody needs")
