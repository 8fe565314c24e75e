"""Writers of 3D keypoints for biomechanics tools: TRC, C3D and CSV."""

from __future__ import annotations

import csv
import io
import struct
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.multiview.scene import Person, ReconstructedScene
from halopose.types import Array

_BLOCK = 512  # bytes per block of a C3D file
_MOST_BLOCKS = 255  # of the parameter section: the count is one byte
_MOST_LABELS = 255  # per parameter: array sizes are one byte each
_WORD = 0xFFFF  # largest 16-bit number
_YUP = np.array([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])  # from world axes with z up to OpenSim axes with y up
_COLUMNS = ["frame", "time", "person", "keypoint", "x", "y", "z", "xx", "xy", "xz", "yy", "yz", "zz", "views"]


def to_trc(person: Person, scene: ReconstructedScene, name: str, *, up: str = "y") -> str:
    """Marker file of OpenSim, in metres.

    Args:
        person: Person to write.
        scene: Scene of the person.
        name: Name of the file, which its first line repeats.
        up: Axis that points up: y, as OpenSim expects, or z, as in the scene.
    """
    place = _all_frames(person, person.place)
    if up == "y":
        place = place @ _YUP.T
    count, names = len(place), scene.layout.names
    rate = f"{scene.rate:g}"
    lines = [
        f"PathFileType\t4\t(X/Y/Z)\t{name}",
        "DataRate\tCameraRate\tNumFrames\tNumMarkers\tUnits\tOrigDataRate\tOrigDataStartFrame\tOrigNumFrames",
        f"{rate}\t{rate}\t{count}\t{len(names)}\tm\t{rate}\t1\t{count}",
        "Frame#\tTime\t" + "\t\t\t".join(names) + "\t\t",
        "\t\t" + "\t".join(f"X{n}\tY{n}\tZ{n}" for n in range(1, len(names) + 1)),
        "",
    ]
    first = int(person.frames[0])
    for n, row in enumerate(place):
        values = ["" if np.isnan(value) else f"{value:.6f}" for value in row.ravel()]
        lines.append("\t".join([str(n + 1), f"{(first + n) / scene.rate:.6f}", *values]))
    return "\n".join(lines) + "\n"


def _all_frames(person: Person, values: Array) -> Array:
    """Values for all frames from the first to the last, NaN where the person was not detected."""
    at = (person.frames - person.frames[0]).astype(int)
    result = np.full((at[-1] + 1, *values.shape[1:]), np.nan)
    result[at] = values
    return result


