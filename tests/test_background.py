"""Items read ahead, and tasks done in a thread."""

import threading
from collections.abc import Iterator

import pytest

from halopose.background import ReadAhead, TaskThread


def numbers(fail_at: int = 100) -> Iterator[int]:
    for number in range(5):
        if number == fail_at:
            raise ValueError("unreadable")
        yield number


def test_items_arrive_in_order_and_an_error_at_its_place() -> None:
    with ReadAhead(numbers(), depth=2) as items:
        assert list(items) == [0, 1, 2, 3, 4]
    with ReadAhead(numbers(3), depth=2) as items:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="unreadable"):
            next(items)


def test_leaving_early_ends_the_thread() -> None:
    before = threading.active_count()
    with ReadAhead(iter(int, 1), depth=2) as items:
        assert next(items) == 0
    assert threading.active_count() == before


def test_only_the_newest_item_waits() -> None:
    read, go = threading.Event(), threading.Event()

    def frames() -> Iterator[int]:
        yield 0
        go.wait(5)
        yield from (1, 2, 3)
        read.set()

    with ReadAhead(frames(), newest=True) as items:
        assert next(items) == 0
        go.set()
        assert read.wait(5)
        assert list(items) == [3]


def test_tasks_are_done_in_order_and_errors_reach_the_user() -> None:
    done: list[int] = []
    with TaskThread(depth=1) as tasks:
        for number in range(4):
            tasks.submit(lambda number=number: done.append(number))  # type: ignore[misc]
        tasks.finish()
        assert done == [0, 1, 2, 3]

    def fail() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"), TaskThread() as tasks:
        tasks.submit(fail)


def test_waiting_tasks_are_done_after_an_error_of_the_user() -> None:
    done: list[int] = []

    def work() -> None:
        with TaskThread() as tasks:
            tasks.submit(lambda: done.append(4))
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert done == [4]
