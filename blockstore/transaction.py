"""One LMDB transaction: get, put and walk the named tables of an index, under its lock."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import lmdb

from .locks import Hold, HostLock, Scope

T = TypeVar("T")


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


class Owner(Protocol):
    """What an environment does for a transaction; end() also after a begin() that failed, and more than once."""

    lock: HostLock
    tables: dict[str, Any]

    def begin(self, hold: Hold, *, write: bool) -> lmdb.Transaction: ...
    def commit(self, txn: lmdb.Transaction) -> None: ...
    def end(self, hold: Hold) -> None: ...
    def translate(self, error: BaseException) -> None: ...


class Access(Scope[T]):
    """One transaction as a context, with the lock that it needs around it; inside is what is `made` of it."""

    def __init__(self, owner: Owner, made: Callable[[Transaction], T], *, write: bool) -> None:
        super().__init__(owner.lock)
        self._owner = owner
        self._made = made
        self._write = write
        self._txn: lmdb.Transaction | None = None

    def _begin(self, hold: Hold) -> T:
        try:
            self._txn = txn = self._owner.begin(hold, write=self._write)
        except BaseException as error:
            self._owner.translate(error)
            raise
        return self._made(Transaction(txn, self._owner.tables))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._owner.translate(error)
            elif self._write and self._txn is not None:
                self._owner.commit(self._txn)
        except lmdb.Error as failure:
            self._owner.translate(failure)
            raise
        finally:
            self._finish()

    def _end(self, hold: Hold) -> None:
        if self._txn is not None:
            abort(self._txn)
        self._owner.end(hold)


def abort(txn: lmdb.Transaction) -> None:
    with suppress(lmdb.Error):  # it has ended already
        txn.abort()
