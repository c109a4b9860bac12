"""Threads of one process over one store, and processes that fork; test_kills has the processes that are killed."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from store_kit import all_facts, assert_clean, assert_exact
from token_caches import IDENTITY, identity, plain, small_store

HERE = Path(__file__).parent
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


def await_word(output: Path, word: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while word not in output.read_text():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.005)


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


@pytest.mark.slow
def test_forks_in_the_middle_of_other_threads_transactions_hang_nobody(tmp_path: Path) -> None:
    assert run_fork(tmp_path, "storm") == "whole"
    with small_store(tmp_path / "store") as store:
        store.gc()
        assert_exact(store)
        assert_clean(store)


def test_a_child_that_lives_on_does_not_keep_its_dead_parents_lease(tmp_path: Path) -> None:
    root, output, end = tmp_path / "store", tmp_path / "fork.log", tmp_path / "store.stop"
    with small_store(root) as store:
        store.save(range(9), plain(range(9)), IDENTITY)
        parent = start("fork_roles.py", "orphan", root, output=output)
        assert parent.wait(PATIENCE_S) == -signal.SIGKILL, output.read_text()
        try:
            await_lines(output, 2)
            assert store.gc(dry_run=True).count("lease") == 1
            assert store.gc().count("lease") == 1
            assert_exact(store)
            await_lines(output, output.read_bytes().count(b"\n") + 2)
        finally:
            end.touch()
        await_word(output, "whole")
        assert {entry.ns for entry in store.entries()} == {"", "orphan"}
        assert_exact(store)
        assert_clean(store)
