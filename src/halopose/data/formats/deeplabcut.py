"""DeepLabCut's csv and h5 tables, also used by Lightning Pose, EKS and Anipose.

Columns have three or four header rows: scorer, individuals (with several animals), bodyparts, coords. Rows are frames.
"""

from __future__ import annotations

import csv
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halopose.data.formats.pose_table import PoseTable, number_images
from halopose.errors import HaloposeError
from halopose.types import Array

_LEVELS = ("scorer", "individuals", "bodyparts", "coords")
_SINGLE = "single"  # DeepLabCut's name for keypoints that belong to no individual
_COVARIANCE = ("x_var", "xy_cov", "y_var")
_BROKEN = (
    pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, MemoryError, OverflowError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip
_ANY_INDEX = 3  # largest number of index columns: a frame, a path, or three parts of a path


def is_deeplabcut_csv(head: str) -> bool:
    """Return whether the beginning of a text file is that of DeepLabCut's csv."""
    rows = head.splitlines()[:4]
    first = [row.split(",", 1)[0].strip() for row in rows]
    return len(rows) >= 3 and first[0] == "scorer" and "bodyparts" in first and "coords" in first


def read_deeplabcut_csv(path: Path, text: str) -> PoseTable:
    """Read the poses of a csv file."""
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    levels = 0
    while levels < min(len(rows), len(_LEVELS)) and rows[levels][0] in _LEVELS:
        levels += 1
    if rows[0][0] != "scorer" or rows[levels - 1][0] != "coords" or len({len(row) for row in rows[1:levels]}) > 1:
        raise HaloposeError(f"{path} is not DeepLabCut's csv: it needs header rows scorer, bodyparts and coords")
    header = {row[0]: row for row in rows[:levels]}
    width = len(header["coords"])
    index = next((n for n in range(1, width) if header["coords"][n].strip()), width)  # blank above index columns
    if index > _ANY_INDEX:
        raise HaloposeError(f"{path}: the header row coords is empty: write the file again")
    columns = [tuple(header[level][n] if level in header else "" for level in _LEVELS[1:]) for n in range(index, width)]
    for number, row in enumerate(rows[levels:], levels + 1):
        if len(row) > width or len(row) < index:
            raise HaloposeError(f"{path}: line {number} has {len(row)} columns, the header has {width}")
        row += [""] * (width - len(row))  # frames without labels may have short rows
    try:
        values = np.array([[float(v) if v.strip() else np.nan for v in row[index:]] for row in rows[levels:]])
    except ValueError:
        raise HaloposeError(f"{path}: a value is not a number") from None
    return _table(path, columns, ["/".join(row[:index]) for row in rows[levels:]], values)


def read_deeplabcut_h5(path: Path, file: Any) -> PoseTable:
    """Read the poses of an open HDF5 file that pandas wrote, in either of its two layouts."""
    for group in file.values():
        if hasattr(group, "get") and group.get("block0_values") is not None:
            return _read_fixed(path, group)
    for group in file.values():
        table = group.get("table") if hasattr(group, "get") else None
        if table is not None and table.dtype.names and "values_block_0" in table.dtype.names:
            break
    else:
        raise HaloposeError(f"{path} is not DeepLabCut's h5: it has no table of values; write it as csv")
    columns = _columns_of(path, group, table)
    content = table[:]
    blocks = [name for name in content.dtype.names if name.startswith("values_block_")]
    if len(blocks) != 1:
        raise HaloposeError(f"{path}: values of several types; write it as csv")
    index = [name for name in content.dtype.names if name not in blocks]
    labels = ["/".join(_text(row[name]) for name in index) for row in content]
    values = np.asarray(content[blocks[0]], dtype=float).reshape(len(content), -1)
    if len(columns) != values.shape[1]:
        raise HaloposeError(f"{path}: {len(columns)} column names for {values.shape[1]} columns")
    return _table(path, columns, labels, values)


def _read_fixed(path: Path, group: Any) -> PoseTable:
    """Read poses in pandas' fixed layout, which stores names by level and an index of the name per row and column."""
    values = np.asarray(group["block0_values"][:], dtype=float)
    columns = _names_of(path, group, "block0_items")
    labels = ["/".join(row) for row in _names_of(path, group, "axis1")]
    if values.shape != (len(labels), len(columns)) or "block1_values" in group:
        raise HaloposeError(f"{path}: values do not fit the names of rows and columns; write it as csv")
    if any(len(name) not in (3, 4) for name in columns):
        raise HaloposeError(f"{path}: column names are not scorer, bodyparts and coords; write it as csv")
    return _table(path, [name[1:] if len(name) == 4 else ("", *name[1:]) for name in columns], labels, values)


def _names_of(path: Path, group: Any, axis: str) -> list[tuple[str, ...]]:
    """Read the names of the rows or columns of an axis, one name per level."""
    if axis in group:
        return [(_text(value),) for value in group[axis][:].tolist()]
    levels: list[list[str]] = []
    while f"{axis}_level{len(levels)}" in group:
        number = len(levels)
        names = [_text(value) for value in group[f"{axis}_level{number}"][:].tolist()]
        places = np.asarray(group[f"{axis}_label{number}"][:], dtype=np.int64)
        if ((places < 0) | (places >= len(names))).any():
            raise HaloposeError(f"{path}: a row or column has no name; write it as csv")
        levels.append([names[place] for place in places])
    return list(zip(*levels, strict=True))


def write_deeplabcut_csv(table: PoseTable) -> str:
    """Return the csv text of a table, with x_var, xy_cov and y_var of each keypoint if there are covariances."""
    many = len(np.unique(table.tracks)) > 1
    tracks = np.unique(table.tracks).tolist() if many else [None]
    coords = ("x", "y", "likelihood", *(_COVARIANCE if table.covariance is not None else ()))
    columns = [(track, k, coord) for track in tracks for k in range(len(table.names)) for coord in coords]
    named = {track: _individual(table, track) for track in tracks}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["scorer", *("halopose" for _ in columns)])
    if many:
        writer.writerow(["individuals", *(named[track] for track, _, _ in columns)])
    writer.writerow(["bodyparts", *(table.names[k] for _, k, _ in columns)])
    writer.writerow(["coords", *(coord for _, _, coord in columns)])
    values = _values(table)
    for frame in np.unique(table.frames).tolist():
        rows = {int(table.tracks[n]) if many else None: n for n in np.flatnonzero(table.frames == frame)}
        cells = [
            "" if track not in rows or np.isnan(value := values[coord][rows[track], k]) else repr(float(value))
            for track, k, coord in columns
        ]
        writer.writerow([table.images.get(frame, str(frame)), *cells])
    return out.getvalue()


