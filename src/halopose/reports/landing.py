"""A landing as one html page that needs nothing but a browser, and as a log; the plots are drawn here as SVG.

In: a ``Flight``, a summary of it, and perhaps its animation. Out: the page's text, or the log's json content.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import chi2

from halopose.errors import HaloposeError
from halopose.landing.flight import Flight
from halopose.landing.navigation.fusion import consistency
from halopose.landing.navigation.sensors import SIZES
from halopose.landing.requirements import LEVELS
from halopose.landing.summary import total_covariance
from halopose.landing.world.dataset import CORNER_NAMES
from halopose.landing.world.scenes import Array
from halopose.reports.landing_pictures import state_of
from halopose.reports.page import page

AXES = ("x", "y", "z")
_MEANING = ("along the runway", "to the left", "up")
_SILENCE = 2.5  # usual intervals without a measurement that make an outage
_KINDS = {b"RIFF": "image/webp", b"GIF8": "image/gif", b"\x89PNG": "image/png"}
_LABELS = {
    "vision_outside_95": "vision outside its 95 % ellipsoid, share",
    "trusted_vision_outside_95": "trusted vision outside it, share",
    "beyond_protection_level": "trusted frames beyond a protection level",
    "available": "frames by alert limit (Stanford diagram)",
    "fused_nees": "fused NEES, should be 3",
    "fused_nees_inside_95": "fused NEES inside its 95 % bounds, share",
    "root_mean_square_error": "root mean square error, metres",
    "rejected_by_filter": "measurements rejected by the filter",
}
_SOURCES = {
    "irs": "IRS",
    "gnss": "GNSS",
    "localizer": "Localizer",
    "glide_slope": "Glide slope",
    "radio": "Radio altimeter",
    "vision": "Vision",
}


def render_page(flight: Flight, summary: dict[str, Any], animation: bytes | None = None) -> str:
    """The page (html) of a flight, with the animation's file embedded if there is one."""
    world = flight.approach.world
    return page(
        "landing.html",
        title=f"Landing on runway {world.runway.designator}",
        summary=_about(flight),
        lead=_lead(flight),
        facts=_facts(flight),
        animation=None if animation is None else _embedded(animation),
        errors=[_error_chart(flight, axis) for axis in range(3)],
        consistency=[_nis_chart(flight), _nees_chart(flight)],
        integrity=[_statistic_chart(flight), *_level_charts(flight)],
        timeline=_timeline(flight),
        silences=_silences(flight),
        tables=_tables(summary),
        settings=[(name.replace("_", " "), _text(value)) for name, value in _settings(flight).items()],
    )


def log_of(flight: Flight) -> dict[str, Any]:
    """Everything that happened as json content: settings, counts per sensor, and every frame beside the truth."""
    track = flight.track
    counts = {
        source: {
            "measurements": len(track.times_of(source)),
            "rejected": int(((track.source == source) & ~track.accepted).sum()),
            "recovered": int(((track.source == source) & track.recovered).sum()),
        }
        for source in SIZES
        if len(track.times_of(source))
    }
    return {
        "settings": _settings(flight),
        "sensors": {source: _json(asdict(sensor)) for source, sensor in flight.settings.sensors.on_board()},
        "sources": counts,
        "ignored": list(track.ignored),
        "frames": [_frame_entry(flight, n) for n in range(len(flight.frame_times))],
    }


