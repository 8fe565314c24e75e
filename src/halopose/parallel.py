"""Run independent tasks on a thread pool, and array functions on blocks of rows.

NumPy and PyTorch release the interpreter lock inside array operations, so threads share the cores. Every task runs
with one PyTorch thread, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import numpy as np
import torch

from halopose.types import Array

Result = TypeVar("Result")
BLOCK_ROWS = 4096  # intermediate arrays of a block stay in the CPU cache
_thread_budget: ContextVar[int | None] = ContextVar("thread_budget", default=None)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run PyTorch operations on one thread; ``run_parallel`` inside still uses all threads PyTorch had.

    The previous number of threads is restored on exit. OpenMP threads spin after each shared operation, and would
    compete with the thread pool for the cores.
    """
    threads = torch.get_num_threads()
    token = _thread_budget.set(_available_threads())
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _thread_budget.reset(token)


def run_parallel(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call all tasks on as many threads as PyTorch may use and return their results in order.

    A task that calls ``run_parallel`` itself runs its own tasks one after another. The first error is raised.
    """
    threads = min(_available_threads(), len(tasks))
    if threads < 2:
        return [task() for task in tasks]
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    with single_threaded(), pool:
        return list(pool.map(_call, tasks))


def _call(task: Callable[[], Result]) -> Result:
    return task()


def _available_threads() -> int:
    """Number of threads that tasks may use: 1 inside a task."""
    return _thread_budget.get() or torch.get_num_threads()


def blocks(count: int, size: int | None = None) -> Iterator[slice]:
    """Slices of at most ``size`` rows that cover 0 to ``count``; one empty slice if ``count`` is 0."""
    size = size or BLOCK_ROWS
    for begin in range(0, max(count, 1), size):
        yield slice(begin, min(begin + size, count))


def stack_columns(parts: Iterable[Mapping[str, Array]], total: int) -> dict[str, Array]:
    """Concatenate named columns of consecutive parts into columns of ``total`` rows; at least one part."""
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


def map_blocks(function: Callable[[slice], Array], count: int, size: int | None = None) -> Array:
    """Call a function on each block of rows and concatenate the returned rows (count, ...)."""
    return stack_columns(({"rows": function(rows)} for rows in blocks(count, size)), count)["rows"]
