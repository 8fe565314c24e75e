"""Poses as tables and text: columns per keypoint, summaries, YOLO label lines and HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from halopose.boxes import xyxy_to_xywh

if TYPE_CHECKING:
    from halopose.poses import PoseDistributions

MOST_ROWS = 20  # detections in an HTML table


def keypoint_columns(poses: PoseDistributions, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Columns of a table with one row per keypoint.

    Args:
        poses: N detections of K keypoints.
        names: Names of the K keypoints; default: those of the layout.

    Returns:
        Arrays (N K,) by column name: image, detection, class, keypoint, x, y, xx, xy, yy, keep and score. Columns
        visibility, image_id, novelty, offset_x, offset_y and dof are added if the poses have them.
    """
    n, k = poses.keypoints.shape[:2]
    names = poses.names if names is None else names
    columns: dict[str, Any] = {} if poses.origin is None else {"image": np.repeat(poses.origin.name, n * k)}
    columns |= {
        "detection": np.repeat(np.arange(n), k),
        "class": np.repeat(np.ones(n, dtype=int) if poses.class_ids is None else poses.class_ids, k),
        "keypoint": np.tile(np.asarray(names), n),
        "x": poses.keypoints[..., 0].ravel(),
        "y": poses.keypoints[..., 1].ravel(),
        "xx": poses.covariance[..., 0, 0].ravel(),
        "xy": poses.covariance[..., 0, 1].ravel(),
        "yy": poses.covariance[..., 1, 1].ravel(),
        "keep": np.asarray(poses.keep, dtype=bool).ravel(),
        "score": np.repeat(poses.scores, k),
    }
    if poses.visibility is not None:
        columns["visibility"] = poses.visibility.ravel()
    if poses.image_ids is not None:
        columns["image_id"] = np.repeat(poses.image_ids, k)
    if poses.novelty is not None:
        columns["novelty"] = np.repeat(poses.novelty, k)
    if poses.offset is not None:
        columns["offset_x"], columns["offset_y"] = poses.offset.reshape(-1, 2).T
    if poses.dof is not None:
        columns["dof"] = poses.dof.ravel()
    return columns


def to_csv(columns: dict[str, Any], header: bool = True) -> str:
    """CSV text of columns of equal length."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(columns)
    writer.writerows(zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True))
    return text.getvalue()


def to_yolo(poses: PoseDistributions, width: int, height: int) -> str:
    """YOLO pose label lines: class from 0, box centre and size, and x, y, visibility of each keypoint.

    Args:
        poses: The detections.
        width: Width of the image in pixels.
        height: Height of the image in pixels.

    Returns:
        One line for each detection; coordinates are shares of the image's sides. The third number of a keypoint is 2
        if pruning keeps it, else 1, as in label files.
    """
    n = len(poses)
    size = np.array([width, height], dtype=float)
    boxes = xyxy_to_xywh(poses.boxes)
    centres, sides = (boxes[:, :2] + boxes[:, 2:] / 2) / size, boxes[:, 2:] / size
    kept = np.where(np.asarray(poses.keep, dtype=bool), 2.0, 1.0)[..., None]
    points = np.concatenate([poses.keypoints / size, kept], axis=-1).reshape(n, -1)
    classes = np.zeros(n, dtype=int) if poses.class_ids is None else poses.class_ids - 1
    rows = np.concatenate([centres, sides, points], axis=1)
    lines = (" ".join([str(int(c)), *(f"{value:.6g}" for value in row)]) for c, row in zip(classes, rows, strict=True))
    return "".join(f"{line}\n" for line in lines)


def summary(poses: PoseDistributions) -> list[dict[str, Any]]:
    """Describe each detection in plain Python values: class, score, box, and place and spread of each keypoint."""
    std = poses.std
    result = []
    for n in range(len(poses)):
        entry: dict[str, Any] = {
            "class": 1 if poses.class_ids is None else int(poses.class_ids[n]),
            "score": float(poses.scores[n]),
            "box": dict(zip(("x1", "y1", "x2", "y2"), poses.boxes[n].tolist(), strict=True)),
            "keypoints": {
                name: {
                    "x": float(poses.keypoints[n, k, 0]),
                    "y": float(poses.keypoints[n, k, 1]),
                    "std_x": float(std[n, k, 0]),
                    "std_y": float(std[n, k, 1]),
                    "keep": bool(np.asarray(poses.keep)[n, k]),
                }
                for k, name in enumerate(poses.names)
            },
        }
        if poses.novelty is not None:
            entry["novelty"] = float(poses.novelty[n])
        result.append(entry)
    return result


def to_html(poses: PoseDistributions, picture: str | None) -> str:
    """HTML of poses: a picture, given as base64 text of a PNG, and a table of the detections."""
    title = "" if poses.origin is None else html.escape(poses.origin.name)
    image = f'<img alt="{title}" style="max-width:100%" src="data:image/png;base64,{picture}">' if picture else ""
    std, keep = poses.std.mean(-1), np.asarray(poses.keep, dtype=bool)
    rows = []
    for n in range(min(len(poses), MOST_ROWS)):
        spread = f"{np.median(std[n][keep[n]]):.1f} px" if keep[n].any() else ""
        cells = (str(n), f"{poses.scores[n]:.2f}", f"{int(keep[n].sum())} of {poses.keypoint_count}", spread)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    if len(poses) > MOST_ROWS:
        rows.append(f'<tr><td colspan="4">and {len(poses) - MOST_ROWS} more</td></tr>')
    head = "<tr><th>detection</th><th>score</th><th>keypoints kept</th><th>median standard deviation</th></tr>"
    return f"<div>{image}<p>{html.escape(repr(poses))}</p><table>{head}{''.join(rows)}</table></div>"
