"""Real processes over one store: writers, a reader and a collector at once, a writer killed again and again; forks."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from store_kit import all_facts, assert_clean, assert_exact
from token_caches import IDENTITY, identity, plain, small_store

HERE = Path(__file__).parent
KILLS, WRITERS = 4, 3
PATIENCE_S = 60.0


def start(script: str, *arguments: object, output: Path) -> subprocess.Popen[bytes]:
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=surroundings)


def await_lines(output: Path, count: int) -> None:
    """Until a process has said something this often: it is at work then."""
    deadline = time.monotonic() + PATIENCE_S
    while output.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.005)


def said(outputs: Sequence[Path], verb: str) -> set[tuple[str, tuple[int, ...]]]:
    """(ns, tokens) of the lines with `verb`; a line that death cut short is no line."""
    found = set()
    for output in outputs:
        for line in output.read_bytes().split(b"\n")[:-1]:
            facts = json.loads(line)
            if verb in facts:
                found.add((facts["ns"], tuple(facts[verb])))
    return found


@pytest.mark.slow
def test_processes_at_once_and_one_killed_again_and_again_lose_nothing(tmp_path: Path) -> None:
    root, rng, outputs = tmp_path / "store", random.Random(7), []

    def launch(role: str, seed: int) -> tuple[subprocess.Popen[bytes], Path]:
        outputs.append(tmp_path / f"{role}-{seed}.log")
        return start("process_roles.py", role, root, seed, output=outputs[-1]), outputs[-1]

    small_store(root).close()
    lasting = [launch("write", seed)[0] for seed in range(1, WRITERS)]
    lasting += [launch("read", 50)[0], launch("collect", 60)[0]]
    for kill in range(KILLS):
        victim, output = launch("write", 100 + kill)
        await_lines(output, 2)
        time.sleep(rng.random() * 0.4)
        victim.send_signal(signal.SIGKILL)
        assert victim.wait(PATIENCE_S) == -signal.SIGKILL
    Path(f"{root}.stop").touch()
    assert [process.wait(PATIENCE_S) for process in lasting] == [0] * len(lasting), "\n".join(
        output.read_text()[-2000:] for output in outputs if "Traceback" in output.read_text()
    )
    assert_everything_committed_is_there(root, outputs)


def assert_everything_committed_is_there(root: Path, outputs: Sequence[Path]) -> None:
    committed = said(outputs, "saved") - said(outputs, "removing")
    assert len(committed) > WRITERS + KILLS
    with small_store(root) as store:
        store.gc()
        assert_exact(store)
        assert_clean(store)
        loaded = [store.load(entry.entry_id) for entry in store.entries()]
        for entry in loaded:
            assert all_facts(entry.caches) == all_facts(plain(entry.tokens, 2))
        assert committed <= {(entry.header.ns or "", tuple(entry.tokens)) for entry in loaded}


# ---- threads


def test_threads_of_one_process_save_load_and_collect_at_once(tmp_path: Path) -> None:
    lists = [[*range(number % 5 * 7), *[number] * (number % 3 + 1)] for number in range(24)]
    with small_store(tmp_path / "store") as store:
        prepared = [store.prepare(tokens, plain(tokens), IDENTITY) for tokens in lists]
        with ThreadPoolExecutor(4) as pool:
            saves = [pool.submit(store.commit, part) for part in prepared]
            others: list[Future[Any]] = [pool.submit(store.gc, full=number % 2 == 0) for number in range(6)]
            others += [pool.submit(store.find, [*tokens, 0], IDENTITY) for tokens in lists]
            ids = [save.result().entry_id for save in saves]
            assert [other.exception() for other in others] == [None] * len(others)
        store.gc()
        assert_exact(store)
        for entry_id, tokens in zip(ids, lists, strict=True):
            assert all_facts(store.load(entry_id).caches) == all_facts(plain(tokens))


# ---- forks


def run_fork(tmp_path: Path, part: str) -> str:
    """The parent's last line; a process of its own, since forking one that has used mlx leaves mlx unusable."""
    root, output = tmp_path / "store", tmp_path / "fork.log"
    with small_store(root) as store:
        store.save(range(9), plain(range(9)), IDENTITY)
    process = start("fork_roles.py", part, root, output=output)
    assert process.wait(PATIENCE_S) == 0, output.read_text()
    return output.read_text().splitlines()[-1]


def test_a_forked_child_opens_reads_and_saves_and_leaves_its_parents_lease_alone(tmp_path: Path) -> None:
    assert run_fork(tmp_path, "lease") == "whole"
    with small_store(tmp_path / "store") as store:
        assert {entry.ns for entry in store.entries()} == {"", "parent", "child", "child with mlx"}
        store.gc()
        assert_exact(store)
        assert_clean(store)
        found = store.restore([*range(9), 1], identity("child with mlx"))
        assert found is not None
        assert all_facts(found.caches) == all_facts(plain(range(9)))


def test_forks_in_the_middle_of_other_threads_transactions_hang_nobody(tmp_path: Path) -> None:
    assert run_fork(tmp_path, "storm") == "whole"
    with small_store(tmp_path / "store") as store:
        store.gc()
        assert_exact(store)
        assert_clean(store)