def _frame_entry(flight: Flight, n: int) -> dict[str, Any]:
    sightings, fixes = flight.sightings, flight.fixes
    nis, accepted = _vision_update(flight, n)
    excluded = int(fixes.excluded[n])
    return {
        "time": float(flight.frame_times[n]),
        "truth": {"position": _plain(flight.position[n]), "attitude": _plain(flight.attitude[n])},
        "state": state_of(flight, n)[0],
        "score": _plain(sightings.score[n]),
        "corners": {
            name: {
                "pixel": _plain(sightings.pixels[n, k]),
                "covariance": _plain(sightings.covariance[n, k]),
                "kept": bool(sightings.keep[n, k]),
            }
            for k, name in enumerate(CORNER_NAMES)
        },
        "vision": {
            "position": _plain(fixes.position[n]),
            "covariance": _plain(fixes.covariance[n]),
            "statistic": _plain(fixes.statistic[n]),
            "dof": int(fixes.dof[n]),
            "trusted": bool(fixes.trusted[n]),
            "excluded": CORNER_NAMES[excluded] if excluded >= 0 else None,
            "reason": fixes.reasons[n],
            "levels": _plain(fixes.levels[n]),
            "nis": nis,
            "accepted": accepted,
        },
        "fused": {
            "position": _plain(flight.fused[n]),
            "covariance": _plain(flight.fused_covariance[n]),
            "nees": _plain(flight.nees[n]),
            "levels": _plain(flight.track.answers.levels[n]),
            "flags": list(flight.track.answers.flags[n]),
        },
    }


def _vision_update(flight: Flight, n: int) -> tuple[float | None, bool | None]:
    """NIS of frame n's fix in the filter and whether it was accepted; None if it never came there."""
    track = flight.track
    near = slice(*np.searchsorted(track.times, flight.frame_times[n] + np.array([-1e-6, 1e-6])))
    rows = np.flatnonzero(track.source[near] == "vision") + near.start
    return (float(track.nis[rows[0]]), bool(track.accepted[rows[0]])) if rows.size else (None, None)


def _plain(values: Any) -> Any:
    """Numbers as json has them: an array with nothing finite in it is null, and so is a single such number."""
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).any():
        return None
    return array.tolist() if np.isfinite(array).all() else [_plain(entry) for entry in array]


def _json(content: Any) -> Any:
    """Nested settings with lists for tuples, and null for what json cannot say."""
    if isinstance(content, dict):
        return {key: _json(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_json(value) for value in content]
    return content if isinstance(content, str) else _plain(content)


def _settings(flight: Flight) -> dict[str, Any]:
    world = flight.approach.world
    chosen = {
        key: value for key, value in vars(flight.settings).items() if isinstance(value, (bool, int, float, str))
    }
    return {
        **chosen,
        "visibility_m": world.visibility,
        "runway": world.runway.designator,
        "runway_length_m": world.runway.length,
        "runway_width_m": world.runway.width,
        "image_size": [world.camera.width, world.camera.height],
        "focal_length_px": world.camera.fx,
        "frames": len(flight.frame_times),
        "corner_law": "Gaussian" if flight.sightings.dof is None else "Student-t",
    }


# --- words and tables -------------------------------------------------------------------------------------


def _about(flight: Flight) -> str:
    world, first, last = flight.approach.world, flight.position[0], flight.position[-1]
    size, air = f"{world.runway.length:.0f} by {world.runway.width:.0f} m", f"{world.visibility / 1000:.3g}"
    return (
        f"From {-first[0] / 1000:.1f} km to {-last[0]:.0f} m before the threshold of a runway of {size}, "
        f"{world.weather}, visibility {air}\N{NO-BREAK SPACE}km, {len(flight.frame_times)} frames."
    )


def _lead(flight: Flight) -> str:
    fused = _quantile(np.linalg.norm(flight.fused - flight.position, axis=1))
    sentence = f"In 95\N{NO-BREAK SPACE}% of the frames the fused position is within {_text(fused)} m of the truth"
    _, _, used = _flags(flight)
    if not used.any():
        return f"{sentence}; vision gave no position to be trusted."
    vision = _quantile(np.linalg.norm((flight.fixes.position - flight.position)[used], axis=1))
    return f"{sentence}, that of vision alone within {_text(vision)} m."


def _quantile(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, 0.95)) if known.size else float("nan")


def _facts(flight: Flight) -> list[tuple[str, str]]:
    labels = "Runway detected", "Position solved", "Position trusted"
    return [(label, _percent(float(np.mean(flags)))) for label, flags in zip(labels, _flags(flight), strict=True)]


