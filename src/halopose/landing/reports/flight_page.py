"""Render a landing as one self-contained html page, and as a json log."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from halopose.landing.flight import Flight, SimulatedFlight
from halopose.landing.navigation.sensors import SIZES
from halopose.landing.reports.flight_charts import (
    AxisScale,
    Chart,
    error_chart,
    flags,
    level_charts,
    nees_chart,
    nis_chart,
    stanford_charts,
    statistic_chart,
)
from halopose.landing.reports.flight_pictures import HEIGHT, PHOTOGRAPHS, RATE, SPLIT, WIDTH, Box, state_of
from halopose.landing.reports.flight_text import LABELS, format_value
from halopose.landing.runway_datasets import CORNER_NAMES
from halopose.reports.html import asset, page, percent
from halopose.types import Array

_SILENCE = 2.5  # number of usual intervals without a measurement that count as an outage
_SOURCES = {
    "irs": "IRS",
    "gnss": "GNSS",
    "localizer": "Localizer",
    "glide_slope": "Glide slope",
    "radio": "Radio altimeter",
    "vision": "Vision",
}


def render_page(flight: Flight, summary: dict[str, Any], stills: Sequence[bytes] = ()) -> str:
    """Return the page (html) of a flight, with the WebP images of its animation embedded if there are any."""
    return page(
        "landing.html",
        package="halopose.landing.reports",
        title=f"Landing on runway {flight.scenario.designator}",
        summary=_about(flight),
        lead=_lead(flight),
        facts=_facts(flight),
        doubts=_doubts(summary),
        film=[_embedded(still) for still in stills],
        rate=RATE,
        size=(WIDTH, HEIGHT),
        split=SPLIT,
        photographs=_outline(PHOTOGRAPHS),
        player=asset("film.js", package="halopose.landing.reports"),
        errors=[error_chart(flight, axis) for axis in range(3)],
        consistency=[nis_chart(flight), nees_chart(flight)],
        integrity=[statistic_chart(flight), *level_charts(flight)],
        stanford=stanford_charts(flight) if flight.has_truth else [],
        timeline=_timeline(flight),
        silences=_silences(flight),
        tables=_tables(summary),
        settings=[(name.replace("_", " "), format_value(name, value)) for name, value in _settings(flight).items()],
    )


def log_of(flight: Flight) -> dict[str, Any]:
    """Return the json content of ``log.json``: settings, counts per sensor, and every frame with the truth."""
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
    corner_detections, fixes = flight.corner_detections, flight.vision_fixes
    nis, accepted = _vision_update(flight, n)
    excluded = int(fixes.excluded[n])
    return {
        "time": float(flight.frame_times[n]),
        "truth": {"position": _plain(flight.position[n]), "attitude": _plain(flight.attitude[n])},
        "state": state_of(flight, n)[0],
        "score": _plain(corner_detections.score[n]),
        "corners": {
            name: {
                "pixel": _plain(corner_detections.pixels[n, k]),
                "covariance": _plain(corner_detections.covariance[n, k]),
                "kept": bool(corner_detections.keep[n, k]),
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
            "levels": _plain(flight.track.output.levels[n]),
            "flags": list(flight.track.output.flags[n]),
        },
    }


def _vision_update(flight: Flight, n: int) -> tuple[float | None, bool | None]:
    """Return the NIS of frame n's fix in the filter and whether it was accepted; None if it was not used."""
    track = flight.track
    rows = np.flatnonzero((track.source == "vision") & (np.abs(track.times - flight.stamps[n]) < 1e-6))
    return (float(track.nis[rows[0]]), bool(track.accepted[rows[0]])) if rows.size else (None, None)


def _plain(values: Any) -> Any:
    """Return numbers as json content; null for a number or array without finite values."""
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).any():
        return None
    return array.tolist() if np.isfinite(array).all() else [_plain(entry) for entry in array]


def _json(content: Any) -> Any:
    """Return nested settings as json content: lists for tuples, and null for values that json cannot express."""
    if isinstance(content, dict):
        return {key: _json(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_json(value) for value in content]
    return content if isinstance(content, str) else _plain(content)


def _settings(flight: Flight) -> dict[str, Any]:
    place = flight.scenario
    foreign = () if isinstance(flight, SimulatedFlight) else ("seed", "weather")
    chosen = {
        key: value
        for key, value in vars(flight.settings).items()
        if isinstance(value, (bool, int, float, str)) and key not in foreign
    }
    return {
        **chosen,
        "air": place.air,
        "runway": place.designator,
        "runway_length_m": place.length,
        "runway_width_m": place.width,
        "image_size": [place.camera.width, place.camera.height],
        "focal_length_px": place.camera.fx,
        "frames": len(flight.frame_times),
        "corner_distribution": "Gaussian" if flight.corner_detections.dof is None else "Student-t",
    }


# --- words and tables -------------------------------------------------------------------------------------


def _about(flight: Flight) -> str:
    place, first, last = flight.scenario, flight.reference[0], flight.reference[-1]
    return (
        f"From {-first[0] / 1000:.1f} km to {-last[0]:.0f} m before the threshold of a runway of "
        f"{place.length:.0f} by {place.width:.0f} m, {place.air}, {len(flight.frame_times)} frames."
    )


def _lead(flight: Flight) -> str:
    if not flight.has_truth:
        spread = _quantile(2 * np.sqrt(np.trace(flight.fused_covariance, axis1=1, axis2=2)))
        return (
            "The true positions are unknown. In 95\N{NO-BREAK SPACE}% of the frames two standard deviations of the "
            f"fused position are below {format_value('', spread)} m."
        )
    fused = _quantile(np.linalg.norm(flight.fused - flight.position, axis=1))
    sentence = (
        f"In 95\N{NO-BREAK SPACE}% of the frames the fused position is within {format_value('', fused)} m of the truth"
    )
    _, _, used = flags(flight)
    if not used.any():
        return f"{sentence}; vision gave no position to be trusted."
    vision = _quantile(np.linalg.norm((flight.vision_fixes.position - flight.position)[used], axis=1))
    return f"{sentence}, that of vision alone within {format_value('', vision)} m."


def _quantile(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, 0.95)) if known.size else float("nan")


