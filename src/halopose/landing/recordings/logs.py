"""Read csv logs of sensors as measurements in runway axes, in order of time.

Column names state quantity and unit: angles end in ``_deg`` or ``_rad``, lengths in ``_m``. Every log has a column
``time_s``, which never decreases.

    attitude  heading (from true north) or yaw (right of the landing direction), pitch, roll
    gnss      latitude_deg, longitude_deg, height_m above the same level as the runway's heights, or x_m, y_m, z_m
    ils       localizer and glide_slope: angles left of the centreline and above the path, at the antennas
    radio     height_m above the ground below
    irs       acceleration_x_mps2, _y_ and _z_ in runway axes, without gravity
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from halopose.data.files import write_text
from halopose.errors import HaloposeError
from halopose.landing.navigation.sensors import Measurement, Sensors, Source, in_order
from halopose.landing.navigation.terrain import LONGEST_GAP_M, Terrain
from halopose.landing.recordings.runway_sites import Site
from halopose.types import Array

Kind = Literal["attitude", "gnss", "ils", "radio", "irs"]
KINDS: tuple[Kind, ...] = ("attitude", "gnss", "ils", "radio", "irs")
_FARTHEST = 200e3  # metres from the threshold beyond which a position is invalid
_LARGEST = {"pitch": math.radians(60), "roll": math.radians(90), "localizer": 0.7, "glide_slope": 0.5}
_GRAVITY = (8.0, 12.0)  # m/s^2: a median acceleration above this includes gravity
_HELD = 1 / 3  # share of repeated positions above which a log is sample and hold
_HIGHEST = 5000.0  # metres; radio altimeters end at half of this


@dataclass(frozen=True)
class Log:
    """One csv file: times (N,) in seconds and columns (N,) by name; missing values are NaN."""

    path: Path
    times: Array
    columns: dict[str, Array]

    def angle(self, name: str) -> Array | None:
        """Return an angle in radians from ``name_deg`` or ``name_rad``; None without such a column."""
        if f"{name}_rad" in self.columns:
            values = self.columns[f"{name}_rad"]
            largest = float(np.nanmax(np.abs(values), initial=0.0))
            if largest > 2 * math.pi + 1e-6:
                raise HaloposeError(
                    f"{self.path}: {name}_rad goes to {largest:.3g}: if these are degrees, call it {name}_deg"
                )
            return values
        return np.radians(self.columns[f"{name}_deg"]) if f"{name}_deg" in self.columns else None

    def column(self, name: str) -> Array:
        """Return a column; raise an error if it is missing."""
        if name not in self.columns:
            raise HaloposeError(f"{self.path} has no column {name}: it has {', '.join(self.columns) or 'none'}")
        return self.columns[name]

    def needed(self, name: str) -> Array:
        """Return an angle in radians; raise an error if it is missing."""
        found = self.angle(name)
        if found is None:
            raise HaloposeError(
                f"{self.path} has no column {name}_deg or {name}_rad: it has {', '.join(self.columns) or 'none'}"
            )
        if float(np.nanmax(np.abs(found), initial=0.0)) > _LARGEST.get(name, math.inf):
            raise HaloposeError(
                f"{self.path}: {name} goes to {np.degrees(np.nanmax(np.abs(found))):.0f} degrees: check its unit"
            )
        return found


def read_log(path: Path | str) -> Log:
    """Read a csv file with a header and non-decreasing times."""
    path, columns = Path(path), _columns(Path(path), "time_s")
    times = columns.pop("time_s")
    _check_times(path, times)
    return Log(path, times, columns)


def read_terrain(path: Path | str, site: Site) -> Terrain:
    """Read a profile of the ground under the approach: columns ``x_m`` and ``height_m``.

    ``x_m`` is the distance from the threshold in the landing direction, negative before it, and ``height_m`` the height
    of the ground above the threshold. The surface of the runway itself is known.
    """
    columns = _columns(Path(path), "x_m")
    if "height_m" not in columns:
        raise HaloposeError(f"{path} has no column height_m: it has {', '.join(columns)}")
    along, height = columns["x_m"], columns["height_m"]
    runway = np.unique(np.append(np.arange(0.0, site.far_end, LONGEST_GAP_M), site.far_end))
    approach = along < 0
    along = np.append(along[approach], runway)
    height = np.append(height[approach], site.corners[2:, 2].mean() * runway / site.far_end)
    order = np.argsort(along)
    try:
        return Terrain(along[order], height[order])
    except HaloposeError as error:
        raise HaloposeError(f"{path}: {error}") from None


def _columns(path: Path, first: str) -> dict[str, Array]:
    """Read the columns (N,) of a csv file of numbers that has the column ``first``; missing values are NaN."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except OSError as error:
        raise HaloposeError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise HaloposeError(f"{path} is not text: give a csv file") from None
    except csv.Error as error:
        raise HaloposeError(f"{path} is not a csv file of numbers ({error})") from None
    if len(rows) < 2:
        raise HaloposeError(f"{path} has no rows: it needs a header and at least one row")
    header = [name.strip() for name in rows[0]]
    if first not in header:
        raise HaloposeError(f"{path} has no column {first}: it has {', '.join(header)}")
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise HaloposeError(f"{path} has {header.count(twice)} columns {twice!r}: leave one, or rename the others")
    table = np.full((len(rows) - 1, len(header)), np.nan)
    for number, row in enumerate(rows[1:]):
        if len(row) != len(header):
            raise HaloposeError(f"{path}, line {number + 2}: {len(row)} values for {len(header)} columns")
        for place, text in enumerate(row):
            try:
                table[number, place] = float(text) if text.strip() else np.nan
            except ValueError:
                raise HaloposeError(f"{path}, line {number + 2}: {text!r} is not a number") from None
    return {name: table[:, place] for place, name in enumerate(header)}