def _values(table: PoseTable) -> dict[str, Array]:
    """Return values (N, K) by coordinate name."""
    gone = table.missing
    values = {"x": table.keypoints[..., 0], "y": table.keypoints[..., 1], "likelihood": table.scores}
    if table.covariance is not None:
        entries = table.covariance[..., 0, 0], table.covariance[..., 0, 1], table.covariance[..., 1, 1]
        values |= dict(zip(_COVARIANCE, entries, strict=True))
    return {name: np.where(gone, np.nan, value) for name, value in values.items()}


def _individual(table: PoseTable, track: int | None) -> str:
    if track is None or track < 0:
        return _SINGLE
    return table.individuals[track] if track < len(table.individuals) else f"individual{track + 1}"


def _table(path: Path, columns: Sequence[tuple[str, ...]], labels: list[str], values: Array) -> PoseTable:
    """Return poses from columns (individual, bodypart, coord), labels of the rows (R,) and values (R, C)."""
    place = {column: number for number, column in enumerate(columns)}
    if len(place) < len(columns):
        raise HaloposeError(f"{path}: the header names a column twice")
    people = list(dict.fromkeys(column[0] for column in columns))
    if len(people) > 1:
        people = [person for person in people if person != _SINGLE]
    names = tuple(dict.fromkeys(column[1] for column in columns if column[0] in people))
    rows, blank = len(labels), np.full(len(labels), np.nan)

    def column(person: str, name: str, coord: str) -> Array:
        found = place.get((person, name, coord))
        return blank if found is None else values[:, found]

    def every(coord: str) -> Array:
        return np.stack([np.stack([column(person, name, coord) for name in names], 1) for person in people], 1)

    if not any(key[2] == "x" for key in place) or not any(key[2] == "y" for key in place):
        raise HaloposeError(f"{path}: coords has no x and y")
    points = np.stack([every("x"), every("y")], axis=-1).reshape(rows * len(people), len(names), 2)
    points[~np.isfinite(points).all(-1)] = np.nan
    scored = any(key[2] == "likelihood" for key in place)
    scores = every("likelihood").reshape(points.shape[:2]) if scored else np.ones(points.shape[:2])
    scores = np.where(np.isnan(points[..., 0]), 0.0, scores)
    covariance = None
    if any(key[2] == _COVARIANCE[0] for key in place):
        xx, xy, yy = (every(coord).reshape(points.shape[:2]) for coord in _COVARIANCE)
        gone = np.isnan(points[..., 0])[..., None, None]
        covariance = np.where(gone, np.eye(2), np.stack([xx, xy, xy, yy], axis=-1).reshape(*points.shape, 2))
    frames, images = _frames(labels)
    tracks = np.tile(np.arange(len(people)), rows) if len(people) > 1 else np.full(rows, -1)
    chosen = np.isfinite(points[..., 0]).any(1) if len(people) > 1 else np.ones(rows, dtype=bool)
    return PoseTable(
        names=names,
        keypoints=points[chosen],
        scores=scores[chosen],
        frames=np.repeat(frames, len(people))[chosen],
        tracks=tracks[chosen],
        individuals=tuple(people) if len(people) > 1 else (),
        images=images,
        covariance=None if covariance is None else covariance[chosen],
    ).checked(path)


def _frames(labels: list[str]) -> tuple[Array, dict[int, str]]:
    """Return frame numbers from row labels that are whole numbers or image names, and the image names."""
    try:
        numbers = np.array([int(float(label)) if float(label) == int(float(label)) else -1 for label in labels])
    except (ValueError, OverflowError):
        return number_images(labels)
    if (numbers < 0).any() or (numbers > 2**53).any() or len(np.unique(numbers)) < len(numbers):
        return number_images(labels)
    return numbers.astype(np.int64), {}


class _Names(pickle.Unpickler):
    """Unpickler of lists and tuples of strings and numbers; it loads no classes, so no code can run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not a name of a column")


def _columns_of(path: Path, group: Any, table: Any) -> list[tuple[str, ...]]:
    """Read column names (individual, bodypart, coord), which PyTables stores as a pickled attribute."""
    kept = table.attrs.get("values_block_0_kind", group.attrs.get("non_index_axes"))
    try:
        raw = kept.tobytes() if isinstance(kept, np.ndarray) else bytes(kept)
        names = _Names(io.BytesIO(raw)).load()
        parts = [tuple(str(part) for part in name) for name in names]
    except _BROKEN:
        raise HaloposeError(f"{path}: column names cannot be read; write it as csv") from None
    if not parts or any(len(name) not in (3, 4) for name in parts):
        raise HaloposeError(f"{path}: column names are not scorer, bodyparts and coords; write it as csv")
    return [name[1:] if len(name) == 4 else ("", *name[1:]) for name in parts]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
