"""One LMDB transaction: get, put and walk the named tables of an index."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import lmdb


class Cursor(Protocol):
    """The part of an LMDB cursor that walks; keys and values are copies."""

    def set_range(self, key: bytes, /) -> bool: ...
    def next(self) -> bool: ...
    def prev(self) -> bool: ...
    def last(self) -> bool: ...
    def key(self) -> bytes: ...
    def value(self) -> bytes: ...


class Transaction:
    """Get, put and walk the named tables inside one LMDB transaction."""

    def __init__(self, txn: lmdb.Transaction, tables: dict[str, Any]) -> None:
        self._txn = txn
        self._tables = tables

    def get(self, table: str, key: bytes) -> bytes | None:
        return cast(bytes | None, self._txn.get(key, db=self._tables[table]))

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._tables[table])

    def delete(self, table: str, key: bytes) -> bool:
        return bool(self._txn.delete(key, db=self._tables[table]))

    def count(self, table: str) -> int:
        return int(self._txn.stat(self._tables[table])["entries"])

    def items(self, table: str, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Rows in key order from the first key ≥ `start`. Change the table only after the walk."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            if cursor.set_range(start) if start else cursor.first():
                yield from cast(Iterator[tuple[bytes, bytes]], cursor)

    def cursor(self, table: str) -> AbstractContextManager["Cursor"]:
        return cast(AbstractContextManager[Cursor], self._txn.cursor(db=self._tables[table]))
