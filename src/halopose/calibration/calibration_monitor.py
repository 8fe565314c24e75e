"""Does a calibration still hold? An anytime-valid test on a stream of p-values, without labels or with them.

Under the null hypothesis the stream is exchangeable with the calibration data. A betting martingale then stays below
1 / alpha with probability 1 - alpha over the whole stream, however long it is (Ville's inequality).

Reference: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, chapter 8.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from halopose.errors import HaloposeError

Watch = Literal["novelty", "calibration"]

_SMALL_BETS = ((0.1, 1.0), (0.3, 1.0), (0.5, 1.0), (0.75, 1.0))  # Beta densities: small p-values
_SHAPE_BETS = (
    (0.5, 1.0), (0.75, 1.0), (1.0, 0.5), (1.0, 0.75),  # errors larger or smaller than stated
    (0.6, 0.6), (2.0, 2.0), (1.5, 1.0), (1.0, 1.5),  # distributions too narrow or too wide
)  # fmt: skip
_FLOOR = 1e-9  # p-values are kept this far from 0 and 1
_LARGEST = 1e300


@dataclass(frozen=True)
class MonitorState:
    """State of a monitor after an update.

    Attributes:
        count: Number of p-values seen.
        evidence: Value of the martingale; at least 1 / alarm raises the alarm.
        alarmed_at: Number of the p-value at which the alarm was raised first, or None.
    """

    count: int
    evidence: float
    alarmed_at: int | None

    @property
    def alarmed(self) -> bool:
        """Whether the alarm was raised at any time."""
        return self.alarmed_at is not None


class CalibrationMonitor:
    """Raise an alarm when a stream stops being like the calibration data.

    Each p-value is ranked among the calibration values and the stream so far, so that the ranks of an exchangeable
    stream are independent and uniform also for a small calibration set. The martingale is a mixture over the moment of
    the change and over bets against uniform ranks. The false-alarm probability over the whole stream is at most
    ``alarm``. Frames of a film that follow closely are not exchangeable: update with one frame in a second or fewer.

    Args:
        alarm: False-alarm probability over the whole stream.
        calibration_size: Number n of calibration values behind conformal p-values k / (n + 1); None: p-values are
            uniform as they are, such as probability integral transforms.
        watch: "novelty" bets on small p-values; "calibration" also on errors larger or smaller than stated.
        seed: Seed of the ranks of equal p-values.

    Raises:
        HaloposeError: A setting is out of range.

    Example:
        >>> monitor, draw = CalibrationMonitor(alarm=0.01), random.Random(0)
        >>> any(monitor.update(draw.random()).alarmed for _ in range(500))
        False
        >>> for _ in range(20):
        ...     state = monitor.update(draw.uniform(0, 0.05))
        >>> state.alarmed_at < 515
        True
    """

    def __init__(
        self,
        alarm: float = 0.01,
        *,
        calibration_size: int | None = None,
        watch: Watch = "novelty",
        seed: int = 0,
    ) -> None:
        if not 0 < alarm < 1:
            raise HaloposeError(f"alarm is a probability between 0 and 1, got {alarm}")
        if calibration_size is not None and calibration_size < 1:
            raise HaloposeError(f"calibration_size is a number of values, at least 1, got {calibration_size}")
        bets = {"novelty": _SMALL_BETS, "calibration": _SHAPE_BETS}.get(watch)
        if bets is None:
            raise HaloposeError(f"watch is novelty or calibration, got {watch!r}")
        self.alarm = alarm
        self._bets = [(a, b, math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) for a, b in bets]
        self._started = [0.0] * len(bets)  # capital of bets that began at an earlier p-value, by bet
        self._unstarted = 1.0  # capital of bets that are still to begin
        self._count = 0
        self._alarmed_at: int | None = None
        self._evidence = 1.0
        self._ranks = None if calibration_size is None else _OnlineRanks(calibration_size, seed)

    @property
    def state(self) -> MonitorState:
        """The state after the last update."""
        return MonitorState(self._count, self._evidence, self._alarmed_at)

    def update(self, p: float) -> MonitorState:
        """Take the next p-value of the stream.

        Args:
            p: A p-value from 0 to 1.

        Raises:
            HaloposeError: The value is not one.
        """
        if not 0 <= p <= 1:
            raise HaloposeError(f"a p-value lies between 0 and 1, got {p}")
        self._count += 1
        rank = p if self._ranks is None else self._ranks.uniform(p)
        begin = self._unstarted - _left(self._count)
        self._unstarted -= begin
        share = begin / len(self._bets)
        low = math.log(max(rank, _FLOOR))
        high = math.log(max(1 - rank, _FLOOR))
        self._started = [
            min((capital + share) * math.exp(norm + (a - 1) * low + (b - 1) * high), _LARGEST)
            for capital, (a, b, norm) in zip(self._started, self._bets, strict=True)
        ]
        self._evidence = self._unstarted + sum(self._started)
        if self._alarmed_at is None and self._evidence >= 1 / self.alarm:
            self._alarmed_at = self._count
        return self.state


def _left(count: int) -> float:
    """Share of the capital that is kept for changes after the n-th p-value: slowly falling, so that late ones count."""
    return 1 / math.log2(2 + count / 8)


class _OnlineRanks:
    """Ranks of conformal p-values among n calibration values and the stream so far.

    A p-value k / (n + 1) says that k - 1 calibration values are more extreme. Values of the stream with the same k are
    in an unknown order, which is drawn at random: under exchangeability every order is equally likely.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._tree = [0] * (size + 2)  # Fenwick tree of the stream by k
        self._count = 0
        self._random = random.Random(seed)

    def uniform(self, p: float) -> float:
        """The rank of a p-value as a number from 0 to 1, and remember the value."""
        k = min(max(round(p * (self._size + 1)), 1), self._size + 1)
        before = self._below(k - 1)
        equal = self._below(k) - before
        place = k - 1 + before + self._random.randrange(equal + 1)
        found = (place + self._random.random()) / (self._size + self._count + 1)
        self._count += 1
        while k < len(self._tree):
            self._tree[k] += 1
            k += k & -k
        return found

    def _below(self, k: int) -> int:
        """Number of values of the stream with at most this k."""
        total = 0
        while k > 0:
            total += self._tree[k]
            k -= k & -k
        return total
