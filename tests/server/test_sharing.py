"""Several servers on one store: what they share, and what they must never."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest

from blockstore import Store
from server.servers import Answer, Server, assistant, environment, user

pytestmark = [pytest.mark.mlx_lm, pytest.mark.slow]
# One conversation at a time stays in memory: all others come from the store.
FORGETFUL: Final = ("--prompt-cache-size", "1")
OPENINGS: Final = [f"{name}, tell me of the sea and of the moon. " * 4 for name in ("Anna", "Boris")]
# What all prompts begin with is one token.
NOTHING: Final = 1
TURNS: Final = 3
HAS_KV_BITS: Final = tuple(map(int, metadata.version("mlx-lm").split(".")[:2])) >= (0, 32)


def converse(server: Server, opening: str) -> list[Answer]:
    said: list[Answer] = []
    messages = [user(opening)]
    for turn in range(TURNS):
        said.append(server.chat(*messages))
        messages += [assistant(said[-1].text), user(f"Go on, part {turn}.")]
    return said


def texts(answers: list[list[Answer]]) -> list[list[str]]:
    return [[one.text for one in talk] for talk in answers]


def from_store(server: Server) -> float:
    return server.metrics()['blockstore_prompt_cache_hits_total{source="store"}']


def collect(root: Path) -> None:
    command = [sys.executable, "-m", "blockstore", "gc", "--full", "--root", str(root)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_two_models_on_one_store_never_see_each_others_state(
    model: Path, other_model: Path, steady: Server, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    with Server(root, model, *FORGETFUL) as one, Server(root, other_model, *FORGETFUL) as other:
        with ThreadPoolExecutor(5) as pool:
            talks = [(server, opening) for opening in OPENINGS for server in (one, other)]
            found = [pool.submit(converse, *talk) for talk in talks]
            collect(root)
            together = [talk.result() for talk in found]
            again = list(pool.map(lambda talk: converse(*talk), talks))
        assert all(talk[0].cached <= NOTHING for talk in together), "both models are asked the same"
        assert texts(again) == texts(together)
        assert texts(together[::2]) == texts([converse(steady, opening) for opening in OPENINGS])
        assert texts(together[::2]) != texts(together[1::2])
        for server in (one, other):
            assert from_store(server) > 0
            assert server.metrics()["blockstore_store_failures_total"] == 0
            assert server.stop() == 0, server.log
            assert "ERROR" not in server.log
    with Store(root, create=False) as store:
        assert {entry.model_id for entry in store.entries()} == {"one", "other"}


def test_two_servers_of_one_model_share(model: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "store", model) as one, Server(tmp_path / "store", model) as other:
        said = one.chat(user(OPENINGS[0]))
        one.stop()
        assert other.chat(user(OPENINGS[0])) == Answer(said.text, said.prompt - 1, said.prompt, said.finish)


@pytest.mark.skipif(not HAS_KV_BITS, reason="this mlx-lm's server quantizes no caches")
def test_quantized_state_never_reaches_a_server_that_does_not_quantize(
    model: Path, steady: Server, tmp_path: Path
) -> None:
    root, quantizes = tmp_path / "store", ("--kv-bits", "4", "--quantized-kv-start", "0")
    with Server(root, model, *quantizes, *FORGETFUL) as quantized, Server(root, model, *FORGETFUL) as plain:
        for opening in OPENINGS:
            expected = converse(steady, opening)
            first, found = converse(quantized, opening), converse(plain, opening)
            assert max(first[0].cached, found[0].cached) <= NOTHING
            assert texts([found]) == texts([expected])
            before = from_store(quantized)
            again = converse(quantized, opening)
            assert texts([again]) == texts([first]) != texts([expected])
            assert again[0].cached == again[0].prompt - 1
            assert from_store(quantized) > before
        assert (quantized.stop(), plain.stop()) == (0, 0)
        assert "ERROR" not in quantized.log + plain.log
    with Store(root, create=False) as store:
        kinds = {entry.kinds for entry in store.entries()}
        assert len({entry.scope for entry in store.entries()}) == 2
    assert kinds == {"kv×3", "qkv×3"}


def test_with_a_draft_model_the_state_of_both_is_kept(
    model: Path, other_model: Path, steady: Server, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    with Server(root, model, "--draft-model", str(other_model), *FORGETFUL) as server:
        first, _, again = (converse(server, OPENINGS[number]) for number in (0, 1, 0))
        assert first[0].cached == 0
        assert again[0].cached == again[0].prompt - 1
        assert from_store(server) > 0
        assert texts([first, again]) == texts([converse(steady, OPENINGS[0])] * 2)
        assert server.stop() == 0, server.log
        assert "ERROR" not in server.log
    with Store(root, create=False) as store:
        assert {entry.kinds for entry in store.entries()} == {"kv×6"}
    with Server(root, model, "--draft-model", str(model)) as drafting_otherwise:
        assert drafting_otherwise.chat(user(OPENINGS[0])).cached == 0
