"""Background threads that overlap reading, computing and writing: item prefetching and a task queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """Iterator whose items a thread prefetches from an iterable. An error is raised at the position of its item.

    Args:
        items: Source of the items. Only the thread uses it.
        depth: Largest number of waiting items.
        newest: Keep only the newest waiting item, for example of a camera that is faster than the model.

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
        except BaseException as error:  # noqa: BLE001  raised again when the item is requested
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
        self._thread.join(timeout=5.0)  # a camera that does not respond must not block the exit


class TaskThread:
    """Runs tasks in order in a thread. The first error stops the work and is raised by the next call.

    On exit of the context all waiting tasks are finished.

    Args:
        depth: Largest number of waiting tasks.
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
        """Add a task; wait while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._depth or self._error is not None)
            if self._error is None:
                self._waiting.append(task)
                self._changed.notify_all()
        self._raise()

    def finish(self) -> None:
        """Wait until all tasks are finished."""
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
            with nullcontext() if kind is None else suppress(Exception):  # the first error is raised
                self.finish()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join()