def _flags(flight: Flight) -> tuple[Array, Array, Array]:
    """Which frames (N,) show the runway, have a position, have one that is trusted; each among those before."""
    seen = np.asarray(flight.sightings.seen, dtype=bool)
    solved = seen & np.asarray(flight.fixes.solved, dtype=bool)
    return seen, solved, solved & np.asarray(flight.fixes.trusted, dtype=bool)


def _percent(share: float) -> str:
    """Never 100 % unless it is all."""
    return f"{100 * share:.{0 if share in (0, 1) else 1}f}\N{NO-BREAK SPACE}%".replace("100.0", "99.9")


def _embedded(animation: bytes) -> str:
    kind = next((kind for start, kind in _KINDS.items() if animation.startswith(start)), None)
    if kind is None:
        raise HaloposeError("the animation is neither WebP nor GIF nor PNG: write it with animate")
    return f"data:{kind};base64,{base64.b64encode(animation).decode('ascii')}"


@dataclass(frozen=True)
class Table:
    """A part of the summary: its name, names of columns if there are several, rows of a label and texts."""

    name: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]


def _tables(summary: dict[str, Any]) -> list[Table]:
    """The summary as tables: single values in one, every dictionary of values or of dictionaries in its own."""
    single = [(_words(key), [_text(value)]) for key, value in summary.items() if not isinstance(value, dict)]
    tables = [Table("Summary", [], single)] if single else []
    for key, part in summary.items():
        if not isinstance(part, dict) or not part:
            continue
        inner = [value for value in part.values() if isinstance(value, dict)]
        columns = list(dict.fromkeys(str(name) for value in inner for name in value))
        rows = [
            (_words(name), [_text(value.get(c)) for c in columns] if isinstance(value, dict) else [_text(value)])
            for name, value in part.items()
        ]
        tables.append(Table(_words(key, first=str.upper), [column.replace("_", " ") for column in columns], rows))
    return tables


def _words(name: Any, first: Callable[[str], str] = str) -> str:
    words = _SOURCES.get(str(name)) or _LABELS.get(str(name)) or str(name).replace("_", " ")
    return first(words[:1]) + words[1:]


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple, np.ndarray)):
        return ", ".join(_text(entry) for entry in value)
    if isinstance(value, (float, np.floating)):
        if not np.isfinite(value):
            return "–"
        text = f"{value:.0f}" if abs(float(value)) >= 1000 else f"{value:.3g}"
        return text.replace("-", "−")
    return str(value)


# --- plots ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """From values to 0 (low) and 1 (high); bent like a logarithm, or like asinh where both signs matter."""

    low: float
    high: float
    ticks: tuple[float, ...]
    bend: Any = np.log

    def __call__(self, values: Any) -> Array:
        """Places of values, held at the ends if beyond them."""
        ends = self.bend(np.array([self.low, self.high]))
        inside = np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)
        return (self.bend(inside) - ends[0]) / (ends[1] - ends[0])


