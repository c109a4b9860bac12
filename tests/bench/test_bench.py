"""The benchmarks work: each in its quick form. What they measure then says nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tools.bench import all as every
from tools.bench.kit import Bench, Row, at_least, at_most, empty, noted, table

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tools" / "bench"
STUDIES = {"flat_directory"}  # has no target
Done = subprocess.CompletedProcess[str]


def run(script: str, *arguments: str) -> Done:
    paths = os.pathsep.join(path for path in sys.path if path)
    variables = {**os.environ, "PYTHONPATH": paths, "PYTHONUTF8": "1"}
    return subprocess.run(
        [sys.executable, str(BENCH / script), *arguments],
        env=variables, capture_output=True, encoding="utf-8", check=False, timeout=100,
    )  # fmt: skip


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """Every benchmark's quick form, two at a time."""
    folder = str(tmp_path_factory.mktemp("bench"))
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda name: run(f"{name}/run.py", "--quick", "--json", "--root", folder), every.NAMES)
        results = dict(zip(every.NAMES, done, strict=True))
    assert os.listdir(folder) == [], "something was left"
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", every.NAMES)
def test_the_quick_form_works_and_says_what_it_measured(name: str, quick: dict[str, Done]) -> None:
    assert quick[name].returncode == 0, quick[name].stderr
    report = json.loads(quick[name].stdout)
    assert (report["benchmark"], report["quick"], report["machine"]["page_cache"]) == (name, True, "warm")
    assert {"platform", "cpus", "file_system", "python", "mlx"} <= report["machine"].keys()
    rows = [Row(**row) for row in report["rows"]]
    if name == "memory" and not os.path.exists("/proc/self/clear_refs"):
        assert rows == []
        return
    assert any(row.target for row in rows)
    assert len({row.what for row in rows}) == len(rows)
    for row in rows:
        assert row.measured[0].isdigit(), row
        assert row.met is None, "sizes that small meet or miss nothing"
        assert all(value >= 0 for value in row.figures.values())


def test_every_benchmark_with_a_target_is_run() -> None:
    found = {path.parent.name for path in BENCH.glob("*/run.py")}
    assert found - STUDIES == set(every.NAMES)
    assert len(set(every.NAMES)) == len(every.NAMES)


@pytest.mark.slow
def test_all_of_them_make_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(every, "NAMES", ("find", "collect"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setattr(sys, "argv", ["all.py", "--quick", "--root", str(tmp_path)])
    every.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["what", "target", "measured"]
    assert [line.split()[0] for line in lines[1:5]] == ["find", "find", "gc", "gc"]
    assert "page_cache warm" in lines[5]
    assert os.listdir(tmp_path) == []


# ---- the kit


def test_contenders_take_turns_each_in_a_new_directory(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []

    def contender(name: str) -> Any:
        def steps(folder: str) -> Generator[None]:
            assert os.listdir(folder) == []
            (Path(folder) / "something").touch()
            yield
            log.append((name, folder))
            yield

        return steps

    seconds = Bench(str(tmp_path), quick=True).times({"a": contender("a"), "b": contender("b")}, 3)
    assert [name for name, _ in log] == ["a", "b", "b", "a", "a", "b"]
    assert len({folder for _, folder in log}) == 6
    assert [len(seconds["a"]), len(seconds["b"])] == [3, 3]


def test_only_what_stands_between_the_yields_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def steps(_: str) -> Generator[None]:
        clock[0] += 100
        yield
        clock[0] += 1
        yield
        clock[0] += 100

    bench = Bench(str(tmp_path), quick=True)
    assert bench.medians({"it": steps}, 3) == {"it": 1}


def test_the_first_round_alone_is_checked_and_every_round_is_tidied_up(tmp_path: Path) -> None:
    log: list[str] = []

    def steps(_: str) -> Generator[None]:
        try:
            yield
            yield
            log.append("checked")
        finally:
            log.append("closed")

    Bench(str(tmp_path), quick=True).times({"it": steps}, 3)
    assert log == ["checked", "closed", "closed", "closed"]


def test_a_contender_that_goes_on_after_its_check_is_refused(tmp_path: Path) -> None:
    def steps(_: str) -> Generator[None]:
        yield
        yield
        yield

    with pytest.raises(RuntimeError, match="more than twice"):
        Bench(str(tmp_path), quick=True).times({"it": steps}, 1)


def test_rows_say_whether_a_target_is_met() -> None:
    assert [at_least("x", 2, found).met for found in (1.9, 2, 2.1)] == [False, True, True]
    assert [at_most("x", 2, found).met for found in (1.9, 2, 2.1)] == [True, True, False]
    assert noted("x", 3).met is None
    assert at_most("x", 0.05, 0.0123, "ms", a=1.0) == Row("x", "≤ 0.05 ms", "0.0123 ms", True, {"a": 1.0})


def test_the_table_marks_them() -> None:
    lines = table([at_least("fast", 2, 12345.6), at_most("small", 1, 3, "MB"), noted("by the way", 0.5)]).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["✓", "✗", "×"]
    assert "12,346 ×" in lines[1]
    assert lines[0].index("target") == lines[1].index("≥") == lines[2].index("≤")


def test_files_are_emptied_and_stay(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"1234")
    empty(str(tmp_path))
    assert (tmp_path / "folder" / "file").read_bytes() == b""


def test_a_benchmark_of_what_does_not_work_fails(tmp_path: Path) -> None:
    """The store that it is to make cannot be made."""
    done = run("collect/run.py", "--quick", "--root", str(tmp_path / "absent"))
    assert done.returncode != 0
    assert done.stdout == ""
