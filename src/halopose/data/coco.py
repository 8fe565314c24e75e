"""COCO json in and out: annotated poses, detections with covariances, calibrations.

In: paths of user files. Out: checked arrays. Anything wrong becomes one line that names the file, the place
and what to do; nothing else in the package reads json. What is written is whole or not there at all.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.evaluation.matching import COCO_SIGMAS
from halopose.poses import Array, GroundTruth, PoseDistributions

SEEN_MARK = "calibrated_on"  # true in a detection whose image was used to fit the calibration applied to it


def read_json(path: Path | str) -> Any:
    """Parse a json file, or say in one line why it cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise HaloposeError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise HaloposeError(f"{path} is not text: expected json in UTF-8") from None
    if not text.strip():
        raise HaloposeError(f"{path} is empty: write it again")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise HaloposeError(
            f"{path} is not complete json (line {error.lineno}, column {error.colno}): write it again"
        ) from None
    except (RecursionError, ValueError):
        raise HaloposeError(f"{path} is json that cannot be read: write it again") from None


def make_folder(path: Path | str) -> Path:
    """A folder made if need be; refused if nothing can be written there, which is best asked before any work."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise HaloposeError(f"cannot write to {path}: {error.strerror or error}") from None
    return path


def make_room(path: Path | str) -> Path:
    """The path of a file to be written later, in a folder where that can be done."""
    path = Path(path)
    if path.is_dir():
        raise HaloposeError(f"cannot write {path}: it is a folder, name a file")
    make_folder(path.parent)
    return path


def write_bytes(path: Path | str, content: bytes | memoryview) -> None:
    """Write a file whole or not at all."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise HaloposeError(f"cannot write {path}: {error.strerror or error}") from None


