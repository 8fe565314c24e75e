"""SLEAP's .slp files (HDF5) and csv tables."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from halopose.data.formats.pose_table import PoseTable
from halopose.errors import HaloposeError

_PREDICTED = 1
_CENTRED = 1.1  # first format version with pixel centres at whole coordinates
_COVARIANCE = ("var_x", "cov_xy", "var_y")


def is_sleap_csv(head: str) -> bool:
    """Return whether the beginning of a text file is that of SLEAP's csv."""
    try:
        first = next(csv.reader([head.split("\n", 1)[0].strip()]), [])
    except csv.Error:
        return False
    return first[:2] == ["track", "frame_idx"] and any(name.endswith(".x") for name in first)


def read_slp(path: Path, file: Any) -> PoseTable:
    """Read the poses of an open .slp file: predicted instances, or labelled ones if there are none."""
    if "instances" in file and getattr(file["instances"], "shape", None) == (0,):
        raise HaloposeError(f"{path} holds no poses: nothing to do")
    try:
        metadata = json.loads(file["metadata"].attrs["json"])
        nodes = [str(node["name"]) for node in metadata["nodes"]]
        skeleton = metadata["skeletons"][0]
        skeleton = skeleton.get("nx_graph", skeleton)
        order = [int(node["id"]) for node in skeleton["nodes"]]
        names = tuple(nodes[node] for node in order)
        links = [(int(link["source"]), int(link["target"])) for link in skeleton.get("links", [])]
        limbs = tuple((order.index(a), order.index(b)) for a, b in links if a in order and b in order)
        centred = float(file["metadata"].attrs.get("format_id", 1.0)) >= _CENTRED
        instances, frames = file["instances"][:], file["frames"][:]
        points, predicted = file["points"][:], file["pred_points"][:]
        kinds = instances["instance_type"]
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, OSError):
        raise HaloposeError(f"{path} is not a complete .slp file of SLEAP: save it again") from None
    chosen = np.flatnonzero(kinds == (_PREDICTED if (kinds == _PREDICTED).any() else 0))
    found, scores = np.full((len(chosen), len(names), 2), np.nan), np.zeros((len(chosen), len(names)))
    films = (
        len(np.unique(frames["video"])) > 1
    )  # frames of several films are numbered consecutively and named after their film
    frame_of = {int(frame["frame_id"]): n if films else int(frame["frame_idx"]) for n, frame in enumerate(frames)}
    named = {n: f"film {frame['video']} frame {frame['frame_idx']}" for n, frame in enumerate(frames)} if films else {}
    numbers = []
    for row, number in enumerate(chosen.tolist()):
        instance = instances[number]
        begin, end = int(instance["point_id_start"]), int(instance["point_id_end"])
        own = predicted if instance["instance_type"] == _PREDICTED else points
        if end - begin != len(names) or not 0 <= begin <= end <= len(own) or int(instance["frame_id"]) not in frame_of:
            raise HaloposeError(f"{path}: instance {number} points outside the file: save it again")
        part = own[begin:end]
        there = part["visible"] & np.isfinite(part["x"]) & np.isfinite(part["y"])
        xy = np.stack([part["x"], part["y"]], axis=-1) - (0.0 if centred else 0.5)
        found[row] = np.where(there[:, None], xy, np.nan)
        scores[row] = np.where(there, part["score"] if "score" in part.dtype.names else 1.0, 0.0)
        numbers.append(frame_of[int(instance["frame_id"])])
    tracks = instances["track"][chosen].astype(np.int64)
    return PoseTable(
        names=names,
        keypoints=found,
        scores=scores,
        frames=np.array(numbers, dtype=np.int64),
        tracks=tracks,
        images=named,
        pose_scores=instances["score"][chosen].astype(float) if (kinds == _PREDICTED).any() else None,
        limbs=limbs,
    ).checked(path)


def read_sleap_csv(path: Path, text: str) -> PoseTable:
    """Read the poses of a csv file with track, frame_idx, instance.score, and x, y and score of each node."""
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    header = rows[0]
    names = tuple(name[:-2] for name in header if name.endswith(".x"))
    place = {name: number for number, name in enumerate(header)}
    if any(f"{name}.{axis}" not in place for name in names for axis in ("y", "score")) or len(place) < len(header):
        raise HaloposeError(f"{path}: every node needs columns .x, .y and .score")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise HaloposeError(f"{path}: line {number} has {len(row)} columns, the header has {len(header)}")
    try:
        values = np.array([[float(v) if v.strip() else np.nan for v in row[1:]] for row in rows[1:]])
        frames = values[:, place["frame_idx"] - 1].astype(np.int64) if len(values) else np.zeros(0, dtype=np.int64)
    except (ValueError, RuntimeWarning):
        raise HaloposeError(f"{path}: a value is not a number") from None

    def columns(suffix: str) -> Any:
        return np.stack([values[:, place[f"{name}.{suffix}"] - 1] for name in names], axis=1)

    if not len(values):
        raise HaloposeError(f"{path} holds no poses: nothing to do")
    points = np.stack([columns("x"), columns("y")], axis=-1)
    points[~np.isfinite(points).all(-1)] = np.nan
    individuals = tuple(dict.fromkeys(row[0] for row in rows[1:] if row[0]))
    score = values[:, place["instance.score"] - 1] if "instance.score" in place else np.full(len(frames), np.nan)
    covariance = None
    if all(f"{name}.{suffix}" in place for name in names for suffix in _COVARIANCE):
        entries = [columns(name) for name in _COVARIANCE]
        covariance = np.stack([entries[0], entries[1], entries[1], entries[2]], axis=-1).reshape(*points.shape, 2)
        covariance = np.where(np.isnan(points[..., 0])[..., None, None], np.eye(2), covariance)
    return PoseTable(
        names=names,
        keypoints=points,
        scores=np.where(np.isnan(points[..., 0]), 0.0, columns("score")),
        frames=frames,
        tracks=np.array([individuals.index(row[0]) if row[0] else -1 for row in rows[1:]], dtype=np.int64),
        individuals=individuals,
        pose_scores=score if np.isfinite(score).all() else None,
        covariance=covariance,
    ).checked(path)


def write_sleap_csv(table: PoseTable) -> str:
    """Return the csv text of a table, with var_x, cov_xy and var_y of each node if there are covariances."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    suffixes = ("x", "y", "score", *(_COVARIANCE if table.covariance is not None else ()))
    nodes = [f"{name}.{suffix}" for name in table.names for suffix in suffixes]
    writer.writerow(["track", "frame_idx", "instance.score", *nodes])
    for row in range(len(table.frames)):
        track = int(table.tracks[row])
        name = "" if track < 0 else table.individuals[track] if track < len(table.individuals) else f"track_{track}"
        cells: list[Any] = []
        for k, gone in enumerate(table.missing[row].tolist()):
            own = [*table.keypoints[row, k].tolist(), float(table.scores[row, k])]
            if table.covariance is not None:
                matrix = table.covariance[row, k]
                own += [float(matrix[0, 0]), float(matrix[0, 1]), float(matrix[1, 1])]
            cells += [""] * len(own) if gone else own
        score = "" if table.pose_scores is None else float(table.pose_scores[row])
        writer.writerow([name, int(table.frames[row]), score, *cells])
    return out.getvalue()
