"""Runways on the earth: read four WGS84 corners, or a runway of the built-in table, and convert positions.

The table (``runways.csv``) holds facts of OurAirports, which are in the public domain: ends, elevations above sea
level, displaced thresholds, widths. Its coordinates are accurate to some metres: for navigation give surveyed corners.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from halopose.data.files import read_json
from halopose.errors import HaloposeError
from halopose.geometry.camera import angles_from_rotation, rotation_from_angles
from halopose.landing.recordings import need
from halopose.types import Array

_LENGTHS, _WIDTHS = (250.0, 6500.0), (8.0, 120.0)  # metres, range of valid lengths
_STEEPEST = 0.03  # slope
_LARGEST = 10_000.0  # degrees or metres of a corner
_SAME_PLACE, _SAME_HEADING = 60.0, math.radians(1.0)  # tolerances for the same runway in the table and in a file
_DOUBTFUL = 20.0  # metres, tolerated difference to the published length


@dataclass(frozen=True)
class Site:
    """A runway with its place on the earth.

    Attributes:
        designator: designator of the runway.
        corners: corners (4, 3) in runway axes.
        latitude: latitude of the landing threshold in degrees.
        longitude: its longitude in degrees.
        height: its height in metres.
        heading: heading of the x axis in radians from true north.
        note: what to know before relying on it.
        surveyed: whether the corners are surveyed; those of the table are not.
    """

    designator: str
    corners: Array
    latitude: float
    longitude: float
    height: float
    heading: float
    note: str = ""
    surveyed: bool = True

    @property
    def length(self) -> float:
        """Length in metres from the near corners to the far ones."""
        return float(np.linalg.norm(self.corners[2:].mean(0) - self.corners[:2].mean(0)))

    @property
    def far_end(self) -> float:
        """Metres from the landing threshold to the far end; less than the length if the threshold is displaced."""
        return float(self.corners[2:, 0].mean())

    @property
    def width(self) -> float:
        """Metres between the near corners."""
        return float(np.linalg.norm(self.corners[0] - self.corners[1]))

    @property
    def turn(self) -> Array:
        """Rotation (3, 3) from runway axes to east, north, up."""
        sin, cos = math.sin(self.heading), math.cos(self.heading)
        return np.array([[sin, -cos, 0.0], [cos, sin, 0.0], [0.0, 0.0, 1.0]])

    def to_enu(self, positions: Array) -> Array:
        """Convert runway axes (..., 3) to east, north, up (..., 3) of the threshold."""
        return np.asarray(positions @ self.turn.T)

    def to_wgs84(self, positions: Array) -> Array:
        """Convert runway axes (..., 3) to latitude and longitude in degrees and height in metres (..., 3)."""
        enu = self.to_enu(positions)
        origin = self.latitude, self.longitude, self.height
        return np.stack(_geodesy().enu2geodetic(enu[..., 0], enu[..., 1], enu[..., 2], *origin), axis=-1)

    def level_to_runway(self, attitudes: Array, p_runway: Array) -> Array:
        """Rotate attitudes from the local level frame of the aircraft into runway axes.

        The level frame tilts by 0.157 mrad per km from the threshold, and true north turns with the longitude.

        Args:
            attitudes: heading relative to the runway's, pitch and roll (N, 3) in the local level frame.
            p_runway: positions (N, 3) of the aircraft in runway axes.

        Returns:
            Yaw, pitch and roll (N, 3) in runway axes.
        """
        places = np.radians(self.to_wgs84(p_runway)[..., :2])
        R_ecef_local = _R_ecef_enu(places[..., 0], places[..., 1])
        R_ecef_site = _R_ecef_enu(np.radians(np.float64(self.latitude)), np.radians(np.float64(self.longitude)))
        R_level_runway = self.turn.T @ np.swapaxes(R_ecef_local, -1, -2) @ R_ecef_site @ self.turn
        return np.stack(angles_from_rotation(rotation_from_angles(*attitudes.T) @ R_level_runway), axis=-1)

    def from_wgs84(self, places: Array) -> Array:
        """Convert latitude and longitude in degrees and height in metres (..., 3) to runway axes (..., 3)."""
        origin = self.latitude, self.longitude, self.height
        enu = np.stack(_geodesy().geodetic2enu(places[..., 0], places[..., 1], places[..., 2], *origin), axis=-1)
        return np.asarray(enu @ self.turn)


def _R_ecef_enu(latitude_rad: Array, longitude_rad: Array) -> Array:
    """Return rotations (..., 3, 3) from east, north, up to the earth-fixed frame."""
    sin_lat, cos_lat = np.sin(latitude_rad), np.cos(latitude_rad)
    sin_lon, cos_lon = np.sin(longitude_rad), np.cos(longitude_rad)
    east = np.stack([-sin_lon, cos_lon, np.zeros_like(sin_lon)], axis=-1)
    north = np.stack([-sin_lat * cos_lon, -sin_lat * sin_lon, cos_lat], axis=-1)
    up = np.stack([cos_lat * cos_lon, cos_lat * sin_lon, sin_lat], axis=-1)
    return np.stack([east, north, up], axis=-1)


def read_runway(given: Path | str) -> Site:
    """Read a runway from a json file, ``KSFO/28R`` from the table, or ``database.json#LFPO/24`` from a file of LARD.

    A json file holds ``corners`` (near left, near right, far right, far left as seen on approach, each with latitude,
    longitude and height) and optionally a ``designator``; or an ``airport`` and a ``designator`` of the table.

    Example:
        >>> site = read_runway("KSFO/28R")
        >>> round(site.length), round(site.width), round(np.degrees(site.heading))
        (3618, 61, 298)
    """
    text = str(given)
    path, mark, name = text.partition("#")
    if mark:
        return from_lard(path, *name.partition("/")[::2])
    if not text.lower().endswith(".json"):
        airport, _, designator = text.partition("/")
        return from_table(airport, designator)
    content = read_json(given)
    if not isinstance(content, dict):
        raise HaloposeError(f"{given} is not a runway: it needs corners, or airport and designator")
    designator = str(content.get("designator", ""))
    if "corners" in content:
        return from_corners(_corners(given, content["corners"]), designator, str(given))
    if "airport" not in content:
        raise HaloposeError(f"{given} is not a runway: it needs corners, or airport and designator")
    return from_table(str(content["airport"]), designator)


def other_runways(site: Site) -> list[Site]:
    """Return the other runways of the table at the airport of a site; none if the table does not have the site.

    A site of surveyed corners counts as a runway of the table if its threshold agrees within 60 m, and its heading
    within a degree.
    """
    for row in _table():
        near = np.array([[float(row[f"{end}_latitude"]), float(row[f"{end}_longitude"])] for end in ("low", "high")])
        if np.abs(near - (site.latitude, site.longitude)).min(0).max() > 0.5:  # degrees
            continue
        for end in ("low", "high"):
            known = from_table(row["airport"], row[f"{end}_end"])
            starts = np.stack([np.zeros(3), known.corners[:2].mean(0)])  # the landing threshold and the pavement
            apart = np.linalg.norm(site.from_wgs84(known.to_wgs84(starts))[:, :2], axis=1)
            if apart.min() < _SAME_PLACE and _angle(known.heading - site.heading) < _SAME_HEADING:
                rows = [each for each in _table() if each["airport"] == row["airport"] and each is not row]
                return [from_table(each["airport"], each["low_end"]) for each in rows]
    return []


def corners_seen_from(site: Site, other: Site) -> Array:
    """Return the corners (4, 3) of another runway in the axes of a site, near and far as seen in its landing
    direction.
    """
    corners = site.from_wgs84(other.to_wgs84(other.corners))
    return corners if _angle(other.heading - site.heading) <= math.pi / 2 else corners[[2, 3, 0, 1]]


def _angle(difference: float) -> float:
    """Return the size of an angle in radians, at most pi."""
    return abs((difference + math.pi) % math.tau - math.pi)


def from_table(airport: str, designator: str) -> Site:
    """Return a runway of the table, for landing in the direction of its designator."""
    named = [row for row in _table() if row["airport"] == airport.upper()]
    if not named:
        known = ", ".join(sorted({row["airport"] for row in _table()}))
        raise HaloposeError(f"no airport {airport!r} in the table ({known}): give a json file with four corners")
    ends = {row[f"{end}_end"]: (row, end) for row in named for end in ("low", "high")}
    wanted = designator.upper().zfill(3 if designator[-1:].upper() in ("L", "R", "C") else 2)
    if wanted not in ends:
        raise HaloposeError(f"no runway {designator!r} at {airport.upper()}: {', '.join(sorted(ends))}")
    row, near = ends[wanted]
    far = "high" if near == "low" else "low"
    keys = ("latitude", "longitude", "elevation_m")
    places = np.array([[float(row[f"{end}_{key}"]) for key in keys] for end in (near, far)])
    site = _site(wanted, np.zeros((4, 3)), places[0], 0.0)
    along = site.from_wgs84(places[1:])[0]
    length = float(np.hypot(along[0], along[1]))
    heading = math.atan2(-along[1], along[0]) % math.tau  # heading 0: x is north and y is west
    half, displaced = float(row["width_m"]) / 2, float(row[f"{near}_displaced_m"])
    flat = np.array([[-displaced, half], [-displaced, -half], [length - displaced, -half], [length - displaced, half]])
    rise = along[2] * (flat[:, :1] / length)
    start = _site(wanted, np.zeros((4, 3)), places[0], heading)
    threshold = start.to_wgs84(np.array([displaced, 0.0, along[2] * displaced / length]))
    apart = abs(length - float(row["length_m"]))
    note = f"{row['source']}, elevations above sea level"
    if apart > _DOUBTFUL:
        note += f"; its ends are {apart:.0f} m off the published length: give surveyed corners"
    return replace(_site(wanted, np.concatenate([flat, rise], axis=1), threshold, heading, note), surveyed=False)


def from_lard(path: Path | str, airport: str, designator: str) -> Site:
    """Read a runway of LARD's data base: corners C and D are near, A and B far, left and right in any order."""
    content = read_json(path)
    airports = content if isinstance(content, dict) else {}
    if airport not in airports or not isinstance(airports[airport], dict):
        known = ", ".join(sorted(airports)[:8])
        raise HaloposeError(f"{path} has no airport {airport!r}: give FILE#AIRPORT/RUNWAY; it has {known} ...")
    runways = airports[airport]
    if designator not in runways:
        raise HaloposeError(f"{path} has no runway {designator!r} at {airport}: {', '.join(sorted(runways))}")
    try:
        given = [runways[designator][name]["coordinate"] for name in "CDBA"]
        places = np.array([[float(each[key]) for key in ("latitude", "longitude", "altitude")] for each in given])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise HaloposeError(
            f"{path}: {airport}/{designator} needs corners A to D, each with a coordinate: latitude, longitude, "
            "altitude"
        ) from None
    east = places[:, 1] * math.cos(math.radians(places[0, 0]))
    along = np.array([east[2:].mean() - east[:2].mean(), places[2:, 0].mean() - places[:2, 0].mean()])
    left = along[0] * (places[:, 0] - places[:, 0].mean()) - along[1] * (east - east.mean())
    near, far = sorted((0, 1), key=lambda k: -left[k]), sorted((2, 3), key=lambda k: left[k])
    return from_corners(places[[*near, *far]], designator, f"{path}#{airport}/{designator}")