class Chart:
    """Values over the time of a flight, drawn as paths of an SVG."""

    left, top, right, bottom = 40.0, 22.0, 8.0, 42.0  # margins

    def __init__(
        self, flight: Flight, title: str, label: str, scale: Scale, width: int = 520, height: int = 250
    ) -> None:
        self.title, self.label, self.scale, self.width, self.height = title, label, scale, width, height
        self.shapes: list[tuple[str, str]] = []
        self.keys: list[tuple[str, str]] = []
        self.times = flight.truth.times[[0, -1]]
        self.x_marks = self._time_marks(flight)
        self.y_marks = [(float(self.y(tick)), f"{tick:g}".replace("-", "−")) for tick in scale.ticks]

    def x(self, times: Any) -> Array:
        """Where times lie in the drawing."""
        share = (np.asarray(times) - self.times[0]) / (self.times[1] - self.times[0])
        return self.left + share * (self.width - self.left - self.right)

    def y(self, values: Any) -> Array:
        """Where values lie in the drawing."""
        floor = self.height - self.bottom
        return floor - self.scale(values) * (floor - self.top)

    def line(self, kind: str, times: Array, values: Array, label: str = "") -> Chart:
        """A line, broken where a value is missing."""
        parts = [_path(self.x(times[run]), self.y(values[run])) for run in _runs(np.isfinite(values))]
        return self._add(kind, "".join(parts), label)

    def band(self, kind: str, times: Array, low: Array, high: Array, label: str = "") -> Chart:
        """A filled band, broken where a value is missing."""
        parts = []
        for run in _runs(np.isfinite(low) & np.isfinite(high)):
            x = np.concatenate([self.x(times[run]), self.x(times[run])[::-1]])
            parts.append(_path(x, np.concatenate([self.y(low[run]), self.y(high[run])[::-1]])) + "Z")
        return self._add(kind, "".join(parts), label)

    def dots(self, kind: str, times: Array, values: Array, label: str = "") -> Chart:
        """Dots: strokes without length, whose round ends the style sheet sizes."""
        known = np.isfinite(values)
        places = zip(self.x(times[known]), self.y(values[known]), strict=True)
        return self._add(f"dots {kind}", "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places), label)

    def _add(self, kind: str, path: str, label: str) -> Chart:
        if path:
            self.shapes.append((kind, path))
            if label:
                self.keys.append((kind, label))
        return self

    def _time_marks(self, flight: Flight) -> list[tuple[float, str, str]]:
        """Place, time and distance of ticks."""
        span = float(self.times[1] - self.times[0])
        step = next((step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if span / step <= 6), 1000)
        times = np.arange(np.ceil(self.times[0] / step) * step, self.times[1] + 1e-9, step)
        away = -flight.truth.position(times)[:, 0] / 1000
        return [(float(self.x(t)), f"{t:g} s", f"{d:.1f} km") for t, d in zip(times, away, strict=True)]


def _path(x: Array, y: Array) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _runs(flags: Array) -> list[slice]:
    """Stretches where flags (N,) are true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(int)))
    return [slice(start, end) for start, end in edges.reshape(-1, 2).tolist()]


def _decades(*values: Array, least: float = 1.0) -> Scale:
    """A logarithmic scale of whole decades about the values, up to ``least`` or more."""
    known = np.concatenate([value[np.isfinite(value) & (value > 0)] for value in values])
    low, high = np.quantile(known, (0.01, 0.995)) if known.size else (0.1, 1.0)
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(max(high, least))))
    first = max(first, last - 5)
    return Scale(10.0**first, 10.0**last, tuple(10.0**k for k in range(first, last + 1)))


def _error_chart(flight: Flight, axis: int) -> Chart:
    """Errors of one axis with bands of two standard deviations."""
    errors = {"vision": flight.fixes.position - flight.position, "fused": flight.fused - flight.position}
    spreads = {"vision": total_covariance(flight), "fused": flight.fused_covariance}
    twice = {name: 2 * np.sqrt(spread[:, axis, axis]) for name, spread in spreads.items()}
    known = np.concatenate([*twice.values(), *(abs(error[:, axis]) for error in errors.values())])
    known = known[np.isfinite(known)]
    reach = 1.1 * float(np.quantile(known, 0.995)) if known.size else 1.0
    linear = float(np.nanmedian(twice["fused"])) if np.isfinite(twice["fused"]).any() else reach
    steps = [step for step in (0.1, 1.0, 10.0, 100.0, 1000.0) if linear / 2 <= step <= reach]
    scale = Scale(-reach, reach, (*(-s for s in steps[::-1]), 0.0, *steps), lambda v: np.arcsinh(v / linear))
    chart = Chart(flight, f"{AXES[axis]}, {_MEANING[axis]}", "error in m", scale, 360, 270)
    times, trusted = flight.frame_times, flight.fixes.trusted
    for name in errors:
        chart.band(f"band {name}", times, -twice[name], twice[name])
    error = errors["vision"][:, axis]
    chart.dots("vision", times, np.where(trusted, error, np.nan), "vision")
    chart.dots("bad", times, np.where(trusted, np.nan, error), "not trusted")
    return chart.line("line fused", times, errors["fused"][:, axis], "fused")


def _against_law(chart: Chart, times: Array, values: Array, dof: int) -> Chart:
    """The band that should hold 95 % of values, named with the share that it does hold."""
    if not np.isfinite(values).any():
        chart.title += ": no values"
        return chart
    found = consistency(values, dof)
    low, high = (np.full(2, bound) for bound in found.bounds)
    chart.band("law", chart.times, low, high, f"should hold 95\N{NO-BREAK SPACE}%, holds {_percent(found.inside)}")
    chart.title += f": mean {found.mean:.2f}, should be {dof}"
    return chart


def _nis_chart(flight: Flight) -> Chart:
    mine = flight.track.source == "vision"
    times, nis, accepted = flight.track.times[mine], flight.track.nis[mine], flight.track.accepted[mine]
    chart = Chart(flight, "NIS of vision", "squared, 3 degrees of freedom", _decades(nis, least=30.0))
    _against_law(chart, times, nis, 3)
    chart.dots("vision", times, np.where(accepted, nis, np.nan), "accepted")
    return chart.dots("bad", times, np.where(accepted, np.nan, nis), "rejected")


def _nees_chart(flight: Flight) -> Chart:
    scale = _decades(flight.nees, least=30.0)
    chart = Chart(flight, "NEES of the fused position", "squared, 3 degrees of freedom", scale)
    _against_law(chart, flight.frame_times, flight.nees, 3)
    return chart.line("line fused", flight.frame_times, flight.nees, "fused")


def _statistic_chart(flight: Flight) -> Chart:
    """The residuals' chi-square against where 95 % of it should lie and where the check's limit is."""
    fixes, times = flight.fixes, flight.frame_times
    scale = _decades(fixes.statistic, least=30.0)
    chart = Chart(flight, "Integrity: chi-square of the corners", "squared", scale, 360, 270)
    checked = _flags(flight)[1] & (fixes.dof > 0)
    bound, limit = (
        np.where(checked, chi2.isf(tail, np.maximum(fixes.dof, 1)), np.nan)
        for tail in (0.05, flight.settings.false_alarm)
    )
    chart.band("law", times, np.full(len(times), scale.low), bound, "should hold 95 %")
    chart.line("line plain", times, limit, "limit")
    chart.dots("vision", times, np.where(fixes.trusted, fixes.statistic, np.nan), "trusted")
    return chart.dots("bad", times, np.where(fixes.trusted, np.nan, fixes.statistic), "not trusted")


def _level_charts(flight: Flight) -> list[Chart]:
    """Protection levels against the errors that they should bound, those of trusted frames, and alert limits."""
    error = np.abs(flight.fixes.error(flight.position))
    error = np.where(_flags(flight)[2][:, None], error, np.nan)
    charts, times, limits = [], flight.frame_times, flight.settings.required.limits
    for axis in (1, 2):
        size, level, limit = error[:, axis], flight.fixes.levels[:, axis], np.full(2, limits[axis])
        scale = _decades(size, np.where(np.isfinite(level), level, np.nan), limit)
        name = f"{LEVELS[axis].capitalize()}: protection level"
        chart = Chart(flight, name, "metres", scale, 360, 270)
        chart.line("line plain", times, level, "level")
        chart.line("line limit", chart.times, limit, f"alert limit, {flight.settings.required.name}")
        within = np.isnan(level) | (size <= level)
        chart.dots("vision", times, np.where(within, size, np.nan), "error of vision")
        charts.append(chart.dots("bad", times, np.where(within, np.nan, size), "beyond its level"))
    return charts


# --- sensors over time ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A sensor of the timeline: its name, counts in words, height in the drawing, bars (x, width), marks."""

    name: str
    counts: str
    y: float
    bars: list[tuple[float, float]]
    marks: list[tuple[str, str]]


@dataclass(frozen=True)
class Timeline:
    """All sensors, one above the other."""

    chart: Chart
    rows: list[Row]


def _flag_row(flight: Flight, chart: Chart, y: float) -> Row:
    """When the navigator said that it was not to be relied upon."""
    answers = flight.track.answers
    flagged = answers.times[answers.flagged]
    step = 1 / flight.settings.rate
    words = f"{len(flagged) * step:g} s raised" if len(flagged) else "never raised"
    marks = [("bad", _ticks(chart, flagged, y))] if len(flagged) else []
    return Row("Integrity flag", words, y, [_bar(chart, *chart.times)], marks)


def _timeline(flight: Flight) -> Timeline:
    present = [source for source in _SOURCES if len(flight.track.times_of(source))]
    height = 30 * (len(present) + 2)
    chart = Chart(flight, "Sensors", "", Scale(0, 1, (), np.asarray), 1080, height + 70)
    chart.left, chart.right = 250.0, 12.0
    chart.x_marks = chart._time_marks(flight)
    rows = [_sensor_row(flight, chart, source, 30.0 * k + 30) for k, source in enumerate(present)]
    below = 30.0 * len(present) + 30
    return Timeline(chart, [*rows, _camera_row(flight, chart, below), _flag_row(flight, chart, below + 30)])


def _sensor_row(flight: Flight, chart: Chart, source: str, y: float) -> Row:
    track = flight.track
    mine = track.source == source
    times, rejected = track.times_of(source), track.times[mine & ~track.accepted]
    bars = [_bar(chart, start, end) for start, end in _heard(times)]
    marks = [
        ("bad", _ticks(chart, rejected, y)),
        ("recovered", _ticks(chart, track.times[mine & track.recovered], y)),
    ]
    counts = f"{times.size:,}" + (f", {rejected.size:,} rejected" if rejected.size else "")
    return Row(_SOURCES[source], counts, y, bars, [(kind, path) for kind, path in marks if path])


def _camera_row(flight: Flight, chart: Chart, y: float) -> Row:
    """Frames of the camera that gave no position, by what went wrong."""
    seen, solved, trusted = _flags(flight)
    groups = {"unseen": ~seen, "unsolved": seen & ~solved, "bad": solved & ~trusted}
    marks = [(kind, _ticks(chart, flight.frame_times[flags], y)) for kind, flags in groups.items() if flags.any()]
    bars = [_bar(chart, start, end) for start, end in _heard(flight.frame_times)]
    lost = int((~trusted).sum())
    return Row("Camera frames", f"{len(seen):,}" + (f", {lost:,} not used" if lost else ""), y, bars, marks)


def _bar(chart: Chart, start: float, end: float) -> tuple[float, float]:
    left, right = (float(place) for place in chart.x([start, end]))
    return round(left, 1), round(max(right - left, 1.5), 1)


def _ticks(chart: Chart, times: Array, y: float) -> str:
    return "".join(f"M{x:.1f} {y - 8:.0f}v16" for x in chart.x(times))


def _heard(times: Array) -> list[tuple[float, float]]:
    """Stretches (start, end) in which a sensor speaks at its usual interval."""
    if times.size < 2:
        return [(float(time), float(time)) for time in times]
    gaps = np.diff(times)
    breaks = np.flatnonzero(gaps > _SILENCE * np.median(gaps))
    starts, ends = np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [times.size - 1]])
    return [(float(times[a]), float(times[b])) for a, b in zip(starts, ends, strict=True)]


def _silences(flight: Flight) -> list[str]:
    """Outages in words: between two stretches of a sensor, before its first and after its last."""
    first, last = flight.truth.times[[0, -1]]
    found = []
    for source, name in _SOURCES.items():
        times = flight.track.times_of(source)
        stretches = _heard(times)
        usual = _SILENCE * float(np.median(np.diff(times))) if times.size > 1 else np.inf
        ends = [first, *(end for _, end in stretches)]
        starts = [*(start for start, _ in stretches), last]
        gaps = [f"{a:.1f} to {b:.1f} s" for a, b in zip(ends, starts, strict=True) if b - a > usual]
        if gaps:
            found.append(f"{name} silent {_joined(gaps)}")
    return found


def _joined(parts: Sequence[str], most: int = 6) -> str:
    more = f" and {len(parts) - most} times more" if len(parts) > most else ""
    return ", ".join(parts[:most]) + more


__all__ = ["log_of", "render_page"]