def _check_times(path: Path, times: Array) -> None:
    if not np.isfinite(times).all():
        raise HaloposeError(f"{path}, line {int(np.argmin(np.isfinite(times))) + 2}: time_s is not a number of seconds")
    back = np.flatnonzero(np.diff(times) < 0)
    if len(back):
        line = int(back[0]) + 3
        raise HaloposeError(
            f"{path}, line {line}: time goes back to {times[line - 2]:.3f} from {times[line - 3]:.3f} s: sort it"
        )
    if len(times) > 1 and np.median(np.diff(times)) > 60:
        raise HaloposeError(f"{path}: {np.median(np.diff(times)):.3g} s between rows: time_s is in seconds")


def measurements(
    log: Log, kind: Kind, site: Site, sensors: Sensors, positions: Sequence[Measurement] = ()
) -> list[Measurement]:
    """Return the measurements of a log in runway axes, with the noise that ``sensors`` state.

    Args:
        log: rows of a csv file.
        kind: what the log holds.
        site: the runway.
        sensors: sensors on board.
        positions: GNSS positions in runway axes. Headings are measured in the local level frame of the aircraft, and
            are rotated into runway axes where positions are given. A yaw is in runway axes already.
    """
    if not any(np.isfinite(column).any() for column in log.columns.values()):
        raise HaloposeError(f"{log.path} has no value in any row: give another log, or leave it out")
    found = _READERS[kind](log, site)
    if kind == "attitude" and positions and log.angle("heading") is not None:
        times, places = np.array([each.time for each in positions]), np.array([each.value for each in positions])
        p_runway = np.stack([np.interp(log.times, times, axis) for axis in places.T], axis=1)
        found = [(source, site.level_to_runway(values, p_runway)) for source, values in found]
    result = []
    for source, values in found:
        sensor = getattr(sensors, source)
        if sensor is None:
            raise HaloposeError(f"{log.path}: {source} is left out of the sensors on board")
        spread = sensor.covariance
        known = np.isfinite(values).all(1)
        rows = zip(log.times[known].tolist(), values[known], strict=True)
        result += [Measurement(time, source, value, spread) for time, value in rows]
    return in_order(result)