def from_corners(places: Array, designator: str = "", name: str = "corners") -> Site:
    """Return a runway of four corners (4, 3): latitude, longitude in degrees and height in metres, near left first."""
    latitude, longitude = places[:, 0], places[:, 1]
    if (np.abs(latitude) > 90).any():
        wrong = float(latitude[np.abs(latitude) > 90][0])
        raise HaloposeError(f"{name}: a latitude of {wrong:g} degrees: are latitude and longitude swapped?")
    if (np.abs(longitude) > 180).any():
        raise HaloposeError(f"{name}: longitudes are degrees from -180 to 180, got {longitude.max():g}")
    middle = places[:2].mean(0)
    rough = _site(designator, np.zeros((4, 3)), middle, 0.0)
    seen = rough.from_wgs84(places)
    along = seen[2:].mean(0) - seen[:2].mean(0)
    heading = math.atan2(-along[1], along[0]) % math.tau
    # The midpoint of two corners is below the mean of their heights because the earth is curved.
    middle = rough.to_wgs84(seen[:2].mean(0))
    placed = _site(designator, np.zeros((4, 3)), middle, heading)
    site = _site(designator or _name(heading), placed.from_wgs84(places), middle, heading)
    _check(site, name)
    return site


def _site(designator: str, corners: Array, origin: Array, heading: float, note: str = "") -> Site:
    latitude, longitude, height = (float(value) for value in origin)
    return Site(designator, corners, latitude, longitude, height, heading, note)


