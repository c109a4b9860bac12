"""tools/recover.py against tensors that are known: golden files for rows, a store built by hand for segments."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from format.headers import changed, entry, header, pack, tensor

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
HASHES = {"blake3": lambda data: blake3(data).hexdigest(), "sha256": lambda data: hashlib.sha256(data).hexdigest()}


def recover(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Isolated from the package: only the script's own folder is importable."""
    command = [sys.executable, "-I", str(ROOT / "tools" / "recover.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["long-kv", "qkv", "ssm", "paged"])
def test_rows(name: str, tmp_path: Path) -> None:
    manifest = json.loads((GOLDEN / "MANIFEST.json").read_text())
    caches = next(file for file in manifest["files"] if file["file"] == f"v5/{name}.mlxkv")["caches"]
    last = len(caches[1]["tensors"]) - 1
    number = len(caches[0]["tensors"]) + last
    done = recover(GOLDEN / "v5" / f"{name}.mlxkv", 1, last, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    size = caches[1]["tensors"][last]["bytes"]
    assert (tmp_path / "out").read_bytes() == bytes((i * 131 + number * 17 + 3) & 255 for i in range(size))


@pytest.fixture
def arrays() -> dict[tuple[int, int], Any]:
    """What the store of `root` holds: two kv caches, one of them in a list, and a wrapped ring."""
    kinds = {
        (0, 0): (2, 5, 3),
        (0, 1): (2, 5, 2),
        (1, 0): (2, 5, 3),
        (1, 1): (2, 5, 2),
        (2, 0): (1, 3, 4),
        (2, 1): (1, 3, 4),
    }
    random = np.random.default_rng(7)
    return {pair: random.standard_normal((1, *shape)).astype(np.float32) for pair, shape in kinds.items()}


def build(root: Path, arrays: dict[tuple[int, int], Any], block_hash: str) -> Path:
    """Segments of span 2 cut by hand: blocks/ in the root, the header two folders below."""
    (root / "blocks").mkdir()
    groups = [(((0, 0), (0, 1), (1, 0), (1, 1)), [2, 2, 1], {}), (((2, 0), (2, 1)), [1, 2], {"tokens": [1, 2]})]
    segments = []
    for pairs, counts, more in groups:
        hashes, start = "", 0
        for count in counts:
            block = b"".join(arrays[pair][:, :, start : start + count].tobytes() for pair in pairs)
            digest = HASHES[block_hash](block)
            (root / "blocks" / digest).write_bytes(block)
            hashes, start = hashes + digest, start + count
        segments.append({"span": 2, "tensors": [list(pair) for pair in pairs], "hashes": hashes, **more})
    described = [[tensor(*arrays[cache, slot].shape, axis=2) for slot in range(2)] for cache in range(3)]
    inner = entry("list", 5, [], children=[entry("kv", 5, described[1])])
    ring = entry("rotating", 5, described[2], idx=2, maxSize=3)
    value = header(5, 5, [entry("kv", 5, described[0]), inner, ring], blockHash=block_hash, segments=segments)
    folder = root / "entries" / "scope"
    folder.mkdir(parents=True)
    (folder / "1.mlxkv").write_bytes(pack(value))
    return folder / "1.mlxkv"


@pytest.mark.parametrize("block_hash", HASHES)
def test_segments(block_hash: str, tmp_path: Path, arrays: dict[tuple[int, int], Any]) -> None:
    path = build(tmp_path, arrays, block_hash)
    for (cache, slot), array in arrays.items():
        out = tmp_path / f"{cache}-{slot}"
        done = recover(path, cache, slot, out)
        assert done.returncode == 0, done.stderr
        assert out.read_bytes() == array.tobytes()
        assert str(list(array.shape)) in done.stdout


def test_damage_is_refused_and_nothing_is_written(tmp_path: Path, arrays: dict[tuple[int, int], Any]) -> None:
    path = build(tmp_path, arrays, "blake3")
    block = next((tmp_path / "blocks").iterdir())
    data = block.read_bytes()
    for bad in (data[:-1], data + b"\0", bytes([data[0] ^ 1]) + data[1:]):
        block.write_bytes(bad)
        outs = [tmp_path / f"{len(bad)}-{bad[0]}-{cache}" for cache in (0, 2)]
        codes = [recover(path, cache, 0, out).returncode for cache, out in zip((0, 2), outs, strict=True)]
        assert sorted(codes) == [0, 1], "one of the two groups holds the block"
        assert [out.exists() for out in outs] == [code == 0 for code in codes]
    other = tmp_path / "other.mlxkv"
    other.write_bytes(pack(changed(header(5, 0, []), formatVersion=6), version=5))
    assert "not a v5 header" in recover(other, 0, 0, tmp_path / "out").stderr
    assert not (tmp_path / "out").exists()
