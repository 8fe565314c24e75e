"""Convert a flight to ROS 2 messages, and write them as an MCAP file for Foxglove, ``ros2 bag`` and other readers.

Messages are plain mappings, from which a node fills its own classes (``examples/ros2_node.py``). Definitions come from
rosbags, encoding from mcap-ros2-support.

    /halopose/runway/pose  geometry_msgs/PoseWithCovarianceStamped in ``runway``: x along the landing direction,
                           y left, z up
    /halopose/enu/pose     the same in ``enu``: east, north, up of the threshold
    /halopose/earth/pose   the same in ``earth`` (REP 105): cartesian WGS84
    /halopose/fix          sensor_msgs/NavSatFix: latitude, longitude, height, covariance in east, north, up
    /halopose/deviation    halopose_msgs/IlsDeviation: deviations as of an ILS, their sigmas, and whether they are valid
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

from halopose.data.files import make_folder
from halopose.errors import HaloposeError
from halopose.landing.recordings import need
from halopose.landing.recordings.position_log import Positions
from halopose.types import Array

POSE, FIX = "geometry_msgs/msg/PoseWithCovarianceStamped", "sensor_msgs/msg/NavSatFix"
DEVIATION = "halopose_msgs/msg/IlsDeviation"
DEVIATION_DEFINITION = """\
# Angles in radians at the antennas: left of the centreline, above the glide path; valid: to be relied upon
std_msgs/Header header
float64 localizer
float64 localizer_sigma
float64 glide_slope
float64 glide_slope_sigma
bool valid
string reason
"""
_UNKNOWN = math.pi**2  # variance of an unknown rotation
_LATEST = 2.0**31  # largest number of seconds in a time stamp
_NO_FIX, _GBAS_FIX, _KNOWN = -1, 2, 3  # sensor_msgs/NavSatStatus and NavSatFix


def messages_at(positions: Positions, n: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return type and content of every topic's message at frame n; an unavailable position has status "no fix"."""
    time, site = float(positions.times[n]), positions.site
    to_earth = _earth_from_enu(site.latitude, site.longitude)
    turn = to_earth @ site.turn
    place = positions.places[n]
    corner = _cartesian(np.array([site.latitude, site.longitude, site.height]))
    frames = {
        "runway": (positions.position[n], np.eye(3)),
        "enu": (positions.enu[n], site.turn),
        "earth": (corner + to_earth @ positions.enu[n], turn),
    }
    told = {
        f"/halopose/{name}/pose": (POSE, _pose(positions, n, name, position, axes))
        for name, (position, axes) in frames.items()
    }
    local = _earth_from_enu(float(place[0]), float(place[1])).T @ turn
    spread = local @ positions.covariance[n] @ local.T
    status = {"status": _GBAS_FIX if positions.available[n] else _NO_FIX, "service": 0}
    fix = {
        "header": header(time, "earth"), "status": status, "latitude": float(place[0]),
        "longitude": float(place[1]), "altitude": float(place[2]), "position_covariance": spread.ravel().tolist(),
        "position_covariance_type": _KNOWN,
    }  # fmt: skip
    why = "; ".join(positions.flags[n])
    if not (positions.available[n] or why):
        why = "protection level beyond the alert limit"
    deviation = {
        "header": header(time, "runway"),
        "localizer": float(positions.deviations[n, 0]),
        "localizer_sigma": float(positions.sigma[n, 0]),
        "glide_slope": float(positions.deviations[n, 1]),
        "glide_slope_sigma": float(positions.sigma[n, 1]),
        "valid": bool(positions.valid[n]),
        "reason": why,
    }
    return {**told, "/halopose/fix": (FIX, fix), "/halopose/deviation": (DEVIATION, deviation)}


