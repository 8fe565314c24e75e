"""Does a calibration still hold? An anytime-valid test on a stream of p-values, without labels or with them.

Under the null hypothesis the stream is exchangeable with the calibration data. A betting martingale then stays below
1 / alpha with probability 1 - alpha over the whole stream, however long it is (Ville's inequality).

Reference: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, chapter 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halopose.errors import HaloposeError
from halopose.runtime.predict import SMALL_BETS, BettingMartingale

Watch = Literal["novelty", "calibration"]

_SHAPE_BETS = (
    (0.5, 1.0), (0.75, 1.0), (1.0, 0.5), (1.0, 0.75),  # errors larger or smaller than stated
    (0.6, 0.6), (2.0, 2.0), (1.5, 1.0), (1.0, 1.5),  # distributions too narrow or too wide
)  # fmt: skip


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

    def __str__(self) -> str:
        found = f"alarm at image {self.alarmed_at}" if self.alarmed else "no alarm"
        return f"{found} of {self.count} (evidence {self.evidence:.3g})"


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
        >>> import random
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
        bets = {"novelty": SMALL_BETS, "calibration": _SHAPE_BETS}.get(watch)
        if bets is None:
            raise HaloposeError(f"watch is novelty or calibration, got {watch!r}")
        self.alarm = alarm
        self._martingale = BettingMartingale(calibration_size, bets, seed)
        self._alarmed_at: int | None = None

    @property
    def state(self) -> MonitorState:
        """The state after the last update."""
        return MonitorState(self._martingale.count, self._martingale.evidence, self._alarmed_at)

    def update(self, p: float) -> MonitorState:
        """Take the next p-value of the stream.

        Args:
            p: A p-value from 0 to 1.

        Raises:
            HaloposeError: The value is not one.
        """
        if not 0 <= p <= 1:
            raise HaloposeError(f"a p-value lies between 0 and 1, got {p}")
        evidence = self._martingale.update(p)
        if self._alarmed_at is None and evidence >= 1 / self.alarm:
            self._alarmed_at = self._martingale.count
        return self.state
