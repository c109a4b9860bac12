"""What serve refuses, and that it says so before anything heavy is loaded."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from blockstore import Store
from blockstore.cli_exit import Code
from rootless import bound_by_permissions
from server.servers import COMMAND, Server, environment

pytestmark = pytest.mark.slow
Done = subprocess.CompletedProcess[str]
# Runs the command, then says on standard output whether mlx-lm was imported.
WATCHED = """
import atexit, sys
{before}
atexit.register(lambda: print("mlx_lm.server" in sys.modules))
from blockstore.cli import main
sys.argv = ["blockstore", "serve", *sys.argv[1:]]
main()
"""


def serve(*arguments: str, before: str = "", **more: str) -> Done:
    command = [sys.executable, "-c", WATCHED.format(before=before), *arguments]
    return run(command, **more)


def run(command: list[str], **more: str) -> Done:
    variables = {**environment(), **more}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=60)


def light(done: Done) -> bool:
    return done.stdout.split()[-1] == "False"


def test_help_loads_nothing_and_names_the_other_help() -> None:
    done = serve("--help", before="sys.modules['mlx'] = None")
    assert (done.returncode, done.stderr) == (0, "")
    assert light(done)
    assert "blockstore serve -- --help" in done.stdout


def test_the_help_of_mlx_lm_is_there(tmp_path: Path) -> None:
    done = serve("--root", str(tmp_path / "store"), "--", "--help")
    assert done.returncode == 0, done.stderr
    assert "--prompt-cache-size" in done.stdout
    assert not (tmp_path / "store").exists()


def test_unknown_arguments_are_mlx_lms_to_refuse(tmp_path: Path) -> None:
    done = serve("--root", str(tmp_path / "store"), "--no-such-thing", "3")
    assert done.returncode == Code.USAGE
    assert "unrecognized arguments: --no-such-thing 3" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-bytes", "much"), "not a size"),
        (("--queue-bytes", "1X"), "not a size"),
        (("--grace", "inf"), "not a number of seconds"),
        (("--metrics-file", "no/such/folder/x.prom"), "no file can be made there"),
        (("--root", __file__), "no store can be here"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = serve("--root", str(tmp_path / "store"), *arguments)
    assert done.returncode == Code.INPUT
    assert said in done.stderr
    assert light(done)


def test_a_broken_store(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    (tmp_path / "store" / "index" / "data.mdb").write_bytes(b"?" * 20_000)
    done = serve("--root", str(tmp_path / "store"))
    assert done.returncode == Code.BROKEN, done.stderr
    assert "check --repair" in done.stderr
    assert light(done)


def test_a_store_that_one_may_not_write(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    (tmp_path / "store").chmod(0o500)
    try:
        done = run([*bound_by_permissions(), sys.executable, *COMMAND, "--root", str(tmp_path / "store"), "--json"])
    finally:
        (tmp_path / "store").chmod(0o700)
    assert done.returncode == Code.SYSTEM, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "not-permitted"


def test_a_port_that_is_taken(model: Path, steady: Server, tmp_path: Path) -> None:
    done = serve("--root", str(tmp_path / "store"), "--model", str(model), "--port", str(steady.port))
    assert done.returncode == Code.SYSTEM, done.stderr
    assert f"cannot listen on 127.0.0.1:{steady.port}" in done.stderr


def test_without_mlx_lm(tmp_path: Path) -> None:
    done = serve("--root", str(tmp_path / "store"), before="sys.modules['mlx_lm'] = None")
    assert done.returncode == Code.MISSING_PACKAGE
    assert "pip install" in done.stderr
    assert "mlx-lm]" in done.stderr


@pytest.mark.parametrize("change", ["del server.ResponseGenerator", "server.run = lambda provider, port: None"])
def test_an_mlx_lm_that_is_not_known(tmp_path: Path, change: str) -> None:
    done = serve("--root", str(tmp_path / "store"), before=f"from mlx_lm import server; {change}")
    assert done.returncode == Code.MISSING_PACKAGE
    assert "serve does not know this mlx-lm: mlx_lm.server." in done.stderr
    assert "pip install" in done.stderr


def test_more_than_one_rank(tmp_path: Path) -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    ring = {**environment(), "MLX_HOSTFILE": str(tmp_path / "hosts.json")}
    command = [sys.executable, *COMMAND, "--root", str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(command, env={**ring, "MLX_RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=60)
            assert rank.returncode == Code.INPUT, said
            assert "each rank holds a part of the state" in said
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait(30)
    assert not os.path.exists(tmp_path / "store")
