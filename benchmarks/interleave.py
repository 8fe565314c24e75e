"""Time two ways of doing the same thing in turns, so that a noisy machine treats both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Median seconds of ours and of the peer's, and the median of the ratios of neighbouring runs."""

    ours: float
    peer: float
    ratio: float


def compare(ours: Callable[[], object], peer: Callable[[], object], rounds: int) -> Comparison:
    """Run both in turns, after one round of warm-up; ratio is peer / ours."""
    ours(), peer()
    pairs = [(_seconds(ours), _seconds(peer)) for _ in range(rounds)]
    mine, theirs = zip(*pairs, strict=True)
    return Comparison(statistics.median(mine), statistics.median(theirs), statistics.median(b / a for a, b in pairs))


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