def header(time: float, frame: str) -> dict[str, Any]:
    """Return a std_msgs/Header for a time in seconds."""
    nanoseconds = round(time * 1e9)
    return {"stamp": {"sec": nanoseconds // 10**9, "nanosec": nanoseconds % 10**9}, "frame_id": frame}


def pose_message(
    stamp: Mapping[str, int], frame: str, position: Array, axes: Array, covariance: Array
) -> dict[str, Any]:
    """Return a geometry_msgs/PoseWithCovarianceStamped.

    Args:
        stamp: time stamp.
        frame: name of the coordinate frame.
        position: position (3,).
        axes: rotation (3, 3).
        covariance: covariance (6, 6) of x, y, z and of rotations about the frame's fixed axes.
    """
    quaternion = Rotation.from_matrix(axes).as_quat()
    return {
        "header": {"stamp": dict(stamp), "frame_id": frame},
        "pose": {
            "pose": {
                "position": dict(zip("xyz", position.tolist(), strict=True)),
                "orientation": dict(zip("xyzw", quaternion.tolist(), strict=True)),
            },
            "covariance": covariance.ravel().tolist(),
        },
    }


def _pose(positions: Positions, n: int, frame: str, position: Array, axes: Array) -> dict[str, Any]:
    """Return the aircraft's pose in a frame given by its axes (3, 3); an unknown attitude has a large variance."""
    covariance = np.zeros((6, 6))
    covariance[:3, :3] = axes @ positions.covariance[n] @ axes.T
    body, turns = axes, _UNKNOWN * np.eye(3)
    if np.isfinite(positions.body[n]).all():
        body = axes @ positions.body[n]
        turns = body @ np.diag(positions.turn_variance[::-1]) @ body.T  # roll, pitch and yaw are x, y and z
    covariance[3:, 3:] = turns
    stamp = header(float(positions.times[n]), frame)["stamp"]
    return pose_message(stamp, frame, position, body, covariance)


def _earth_from_enu(latitude: float, longitude: float) -> Array:
    """Return the rotation (3, 3) from east, north, up at a place in degrees to the WGS84 cartesian axes."""
    (sin, cos), (sin_l, cos_l) = ((math.sin(a), math.cos(a)) for a in map(math.radians, (latitude, longitude)))
    return np.array([[-sin_l, -sin * cos_l, cos * cos_l], [cos_l, -sin * sin_l, cos * sin_l], [0.0, cos, sin]])


def _cartesian(place: Array) -> Array:
    return np.array(need("pymap3d").geodetic2ecef(*place.tolist()), dtype=np.float64)


def definition(datatype: str) -> str:
    """Return the text of a message's definition with the definitions it depends on."""
    if datatype == DEVIATION:
        text = definition("geometry_msgs/msg/PoseStamped").split("\n" + "=" * 80 + "\n")
        used = [part for part in text[1:] if part.startswith(("MSG: std_msgs/Header", "MSG: builtin_interfaces"))]
        return ("\n" + "=" * 80 + "\n").join([DEVIATION_DEFINITION.rstrip("\n"), *used])
    store = need("rosbags.typesys")
    found, _ = store.get_typestore(store.Stores.ROS2_HUMBLE).generate_msgdef(datatype, ros_version=2)
    return str(found)


def write_mcap(positions: Positions, path: Path) -> Path:
    """Write all messages of a flight, with time stamps of the logs."""
    latest = float(np.abs(positions.times).max(initial=0.0))
    if latest >= _LATEST:
        raise HaloposeError(f"{latest:.3g} s is beyond the clock of ROS messages, {_LATEST:.3g} s: check time_s")
    writing = need("mcap_ros2.writer")
    make_folder(path.parent)
    try:
        with path.open("wb") as file:
            writer = writing.Writer(file)
            schemas: dict[str, Any] = {}
            for n, time in enumerate(positions.times.tolist()):
                for topic, (kind, content) in messages_at(positions, n).items():
                    if kind not in schemas:
                        schemas[kind] = writer.register_msgdef(kind, definition(kind))
                    stamp = max(round(time * 1e9), 0)
                    writer.write_message(topic, schemas[kind], content, log_time=stamp, sequence=n)
            writer.finish()
    except OSError as error:
        raise HaloposeError(f"cannot write {path}: {error.strerror or error}") from None
    return path


def fill(message: Any, content: Mapping[str, Any]) -> Any:
    """Fill a message of any ROS library from a mapping, field by field."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            fill(getattr(message, name), value)
        else:
            setattr(message, name, value)
    return message