Parts = list[tuple[Source, Array]]


def _attitude(log: Log, site: Site) -> Parts:
    heading = log.angle("heading")
    yaw = log.needed("yaw") if heading is None else heading - site.heading
    angles = np.stack([(yaw + math.pi) % (2 * math.pi) - math.pi, log.needed("pitch"), log.needed("roll")], axis=1)
    if float(np.nanmedian(np.abs(angles[:, 0]))) > math.pi / 2:
        raise HaloposeError(
            f"{log.path}: the aircraft heads away from runway {site.designator}: is the heading from true north, "
            "and the runway not the other end?"
        )
    return [("attitude", angles)]


def _gnss(log: Log, site: Site) -> Parts:
    positions = _positions(log, site)
    positions = np.where(_repeated(positions)[:, None], np.nan, positions)
    known = np.isfinite(positions).all(1)
    if not known.any():
        raise HaloposeError(f"{log.path} has no whole position in any row: give another log, or leave it out")
    away = np.linalg.norm(positions, axis=1)
    if float(away[known].min()) > _FARTHEST:
        raise HaloposeError(
            f"{log.path}: never nearer than {away[known].min() / 1000:.0f} km to runway {site.designator}: are "
            "latitude and longitude swapped, or the runway another?"
        )
    return [("gnss", np.where((away <= _FARTHEST)[:, None], positions, np.nan))]


def _positions(log: Log, site: Site) -> Array:
    """Return positions (N, 3) of a log in runway axes."""
    if "x_m" in log.columns:
        return np.stack([log.column(f"{axis}_m") for axis in "xyz"], axis=1)
    places = np.stack([log.column(name) for name in ("latitude_deg", "longitude_deg", "height_m")], axis=1)
    if float(np.nanmax(np.abs(places[:, 0]), initial=0.0)) > 90:
        raise HaloposeError(f"{log.path}: a latitude beyond 90 degrees: are latitude and longitude swapped?")
    return site.from_wgs84(places)


def _repeated(positions: Array) -> Array:
    """Return which rows (N,) repeat the previous position, if a logger wrote positions faster than the receiver gave
    them.

    Repeats are not measurements. A few equal rows are not evidence of sample and hold, and are kept.
    """
    same = np.zeros(len(positions), dtype=bool)
    same[1:] = (positions[1:] == positions[:-1]).all(1)
    moving = len(positions) > 1 and float(np.nanmax(np.ptp(positions, axis=0), initial=0.0)) > 0
    return same if moving and same.sum() > _HELD * len(positions) else np.zeros_like(same)


def held(log: Log, site: Site) -> str:
    """Return one line about a log that repeats positions (sample and hold), or an empty text."""
    count = int(_repeated(_positions(log, site)).sum())
    if not count:
        return ""
    return (
        f"{log.path}: {count} of {len(log.times)} rows repeat the position before (sample and hold): repeats are "
        "left out; log each position once, with the time it is valid at"
    )


def too_far(log: Log, site: Site) -> str:
    """Return one line about positions too far away for this approach, or an empty text."""
    far = int((np.linalg.norm(_positions(log, site), axis=1) > _FARTHEST).sum())
    if not far:
        return ""
    return (
        f"{log.path}: {far} of {len(log.times)} rows are over {_FARTHEST / 1000:.0f} km from runway "
        f"{site.designator}, and are left out"
    )


def _ils(log: Log, _: Site) -> Parts:
    return [("localizer", log.needed("localizer")[:, None]), ("glide_slope", log.needed("glide_slope")[:, None])]


