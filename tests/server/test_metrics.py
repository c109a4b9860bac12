"""What Prometheus reads, over HTTP and from a file."""

import re
from pathlib import Path
from typing import Final

import pytest

from blockstore.serve_metrics import MetricsFile
from server.servers import Server, await_, user, values_of

pytestmark = pytest.mark.slow
SAMPLE: Final = re.compile(r'(blockstore_[a-z_]+)(?:\{[a-z]+="[a-z]+"\})? (?:\d+|\d+\.\d+(?:e-\d+)?)')
DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "command.md"


def families_of(text: str) -> dict[str, str]:
    """Each metric's type. Fails where the text is not in the format: help, type, samples, metric after metric."""
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    sampled: set[str] = set()
    helped = name = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped, words = line.split(" ", 3)[2:]
            assert words.strip()
            assert helped not in kinds
        elif line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            assert name == helped
            kinds[name] = kind
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            assert found[1] == name
            sampled.add(name)
    assert sampled == set(kinds)
    return kinds


def test_the_text_is_what_prometheus_reads(steady: Server) -> None:
    steady.chat(user("How many steps are there?"))
    status, headers, text = steady.get("/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    kinds = families_of(text)
    assert set(kinds.values()) == {"counter", "gauge"}
    assert {name for name, kind in kinds.items() if kind == "counter"} == {
        name for name in kinds if name.endswith("_total")
    }
    described = set(re.findall(r"`(blockstore_[a-z_]+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert described == set(kinds)
    assert "/metrics" not in steady.log, "scrapes do not fill the log"


def test_the_numbers_are_those_of_what_happened(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "blockstore.prom"
    options = ("--metrics-file", str(path), "--max-bytes", "64M", "--keep-turns")
    with Server(tmp_path / "store", model, *options) as server:
        await_(path.exists)
        families_of(path.read_text())
        said = server.chat(user("How many steps are there?"))
        server.chat(user("How many steps are there?"))
        found = server.metrics()
        assert found["blockstore_prompt_cache_misses_total"] == 1
        assert found['blockstore_prompt_cache_hits_total{source="memory"}'] == 1
        assert found['blockstore_reused_tokens_total{source="memory"}'] == said.prompt - 1
        assert found["blockstore_requests_in_flight"] == 0
        assert found["blockstore_store_max_bytes"] == 64 << 20
        parts = server.stream(user("And how many of them creak?"), max_tokens=200)
        next(parts)
        assert server.metrics()["blockstore_requests_in_flight"] == 1
        list(parts)
        assert server.stop() == 0
    last = values_of(path.read_text())
    assert last["blockstore_store_entries"] > 2, "every turn is kept"
    assert last["blockstore_pending_entries"] == 0
    assert [one.name for one in tmp_path.iterdir() if "prom" in one.name] == [path.name]


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "collector"
    file = MetricsFile(str(folder / "x.prom"))
    for _ in range(3):
        file.write("old\n")
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    folder.mkdir()
    file.write("new\n")
    assert [path.read_text() for path in folder.iterdir()] == ["new\n"]
