"""A few threads beside the one that reads a medium.

Not a pool of concurrent.futures: Python waits for the threads of those at its end, so that a medium which hangs while
an index is read would keep the process from ending.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class SideThreads:
    """Used by one thread, in a with-block. Its end waits for calls that have begun: what they use may be closed then.

    Args:
        count: How many; fewer do where no more can be had.
        name: What they are called.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wanted = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        self._threads: list[threading.Thread] = []

    def map(self, call: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
        """Results in the order of the items.

        Args:
            ahead: Items that are worked at before the result of the first of them is taken.

        Raises:
            BaseException: what the call raised. Items that nobody has begun with are left out then.
        """
        under_way: collections.deque[Future[R]] = collections.deque()
        try:
            for item in items:
                under_way.append(self._submit(call, item))
                if len(under_way) > ahead:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()

    def _submit(self, call: Callable[[T], R], item: T) -> Future[R]:
        future: Future[R] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(item))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        return future

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
            del run  # with its item and its result

    def __enter__(self) -> Self:
        for thread in self._wanted:
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                break
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