def _facts(flight: Flight) -> list[tuple[str, str]]:
    labels = "Runway detected", "Position solved", "Position trusted"
    return [(label, percent(float(np.mean(flags)))) for label, flags in zip(labels, flags(flight), strict=True)]


def _embedded(still: bytes) -> str:
    return f"data:image/webp;base64,{base64.b64encode(still).decode('ascii')}"


def _outline(boxes: Sequence[Box]) -> str:
    """Return the photographs in a still's left half as a CSS polygon."""
    around = ((0, 0), (1, 0), (1, 1), (0, 1), (0, 0))
    corners = [(left + x * width, top + y * height) for left, top, width, height in boxes for x, y in around]
    # Back to where it began, so that the way from one to the next has no width.
    return ", ".join(f"{100 * x / SPLIT:.3f}% {100 * y / HEIGHT:.3f}%" for x, y in [*corners, corners[0]])


def _doubts(summary: dict[str, Any]) -> list[str]:
    """Return why frames were not used, the most frequent reason first."""
    lost = summary.get("frames_not_used_because", {})
    return [
        f"{count} {'frame' if count == 1 else 'frames'} not used: {why.removeprefix('not trusted: ')}."
        for why, count in sorted(lost.items(), key=lambda entry: -entry[1])
    ]


@dataclass(frozen=True)
class Table:
    """Part of the summary: title, column names if there are several, and rows of a label and texts."""

    name: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]


def _tables(summary: dict[str, Any]) -> list[Table]:
    """Return the summary as tables: single values in one table, and each dictionary in its own."""
    single = [
        (_words(key), [format_value(key, value)]) for key, value in summary.items() if not isinstance(value, dict)
    ]
    tables = [Table("Summary", [], single)] if single else []
    for key, part in summary.items():
        if not isinstance(part, dict) or not part:
            continue
        inner = [value for value in part.values() if isinstance(value, dict)]
        columns = list(dict.fromkeys(str(name) for value in inner for name in value))
        rows = [
            (
                _words(name),
                [format_value(key, value.get(c)) for c in columns]
                if isinstance(value, dict)
                else [format_value(key, value)],
            )
            for name, value in part.items()
        ]
        tables.append(Table(_words(key, first=str.upper), [column.replace("_", " ") for column in columns], rows))
    return tables


def _words(name: Any, first: Callable[[str], str] = str) -> str:
    words = _SOURCES.get(str(name)) or LABELS.get(str(name)) or str(name).replace("_", " ")
    return first(words[:1]) + words[1:]


# --- sensors over time ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A sensor of the timeline: name, counts in words, height in the drawing, bars (x, width), marks."""

    name: str
    counts: str
    y: float
    bars: list[tuple[float, float]]
    marks: list[tuple[str, str]]


@dataclass(frozen=True)
class Timeline:
    """Timeline of all sensors, one row each."""

    chart: Chart
    rows: list[Row]


def _flag_row(flight: Flight, chart: Chart, y: float) -> Row:
    """Return the row that shows when the position was flagged."""
    answers = flight.track.output
    flagged = answers.times[answers.flagged]
    step = 1 / flight.settings.rate
    words = f"{len(flagged) * step:g} s raised" if len(flagged) else "never raised"
    marks = [("bad", _ticks(chart, flagged, y))] if len(flagged) else []
    return Row("Integrity flag", words, y, [_bar(chart, *chart.times)], marks)


def _timeline(flight: Flight) -> Timeline:
    present = [source for source in _SOURCES if len(flight.track.times_of(source))]
    height = 30 * (len(present) + 2)
    chart = Chart(flight, "Sensors", "", AxisScale(0, 1, (), np.asarray), 1080, height + 70)
    chart.left, chart.right = 250.0, 26.0
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
    """Return the row of camera frames without a position, by reason."""
    seen, solved, trusted = flags(flight)
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
    """Return the intervals (start, end) in which a sensor measures at its usual rate."""
    if times.size < 2:
        return [(float(time), float(time)) for time in times]
    gaps = np.diff(times)
    breaks = np.flatnonzero(gaps > _SILENCE * np.median(gaps))
    starts, ends = np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [times.size - 1]])
    return [(float(times[a]), float(times[b])) for a, b in zip(starts, ends, strict=True)]


def _silences(flight: Flight) -> list[str]:
    """Return the outages of all sensors in words, in seconds since frame 0."""
    first, last = flight.frame_times[[0, -1]]
    found = []
    for source, name in _SOURCES.items():
        times = flight.track.times_of(source)
        stretches = _heard(times)
        usual = _SILENCE * float(np.median(np.diff(times))) if times.size > 1 else np.inf
        ends = [first, *(end for _, end in stretches)]
        starts = [*(start for start, _ in stretches), last]
        gaps = [f"{a - first:.1f} to {b - first:.1f} s" for a, b in zip(ends, starts, strict=True) if b - a > usual]
        if gaps:
            found.append(f"{name} silent {_joined(gaps)}")
    return found


def _joined(parts: Sequence[str], most: int = 6) -> str:
    more = f" and {len(parts) - most} times more" if len(parts) > most else ""
    return ", ".join(parts[:most]) + more
