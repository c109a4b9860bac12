"""What the tests of files share: the golden files, small caches, and a look at what a directory holds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

import kvcodecs
from blockstore import Attachment, GenerationCheckpoint, Meta
from cache_cases import bits, random_array

GOLDEN = Path(__file__).parent.parent / "golden"
MANIFEST: dict[str, dict[str, Any]] = {
    file["file"]: file for file in json.loads((GOLDEN / "MANIFEST.json").read_text())["files"]
}
# A header field that no reader knows, in the one file that the manifest says has one.
UNKNOWN_FIELD = b'"futureField":{"any":[1,2.5,null]},'

CHECKPOINT = GenerationCheckpoint("request-1", "adapter", 9, 3, 42, 4294967295, False)
IDENTITY = {"model_id": "org/model", "config_fingerprint": "config", "tokenizer_hash": "tokenizer", "ns": "prüfung"}


# ---- golden files


def known_kinds() -> set[str]:
    return {codec.kind for codec in kvcodecs.default_provider().codecs}


def is_loadable(name: str) -> bool:
    """Whether the provider knows every kind of a golden file; else it must refuse the file by name."""
    return set(MANIFEST[name]["kinds"]) <= known_kinds()


LOADABLE = [name for name in MANIFEST if is_loadable(name)]


def pattern(number: int, size: int) -> bytes:
    """The bytes of the tensor with this number in its golden file: the manifest's rule."""
    return bytes((index * 131 + number * 17 + 3) & 255 for index in range(size))


def golden_tensors(name: str) -> list[tuple[tuple[int, ...], str, bytes]]:
    """Shape, dtype and bytes of every tensor of a golden file, caches first, as `bits` has them."""
    file = MANIFEST[name]
    described = [tensor for part in (*file["caches"], *file["attachments"]) for tensor in part["tensors"]]
    return [
        (tuple(tensor["shape"]), f"mlx.core.{tensor['dtype']}", pattern(number, tensor["bytes"]))
        for number, tensor in enumerate(described)
    ]


# ---- caches


def kv(tokens: int, seed: int = 0, dim: int = 8, dtype: mx.Dtype = mx.float32) -> Any:
    """A kv cache of `tokens` tokens; the same bytes for a token, however many follow."""
    cache = kvcodecs.KVCache()
    keys, values = (random_array(100 * seed + i, (1, 2, 512, dim), dtype)[:, :, :tokens] for i in range(2))
    cache.update_and_fetch(keys, values)
    mx.eval(cache.state)
    return cache


def ssm(tokens: int, seed: int = 0) -> Any:
    cache = kvcodecs.RecurrentCache()
    cache[0], cache[1] = random_array(seed, (1, 3, 8)), random_array(seed + 1, (1, 2, 4, 4), mx.bfloat16)
    cache.advance(tokens)
    return cache


def layers(tokens: int, seed: int = 0) -> list[Any]:
    return [kv(tokens, seed), kv(tokens, seed + 1)]


def attachments() -> tuple[Attachment, ...]:
    """Three: with tensors of odd sizes, an empty one among them; without tensors; with a scalar."""
    tensors = (random_array(1, (1, 3, 5), mx.bfloat16), mx.zeros((2, 0, 4)), mx.array([True, False, True]))
    return (
        Attachment("draft-v1", {"draftOffset": 8, "scale": 0.1, "label": "dräft ✓", "none": None}, tensors),
        Attachment("empty-v1", [1, "two", {}]),
        Attachment("scalar-v1", "text", (mx.array(7, mx.int64),)),
    )


def plain_attachments(found: Sequence[Attachment]) -> list[tuple[str, Any, list[Any]]]:
    return [(one.schema, one.metadata, [bits(tensor) for tensor in one.tensors]) for one in found]


def meta(**changes: Any) -> Meta:
    return Meta(**{**IDENTITY, "created_at_ms": 1760000000123, **changes})


# ---- directories


def tree(root: Path) -> dict[str, bytes]:
    """Every file below `root`, by its relative path."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
