"""A conversation with a small model: chunks go in, every logit is kept, answers are greedy.

Logits depend in their last bits on how a prompt is cut into chunks, so whoever compares two conversations gives both
the same chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache

from blockstore import Identity
from models.families import VOCABULARY, Family

ANSWER_TOKENS: Final = 9
FURTHER_TOKENS: Final = 10


@dataclass
class Conversation:
    """Caches, and the tokens that they encode. `logits`: one array for each chunk, [1, tokens, vocabulary]."""

    family: Family
    model: Any
    caches: list[Any]
    tokens: list[int] = field(default_factory=list)
    logits: list[mx.array] = field(default_factory=list)

    def feed(self, chunk: Sequence[int]) -> None:
        logits = self.model(mx.array([chunk]), cache=self.caches)
        mx.eval(logits)
        if self.family.kv_bits is not None:
            maybe_quantize_kv_cache(self.caches, 0, 64, self.family.kv_bits)
        self.tokens += chunk
        self.logits.append(logits)

    def feed_system_prompt(self) -> None:
        for chunk in system_prompt(self.family):
            self.feed(chunk)

    def answer(self, count: int) -> None:
        for _ in range(count):
            self.feed([self.next_token()])

    def next_token(self) -> int:
        return int(mx.argmax(self.logits[-1][0, -1]).item())

    def logits_since(self, step: int) -> mx.array:
        """Of all chunks from number `step` on, [tokens, vocabulary]."""
        return mx.concatenate(self.logits[step:], axis=1)[0]


def identity_of(name: str, ns: str = "") -> Identity:
    return Identity(model_id=name, config_fingerprint="small", tokenizer_hash=None, ns=ns)


def system_prompt(family: Family) -> list[list[int]]:
    """Its chunks."""
    tokens = _tokens(5, sum(family.system_chunks))
    return [tokens[start:stop] for start, stop in pairwise(accumulate(family.system_chunks, initial=0))]


def questions(family: Family) -> tuple[list[int], list[int]]:
    """Two that differ from their first token on."""
    first = _tokens(11, family.question_chunk)
    return first, [(token + 1) % VOCABULARY for token in first]


def _tokens(seed: int, count: int) -> list[int]:
    return [(seed * i * i + 7 * i + seed) % VOCABULARY for i in range(count)]
