"""Plots of html pages, drawn as SVG by templates/chart.html without scripts.

Values are converted to positions between 0 and 1 along the axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from halopose.types import Array

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        label: Text of the axis.
        low: Value at the start.
        high: Value at the end.
        ticks: Values of the ticks.
        names: Texts of the ticks if they are not numbers; such an axis has no grid.
        logarithmic: Whether the scale is logarithmic.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    names: Sequence[str] = ()
    logarithmic: bool = False

    @classmethod
    def linear(cls, label: str, low: float, high: float) -> Axis:
        """A linear axis with round ticks."""
        return cls(label, low, high, linear_ticks(low, high))

    @classmethod
    def log(cls, label: str, low: float, high: float) -> Axis:
        """A logarithmic axis."""
        return cls(label, low, high, decade_ticks(low, high), logarithmic=True)

    @classmethod
    def of_bins(cls, label: str, count: int, names: Sequence[str]) -> Axis:
        """An axis of bins at 0, 1, ....

        Args:
            label: Text of the axis.
            count: Number of bins.
            names: Names of the bins, or of their edges if there is one more.
        """
        start = -0.5 if len(names) > count else 0.0
        return cls(label, -0.5, count - 0.5, [start + number for number in range(len(names))], names)

    def share(self, values: ArrayLike) -> Array:
        """Positions along the axis: 0 at its start, 1 at its end, not finite for values that have no position."""
        found, ends = np.asarray(values, dtype=float), np.array([self.low, self.high])
        if self.logarithmic:
            with np.errstate(divide="ignore", invalid="ignore"):
                found, ends = np.log(found), np.log(ends)
        return np.asarray((found - ends[0]) / (ends[1] - ends[0]))

    def marks(self) -> list[tuple[float, str]]:
        """Position and text of each tick."""
        texts = self.names or [tick_text(tick) for tick in self.ticks]
        return list(zip(self.share(self.ticks).tolist(), texts, strict=True))


@dataclass(frozen=True)
class Curve:
    """A line.

    Attributes:
        label: Text in the legend; empty for none.
        kind: Name of the colour.
        x: (n,) x values.
        y: (n,) y values.
        low: (n,) lower ends of intervals.
        high: (n,) upper ends of intervals.
        marked: Whether each point has a mark.
    """

    label: str
    kind: str
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None
    marked: bool = False


@dataclass(frozen=True)
class Plot:
    """A chart with curves and bars.

    Attributes:
        title: Title.
        x: Horizontal axis.
        y: Vertical axis.
        curves: Lines and marks.
        bars: Left end, right end and height of each bar.
    """

    title: str
    x: Axis
    y: Axis
    curves: Sequence[Curve] = ()
    bars: Sequence[tuple[float, float, float]] = ()

    def keys(self) -> list[tuple[str, str]]:
        """Kind and label of every curve in the legend."""
        return [(curve.kind, curve.label) for curve in self.curves if curve.label]

    def line(self, curve: Curve) -> list[list[float]]:
        """Positions (x, y) of the line, clipped to the frame. Points that are not finite are skipped."""
        points = self._points(curve)
        return clipped(points[np.isfinite(points).all(1)]).tolist()

    def dots(self, curve: Curve) -> list[list[float]]:
        """Positions (x, y) of the marks inside the frame."""
        points = self._points(curve)
        return points[_framed(points)].tolist() if curve.marked else []

    def intervals(self, curve: Curve) -> list[list[float]]:
        """Positions (x, low, high) of the intervals, clipped to the frame."""
        if curve.low is None or curve.high is None:
            return []
        points = self._points(curve)
        ends = [self.y.share(curve.low), self.y.share(curve.high)]
        # The position of 0 on a logarithmic axis is minus infinity. A point without an interval is NaN.
        drawn = _framed(points) & ~np.isnan(ends).any(0)
        return np.column_stack([points[:, 0], *np.clip(ends, 0, 1)])[drawn].tolist()

    def columns(self) -> list[list[float]]:
        """Positions (left, right, height) of the bars, clipped to the frame."""
        sides = np.reshape(np.array(self.bars, dtype=float), (-1, 3))
        shares = np.column_stack([self.x.share(sides[:, :2]), self.y.share(sides[:, 2])])
        return np.clip(shares[np.isfinite(shares).all(1)], 0, 1).tolist()

    def _points(self, curve: Curve) -> Array:
        return np.column_stack([self.x.share(curve.x), self.y.share(curve.y)])


def _framed(points: Array) -> Array:
    slack = 1e-9  # for values on the border
    return np.asarray(((points >= -slack) & (points <= 1 + slack)).all(1))


def clipped(points: Array) -> Array:
    """Clip a line (n, 2) to the unit square. Between leaving and entering, the result runs along the border."""
    for axis, sign, offset in ((0, 1, 0), (0, -1, 1), (1, 1, 0), (1, -1, 1)):
        depth = sign * points[:, axis] + offset
        (last,) = np.nonzero((depth[:-1] < 0) != (depth[1:] < 0))
        fraction = depth[last] / (depth[last] - depth[last + 1])
        crossing = points[last] + fraction[:, None] * (points[last + 1] - points[last])
        crossing[:, axis] = (1 - sign) // 2
        inside = np.insert(depth >= 0, last + 1, True)
        points = np.insert(points, last + 1, crossing, axis=0)[inside]
    return points


def linear_ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers between low and high."""
    least = (high - low) / 6 * 0.999
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [number * step for number in range(first, last + 1)]


def decade_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two positive numbers, with intermediate ticks if there are few."""
    decades = math.log10(high / low)
    factors = (1, 2, 5) if decades < 1.5 else (1, 3) if decades < 3.5 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
    found = [tick for tick in ticks if low <= tick <= high]
    return found if len(found) > 2 else linear_ticks(low, high)


def tick_text(value: float) -> str:
    """Short text of a number; very small and very large numbers as powers of ten."""
    if not value or 1e-3 <= abs(value) < 1e5:
        return f"{value:g}".replace("-", "−")
    factor, power = f"{value:.3e}".split("e")
    mantissa = {"1": "", "-1": "−"}.get(f"{float(factor):g}", f"{float(factor):g}·".replace("-", "−"))
    return f"{mantissa}10{str(int(power)).translate(_SUPERSCRIPT)}"
