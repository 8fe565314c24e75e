"""Plots for html pages; templates/chart.html draws them as SVG, without scripts.

In: values in units of their own. Out: shares of a plot's sides, with the texts of its axes.
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
    """From low to high. names: texts of the ticks that are more than their numbers; such have no grid."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    names: Sequence[str] = ()
    logarithmic: bool = False

    @classmethod
    def linear(cls, label: str, low: float, high: float) -> Axis:
        """With round ticks."""
        return cls(label, low, high, linear_ticks(low, high))

    @classmethod
    def log(cls, label: str, low: float, high: float) -> Axis:
        """With ticks even in the logarithm, or nearly."""
        return cls(label, low, high, decade_ticks(low, high), logarithmic=True)

    @classmethod
    def of_bins(cls, label: str, count: int, names: Sequence[str]) -> Axis:
        """Bins at 0, 1, ... with a name each; one name more than bins is for their edges."""
        start = -0.5 if len(names) > count else 0.0
        return cls(label, -0.5, count - 0.5, [start + number for number in range(len(names))], names)

    def share(self, values: ArrayLike) -> Array:
        """How far along the axis, 0 at its low end and 1 at its high one; not finite where nowhere."""
        found, ends = np.asarray(values, dtype=float), np.array([self.low, self.high])
        if self.logarithmic:
            with np.errstate(divide="ignore", invalid="ignore"):
                found, ends = np.log(found), np.log(ends)
        return np.asarray((found - ends[0]) / (ends[1] - ends[0]))

    def marks(self) -> list[tuple[float, str]]:
        """Share and text of each tick."""
        texts = self.names or [tick_text(tick) for tick in self.ticks]
        return list(zip(self.share(self.ticks).tolist(), texts, strict=True))


@dataclass(frozen=True)
class Curve:
    """A line through x, y (n,) with, if given, an interval at each point; ``kind`` picks its colour.

    Without a label it is not in the legend. marked: each point has a mark.
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
    """Curves over bars; a bar is left and right in x, and height in y."""

    title: str
    x: Axis
    y: Axis
    curves: Sequence[Curve] = ()
    bars: Sequence[tuple[float, float, float]] = ()

    def keys(self) -> list[tuple[str, str]]:
        """Kind and label of every curve that the legend names."""
        return [(curve.kind, curve.label) for curve in self.curves if curve.label]

    def line(self, curve: Curve) -> list[list[float]]:
        """Shares (x, y) of the line, cut at the frame; over what is not a number it goes straight on."""
        points = self._points(curve)
        return clipped(points[np.isfinite(points).all(1)]).tolist()

    def dots(self, curve: Curve) -> list[list[float]]:
        """Shares (x, y) of the marks in the frame."""
        points = self._points(curve)
        return points[_framed(points)].tolist() if curve.marked else []

    def intervals(self, curve: Curve) -> list[list[float]]:
        """Shares (x, low, high) of the intervals, cut at the frame."""
        if curve.low is None or curve.high is None:
            return []
        points = self._points(curve)
        ends = [self.y.share(curve.low), self.y.share(curve.high)]
        # Below a logarithmic axis is minus infinity; of what has no interval there is nothing to draw.
        drawn = _framed(points) & ~np.isnan(ends).any(0)
        return np.column_stack([points[:, 0], *np.clip(ends, 0, 1)])[drawn].tolist()

    def columns(self) -> list[list[float]]:
        """Shares (left, right, height) of the bars, cut at the frame."""
        sides = np.reshape(np.array(self.bars, dtype=float), (-1, 3))
        shares = np.column_stack([self.x.share(sides[:, :2]), self.y.share(sides[:, 2])])
        return np.clip(shares[np.isfinite(shares).all(1)], 0, 1).tolist()

    def _points(self, curve: Curve) -> Array:
        return np.column_stack([self.x.share(curve.x), self.y.share(curve.y)])


def _framed(points: Array) -> Array:
    slack = 1e-9  # of a value on the border
    return np.asarray(((points >= -slack) & (points <= 1 + slack)).all(1))


def clipped(points: Array) -> Array:
    """A line (n, 2) cut at the unit square; where it leaves and returns over one side, along that side."""
    for axis, sign, offset in ((0, 1, 0), (0, -1, 1), (1, 1, 0), (1, -1, 1)):
        depth = sign * points[:, axis] + offset
        (last,) = np.nonzero((depth[:-1] < 0) != (depth[1:] < 0))
        way = depth[last] / (depth[last] - depth[last + 1])
        crossing = points[last] + way[:, None] * (points[last + 1] - points[last])
        crossing[:, axis] = (1 - sign) // 2
        inside = np.insert(depth >= 0, last + 1, True)
        points = np.insert(points, last + 1, crossing, axis=0)[inside]
    return points


def linear_ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers from low to high."""
    least = (high - low) / 6 * 0.999
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [number * step for number in range(first, last + 1)]


def decade_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two positive numbers, with some between them if they are few."""
    decades = math.log10(high / low)
    factors = (1, 2, 5) if decades < 1.5 else (1, 3) if decades < 3.5 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
    found = [tick for tick in ticks if low <= tick <= high]
    return found if len(found) > 2 else linear_ticks(low, high)


def tick_text(value: float) -> str:
    """Short; very small and very large numbers as powers of ten."""
    if not value or 1e-3 <= abs(value) < 1e5:
        return f"{value:g}".replace("-", "−")
    factor, power = f"{value:.3e}".split("e")
    mantissa = {"1": "", "-1": "−"}.get(f"{float(factor):g}", f"{float(factor):g}·".replace("-", "−"))
    return f"{mantissa}10{str(int(power)).translate(_SUPERSCRIPT)}"
