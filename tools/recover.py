"""Reassemble one tensor from a v5 header and its blocks, without the package: the standard library, and blake3 where
the header names it.

    python tools/recover.py HEADER CACHE SLOT OUT

CACHE counts the header entries, nested lists opened; SLOT counts the tensors of that entry. OUT gets the tensor's bytes
in C order; shape and dtype code are printed. Every block's size and digest are checked. The blocks are looked for in a
folder `blocks` beside the header, then further up. FORMAT.md says what is read here.
"""

import hashlib
import json
import re
import sys
from math import prod
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def main(arguments: list[str]) -> None:
    if len(arguments) != 4:
        raise SystemExit("usage: python tools/recover.py HEADER CACHE SLOT OUT")
    path, cache, slot, out = Path(arguments[0]), int(arguments[1]), int(arguments[2]), Path(arguments[3])
    header = read_header(path)
    blocks = Blocks(find_blocks(path), header.get("blockHash") or "sha256")
    entries = [leaf for entry in header["caches"] for leaf in leaves(entry)]
    tensor = entries[cache]["tensors"][slot]
    data = own_blocks(tensor, blocks) if "blocks" in tensor else from_segments(header, entries, [cache, slot], blocks)
    if len(data) != tensor["bytes"]:
        raise SystemExit(f"the blocks hold {len(data)} bytes, the tensor {tensor['bytes']}")
    with out.open("xb") as file:
        file.write(data)
    print(f"kind {entries[cache]['kind']} shape {tensor['shape']} dtype {tensor['dtype']} bytes {len(data)}")


def read_header(path: Path) -> Json:
    data = path.read_bytes()
    size = int.from_bytes(data[10:14], "little")
    header: Json = json.loads(data[26 : 26 + size])
    if data[:10] != b"MLXBUNKV2\n" or header["formatVersion"] != 5:
        raise SystemExit(f"{path} is not a v5 header")
    return header


def find_blocks(path: Path) -> Path:
    folders = [parent / "blocks" for parent in path.resolve().parents]
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is None:
        raise SystemExit(f"no folder blocks beside {path} or above it")
    return found


class Blocks:
    """A folder of blocks whose names are digests under the hash `name`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def read(self, digest: str, size: int) -> bytes:
        if re.fullmatch("[0-9a-f]{64}", digest) is None:
            raise SystemExit(f"{digest!r} is no digest")
        data = (self.folder / digest).read_bytes()
        if len(data) != size or self.digest(data) != digest:
            raise SystemExit(
                f"block {digest}: {len(data)} bytes with digest {self.digest(data)}, expected {size} bytes"
            )
        return data

    def digest(self, data: bytes) -> str:
        if self.name == "blake3":
            from blake3 import blake3

            return blake3(data).hexdigest()
        return hashlib.new(self.name, data).hexdigest()


def leaves(entry: Json) -> list[Json]:
    children = entry.get("children") if entry["kind"] == "list" else None
    return [leaf for child in children for leaf in leaves(child)] if children else [entry]


def own_blocks(tensor: Json, blocks: Blocks) -> bytes:
    return b"".join(blocks.read(block["hash"], block["bytes"]) for block in tensor["blocks"])


def from_segments(header: Json, entries: list[Json], member: list[int], blocks: Blocks) -> bytes:
    """Each block holds some tokens of every tensor of the group, tensor after tensor: take this one's part of each."""
    group = next(group for group in header["segments"] if member in group["tensors"])
    tensors = [entries[cache]["tensors"][slot] for cache, slot in group["tensors"]]
    token_bytes = [tensor["bytes"] // tensor["shape"][tensor["axis"]] for tensor in tensors]
    index = group["tensors"].index(member)
    before, tensor, axis = sum(token_bytes[:index]), tensors[index], tensors[index]["axis"]
    total, outer = tensor["shape"][axis], prod(tensor["shape"][:axis])
    row = token_bytes[index] // outer
    result, start = bytearray(tensor["bytes"]), 0
    for number, tokens in enumerate(group.get("tokens") or token_counts(total, group["span"])):
        block = blocks.read(group["hashes"][number * 64 :][:64], tokens * sum(token_bytes))
        part = block[tokens * before :]
        for which in range(outer):
            target = (which * total + start) * row
            result[target : target + tokens * row] = part[which * tokens * row : (which + 1) * tokens * row]
        start += tokens
    return bytes(result)


def token_counts(total: int, span: int) -> list[int]:
    return [min(span, total - start) for start in range(0, total, span)]


if __name__ == "__main__":
    main(sys.argv[1:])