def write_text(path: Path | str, text: str) -> None:
    """Write a file of text in UTF-8 whole or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Path | str, content: Any, indent: int | None = None) -> None:
    """Write json whole or not at all; NaN becomes null."""
    write_text(path, json.dumps(_without_nan(content), indent=indent, allow_nan=False) + "\n")


def _without_nan(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(key): _without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_nan(value) for value in content]
    if isinstance(content, np.ndarray):
        return _without_nan(content.tolist())
    if isinstance(content, np.generic):
        return _without_nan(content.item())
    if isinstance(content, float) and not np.isfinite(content):
        return None
    return content


def read_ground_truth(path: Path | str, sigmas: Sequence[float] | None = None) -> GroundTruth:
    """Read COCO keypoint annotations.

    Keypoint names and count come from the category, sigmas from ``sigmas``, else the category's ``sigmas``,
    else COCO's own if there are 17 keypoints, else 1 / K.
    """
    return parse_ground_truth(path, read_json(path), sigmas)


def parse_ground_truth(path: Path | str, content: Any, sigmas: Sequence[float] | None = None) -> GroundTruth:
    """Check already parsed annotations; ``path`` only names them in messages."""
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), list) for key in ("images", "annotations", "categories")
    ):
        raise HaloposeError(f"{path} is not COCO ground truth: it needs images, annotations and categories")
    names, category_sigmas, categories = _keypoint_category(path, content["categories"])
    count = len(names)
    images = _column(path, content["images"], "image", "id", np.int64)
    if not len(images):
        raise HaloposeError(f"{path} lists no images")
    if len(np.unique(images)) != len(images):
        raise HaloposeError(f"{path} lists an image id twice: make the ids unique")
    annotations = [
        entry
        for entry in content["annotations"]
        if not isinstance(entry, dict) or entry.get("category_id") in categories
    ]
    image_ids = _column(path, annotations, "annotation", "image_id", np.int64)
    _check_known_images(path, "annotation", image_ids, np.sort(images))
    keypoints = _matrix(path, annotations, "annotation", "keypoints", 3 * count).reshape(-1, count, 3)
    crowd = _column(path, annotations, "annotation", "iscrowd", np.int64, default=0) != 0
    labelled = keypoints[..., 2] > 0
    area = _column(path, annotations, "annotation", "area", np.float64)
    bad = np.flatnonzero((area <= 0) & labelled.any(1))
    if len(bad):
        raise HaloposeError(f"{path}: annotation {bad[0]} has keypoints but area {area[bad[0]]}")
    return GroundTruth(
        images=np.sort(images),
        image_ids=image_ids,
        class_ids=_column(path, annotations, "annotation", "category_id", np.int64),
        keypoints=keypoints[..., :2],
        labelled=labelled,
        boxes=_matrix(path, annotations, "annotation", "bbox", 4),
        area=area,
        crowd=crowd,
        ignore=crowd | ~labelled.any(1),
        names=names,
        sigmas=_sigmas(path, sigmas, category_sigmas, count),
    )


def _keypoint_category(path: Path | str, entries: list[Any]) -> tuple[tuple[str, ...], Any, set[Any]]:
    """Names and sigmas of the keypoint category; several categories must share their keypoints."""
    found = [entry for entry in entries if isinstance(entry, dict) and entry.get("keypoints")]
    if not found:
        raise HaloposeError(f"{path}: no category has keypoints; add their names to the category")
    names = found[0]["keypoints"]
    if not isinstance(names, list) or any(entry["keypoints"] != names for entry in found):
        raise HaloposeError(f"{path}: categories with different keypoints; score them one at a time")
    ids = [entry.get("id") for entry in found]
    if any(not isinstance(identity, int) for identity in ids):
        raise HaloposeError(f"{path}: a category's id is not a whole number")
    return tuple(str(name) for name in names), found[0].get("sigmas"), set(ids)


def _sigmas(path: Path | str, given: Any, category: Any, count: int) -> Array:
    default = COCO_SIGMAS if count == len(COCO_SIGMAS) else np.full(count, 1 / count)
    chosen = given if given is not None else category if category is not None else default
    sigmas = _floats(chosen)
    if sigmas is None or sigmas.shape != (count,) or not (np.isfinite(sigmas) & (sigmas > 0)).all():
        raise HaloposeError(f"{path}: give {count} positive sigmas, one per keypoint")
    return sigmas


def read_predictions(path: Path | str, truth: GroundTruth | None = None) -> PoseDistributions:
    """Read COCO keypoint results that carry ``covariance`` [[xx, xy, yy], ...K] per detection.

    Optional per detection: ``scale`` (like covariance) and ``dof`` [...K] for a Student-t, ``bbox`` xywh;
    a missing box is the keypoints' extent, as in pycocotools.
    """
    return parse_predictions(path, read_json(path), truth)


def parse_predictions(path: Path | str, content: Any, truth: GroundTruth | None) -> PoseDistributions:
    """Check already parsed results; ``path`` only names them in messages."""
    what = "detection"
    if not isinstance(content, list):
        raise HaloposeError(f"{path} is not COCO results: it should be a list of detections")
    if not content:
        raise HaloposeError(f"{path} holds no detections: nothing to do")
    count = truth.keypoint_count if truth is not None else _keypoints_of_first(path, content)
    keypoints = _matrix(path, content, what, "keypoints", 3 * count).reshape(-1, count, 3)
    covariance = _covariances(path, content, "covariance", count)
    has_scale = _all_or_none(path, content, "scale")
    has_dof = _all_or_none(path, content, "dof")
    if has_scale != has_dof:
        raise HaloposeError(f"{path}: scale and dof describe a Student-t together: give both or neither")
    image_ids = _column(path, content, what, "image_id", np.int64)
    class_ids = _column(path, content, what, "category_id", np.int64, default=1)
    if truth is not None:
        _check_known_images(path, what, image_ids, truth.images)
        _check_known_classes(path, class_ids, truth)
    if _all_or_none(path, content, "bbox"):
        boxes = _matrix(path, content, what, "bbox", 4)
        boxes = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    else:
        boxes = np.concatenate([keypoints[..., :2].min(1), keypoints[..., :2].max(1)], axis=1)
    return PoseDistributions(
        boxes=boxes,
        scores=_column(path, content, what, "score", np.float64),
        keypoints=keypoints[..., :2],
        covariance=covariance,
        scale=_covariances(path, content, "scale", count) if has_scale else covariance,
        dof=_dof(path, content, count) if has_dof else None,
        visibility=keypoints[..., 2],
        class_ids=class_ids,
        image_ids=image_ids,
    )


def prediction_entries(predictions: PoseDistributions) -> list[dict[str, Any]]:
    """The inverse of ``parse_predictions``: COCO results entries with covariances."""
    n, k = predictions.keypoints.shape[:2]
    visibility = np.ones((n, k))
    if predictions.visibility is not None:
        visibility = predictions.visibility
    triples = np.concatenate([predictions.keypoints, visibility[..., None]], axis=2).reshape(n, 3 * k)
    boxes = predictions.boxes
    boxes = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
    columns: dict[str, list[Any]] = {
        "image_id": _list(predictions.image_ids, n, 0),
        "category_id": _list(predictions.class_ids, n, 1),
        "bbox": boxes.tolist(),
        "score": predictions.scores.tolist(),
        "keypoints": triples.tolist(),
        "covariance": _triangle(predictions.covariance).tolist(),
    }
    if predictions.dof is not None:
        columns["scale"] = _triangle(predictions.scale).tolist()
        columns["dof"] = [predictions.dof.tolist()] * n
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _list(values: Array | None, count: int, default: int) -> list[Any]:
    return [default] * count if values is None else list(values.tolist())


def _triangle(matrices: Array) -> Array:
    """(..., 3) of xx, xy, yy."""
    return np.stack([matrices[..., 0, 0], matrices[..., 0, 1], matrices[..., 1, 1]], axis=-1)


def _keypoints_of_first(path: Path | str, content: list[Any]) -> int:
    first = content[0].get("covariance") if isinstance(content[0], dict) else None
    if not isinstance(first, list) or not first:
        raise HaloposeError(f'{path}: detection 0 has no "covariance": [[xx, xy, yy], ...]')
    return len(first)


def _covariances(path: Path | str, content: list[Any], key: str, count: int) -> Array:
    """(N, K, 2, 2) from rows of [[xx, xy, yy], ...K], each positive definite."""
    values = [entry.get(key) if isinstance(entry, dict) else None for entry in content]
    triangle = _floats(values)
    if triangle is None or triangle.shape != (len(content), count, 3):
        for index, value in enumerate(values):
            row = _floats(value) if isinstance(value, list) else None
            if row is None or row.shape != (count, 3):
                raise HaloposeError(f"{path}: detection {index} needs {key} as {count} rows of [xx, xy, yy]")
        raise HaloposeError(f"{path}: every detection needs {key} as {count} rows of [xx, xy, yy]")
    xx, xy, yy = np.moveaxis(triangle, -1, 0)
    # An infinite or NaN entry fails the comparison too.
    with np.errstate(over="ignore", invalid="ignore"):
        definite = (xx > 0) & (yy > 0) & (xx * yy - xy**2 > 1e-12 * xx * yy) & np.isfinite(xx * yy)
    if not definite.all():
        row, column = np.argwhere(~definite)[0]
        raise HaloposeError(
            f"{path}: {key} of detection {row}, keypoint {column} is not a finite positive definite "
            f"matrix: {triangle[row, column].tolist()}"
        )
    return np.stack([xx, xy, xy, yy], axis=-1).reshape(len(content), count, 2, 2)


def _dof(path: Path | str, content: list[Any], count: int) -> Array:
    dof = _matrix(path, content, "detection", "dof", count)
    if (dof <= 0).any():
        raise HaloposeError(f"{path}: dof must be positive, got {dof.min()}")
    if (dof != dof[0]).any():
        raise HaloposeError(f"{path}: dof must be the same in every detection: one value per keypoint")
    return np.asarray(dof[0])


def _all_or_none(path: Path | str, content: list[Any], key: str) -> bool:
    present = [isinstance(entry, dict) and entry.get(key) is not None for entry in content]
    if any(present) and not all(present):
        raise HaloposeError(f"{path}: detection {present.index(False)} has no {key}, but others have")
    return all(present)


def _floats(values: Any) -> Array | None:
    """A float array, or None where the nesting is ragged or something in it is not a number."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        return None
    return array.astype(np.float64) if array.dtype.kind in "iuf" else None