def _check(site: Site, name: str) -> None:
    if not _LENGTHS[0] <= site.length <= _LENGTHS[1] or not _WIDTHS[0] <= site.width <= _WIDTHS[1]:
        raise HaloposeError(
            f"{name}: a runway of {site.length:.0f} by {site.width:.0f} m: are latitude and longitude swapped, or "
            "the corners not near left, near right, far right, far left?"
        )
    left, right = site.corners[[0, 3], 1], site.corners[[1, 2], 1]
    if not ((left > 0).all() and (right < 0).all()):
        raise HaloposeError(f"{name}: left and right corners are exchanged: near left, near right, far right, far left")
    slope = float(np.ptp(site.corners[:, 2])) / site.length
    if slope > _STEEPEST:
        raise HaloposeError(f"{name}: a slope of {100 * slope:.1f} %: give all heights in metres, above one level")


def _corners(path: Path | str, given: Any) -> Array:
    if not isinstance(given, list) or len(given) != 4:
        raise HaloposeError(f"{path}: corners are four: near left, near right, far right, far left")
    rows = []
    for number, corner in enumerate(given, start=1):
        try:
            rows.append([float(corner[key]) for key in ("latitude", "longitude", "height")])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise HaloposeError(
                f"{path}: corner {number} needs latitude and longitude in degrees and height in metres"
            ) from None
    places = np.array(rows)
    if not np.isfinite(places).all():
        raise HaloposeError(f"{path}: a corner is not finite")
    if np.abs(places).max() > _LARGEST:
        raise HaloposeError(f"{path}: a corner has {np.abs(places).max():g} degrees or metres: correct it")
    return places


def runway_content(site: Site) -> dict[str, Any]:
    """Return the json content of a site with its corners, as ``read_runway`` reads it."""
    places = site.to_wgs84(site.corners).tolist()
    keys = ("latitude", "longitude", "height")
    return {"designator": site.designator, "corners": [dict(zip(keys, place, strict=True)) for place in places]}


def _name(heading: float) -> str:
    return f"{round(math.degrees(heading) / 10 - 1) % 36 + 1:02d}"


@lru_cache(maxsize=1)
def _table() -> tuple[dict[str, str], ...]:
    text = (resources.files("halopose.landing.recordings") / "runways.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def _geodesy() -> Any:
    return need("pymap3d")
