"""Json files of OpenPose (also RTMLib's and Pose2Sim's), MMPose and MediaPipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halopose.data.formats.pose_table import PoseTable
from halopose.errors import HaloposeError
from halopose.keypoints import COCO_NAMES
from halopose.types import Array

BODY_25 = (
    "nose", "neck", "right_shoulder", "right_elbow", "right_wrist", "left_shoulder", "left_elbow", "left_wrist",
    "mid_hip", "right_hip", "right_knee", "right_ankle", "left_hip", "left_knee", "left_ankle", "right_eye",
    "left_eye", "right_ear", "left_ear", "left_big_toe", "left_small_toe", "left_heel", "right_big_toe",
    "right_small_toe", "right_heel",
)  # fmt: skip
HALPE_26 = (*COCO_NAMES, "head", "neck", "hip", "left_big_toe", "right_big_toe", "left_small_toe", "right_small_toe",
            "left_heel", "right_heel")  # fmt: skip
MEDIAPIPE_33 = (
    "nose", "left_eye_inner", "left_eye", "left_eye_outer", "right_eye_inner", "right_eye", "right_eye_outer",
    "left_ear", "right_ear", "mouth_left", "mouth_right", "left_shoulder", "right_shoulder", "left_elbow",
    "right_elbow", "left_wrist", "right_wrist", "left_pinky", "right_pinky", "left_index", "right_index",
    "left_thumb", "right_thumb", "left_hip", "right_hip", "left_knee", "right_knee", "left_ankle", "right_ankle",
    "left_heel", "right_heel", "left_foot_index", "right_foot_index",
)  # fmt: skip
_NAMES = {len(names): names for names in (COCO_NAMES, BODY_25, HALPE_26, MEDIAPIPE_33)}
_LANDMARKS = ("landmarks", "landmark", "poseLandmarks", "pose_landmarks")
_LARGEST_SIDE = 99_999  # pixels
_OPENPOSE = "pose_keypoints_2d"


def is_openpose(content: Any) -> bool:
    """Whether parsed json is a frame of OpenPose."""
    return isinstance(content, dict) and isinstance(content.get("people"), list)


def is_mmpose(content: Any) -> bool:
    """Return whether parsed json comes from MMPose: frames with instances, or the instances of one image."""
    if isinstance(content, dict):
        return isinstance(content.get("instance_info"), list)
    return isinstance(content, list) and bool(content) and _is(content[0], ("keypoint_scores", "instances"))


def is_mediapipe(content: Any) -> bool:
    """Return whether parsed json has landmarks of MediaPipe, of one image or of a list of frames."""
    first = content[0] if isinstance(content, list) and content else content
    if isinstance(first, dict) and isinstance(first.get("frames"), list) and first["frames"]:
        first = first["frames"][0]
    return _is(first, _LANDMARKS)


def _is(entry: Any, keys: Sequence[str]) -> bool:
    return isinstance(entry, dict) and any(isinstance(entry.get(key), list) for key in keys)


def read_openpose(path: Path, frames: Sequence[tuple[int, str, Any]]) -> PoseTable:
    """Read poses.

    Args:
        path: Name of the source in messages.
        frames: Number, file name and parsed json of each frame.
    """
    rows: list[Any] = []
    numbers: list[int] = []
    tracks: list[int] = []
    covariances: list[Any] = []
    for number, name, content in frames:
        if not is_openpose(content):
            raise HaloposeError(f"{name} is not OpenPose's json: it has no people")
        for person in content["people"]:
            if not isinstance(person, dict):
                raise HaloposeError(f"{name}: a person is not an object")
            if person.get(_OPENPOSE) == []:  # OpenPose found a face or a hand of this person, but no body
                continue
            rows.append(person.get(_OPENPOSE))
            covariances.append(person.get("pose_covariances_2d"))
            identity = person.get("person_id", [-1])
            identity = identity[0] if isinstance(identity, list) and identity else identity
            tracks.append(_whole(identity, -1))
            numbers.append(number)
    triples = _numbers(path, rows, _OPENPOSE)
    if triples.shape[1] % 3:
        raise HaloposeError(f"{path}: {_OPENPOSE} is not x, y, score of each keypoint")
    return _table(path, triples.reshape(len(rows), -1, 3), numbers, tracks, None, None, _matrices(path, covariances))


def read_mmpose(path: Path, content: Any) -> PoseTable:
    """Read the poses of a film or an image."""
    meta = content.get("meta_info") if isinstance(content, dict) else None
    frames = content["instance_info"] if isinstance(content, dict) else content
    if frames and not _is(frames[0], ("instances",)):
        frames = [{"frame_id": 0, "instances": frames}]
    people: list[tuple[int, dict[str, Any]]] = []
    for place, frame in enumerate(frames):
        number = _whole(frame.get("frame_id", place), -1) if isinstance(frame, dict) else -1
        instances = frame.get("instances") if isinstance(frame, dict) else None
        if number < 0 or not isinstance(instances, list):
            raise HaloposeError(f"{path}: frame {place} needs frame_id and instances")
        for person in instances:
            if not isinstance(person, dict):
                raise HaloposeError(f"{path}: an instance of frame {place} is not an object")
            people.append((number, person))
    points = _numbers(path, [person.get("keypoints") for _, person in people], "keypoints", 3)
    scores = _numbers(path, [person.get("keypoint_scores") for _, person in people], "keypoint_scores")
    if points.shape[:2] != scores.shape or points.shape[2] != 2:
        raise HaloposeError(f"{path}: keypoints are [x, y] each, with as many keypoint_scores")
    boxes, pose_scores = None, None
    if people and all(person.get("bbox") is not None for _, person in people):
        corners = [_flat(person["bbox"]) for _, person in people]
        boxes = _numbers(path, corners, "bbox")
        if boxes.shape[1:] != (4,):
            raise HaloposeError(f"{path}: bbox needs four numbers x1, y1, x2, y2 in every instance")
    if people and all(isinstance(person.get("bbox_score"), float) for _, person in people):
        pose_scores = np.array([person["bbox_score"] for _, person in people])
    tracks = [_whole(person.get("track_id"), -1) for _, person in people]
    triples = np.concatenate([points, scores[..., None]], axis=2)
    matrices = _matrices(path, [person.get("keypoint_covariances") for _, person in people])
    table = _table(path, triples, [number for number, _ in people], tracks, boxes, pose_scores, matrices)
    names = _mmpose_names(meta, len(table.names))
    return table if names is None else replace(table, names=names).checked(path)


def read_mediapipe(path: Path, content: Any, size: tuple[int, int] | None) -> PoseTable:
    """Read poses from landmarks, whose coordinates are shares of the image.

    Args:
        path: Name of the file in messages.
        content: Parsed json: the result of one image, a list of results, or an object with ``frames``, ``width`` and
            ``height``.
        size: Width and height of the images in pixels, if the file does not state them.
    """
    frames = content
    if isinstance(content, dict):
        stated = content.get("width"), content.get("height")
        if all(0 < _whole(side, 0) <= _LARGEST_SIDE for side in stated):
            size = stated  # type: ignore[assignment]
        frames = content.get("frames", [content])
    if size is None:
        raise HaloposeError(
            f"{path}: MediaPipe's landmarks are shares of the image: give its size, as in --size 1280x720"
        )
    rows: list[Any] = []
    numbers: list[int] = []
    for place, frame in enumerate(frames):
        found = next((frame[key] for key in _LANDMARKS if isinstance(frame.get(key), list)), None) if isinstance(
            frame, dict
        ) else None  # fmt: skip
        if found is None:
            raise HaloposeError(f"{path}: frame {place} has no landmarks")
        people = [found] if found and isinstance(found[0], dict) else found
        number = frame.get("frame", place)
        for person in people:
            rows.append([_landmark(path, place, mark) for mark in person] if isinstance(person, list) else None)
            numbers.append(_whole(number, place))
    values = _numbers(path, rows, "landmarks", 3)
    triples = values[..., :3] * np.array([size[0], size[1], 1.0])
    table = _table(path, triples, numbers, [-1] * len(rows), None, None, None, size)
    if np.isfinite(values[..., 3:]).all():
        covariance = values[..., [3, 4, 4, 5]].reshape(*triples.shape[:2], 2, 2)
        return replace(table, covariance=covariance)
    return table


def write_openpose(table: PoseTable) -> dict[int, dict[str, Any]]:
    """Return one json object per frame, by frame number."""
    frames: dict[int, dict[str, Any]] = {frame: {"version": 1.3, "people": []} for frame in _range(table)}
    for row, frame in enumerate(table.frames.tolist()):
        person: dict[str, Any] = {
            "person_id": [int(table.tracks[row])],
            _OPENPOSE: _triples(table, row).ravel().tolist(),
        }
        if table.covariance is not None:
            person["pose_covariances_2d"] = _triangles(table, row)
        frames[frame]["people"].append(person)
    return frames


def write_mmpose(table: PoseTable) -> dict[str, Any]:
    """Return the json object of a film."""
    frames: dict[int, list[dict[str, Any]]] = {frame: [] for frame in np.unique(table.frames).tolist()}
    for row, frame in enumerate(table.frames.tolist()):
        triples = _triples(table, row)
        person: dict[str, Any] = {"keypoints": triples[:, :2].tolist(), "keypoint_scores": triples[:, 2].tolist()}
        if table.boxes is not None:
            person["bbox"] = [table.boxes[row].tolist()]
        if table.pose_scores is not None:
            person["bbox_score"] = float(table.pose_scores[row])
        if table.tracks[row] >= 0:
            person["track_id"] = int(table.tracks[row])
        if table.covariance is not None:
            person["keypoint_covariances"] = _triangles(table, row)
        frames[frame].append(person)
    names = {str(number): name for number, name in enumerate(table.names)}
    listed = [{"frame_id": frame, "instances": people} for frame, people in frames.items()]
    return {"meta_info": {"keypoint_id2name": names}, "instance_info": listed}


def write_mediapipe(table: PoseTable) -> dict[str, Any]:
    """Return landmarks of frames as shares of the image, with the size of the image."""
    if table.size is None:
        raise HaloposeError("MediaPipe's landmarks are shares of the image: give its size, as in --size 1280x720")
    width, height = table.size
    frames: dict[int, list[Any]] = {frame: [] for frame in np.unique(table.frames).tolist()}
    for row, frame in enumerate(table.frames.tolist()):
        triangles = None if table.covariance is None else _triangles(table, row)
        marks = []
        for k, (x, y, score) in enumerate(_triples(table, row).tolist()):
            mark: dict[str, Any] = {"x": x / width, "y": y / height, "visibility": score}
            marks.append(mark if triangles is None else mark | {"covariance": triangles[k]})
        frames[frame].append(marks)
    listed = [{"frame": frame, "landmarks": people} for frame, people in frames.items()]
    return {"width": width, "height": height, "frames": listed}


def default_names(count: int) -> tuple[str, ...]:
    """Return the names of COCO's, OpenPose's, Halpe's or MediaPipe's keypoints by their number, else numbered names."""
    return _NAMES.get(count, tuple(f"keypoint_{k}" for k in range(count)))


def _range(table: PoseTable) -> list[int]:
    return list(range(int(table.frames.min()), int(table.frames.max()) + 1))


def _triples(table: PoseTable, row: int) -> Array:
    triples = np.concatenate([table.keypoints[row], table.scores[row][:, None]], axis=1)
    return np.asarray(np.where(table.missing[row][:, None], 0.0, triples))


def _triangles(table: PoseTable, row: int) -> list[list[float]]:
    assert table.covariance is not None
    matrix = table.covariance[row]
    return np.stack([matrix[:, 0, 0], matrix[:, 0, 1], matrix[:, 1, 1]], axis=1).tolist()


def _landmark(path: Path, frame: int, mark: Any) -> list[Any]:
    if not isinstance(mark, dict):
        raise HaloposeError(f"{path}: a landmark of frame {frame} is not an object with x and y")
    stated = mark.get("covariance")
    covariance = stated if isinstance(stated, list) and len(stated) == 3 else [np.nan] * 3
    return [mark.get("x"), mark.get("y"), mark.get("visibility", 1.0), *covariance]


def _whole(value: Any, otherwise: int) -> int:
    """Return the value if it is an integer that floats represent exactly, else ``otherwise``."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**53 else otherwise


