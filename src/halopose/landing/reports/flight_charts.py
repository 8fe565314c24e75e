"""Charts of a landing: values over time as SVG paths, and errors against protection levels (Stanford diagrams)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import chi2

from halopose.landing.flight import Flight
from halopose.landing.navigation.fusion import consistency
from halopose.landing.requirements import LEVEL_AXES, count_stanford
from halopose.landing.summary import total_covariance
from halopose.reports.html import percent
from halopose.types import Array

AXES = ("x", "y", "z")
_MEANING = ("along the runway", "to the left", "up")


def flags(flight: Flight) -> tuple[Array, Array, Array]:
    """Return which frames (N,) show the runway, have a position, and have a trusted one; each a subset of the
    previous.
    """
    seen = np.asarray(flight.corner_detections.seen, dtype=bool)
    solved = seen & np.asarray(flight.vision_fixes.solved, dtype=bool)
    return seen, solved, solved & np.asarray(flight.vision_fixes.trusted, dtype=bool)


@dataclass(frozen=True)
class AxisScale:
    """Map from values to 0 (low) and 1 (high); linear, logarithmic, or asinh for both signs."""

    low: float
    high: float
    ticks: tuple[float, ...]
    bend: Any = np.log

    def __call__(self, values: Any) -> Array:
        """Return the places of values, clipped at the ends."""
        ends = self.bend(np.array([self.low, self.high]))
        inside = np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)
        return (self.bend(inside) - ends[0]) / (ends[1] - ends[0])


class Chart:
    """Chart of values over the time of a flight, drawn as SVG paths."""

    over = "time"
    left, top, right, bottom = 40.0, 22.0, 8.0, 42.0  # margins

    def __init__(
        self, flight: Flight, title: str, label: str, scale: AxisScale, width: int = 520, height: int = 250
    ) -> None:
        self.title, self.label, self.scale, self.width, self.height = title, label, scale, width, height
        self.shapes: list[tuple[str, str]] = []
        self.keys: list[tuple[str, str]] = []
        self.times = _ends(flight)
        self.x_marks = self._time_marks(flight)
        self.y_marks = [(float(self.y(tick)), f"{tick:g}".replace("-", "−")) for tick in scale.ticks]

    def x(self, times: Any) -> Array:
        """Return the x coordinates of times."""
        share = (np.asarray(times) - self.times[0]) / (self.times[1] - self.times[0])
        return self.left + share * (self.width - self.left - self.right)

    def y(self, values: Any) -> Array:
        """Return the y coordinates of values."""
        floor = self.height - self.bottom
        return floor - self.scale(values) * (floor - self.top)

    def line(self, kind: str, times: Array, values: Array, label: str = "") -> Chart:
        """Add a line, broken at missing values."""
        parts = [_path(self.x(times[run]), self.y(values[run])) for run in _runs(np.isfinite(values))]
        return self._add(kind, "".join(parts), label)

    def band(self, kind: str, times: Array, low: Array, high: Array, label: str = "") -> Chart:
        """Add a filled band, broken at missing values."""
        parts = []
        for run in _runs(np.isfinite(low) & np.isfinite(high)):
            x = np.concatenate([self.x(times[run]), self.x(times[run])[::-1]])
            parts.append(_path(x, np.concatenate([self.y(low[run]), self.y(high[run])[::-1]])) + "Z")
        return self._add(kind, "".join(parts), label)

    def dots(self, kind: str, times: Array, values: Array, label: str = "") -> Chart:
        """Add dots: strokes without length, whose round ends the style sheet sizes."""
        known = np.isfinite(values) & np.isfinite(times)
        places = zip(self.x(times[known]), self.y(values[known]), strict=True)
        return self._add(f"dots {kind}", "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places), label)

    def _add(self, kind: str, path: str, label: str) -> Chart:
        if path:
            self.shapes.append((kind, path))
            if label:
                self.keys.append((kind, label))
        return self

    def _time_marks(self, flight: Flight) -> list[tuple[float, str, str]]:
        """Return position, time since the first frame and distance of at most seven ticks."""
        start, span = float(self.times[0]), float(self.times[1] - self.times[0])
        unit = 10.0 ** np.floor(np.log10(span / 6))
        step = next(factor * unit for factor in (1, 2, 5, 10) if span <= 6.001 * factor * unit)
        since = step * np.arange(int(span / step + 1e-6) + 1)
        away = -np.interp(start + since, flight.frame_times, flight.reference[:, 0]) / 1000
        return [(float(self.x(start + t)), f"{t:g} s", f"{d:.1f} km") for t, d in zip(since, away, strict=True)]


def _ends(flight: Flight) -> Array:
    """Return the first and last instant (2,) of a flight, never equal."""
    first, last = float(flight.frame_times[0]), float(flight.frame_times[-1])
    return np.array([first, last if last > first else first + 1.0])


def _path(x: Array, y: Array) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _runs(flags: Array) -> list[slice]:
    """Return the intervals in which flags (N,) are true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(int)))
    return [slice(start, end) for start, end in edges.reshape(-1, 2).tolist()]


