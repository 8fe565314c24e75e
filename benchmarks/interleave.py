"""Time two ways of doing the same thing in turns, so that a noisy machine treats both alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Times of two actions that ran in turns.

    Attributes:
        ours: median seconds of the first action.
        peer: median seconds of the second action.
        ratios: peer / ours of each pair of neighbouring runs.
    """

    ours: float
    peer: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of the median ratio, see `median_interval`; None of one round."""
        return median_interval(self.ratios) if len(self.ratios) > 1 else None

    def divided(self, ours: float = 1.0, peer: float = 1.0) -> Comparison:
        """The same comparison where a run did ``ours`` and ``peer`` units of work."""
        ratios = tuple(ratio * ours / peer for ratio in self.ratios)
        return Comparison(self.ours / ours, self.peer / peer, ratios)


def compare(ours: Callable[[], object], peer: Callable[[], object], rounds: int) -> Comparison:
    """Run both in turns, after one round of warm-up.

    Args:
        ours: the first action of each pair.
        peer: the second action of each pair.
        rounds: number of pairs.
    """
    ours(), peer()
    pairs = [(_seconds(ours), _seconds(peer)) for _ in range(rounds)]
    mine, theirs = zip(*pairs, strict=True)
    return Comparison(statistics.median(mine), statistics.median(theirs), tuple(b / a for a, b in pairs))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median by order statistics; of fewer than six values their range."""
    ordered, count = sorted(values), len(values)
    rank, tail = 0, 0.5**count  # tail: probability that at most `rank` of the values lie below the true median
    while tail <= 0.025:
        rank += 1
        tail += math.comb(count, rank) * 0.5**count
    rank = max(rank - 1, 0)
    return ordered[rank], ordered[count - 1 - rank]


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