def _matrix(path: Path | str, entries: list[Any], what: str, key: str, width: int) -> Array:
    """(N, width) finite floats from a list-valued field."""
    values = [entry.get(key) if isinstance(entry, dict) else None for entry in entries]
    if not values:
        return np.zeros((0, width))
    matrix = _floats(values)
    if matrix is None or matrix.shape != (len(entries), width):
        for index, value in enumerate(values):
            row = _floats(value) if isinstance(value, list) else None
            if row is None or row.shape != (width,):
                length = len(value) if isinstance(value, list) else "none"
                raise HaloposeError(f"{path}: {what} {index} needs {key} of {width} numbers, has {length}")
        raise HaloposeError(f"{path}: every {what} needs {key} of {width} numbers")
    _check_finite(path, what, key, matrix)
    return matrix


def _column(path: Path | str, entries: list[Any], what: str, key: str, dtype: Any, default: Any = None) -> Array:
    """(N,) numbers of a scalar field."""
    values = [entry.get(key, default) if isinstance(entry, dict) else None for entry in entries]
    column = _floats(values)
    if column is None or column.shape != (len(entries),):
        bad = next(
            (
                i
                for i, value in enumerate(values)
                if isinstance(value, bool) or not isinstance(value, (int, float))
            ),
            0,
        )
        raise HaloposeError(f"{path}: {what} {bad} needs a number as {key}")
    _check_finite(path, what, key, column)
    if dtype is np.int64 and (column != np.round(column)).any():
        raise HaloposeError(f"{path}: {key} must be whole numbers")
    if dtype is np.int64 and (np.abs(column) > 2**53).any():
        raise HaloposeError(f"{path}: {key} is out of range")
    return np.asarray(column.astype(dtype))


def _check_finite(path: Path | str, what: str, key: str, values: Array) -> None:
    if not np.isfinite(values).all():
        index = np.argwhere(~np.isfinite(values))[0][0]
        raise HaloposeError(f"{path}: {what} {index} has a {key} that is not finite")


def _check_known_images(path: Path | str, what: str, image_ids: Array, images: Array) -> None:
    unknown = np.setdiff1d(image_ids, images)
    if len(unknown):
        shown = ", ".join(str(identity) for identity in unknown[:3])
        raise HaloposeError(
            f"{path}: {len(unknown)} image ids of its {what}s are not in the ground truth, e.g. {shown}"
        )


def _check_known_classes(path: Path | str, class_ids: Array, truth: GroundTruth) -> None:
    unknown = np.setdiff1d(class_ids, truth.class_ids)
    if len(unknown) and len(truth):
        raise HaloposeError(
            f"{path}: category {unknown[0]} has no keypoints in the ground truth: check category_id"
        )
