"""Headers as another program writes them: plain JSON values, packed with a hash that fits."""

import copy
import json
import re
import struct
from typing import Any

from blockstore.wyhash import wyhash64

MAGIC = b"MLXBUNKV2\n"
REMOVED = object()
Json = dict[str, Any]


def pack(value: Json | bytes, *, version: int | None = None, magic: bytes = MAGIC, **prefix: int) -> bytes:
    """Prefix and JSON of `value`; `size`, `start` and `hash` override what belongs into the prefix."""
    text = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    if version is None:
        version = value["formatVersion"] if isinstance(value, dict) else 5
    end = 26 + len(text)
    start = end if version == 5 else (end + 16383) // 16384 * 16384
    fields = prefix.get("size", len(text)), prefix.get("start", start), prefix.get("hash", wyhash64(text))
    return struct.pack("<10sIIQ", magic, *fields) + text


def changed(value: Json, **changes: Any) -> Json:
    """A copy of `value` with paths such as `caches[0].kind` set, or removed where the new value is REMOVED."""
    result = copy.deepcopy(value)
    for path, new in changes.items():
        *steps, last = [int(step) if step.isdigit() else step for step in re.findall(r"\w+", path)]
        place: Any = result
        for step in steps:
            place = place[step]
        if new is REMOVED:
            del place[last]
        else:
            if isinstance(place, list) and last == len(place):
                place.append(None)
            place[last] = copy.deepcopy(new)
    return result


def header(version: int, tokens: int, caches: list[Json], **more: Any) -> Json:
    identity = {"modelId": "m", "configFingerprint": "c", "tokenizerHash": "t", "ns": ""}
    provider = "mlx-cache-v5" if "segments" in more else "mlx-cache-v3"
    tail = {"tokens": list(range(tokens)), "caches": caches}
    return {"formatVersion": version, "createdAt": 1, **identity, "codecProvider": provider, **more, **tail}


def entry(kind: str, offset: int, tensors: list[Json], **fields: Any) -> Json:
    return {"kind": kind, "offset": offset, **fields, "tensors": tensors}


def tensor(*shape: int, dtype: int = 10, item: int = 4, **more: Any) -> Json:
    size = item
    for dimension in shape:
        size *= dimension
    return {"off": 0, "bytes": size, "shape": list(shape), "dtype": dtype, "hash": "", **more}


def digest(number: int) -> str:
    return f"{number:064x}"


def in_rows(*shape: int, **more: Any) -> Json:
    """A tensor whose bytes are two blocks of its own."""
    plain = tensor(*shape, **more)
    size = plain["bytes"]
    blocks = [{"hash": digest(1), "bytes": size - 4}, {"hash": digest(2), "bytes": 4}] if size else []
    return {**plain, "blocks": blocks}


def in_file(off: int, *shape: int, **more: Any) -> Json:
    return {**tensor(*shape, **more), "off": off, "hash": "0" * 16}


def monolith() -> Json:
    """v3: one kv cache of 5 tokens; the file is 16384 + 16384 + 40 bytes long."""
    return header(3, 5, [entry("kv", 5, [in_file(0, 1, 1, 5, 2), in_file(16384, 1, 1, 5, 2)])])


def attached() -> Json:
    """v4: a kv cache, and attachments whose first tensor follows unaligned."""
    tensors = [in_file(16424, 2, 3), in_file(32768, 4)]
    return {
        **monolith(),
        "formatVersion": 4,
        "attachments": [{"schema": "s", "metadata": {"a": 1}, "tensors": tensors}],
    }


def rows() -> Json:
    """v5, rows cut: kv and ssm, an attachment, a generation checkpoint."""
    checkpoint = {
        "key": "k", "cacheNs": "", "originalPromptTokens": 4, "generatedTokens": 1,
        "pendingToken": 9, "seed": 0, "seedWasExplicit": False,
    }  # fmt: skip
    caches = [
        entry("kv", 5, [in_rows(1, 1, 5, 2), in_rows(1, 1, 5, 2)], minimumReusableOffset=3),
        entry("ssm", 5, [in_rows(1, 3, 4), in_rows(1, 2, 2)]),
    ]
    attachments = [{"schema": "s", "metadata": {}, "tensors": [in_rows(3), in_rows(1, 0, 4)]}]
    return header(5, 5, caches, generationCheckpoint=checkpoint, attachments=attachments)


def segments() -> Json:
    """v5, segments: two kv caches in one group (5 tokens, span 4) and a full ring in another."""
    kv = [entry("kv", 5, [tensor(1, 1, 5, 2, axis=2), tensor(1, 1, 5, 2, axis=2)]) for _ in range(2)]
    ring = entry("rotating", 5, [tensor(1, 1, 3, 2, axis=2), tensor(1, 1, 3, 2, axis=2)], idx=2, maxSize=3)
    groups = [
        {"span": 4, "tensors": [[0, 0], [0, 1], [1, 0], [1, 1]], "hashes": digest(1) + digest(2)},
        {"span": 4, "tensors": [[2, 0], [2, 1]], "hashes": digest(3) + digest(4), "tokens": [1, 2]},
    ]
    return header(5, 5, [*kv, ring], blockHash="blake3", segments=groups)


def nested(depth: int) -> Json:
    """v5: lists around one kv cache; the list itself is at depth 1."""
    value = entry("kv", 5, [in_rows(1, 1, 5, 2), in_rows(1, 1, 5, 2)])
    for _ in range(depth):
        value = entry("list", 5, [], children=[value])
    return header(5, 5, [value])
