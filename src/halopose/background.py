"""Two helpers that overlap reading, computing and writing: items read ahead by a thread, and tasks done by a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """Iterator over items that a thread takes from an iterable ahead of use. An error is raised at its place.

    Args:
        items: Where the items come from. Only the thread uses it.
        depth: Largest number of items that wait.
        newest: Keep only the newest item that waits, as for a camera that is faster than its user.

    Example:
        >>> with ReadAhead(range(5), depth=2) as numbers:
        ...     list(numbers)
        [0, 1, 2, 3, 4]
    """

    def __init__(self, items: Iterable[Item], depth: int = 3, newest: bool = False) -> None:
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._thread = threading.Thread(target=self._read, args=(items, depth, newest), daemon=True)
        self._thread.start()

    def _read(self, items: Iterable[Item], depth: int, newest: bool) -> None:
        iterator = iter(items)
        try:
            for item in iterator:
                with self._changed:
                    if newest:
                        self._waiting.clear()
                    self._changed.wait_for(lambda: self._closed or len(self._waiting) < depth)
                    if self._closed:
                        return
                    self._waiting.append(item)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  raised again where the item is asked for
            self._error = error
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._ended)
            if self._waiting:
                item = self._waiting.popleft()
                self._changed.notify_all()
                return item
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def __enter__(self) -> ReadAhead[Item]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)  # a camera that hangs must not hold up the end


class TaskThread:
    """Does tasks one after the other in a thread. The first error is raised by the next call, and ends the work.

    On leaving the context the waiting tasks are done.

    Args:
        depth: Largest number of tasks that wait.
    """

    def __init__(self, depth: int = 3) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._depth, self._busy, self._closed = depth, False, False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                if not self._waiting:
                    return
                task, self._busy = self._waiting.popleft(), True
            try:
                task()
            except BaseException as error:  # noqa: BLE001  raised again in the thread of the user
                self._error = self._error or error
            with self._changed:
                self._busy = False
                if self._error is not None:
                    self._waiting.clear()
                self._changed.notify_all()

    def submit(self, task: Callable[[], object]) -> None:
        """Hand over a task; wait while too many are waiting."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._depth or self._error is not None)
            if self._error is None:
                self._waiting.append(task)
                self._changed.notify_all()
        self._raise()

    def finish(self) -> None:
        """Wait until every task is done."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._busy))
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> TaskThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with nullcontext() if kind is None else suppress(Exception):  # the first error counts
                self.finish()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join()