def _decades(*values: Array, least: float = 1.0) -> AxisScale:
    """Return a logarithmic scale of whole decades around the values, up to at least ``least``."""
    known = np.concatenate([value[np.isfinite(value) & (value > 0)] for value in values])
    low, high = np.quantile(known, (0.01, 0.995)) if known.size else (0.1, 1.0)
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(max(high, least))))
    first = max(first, last - 5)
    return AxisScale(10.0**first, 10.0**last, tuple(10.0**k for k in range(first, last + 1)))


def error_chart(flight: Flight, axis: int) -> Chart:
    """Chart the errors of one axis with bands of two standard deviations."""
    errors = {"vision": flight.vision_fixes.position - flight.position, "fused": flight.fused - flight.position}
    spreads = {"vision": total_covariance(flight), "fused": flight.fused_covariance}
    twice = {name: 2 * np.sqrt(spread[:, axis, axis]) for name, spread in spreads.items()}
    known = np.concatenate([*twice.values(), *(abs(error[:, axis]) for error in errors.values())])
    known = known[np.isfinite(known)]
    reach = 1.1 * float(np.quantile(known, 0.995)) if known.size else 1.0
    linear = float(np.nanmedian(twice["fused"])) if np.isfinite(twice["fused"]).any() else reach
    steps = [step for step in (0.1, 1.0, 10.0, 100.0, 1000.0) if linear / 2 <= step <= reach]
    scale = AxisScale(-reach, reach, (*(-s for s in steps[::-1]), 0.0, *steps), lambda v: np.arcsinh(v / linear))
    chart = Chart(flight, f"{AXES[axis]}, {_MEANING[axis]}", "error in m", scale, 360, 270)
    times, trusted = flight.frame_times, flight.vision_fixes.trusted
    for name in errors:
        chart.band(f"band {name}", times, -twice[name], twice[name])
    error = errors["vision"][:, axis]
    chart.dots("vision", times, np.where(trusted, error, np.nan), "vision")
    chart.dots("bad", times, np.where(trusted, np.nan, error), "not trusted")
    return chart.line("line fused", times, errors["fused"][:, axis], "fused")


def _against_distribution(chart: Chart, times: Array, values: Array, dof: int) -> Chart:
    """Add the band that should contain 95 % of values, labelled with the share that it does contain."""
    if not np.isfinite(values).any():
        chart.title += ": no values"
        return chart
    found = consistency(values, dof)
    low, high = (np.full(2, bound) for bound in found.bounds)
    chart.band("nominal", chart.times, low, high, f"should hold 95\N{NO-BREAK SPACE}%, holds {percent(found.inside)}")
    chart.title += f": mean {found.mean:.2f}, should be {dof}"
    return chart


def nis_chart(flight: Flight) -> Chart:
    mine = flight.track.source == "vision"
    times, nis, accepted = flight.track.times[mine], flight.track.nis[mine], flight.track.accepted[mine]
    chart = Chart(flight, "NIS of vision", "squared, 3 degrees of freedom", _decades(nis, least=30.0))
    _against_distribution(chart, times, nis, 3)
    chart.dots("vision", times, np.where(accepted, nis, np.nan), "accepted")
    return chart.dots("bad", times, np.where(accepted, np.nan, nis), "rejected")


def nees_chart(flight: Flight) -> Chart:
    scale = _decades(flight.nees, least=30.0)
    chart = Chart(flight, "NEES of the fused position", "squared, 3 degrees of freedom", scale)
    _against_distribution(chart, flight.frame_times, flight.nees, 3)
    return chart.line("line fused", flight.frame_times, flight.nees, "fused")


