"""Work spread over a few threads of its own, with the first failure raised and no thread left behind."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def spread(items: Iterable[T], work: Callable[[T], object], threads: int) -> None:
    """Call `work` on every item. After a failure no further item is begun; the first one is raised, all are joined.

    The caller's thread works too. `items` is advanced by one thread at a time.
    """
    iterator, lock, failures = iter(items), threading.Lock(), list[BaseException]()

    def run() -> None:
        while True:
            with lock:
                if failures:
                    return
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            work(item)

    def guarded() -> None:
        try:
            run()
        except BaseException as error:  # carried to the caller's thread, whatever it is
            with lock:
                failures.append(error)

    helpers = [threading.Thread(target=guarded, name="blockstore-worker") for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    try:
        guarded()
    finally:
        for helper in helpers:
            helper.join()
    if failures:
        raise failures[0]
