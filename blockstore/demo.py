"""`blockstore demo`: two processes share what a small model has read, and prove that nothing changed on the way.

The first process reads a system prompt and a question and saves. The second finds the system prompt in the store, goes
on from there with another question, and saves too. The first then runs that second conversation without a store and
compares every logit, bit for bit.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcodecs.backend import mx
from kvcodecs.provider import default_provider

from . import loading, saving  # noqa: F401  # else the first load and save would be timed with their imports
from .cli_text import count, size
from .errors import InvalidInput
from .identity import Identity, identity_of
from .store import Store

_SEED: Final = 7
# So small that two slow cores read the system prompt in seconds. A token is a byte: no tokenizer to download.
_CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_SYSTEM_TOKENS: Final = 2048
# A model computes other last bits where a prompt is cut into other chunks, with or without a store. So the reusable
# prefix ends where a chunk of the uninterrupted run ends: the questions differ from their first token on.
_CHUNK_TOKENS: Final = 512
_ANSWER_TOKENS: Final = 16
_RULES: Final = (
    "Answer in one sentence.",
    "Name the shelf before the book.",
    "Never guess a date: say that the catalogue does not know it.",
    "Offer a second book where the first is lent.",
    "Speak the reader's language, and keep titles in their own.",
)
_QUESTIONS: Final = ("Where do I find books on tides?", "Is there a history of the metre?")
_FOLLOW_UP: Final = "\nReader: And for a child of nine?\nLibrarian: "
_TITLES: Final = ("first question", "second question", "its follow-up")
_CHILD_LIMIT_S: Final = 300


class _Failed(Exception):
    """The demo found what must not be."""


def run(root: str | None = None) -> int:
    """Run the demo and print what happens; 0 on success, 1 where something was not as it must be.

    root: where the store goes, which must be empty and is empty again at the end; None: a temporary directory.
    Raises what Store raises.
    """
    console = Console(highlight=False, emoji=False)
    with tempfile.TemporaryDirectory(prefix="blockstore-demo-") as folder:
        try:
            _Demo(console, Path(folder), root or os.path.join(folder, "store")).run()
        except _Failed as error:
            print(f"blockstore: the demo failed: {error}", file=sys.stderr)
            return 1
    return 0


# ---- the model and what is said


def _write_model(folder: Path) -> None:
    """A model directory as mlx-lm loads it: a configuration, weights, a tokenizer."""
    from mlx_lm.models import llama

    folder.mkdir()
    mx.random.seed(_SEED)
    model = llama.Model(llama.ModelArgs.from_dict(_CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(model))
    (folder / "config.json").write_bytes(msgspec.json.encode(_CONFIG))
    vocabulary = {f"<{byte:02x}>": byte for byte in range(256)}
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))


def _weights(model: Any) -> dict[str, Any]:
    found: Any = tree_flatten(model.parameters())
    return dict(found)


def _read_model(folder: Path) -> tuple[Any, Identity]:
    """What every process does by itself: load the model, and compute whose caches it can use."""
    model, _ = load_model(folder / "model")
    return model, identity_of(folder / "model", cache_dir=folder / "digests", model_id="demo/small-llama")


def _tokens(text: str) -> list[int]:
    return list(text.encode())


def _system_prompt() -> list[int]:
    head, tail = "You are a librarian.\n", "\nReader: "
    rules = "".join(f"{number}. {_RULES[number % len(_RULES)]}\n" for number in range(1, 100))
    return _tokens(head + rules[: _SYSTEM_TOKENS - len(head) - len(tail)] + tail)


@dataclass
class _Conversation:
    """Caches, the tokens that they encode, and the logits of every chunk so far ([1, tokens, vocabulary])."""

    model: Any
    caches: list[Any]
    tokens: list[int] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)

    def feed(self, chunk: Sequence[int]) -> None:
        logits = self.model(mx.array([list(chunk)]), cache=self.caches)
        mx.eval(logits)
        self.tokens += chunk
        self.logits.append(logits)

    def prefill(self) -> float:
        """Read the system prompt, chunk by chunk; how long that took, in seconds."""
        began, prompt = time.perf_counter(), _system_prompt()
        for start in range(0, len(prompt), _CHUNK_TOKENS):
            self.feed(prompt[start : start + _CHUNK_TOKENS])
        return time.perf_counter() - began

    def ask(self, question: str) -> None:
        """Read a question as one chunk, then answer greedily."""
        self.feed(_tokens(question))
        for _ in range(_ANSWER_TOKENS):
            best: Any = mx.argmax(self.logits[-1][0, -1]).item()
            self.feed([best])


# ---- the second process


class _Save(msgspec.Struct, frozen=True):
    """What the tables show of a save."""

    entry_id: str
    token_count: int
    logical_bytes: int
    written_bytes: int
    blocks_written: int
    blocks_reused: int
    seconds: float


class _Report(msgspec.Struct, frozen=True):
    """What the second process tells the first, beside its logits."""

    reused_tokens: int
    entry_tokens: int
    find_s: float
    load_s: float
    saves: list[_Save]


def _save(store: Store, talk: _Conversation, identity: Identity) -> _Save:
    return msgspec.convert(store.save(talk.tokens, talk.caches, identity), _Save, from_attributes=True)


def _second_process(folder: Path, root: str) -> None:
    """Go on from what the first process saved; leaves report.json and logits.safetensors in `folder`."""
    model, identity = _read_model(folder)
    with Store(root, create=False, provider=default_provider()) as store:
        prompt = _system_prompt() + _tokens(_QUESTIONS[1])
        began = time.perf_counter()
        match = store.find(prompt, identity)
        found = time.perf_counter()
        if match is None:
            raise _Failed("the second process found no prefix of its prompt")
        loaded = store.load(match, model)
        restored = time.perf_counter()
        talk = _Conversation(model, loaded.caches, loaded.tokens)
        talk.ask(_QUESTIONS[1])
        saves = [_save(store, talk, identity)]
        talk.ask(_FOLLOW_UP)
        saves.append(_save(store, talk, identity))
    report = _Report(match.length, match.entry_length, found - began, restored - found, saves)
    mx.save_safetensors(str(folder / "logits.safetensors"), {"logits": mx.concatenate(talk.logits, axis=1)})
    (folder / "report.json").write_bytes(msgspec.json.encode(report))


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a process of its own, which imports from where this one does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", *arguments]
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=_CHILD_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise _Failed(f"{arguments[0]} did not end within {_CHILD_LIMIT_S} s") from error


# ---- the first process


class _Demo:
    """The steps, in order. `folder` holds the model and what the processes tell each other."""

    def __init__(self, console: Console, folder: Path, root: str) -> None:
        self.console = console
        self.folder = folder
        self.root = root

    def run(self) -> None:
        _write_model(self.folder / "model")
        model, identity = _read_model(self.folder)
        with Store(self.root, provider=default_provider()) as store:
            stats = store.stats()
            if stats.entries or stats.blocks:
                hint = "The demo empties its store: name a directory that does not exist yet."
                raise InvalidInput("the demo needs an empty store", path=self.root, hint=hint)
            self._introduce(model)
            first = self._first_conversation(store, model, identity)
            report = self._start_second_process()
            prefill_s = self._compare(model, report)
            self._show(store, [first, *report.saves], report, prefill_s)
            self._collect(store, first)
            self._empty(store)
        self._say("\n[bold]The demo succeeded.[/]")

    def _introduce(self, model: Any) -> None:
        parameters = sum(array.size for array in _weights(model).values())
        self._say(
            f"A llama of {count(_CONFIG['num_hidden_layers'], 'layer')} and {parameters / 1e6:.1f} million parameters, "
            f"random weights; a token is a byte.\nThe store: {escape(self.root)}\n"
        )

    def _first_conversation(self, store: Store, model: Any, identity: Identity) -> _Save:
        self._step(1, f"This process reads a system prompt of {_SYSTEM_TOKENS:,} tokens and a question, and saves.")
        talk = _Conversation(model, make_prompt_cache(model))
        talk.prefill()
        talk.ask(_QUESTIONS[0])
        return _save(store, talk, identity)

    def _start_second_process(self) -> _Report:
        self._step(2, "A second process asks something else behind the same system prompt, and saves twice.")
        done = _python("blockstore.demo", str(self.folder), self.root)
        if done.returncode != 0:
            raise _Failed(f"the second process ended with {done.returncode}:\n{done.stderr.strip()}")
        report = msgspec.json.decode((self.folder / "report.json").read_bytes(), type=_Report)
        if report.reused_tokens != _SYSTEM_TOKENS:
            raise _Failed(f"{report.reused_tokens} tokens were reused, not the {_SYSTEM_TOKENS} of the system prompt")
        self._say(
            f"   It found {report.reused_tokens:,} tokens in an entry of {report.entry_tokens:,}, loaded them, and "
            "read nothing but its question."
        )
        return report

    def _compare(self, model: Any, report: _Report) -> float:
        """Run the second conversation without a store; the seconds that its system prompt took."""
        self._step(3, "This process runs that second conversation without a store, and compares.")
        talk = _Conversation(model, make_prompt_cache(model))
        prefill_s = talk.prefill()
        known = len(talk.logits)
        talk.ask(_QUESTIONS[1])
        talk.ask(_FOLLOW_UP)
        expected = mx.concatenate(talk.logits[known:], axis=1)
        loaded: Any = mx.load(str(self.folder / "logits.safetensors"))
        found = loaded["logits"]
        _compare_bits(expected, found)
        self._say(f"   {found.size:,} logits of {count(found.shape[1], 'token')}: [bold]equal, bit for bit[/].")
        return prefill_s

    def _show(self, store: Store, saves: Sequence[_Save], report: _Report, prefill_s: float) -> None:
        logical, stored = sum(save.logical_bytes for save in saves), store.stats().block_bytes
        self._show_table(self._saves_table(saves))
        self._say(
            f"   {count(len(saves), 'entry', 'entries')} with {size(logical)} of tensors take {size(stored)} of "
            f"blocks: {logical / stored:.1f} times less."
        )
        self._show_table(self._times_table(report, prefill_s))

    def _saves_table(self, saves: Sequence[_Save]) -> Table:
        table = self._table("saved", "tokens", "tensors", "written", "new blocks", "shared", "time")
        for title, save in zip(_TITLES, saves, strict=True):
            table.add_row(
                title,
                f"{save.token_count:,}",
                size(save.logical_bytes),
                size(save.written_bytes),
                f"{save.blocks_written:,}",
                f"{save.blocks_reused:,}",
                _duration(save.seconds),
            )
        return table

    def _times_table(self, report: _Report, prefill_s: float) -> Table:
        restore_s = report.find_s + report.load_s
        table = self._table(f"the {_SYSTEM_TOKENS:,} tokens of the system prompt", "time")
        table.add_row("computed: prefill", _duration(prefill_s))
        table.add_row("restored: find", _duration(report.find_s))
        table.add_row("restored: load, every block verified", _duration(report.load_s))
        table.add_row("restored instead of computed", f"{prefill_s / restore_s:.0f} times faster")
        return table

    def _collect(self, store: Store, first: _Save) -> None:
        self._step(4, "The first conversation is removed; what the others share with it stays.")
        store.remove(first.entry_id)
        plan = store.gc()
        stats = store.stats()
        self._say(
            f"   Collected {count(plan.count('block'), 'block')} ({size(plan.bytes)}); {stats.blocks:,} are in use."
        )
        done = _python("blockstore", "check", "--deep", "--root", self.root)
        if done.returncode != 0:
            raise _Failed(f"`blockstore check --deep` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        self._say("   `blockstore check --deep` reads every block: nothing is missing, nothing has changed.")

    def _empty(self, store: Store) -> None:
        self._step(5, "The others are removed too.")
        for entry in store.entries():
            store.remove(entry.entry_id)
        store.gc(full=True)
        stats = store.stats()
        if stats.entries or stats.blocks or stats.block_bytes:
            raise _Failed(f"the store is not empty: {stats.entries} entries, {stats.blocks} blocks")
        self._say(f"   {stats.entries} entries, {stats.blocks} blocks: the store is empty.")

    def _step(self, number: int, text: str) -> None:
        self._say(f"[bold]{number}.[/] {text}")

    def _say(self, text: str) -> None:
        """A paragraph: as wide as the terminal, one long line elsewhere."""
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    def _show_table(self, table: Table) -> None:
        if self.console.is_terminal:
            self.console.print(table)
        else:  # the ruled one brings its own blank lines
            self.console.print("", table, "", sep="\n")

    def _table(self, first: str, *others: str) -> Table:
        """Ruled on a terminal, plain columns elsewhere."""
        table = Table(box=box.SIMPLE if self.console.is_terminal else None, collapse_padding=True)
        table.add_column(first, no_wrap=True)
        for title in others:
            table.add_column(title, justify="right")
        return table


def _compare_bits(expected: Any, found: Any) -> None:
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        raise _Failed(f"the logits differ in kind: {expected.shape} {expected.dtype}, {found.shape} {found.dtype}")
    if mx.array_equal(expected.view(mx.uint32), found.view(mx.uint32)).item():
        return
    differs = (expected != found).any(axis=(0, 2))
    largest = mx.abs(expected - found).max().item()
    raise _Failed(f"the logits differ at new token {mx.argmax(differs).item()} and later, by up to {largest:.3g}")


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


if __name__ == "__main__":
    try:
        _second_process(Path(sys.argv[1]), sys.argv[2])
    except _Failed as error:
        sys.exit(str(error))