def statistic_chart(flight: Flight) -> Chart:
    """Chart the residuals' chi-square against its 95 % band and the limit of the integrity check."""
    fixes, times = flight.vision_fixes, flight.frame_times
    scale = _decades(fixes.statistic, least=30.0)
    chart = Chart(flight, "Integrity: chi-square of the corners", "squared", scale, 360, 270)
    checked = flags(flight)[1] & (fixes.dof > 0)
    bound, limit = (
        np.where(checked, chi2.isf(tail, np.maximum(fixes.dof, 1)), np.nan)
        for tail in (0.05, flight.settings.false_alarm)
    )
    chart.band("nominal", times, np.full(len(times), scale.low), bound, "should hold 95 %")
    chart.line("line plain", times, limit, "limit")
    chart.dots("vision", times, np.where(fixes.trusted, fixes.statistic, np.nan), "trusted")
    return chart.dots("bad", times, np.where(fixes.trusted, np.nan, fixes.statistic), "not trusted")


def level_charts(flight: Flight) -> list[Chart]:
    """Chart protection levels against the errors of trusted frames and the alert limits."""
    error = np.abs(flight.vision_fixes.error(flight.position))
    error = np.where(flags(flight)[2][:, None], error, np.nan)
    charts, times, limits = [], flight.frame_times, flight.settings.approach_requirement.limits
    for axis in (1, 2):
        size, level, limit = error[:, axis], flight.vision_fixes.levels[:, axis], np.full(2, limits[axis])
        scale = _decades(size, np.where(np.isfinite(level), level, np.nan), limit)
        name = f"{LEVEL_AXES[axis].capitalize()}: protection level"
        chart = Chart(flight, name, "metres", scale, 360, 270)
        chart.line("line plain", times, level, "level")
        chart.line("line limit", chart.times, limit, f"alert limit, {flight.settings.approach_requirement.name}")
        within = np.isnan(level) | (size <= level)
        chart.dots("vision", times, np.where(within, size, np.nan), "error of vision")
        charts.append(chart.dots("bad", times, np.where(within, np.nan, size), "beyond its level"))
    return charts


class Diagram(Chart):
    """Stanford diagram: protection levels over errors, both on the same logarithmic scale."""

    def __init__(self, title: str, scale: AxisScale, width: int = 520, height: int = 360) -> None:
        self.title, self.label, self.scale, self.width, self.height = title, "level in m", scale, width, height
        self.over, self.shapes, self.keys = "error in m", [], []
        self.times = np.array([scale.low, scale.high])
        marks = [(tick, f"{tick:g}") for tick in scale.ticks]
        self.x_marks = [(float(self.x(tick)), text, "error in m" * (tick == marks[-1][0])) for tick, text in marks]
        self.y_marks = [(float(self.y(tick)), text) for tick, text in marks]

    def x(self, values: Any) -> Array:
        """Return the x coordinates of errors."""
        return self.left + self.scale(values) * (self.width - self.left - self.right)


def stanford_charts(flight: Flight) -> list[Diagram]:
    """Chart level over error of every trusted frame, lateral and across the path, against the alert limit.

    Above the diagonal the level bounds the error; below the alert limit the frame is available. Below the diagonal the
    frame is misleading. An error beyond the limit with a level below it is hazardous.
    """
    error = np.abs(flight.vision_fixes.error(flight.position))
    used, limits, charts = flags(flight)[2], flight.settings.approach_requirement.limits, []
    for axis in (1, 2):
        size, level, limit = error[used, axis], flight.vision_fixes.levels[used, axis], limits[axis]
        scale = _decades(size, np.where(np.isfinite(level), level, np.nan), np.array([0.1, limit]), least=100.0)
        count = count_stanford(size, level, limit)
        share = percent(count.available / count.total) if count.total else "none"
        chart = Diagram(f"{LEVEL_AXES[axis].capitalize()}: {share} available", scale)
        ends = np.array([scale.low, scale.high])
        chart.band("band bad", ends, np.full(2, scale.low), ends, f"misleading {count.misleading}")
        chart.line("line plain", ends, ends)
        name = f"alert limit, {flight.settings.approach_requirement.name}, hazardous {count.hazardous}"
        chart.line("line limit", ends, np.full(2, limit), name)
        chart.line("line limit", np.full(2, limit), np.array([scale.low, limit]))
        held = size <= level
        chart.dots("vision", size[held], level[held], "level held")
        chart.dots("bad", size[~held], level[~held], "error beyond its level")
        charts.append(chart)
    return charts