def to_csv(scene: ReconstructedScene) -> str:
    """One row per frame, person and keypoint: position in metres, covariance, number of views."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for person in scene.persons:
        for n, frame in enumerate(person.frames.astype(int).tolist()):
            for k, name in enumerate(scene.layout.names):
                if not np.isfinite(person.place[n, k]).all():
                    continue
                numbers = [*person.place[n, k], *person.covariance[n, k][np.triu_indices(3)]]
                cells = [f"{value:.7g}" for value in numbers]
                row = [frame, f"{frame / scene.rate:.4f}", person.identity, name, *cells]
                writer.writerow([*row, int(person.views[n, k])])
    return text.getvalue()


def to_c3d(person: Person, scene: ReconstructedScene) -> bytes:
    """C3D file in millimetres; the residual of a point is its standard deviation, -1 where unknown.

    C3D stores residuals as integers up to 127 and counts frames from 1. The first frame of the film has number 1, so
    that the persons of a scene are synchronous. The header holds frame numbers up to 65535; TRIAL holds larger ones.

    Raises:
        HaloposeError: There are more keypoints than the parameter section of a C3D file can name.
    """
    place, spread = _all_frames(person, person.place), _all_frames(person, person.covariance)
    count, points = place.shape[:2]
    deviation = np.clip(np.round(1000 * np.sqrt(np.trace(spread, axis1=-2, axis2=-1) / 3)), 0, 127)
    data = np.concatenate([1000 * place, deviation[..., None]], axis=-1)
    known = np.isfinite(data).all(-1, keepdims=True)
    data = np.where(known, data, [0.0, 0.0, 0.0, -1.0]).astype("<f4")
    first = int(person.frames[0]) + 1
    last = first + count - 1
    blocks = -(-len(_parameters(scene, first, last, points, 0)) // _BLOCK)
    start = 2 + blocks
    parameters = _padded(_parameters(scene, first, last, points, start))
    shown = min(first, _WORD), min(last, _WORD)
    header = struct.pack("<BBHHHHHfHHf", 2, 0x50, points, 0, *shown, 10, -1.0, start, 0, scene.rate)
    content = data.tobytes()
    # If the header cannot hold the last frame, readers read to the end of the file: padding would be a frame.
    return _padded(header) + parameters + (_padded(content) if last < _WORD else content)


def _padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % _BLOCK)


def _parameters(scene: ReconstructedScene, first: int, last: int, points: int, start: int) -> bytes:
    """Parameter section: groups of parameters, among them the names of the points."""
    frames = last - first + 1
    names = [name[:30] for name in scene.layout.names]
    groups: dict[str, dict[str, Any]] = {
        "POINT": {
            "USED": points, "SCALE": -1.0, "RATE": float(scene.rate), "DATA_START": start,
            "FRAMES": min(frames, _WORD), "LONG_FRAMES": float(frames),
            **_in_parts("LABELS", names), **_in_parts("DESCRIPTIONS", ["keypoint"] * points), "UNITS": ["mm"],
        },
        "TRIAL": {"ACTUAL_START_FIELD": _words(first), "ACTUAL_END_FIELD": _words(last)},
        "ANALOG": {"USED": 0, "LABELS": [], "GEN_SCALE": 1.0, "RATE": 0.0},
        "FORCE_PLATFORM": {"USED": 0},
    }  # fmt: skip
    content = b""
    for number, (group, entries) in enumerate(groups.items(), 1):
        content += struct.pack("<bb", len(group), -number) + group.encode() + struct.pack("<hB", 3, 0)
        for name, value in entries.items():
            body = _value(value)
            content += struct.pack("<bb", len(name), number) + name.encode()
            content += struct.pack("<h", len(body) + 3) + body + b"\0"
    content += b"\0\0"
    blocks = -(-(len(content) + 4) // _BLOCK)
    if blocks > _MOST_BLOCKS:
        raise HaloposeError(f"a C3D file cannot name {points} keypoints: use fewer keypoints or shorter names")
    return struct.pack("<BBBB", 1, 0x50, blocks, 84) + content


def _in_parts(name: str, texts: list[str]) -> dict[str, list[str]]:
    """Texts in parameters NAME, NAME2, NAME3, ..., as the format demands for more than 255 points."""
    parts = [texts[start : start + _MOST_LABELS] for start in range(0, max(len(texts), 1), _MOST_LABELS)]
    return {f"{name}{number if number > 1 else ''}": part for number, part in enumerate(parts, 1)}


def _words(number: int) -> tuple[int, int]:
    """A 32-bit number as two 16-bit numbers, the lower one first."""
    return number & _WORD, number >> 16


def _value(value: int | float | list[str] | tuple[int, int]) -> bytes:
    """Type, dimensions and content of a parameter."""
    if isinstance(value, tuple):
        return struct.pack("<bBBHH", 2, 1, 2, *value)
    if isinstance(value, list):
        width = max(map(len, value), default=0)
        text = "".join(word.ljust(width) for word in value)
        return struct.pack("<bBBB", -1, 2, width, len(value)) + text.encode("ascii", "replace")
    if isinstance(value, float):
        return struct.pack("<bBf", 4, 0, value)
    return struct.pack("<bBH", 2, 0, value)
