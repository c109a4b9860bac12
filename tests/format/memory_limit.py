"""Run by test_memory: decode every header that is made to cost memory, with 512 MiB of address space to spare."""

import resource
import sys
from pathlib import Path

from blockstore.errors import CacheMiss
from blockstore.header import decode_header
from format.hostile import of_memory

LIMIT_BYTES = 512 << 20


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def main() -> int:
    wrong = []
    for row in of_memory():
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + LIMIT_BYTES, hard))
        try:
            decode_header(row.data, path="some/file.mlxkv")
            wrong.append(f"{row.fact}: accepted")
        except CacheMiss as error:
            if (type(error), error.field) != (row.error, row.field):
                wrong.append(f"{row.fact}: {error}")
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    print("\n".join(wrong))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
