"""A model server without its sockets: mlx-lm's own generation thread over small models, with a tokenizer of bytes."""

import argparse
import contextlib
import dataclasses
import queue
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from mlx_lm import server as mlx_server
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blockstore import Identity, PersistentPromptCache, Store
from blockstore.checkpoints import Checkpoints
from blockstore.resume import response_generator
from models.families import FAMILIES, VOCABULARY

PROMPT: Final = "What floats, and why? " * 3
END: Final = "<end>"
EVERY: Final = 5
# What keeps a text going: nothing ends it before max_tokens.
NO_END: Final = {VOCABULARY - 1: -100.0}
# Characters of two and three bytes, which a token each is a part of.
_ALPHABET: Final = (
    "\n ?,.abcdefghijklmnopqrstuvwxyzWéüß€→漢字かな語" + "ABCDEFGHIJKLMNOPQRSTUVXYZ0123456789-+=:;()[]{}<>_*"
)
_PATIENCE_S: Final = 60


@cache
def tokenizer() -> TokenizerWrapper:
    """A token is a byte; the last one of the vocabulary ends a text."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = dict.fromkeys(split.pre_tokenize_str(_ALPHABET)[0][0])
    vocabulary = {symbol: number for number, symbol in enumerate([*symbols][: VOCABULARY - 1])}
    assert len(vocabulary) == VOCABULARY - 1
    made = Tokenizer(models.BPE(vocab={**vocabulary, END: VOCABULARY - 1}, merges=[]))
    made.pre_tokenizer = split
    made.decoder = decoders.ByteLevel()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END), BPEStreamingDetokenizer)


def tokens_of(text: str) -> list[int]:
    return list(tokenizer().encode(text))


class Provider:
    """Stands where ModelProvider stands, with one model, which is built on the generation thread."""

    model: Any = None
    processor = None
    draft_model = None

    def __init__(self, name: str, *, is_batchable: bool = False, **settings: Any) -> None:
        self.cli_args = argparse.Namespace(
            **{
                "prefill_step_size": 32,
                "kv_bits": FAMILIES[name].kv_bits,
                "kv_group_size": 64,
                "quantized_kv_start": 0,
                "prompt_cache_bytes": None,
                "decode_concurrency": 2,
                "prompt_concurrency": 2,
                **settings,
            }
        )
        self.tokenizer = tokenizer()
        self.model_key = (name, None, None)
        self.is_batchable = is_batchable

    def load_default(self) -> None:
        self.model = FAMILIES[self.model_key[0]].build()

    def load(self, *names: Any) -> tuple[Any, Any]:
        return self.model, self.tokenizer

    def reset(self) -> None:
        self.model = None


def identity_of(model_key: Any) -> Identity:
    return Identity(model_key[0], "config", "bytes")


def arguments(**changed: Any) -> Any:
    """What a client asks for: of GenerationArguments, of its `sampling` or its `logits`, by name."""
    sampling = {
        "temperature": 1.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
    }
    logits = {
        "logit_bias": None, "repetition_penalty": 0.0, "repetition_context_size": 20, "presence_penalty": 0.0,
        "presence_context_size": 20, "frequency_penalty": 0.0, "frequency_context_size": 20,
    }  # fmt: skip
    others = {
        "stop_words": [], "max_tokens": 48, "num_draft_tokens": 3, "logprobs": False, "top_logprobs": -1, "seed": 7,
        "chat_template_kwargs": None,
    }  # fmt: skip
    for known in (sampling, logits, others):
        known.update({name: changed.pop(name) for name in list(changed) if name in known})
    assert not changed
    return mlx_server.GenerationArguments(
        model=mlx_server.ModelDescription("default_model", "default_model", None),
        sampling=mlx_server.SamplingArguments(**sampling),
        logits=mlx_server.LogitsProcessorArguments(**logits),
        **others,
    )


@dataclasses.dataclass
class Answer:
    """What a client got, token by token. cached_tokens is what the server says of the prompt."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    parts: list[str] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Client(queue.Queue[Any]):
    """Gets what the generation thread says. on_token is called on that thread, with the number of tokens so far."""

    def __init__(self, on_token: Callable[[int], object]) -> None:
        super().__init__()
        self._on_token = on_token
        self._count = 0
        self.context: Any = None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        if hasattr(item, "prompt_cache_count"):
            self.context = item
        elif hasattr(item, "finish_reason"):
            self._count += 1
            self._on_token(self._count)


class Server:
    """One process's life: a store, a prompt cache, checkpoints, and mlx-lm's thread.

    every: None for mlx-lm alone. remembers: whether the prompt cache, too, is on the store.
    """

    def __init__(
        self,
        store: Store,
        name: str = "llama",
        *,
        every: int | None = EVERY,
        remembers: bool = False,
        settle: Callable[[], object] | None = None,
        **settings: Any,
    ) -> None:
        self.store = store
        provider = Provider(name, **settings)
        self.prompt_cache: Any = remembering(store, provider) if remembers else LRUPromptCache(10)
        if settle is None:
            settle = self.prompt_cache.settle if remembers else lambda: None
        self.checkpoints = Checkpoints(store, every=every or EVERY, settle=settle)
        made = mlx_server.ResponseGenerator if every is None else response_generator(self.checkpoints, identity_of)
        self.generator = made(provider, self.prompt_cache)

    def ask(
        self,
        args: Any,
        prompt: str = PROMPT,
        *,
        leave_after: int | None = None,
        on_token: Callable[[int], object] = lambda count: None,
    ) -> Answer:
        """One request; the client leaves at once when it has `leave_after` tokens."""

        def on_each(count: int) -> None:
            on_token(count)
            if count == leave_after:
                client.context.stop()

        client, answer = Client(on_each), Answer()
        self.generator.requests.put((client, mlx_server.CompletionRequest("text", prompt, [], None, None), args))
        for item in iter(lambda: client.get(timeout=_PATIENCE_S), None):
            if isinstance(item, Exception):
                raise item
            if hasattr(item, "finish_reason"):
                answer.tokens.append(item.token)
                answer.parts.append(item.text)
                answer.finish_reason = item.finish_reason
        answer.cached_tokens = client.context.prompt_cache_count
        return answer

    def stop(self) -> None:
        self.generator.stop_and_join()
        if isinstance(self.prompt_cache, PersistentPromptCache):
            self.prompt_cache.flush(_PATIENCE_S)
            assert self.prompt_cache.close(_PATIENCE_S)
        assert self.checkpoints.close(_PATIENCE_S)


def remembering(store: Store, provider: Provider) -> PersistentPromptCache:
    def prototypes(model_key: Any) -> list[list[Any]]:
        return [make_prompt_cache(provider.model)]

    return PersistentPromptCache(store, identity=identity_of, prototypes=prototypes, leave_one=True)


@contextlib.contextmanager
def serving(root: Path, name: str = "llama", **options: Any) -> Iterator[Server]:
    """Another process's life in this one: nothing but the store's directory survives it. Options as for Server."""
    with Store(root, durability="none") as store:
        server = Server(store, name, **options)
        try:
            yield server
        finally:
            server.stop()


def uninterrupted(root: Path, args: Any, name: str = "llama", **settings: Any) -> Answer:
    """What mlx-lm alone answers."""
    with serving(root, name, every=None, **settings) as server:
        return server.ask(args)


def checkpoints_in(root: Path) -> list[int]:
    """The tokens of each checkpoint in a store."""
    with Store(root) as store:
        return [entry.token_count for entry in store.entries() if "checkpoint/" in (entry.ns or "")]