def _flat(values: Any) -> Any:
    return values[0] if isinstance(values, list) and len(values) == 1 else values


def _numbers(path: Path, rows: list[Any], what: str, dimensions: int = 2) -> Array:
    """Return rows of numbers of equal shape as an array."""
    if not rows:
        raise HaloposeError(f"{path} holds no poses: nothing to do")
    try:
        values = np.array(rows)
    except (ValueError, TypeError, OverflowError):
        values = np.zeros(0, dtype=object)
    if values.dtype.kind not in "iuf" or values.ndim != dimensions:
        raise HaloposeError(f"{path}: {what} is missing, not all numbers, or not of the same length in every pose")
    return values.astype(np.float64)


def _matrices(path: Path, rows: list[Any]) -> Array | None:
    """Return covariances (N, K, 2, 2); None if a pose has none."""
    if not rows or any(row is None for row in rows):
        return None
    values = _numbers(path, rows, "covariances", 3)
    if values.shape[2] != 3:
        raise HaloposeError(f"{path}: covariances are [xx, xy, yy] each")
    return values[..., [0, 1, 1, 2]].reshape(*values.shape[:2], 2, 2)


def _table(
    path: Path,
    triples: Array,
    numbers: list[int],
    tracks: list[int],
    boxes: Array | None,
    pose_scores: Array | None,
    covariance: Array | None,
    size: tuple[int, int] | None = None,
) -> PoseTable:
    missing = (triples == 0).all(-1) | ~np.isfinite(triples[..., :2]).all(-1)
    return PoseTable(
        names=default_names(triples.shape[1]),
        keypoints=np.where(missing[..., None], np.nan, triples[..., :2]),
        scores=np.where(missing, 0.0, triples[..., 2]),
        frames=np.array(numbers, dtype=np.int64),
        tracks=np.array(tracks, dtype=np.int64),
        boxes=boxes,
        pose_scores=pose_scores,
        covariance=covariance,
        size=size,
    ).checked(path)


def _mmpose_names(meta: Any, count: int) -> tuple[str, ...] | None:
    by_number = meta.get("keypoint_id2name") if isinstance(meta, dict) else None
    if not isinstance(by_number, dict) or len(by_number) != count:
        return None
    names = [by_number.get(str(k)) for k in range(count)]
    return None if None in names else tuple(str(name) for name in names)
