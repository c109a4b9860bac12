"""find against the plain reading of its promise: every entry compared with the prompt, token by token."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstore import EntryGone, Identity, InvalidInput, Store
from blockstore.listing import entries_of
from blockstore.prefixes import MAX_TOKEN
from store_kit import all_facts, block_path, flip, header_of, header_paths, named_blocks, served
from token_caches import IDENTITY, hybrid, identity, plain, small_store, usable

_numbers = itertools.count()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with small_store(tmp_path_factory.mktemp("find") / "store", span=64) as opened:
        yield opened


# ---- the oracle


class Known:
    """An entry as the oracle sees it."""

    def __init__(self, tokens: Sequence[int], shortens: bool, minimum: int, who: Identity) -> None:
        self.tokens, self.shortens, self.minimum, self.who = list(tokens), shortens, minimum, who
        self.id = ""

    def save(self, store: Store) -> str:
        caches = plain(self.tokens, minimum=self.minimum) if self.shortens else hybrid(self.tokens)
        self.id = store.save(self.tokens, caches, self.who).entry_id
        return self.id

    def usable(self, prompt: Sequence[int]) -> int:
        return usable(self.tokens, self.shortens, self.minimum, prompt)


def assert_finds_the_longest(store: Store, known: Sequence[Known], prompt: Sequence[int], who: Identity) -> None:
    lengths = {entry.id: entry.usable(prompt) for entry in known if entry.who == who}
    best = max(lengths.values(), default=0)
    found = store.find(prompt, who)
    if best == 0:
        assert found is None
        return
    assert found is not None
    assert (found.length, lengths[found.entry_id]) == (best, best)
    assert found.entry_length == next(len(entry.tokens) for entry in known if entry.id == found.entry_id)


# ---- random stores

# Few different tokens, so that prefixes agree by chance; lengths around the boundaries of 64.
TOKEN = st.integers(0, 2)
LENGTH = st.sampled_from([1, 2, 5, 62, 63, 64, 65, 66, 100, 126, 127, 128, 129, 130, 192, 200])


@st.composite
def branches(draw: st.DrawFn) -> list[list[int]]:
    """Token lists, most of which begin as another one does."""
    found = [[draw(TOKEN)] * draw(LENGTH)]
    for _ in range(draw(st.integers(0, 7))):
        trunk = draw(st.sampled_from(found))
        stem = trunk[: draw(st.integers(0, len(trunk)))]
        tail = draw(st.lists(TOKEN, min_size=1, max_size=4)) + [draw(TOKEN)] * draw(st.sampled_from([0, 0, 60, 70]))
        found.append(stem + tail)
    return found


@st.composite
def stores(draw: st.DrawFn) -> list[Known]:
    people = [identity(f"{next(_numbers)}") for _ in range(2)]
    known = {}
    for tokens in draw(branches()):
        minimum = draw(st.sampled_from([0, 0, 0, 1, len(tokens) // 2, max(len(tokens) - 1, 0), len(tokens)]))
        entry = Known(tokens, draw(st.sampled_from([True, True, False])), minimum, draw(st.sampled_from(people)))
        known[entry.who.ns, tuple(tokens)] = entry
    return list(known.values())


@given(stores(), st.data())
def test_the_longest_usable_prefix_is_found(store: Store, known: list[Known], data: st.DataObject) -> None:
    for entry in known:
        entry.save(store)
    people = [entry.who for entry in known]
    for entry in known:
        at = data.draw(st.integers(0, len(entry.tokens) - 1))
        for prompt in (
            entry.tokens,
            [*entry.tokens, 0],
            [*entry.tokens, 1, 2, *[0] * 70],
            entry.tokens[: at + 1],
            [*entry.tokens[:at], 3, *entry.tokens[at + 1 :]],
            [*entry.tokens[:at], (entry.tokens[at] + 1) % 3, *entry.tokens[at + 1 :], 0],
        ):
            assert_finds_the_longest(store, known, prompt, data.draw(st.sampled_from(people)))
    gone = data.draw(st.sampled_from(known))
    store.remove(gone.id)
    left = [entry for entry in known if entry is not gone]
    for entry in known:
        assert_finds_the_longest(store, left, [*entry.tokens, 0], gone.who)
    for entry in left:
        store.remove(entry.id)
    for entry in known:
        assert store.find([*entry.tokens, 0], entry.who) is None


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 130])
def test_prompts_that_diverge_at_every_position(count: int, store: Store) -> None:
    who = identity(f"{next(_numbers)}")
    tokens = [i % 5 for i in range(count)]
    known = [
        Known(tokens, True, 0, who),
        Known([*tokens, 9, 9], True, count // 2, who),
        Known(tokens[: count // 2 + 1], False, 0, who),
        Known([*tokens[: count // 3], 8, *tokens], True, 0, who),
    ]
    known = list({tuple(entry.tokens): entry for entry in known}.values())
    for entry in known:
        entry.save(store)
    for entry in known:
        for at in range(len(entry.tokens)):
            assert_finds_the_longest(store, known, [*entry.tokens[:at], 7, *entry.tokens[at + 1 :], 1], who)
            assert_finds_the_longest(store, known, entry.tokens[: at + 1], who)


# ---- identities

OTHERS = [
    Identity("model", "config", "tokenizer", "x"),
    Identity("model", "config", "other", ""),
    Identity("model", "other", "tokenizer", ""),
    Identity("other", "config", "tokenizer", ""),
]


@pytest.mark.parametrize("other", OTHERS, ids=["ns", "tokenizer", "config", "model"])
def test_what_another_identity_saved_is_never_found(other: Identity, store: Store) -> None:
    tokens = [4, 4, 4, next(_numbers)]
    saved = store.save(tokens, plain(tokens), other)
    assert store.find([*tokens, 1], IDENTITY) is None
    assert served(store.find([*tokens, 1], other)) == (saved.entry_id, 4, 4)


# ---- what tokens may be

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", ">u4", ">i8")
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "tuple": tuple,
    "range": lambda tokens: range(tokens[0], tokens[-1] + 1),
    "numpy, strided": lambda tokens: np.repeat(np.array(tokens), 3)[::3],
    **{f"numpy {name}": partial(np.array, dtype=name) for name in INTEGERS},
    **{str(dtype): partial(mx.array, dtype=dtype) for dtype in (mx.uint8, mx.int32, mx.uint32, mx.int64)},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_tokens_may_be_any_sequence_of_integers(form: Callable[[list[int]], Any], store: Store) -> None:
    who, tokens = identity(f"{next(_numbers)}"), list(range(3, 103))
    saved = store.save(form(tokens), plain(tokens), who)
    assert served(store.find(form([*tokens, 103]), who)) == (saved.entry_id, 100, 100)
    assert served(store.find(form(tokens), who)) == (saved.entry_id, 99, 100)
    assert store.load(saved.entry_id).tokens == tokens


@pytest.mark.parametrize(
    "tokens",
    [[-1, 2], [1.5], [MAX_TOKEN + 1, 1], "12", [[1, 2]], np.array([[1, 2]]), np.array([1.0]), np.array([-1, 3]), None,
     mx.array([[1]]), mx.array([0.5, 1.0])],
    ids=repr,
)  # fmt: skip
def test_what_is_no_list_of_tokens_is_refused(tokens: Any, store: Store) -> None:
    with pytest.raises(InvalidInput):
        store.find(tokens, IDENTITY)


def test_the_largest_token_and_zero_are_tokens_like_others(store: Store) -> None:
    who, tokens = identity(f"{next(_numbers)}"), [0, MAX_TOKEN, 0, MAX_TOKEN]
    saved = store.save(tokens, plain(tokens), who)
    assert served(store.find([*tokens, MAX_TOKEN], who)) == (saved.entry_id, 4, 4)
    assert served(store.find([0, MAX_TOKEN, 0, 0, 0], who)) == (saved.entry_id, 3, 4)


@pytest.mark.parametrize("prompt", [[], [1]])
def test_nothing_is_found_for_a_prompt_without_a_token_to_spare(prompt: list[int], store: Store) -> None:
    who = identity(f"{next(_numbers)}")
    store.save([1], plain([1]), who)
    assert store.find(prompt, who) is None


# ---- restore


def spoil_block(store: Store, entry_id: str) -> None:
    shorter = [named_blocks(header_of(store, other)) for other in header_paths(store) if other != entry_id]
    own = named_blocks(header_of(store, entry_id)) - set().union(*shorter)
    flip(block_path(store, min(own)))


def lose_block(store: Store, entry_id: str) -> None:
    shorter = [named_blocks(header_of(store, other)) for other in header_paths(store) if other != entry_id]
    block_path(store, min(named_blocks(header_of(store, entry_id)) - set().union(*shorter))).unlink()


def spoil_header(store: Store, entry_id: str) -> None:
    flip(header_paths(store)[entry_id])


def lose_header(store: Store, entry_id: str) -> None:
    header_paths(store)[entry_id].unlink()


DAMAGE = [spoil_block, lose_block, spoil_header, lose_header]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_hides_no_shorter_good_one_and_is_dropped(
    damage: Callable[[Store, str], None], store: Store
) -> None:
    who, tokens = identity(f"{next(_numbers)}"), [next(_numbers) for _ in range(200)]
    good = store.save(tokens[:70], plain(tokens[:70]), who)
    bad = store.save(tokens, plain(tokens), who)
    assert served(store.find([*tokens, 1], who)) == (bad.entry_id, 200, 200)
    damage(store, bad.entry_id)
    loaded = store.restore([*tokens, 1], who)
    assert loaded is not None
    assert (loaded.entry_id, loaded.tokens) == (good.entry_id, tokens[:70])
    assert all_facts(loaded.caches) == all_facts(plain(tokens[:70]))
    with pytest.raises(EntryGone):
        store.load(bad.entry_id)
    assert served(store.find([*tokens, 1], who)) == (good.entry_id, 70, 70)


def test_restore_gives_none_where_every_candidate_is_damaged(store: Store) -> None:
    who, tokens = identity(f"{next(_numbers)}"), [next(_numbers) for _ in range(90)]
    for count in (5, 64, 90):
        lose_header(store, store.save(tokens[:count], plain(tokens[:count]), who).entry_id)
    assert store.restore([*tokens, 1], who) is None
    assert store.find([*tokens, 1], who) is None


def test_restore_goes_on_where_the_longest_does_not_fit_the_model(store: Store) -> None:
    who, tokens = identity(f"{next(_numbers)}"), [next(_numbers) for _ in range(20)]
    fits = store.save(tokens[:9], plain(tokens[:9]), who)
    other = store.save(tokens, plain(tokens, layers=2), who)
    loaded = store.restore([*tokens, 1], who, plain([]))
    assert loaded is not None
    assert loaded.entry_id == fits.entry_id
    assert store.load(other.entry_id).tokens == tokens


# ---- all of one identity


def test_the_entries_of_one_identity_are_listed_without_the_others(store: Store) -> None:
    who = [identity(f"listed-{next(_numbers)}") for _ in range(3)]
    known = [
        Known(range(100, 100 + count), shortens, 0, who[0]) for count, shortens in [(3, True), (200, False), (70, True)]
    ]
    others = [Known(range(100, 164), True, 0, who[1])]
    for entry in known + others:
        entry.save(store)
    provider_id = store.provider.id
    longest_first = [known[1].id, known[2].id, known[0].id]
    assert [entry.entry_id for entry in entries_of(store.rooms, who[0], provider_id)] == longest_first
    assert [entry.entry_id for entry in entries_of(store.rooms, who[1], provider_id)] == [others[0].id]
    assert entries_of(store.rooms, who[2], provider_id) == []
    assert entries_of(store.rooms, who[0], "another provider") == []
    store.remove(known[2].id)
    assert [entry.token_count for entry in entries_of(store.rooms, who[0], provider_id)] == [200, 3]