def _radio(log: Log, _: Site) -> Parts:
    heights = log.column("height_m")
    if float(np.nanmax(heights, initial=0.0)) > _HIGHEST:
        raise HaloposeError(f"{log.path}: a radio altimeter at {np.nanmax(heights):.0f} m: is height_m in feet?")
    return [("radio", heights[:, None])]


def _irs(log: Log, _: Site) -> Parts:
    values = np.stack([log.column(f"acceleration_{axis}_mps2") for axis in "xyz"], axis=1)
    usual = float(np.nanmedian(np.linalg.norm(values, axis=1)))
    if _GRAVITY[0] < usual < _GRAVITY[1]:
        raise HaloposeError(
            f"{log.path}: the median acceleration is {usual:.2f} m/s2, close to gravity: give accelerations in runway "
            "axes without gravity, not the specific force in body axes"
        )
    return [("irs", values)]


_READERS: dict[Kind, Callable[[Log, Site], Parts]] = {
    "attitude": _attitude, "gnss": _gnss, "ils": _ils, "radio": _radio, "irs": _irs,
}  # fmt: skip


def attitudes_at(measured: Sequence[Measurement], times: Array, apart: float = 0.2) -> Array:
    """Interpolate yaw, pitch and roll (N, 3) at times (N,), linearly; NaN if no sample is within ``apart`` seconds."""
    given = [each for each in measured if each.source == "attitude"]
    if not given:
        return np.full((len(times), 3), np.nan)
    stamps, angles = np.array([each.time for each in given]), np.unwrap([each.value for each in given], axis=0)
    result = np.stack([np.interp(times, stamps, axis) for axis in angles.T], axis=1)
    after = (
        np.clip(np.searchsorted(stamps, times), 1, len(stamps) - 1) if len(stamps) > 1 else np.zeros(len(times), int)
    )
    nearest = np.minimum(np.abs(stamps[after] - times), np.abs(stamps[np.maximum(after - 1, 0)] - times))
    return np.where((nearest <= apart)[:, None], result, np.nan)


def write_logs(folder: Path, measured: Sequence[Measurement], site: Site) -> dict[Kind, Path]:
    """Write measurements as logs that ``read_log`` reads, with all digits."""
    paths: dict[Kind, Path] = {}
    heads: dict[Kind, tuple[tuple[Source, ...], str]] = {
        "attitude": (("attitude",), "yaw_rad,pitch_rad,roll_rad"),
        "gnss": (("gnss",), "latitude_deg,longitude_deg,height_m"),
        "ils": (("localizer", "glide_slope"), "localizer_rad,glide_slope_rad"),
        "radio": (("radio",), "height_m"),
        "irs": (("irs",), "acceleration_x_mps2,acceleration_y_mps2,acceleration_z_mps2"),
    }
    for kind, (sources, head) in heads.items():
        rows: dict[float, dict[Source, Array]] = {}
        for each in measured:
            if each.source in sources:
                value = site.to_wgs84(each.value) if each.source == "gnss" else each.value
                rows.setdefault(each.time, {})[each.source] = value
        if not rows:
            continue
        lines = [f"time_s,{head}"]
        for time in sorted(rows):
            cells = [cell for source in sources for cell in _cells(rows[time].get(source), head, sources)]
            lines.append(",".join([repr(time), *cells]))
        paths[kind] = folder / f"{kind}.csv"
        write_text(paths[kind], "\n".join(lines) + "\n")
    return paths


def write_terrain(path: Path, terrain: Terrain) -> None:
    """Write a profile that ``read_terrain`` reads, with all digits."""
    rows = zip(terrain.along.tolist(), terrain.height.tolist(), strict=True)
    write_text(path, "\n".join(["x_m,height_m", *(f"{x!r},{height!r}" for x, height in rows)]) + "\n")


def _cells(value: Array | None, head: str, sources: tuple[Source, ...]) -> list[str]:
    count = (head.count(",") + 1) // len(sources)
    return [""] * count if value is None else [repr(float(each)) for each in value]
