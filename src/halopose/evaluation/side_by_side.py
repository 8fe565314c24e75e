"""Independent pieces of one evaluation, on as many cores as torch may use.

In: functions. Out: what they return, in their order. Each runs with one thread: results do not depend on how many
there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def side_by_side(pieces: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call them all; numpy and torch let go of the interpreter while they work on arrays of this size."""
    threads = torch.get_num_threads()
    if min(threads, len(pieces)) < 2:
        return [piece() for piece in pieces]
    try:
        with ThreadPoolExecutor(
            min(threads, len(pieces)), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            return [done.result() for done in [pool.submit(piece) for piece in pieces]]
    finally:
        torch.set_num_threads(threads)


__all__ = ["side_by_side"]
