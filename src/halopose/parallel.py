"""Independent pieces of an evaluation or fit, on as many cores as torch may use; blocks of rows that fit a cache.

In: functions. Out: what they return, in their order. Each runs with one thread: results do not depend on how many
there are.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from halopose.types import Array

Item = TypeVar("Item")
Result = TypeVar("Result")
_threads: ContextVar[int | None] = ContextVar("threads", default=None)  # that pieces may use
_ROWS = 4096  # objects in a block: what is worked out on the way stays in the cache and out of fresh pages
_PATIENCE = 2e-4  # seconds that a piece waits for the interpreter; Python's 5 ms are as long as many pieces' steps


@contextmanager
def single_threaded(most: int | None = None) -> Iterator[None]:
    """While it holds, torch works on one thread, and ``run_parallel`` on as many as torch had, or on ``most``.

    After a step that torch has shared out its threads keep their cores busy waiting for the next one, and pieces
    that follow would have to share these cores with them.
    """
    threads = torch.get_num_threads()
    token = _threads.set(most or _threads.get() or threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _threads.reset(token)


def run_parallel(pieces: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call them all; numpy and torch let go of the interpreter while they work on arrays of this size.

    The thread that asks takes its share, and need not wait for others to start.
    """
    helpers = min(_usable(), len(pieces)) - 1
    if helpers < 1:
        return [piece() for piece in pieces]
    left, found = deque(enumerate(pieces)), dict[int, Result]()

    def work() -> None:
        while left:
            try:
                number, piece = left.popleft()
            except IndexError:  # another one was faster
                return
            found[number] = piece()

    pool = ThreadPoolExecutor(helpers, initializer=torch.set_num_threads, initargs=(1,))
    with single_threaded(1), _taking_turns(), pool:
        others = [pool.submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            left.clear()
        for other in others:
            other.result()
    return [found[number] for number in range(len(pieces))]


@contextmanager
def _taking_turns() -> Iterator[None]:
    """A piece of many small steps soon lets another one, which may only have to start a long one, go on."""
    before = sys.getswitchinterval()
    if before <= _PATIENCE:
        yield
        return
    sys.setswitchinterval(_PATIENCE)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _usable() -> int:
    """Threads that pieces may use; 1 within a piece."""
    return _threads.get() or torch.get_num_threads()


def map_chunks(work: Callable[[Sequence[Item]], list[Result]], items: Sequence[Item], least: int) -> list[Result]:
    """What ``work`` returns of each item, in their order; each thread is given a run of at least so many."""
    runs = max(1, min(_usable(), len(items) // least))
    bounds = [len(items) * number // runs for number in range(runs + 1)]
    found = run_parallel([partial(work, items[begin:end]) for begin, end in itertools.pairwise(bounds)])
    return list(itertools.chain.from_iterable(found))


def blocks(count: int, size: int | None = None) -> Iterator[slice]:
    """Rows 0 to ``count`` block by block; one block, empty, if there are none."""
    size = size or _ROWS
    for begin in range(0, max(count, 1), size):
        yield slice(begin, min(begin + size, count))


def stack_columns(parts: Iterable[Mapping[str, Array]], total: int) -> dict[str, Array]:
    """Columns (total, ...) by name from those of parts that follow each other; at least one part."""
    columns: dict[str, Array] = {}
    begin = 0
    for part in parts:
        end = begin
        for name, values in part.items():
            if name not in columns:
                columns[name] = np.empty((total, *values.shape[1:]), dtype=values.dtype)
            end = begin + len(values)
            columns[name][begin:end] = values
        begin = end
    return columns


def map_blocks(work: Callable[[slice], Array], count: int, size: int | None = None) -> Array:
    """Rows (count, ...) from those that ``work`` returns of each block."""
    return stack_columns(({"rows": work(rows)} for rows in blocks(count, size)), count)["rows"]
