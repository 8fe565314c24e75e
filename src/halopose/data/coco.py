"""COCO json: annotated poses, and detections with covariances.

Every error in a file is reported as one line that names the file, the entry and the correction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Optional

import numpy as np

from halopose.boxes import box_area, xywh_to_xyxy
from halopose.data.annotation_checks import Faults
from halopose.data.files import read_entries, read_json
from halopose.data.storage.address import Place
from halopose.data.storage.json_stream import LIST
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import GroundTruth, PoseDistributions
from halopose.rfdetr_units import PRECISION_KEY, SHAPE_KEY, area_share, pixel_covariance
from halopose.types import Array
from halopose.uncertainty.joint_distribution import whitened_correlation

log = logging.getLogger(__name__)

CHUNK = 4096  # json entries in memory at a time
_LISTS = {"images", "annotations", "categories"}
APPLIED_MARK = "calibrations"  # marks of the calibrations applied to a detection
SEEN_MARK = "calibrated_on"  # true in a detection whose image was used to fit the calibration applied to it


@dataclass(frozen=True)
class Annotated:
    """Ground truth of a file.

    Attributes:
        truth: Annotated objects.
        images: Image ids (I,) in the order of the file.
        names: File names of the images.
        classes: Ids of the categories that have keypoints.
    """

    truth: GroundTruth
    images: Array
    names: tuple[str | None, ...]
    classes: Array


def read_ground_truth(path: Place | str, sigmas: Sequence[float] | None = None) -> GroundTruth:
    """Read COCO keypoint annotations as a stream, so that large files fit into memory.

    Args:
        path: File.
        sigmas: OKS sigmas (K,); default: the category's ``sigmas``, else COCO's for 17 keypoints, else 1 / K.
    """
    return read_annotated(path, sigmas).truth


# From categories to the categories to use and a function that converts an annotation; None: no conversion.
Conversion = Callable[[list[Any]], Optional[tuple[list[Any], Callable[[Any], Any]]]]


def read_annotated(
    path: Place | str,
    sigmas: Sequence[float] | None = None,
    otherwise: Keypoints | None = None,
    convert: Conversion | None = None,
) -> Annotated:
    """Read COCO keypoint annotations with the file names of the images.

    Args:
        path: File.
        sigmas: OKS sigmas (K,), as in ``read_ground_truth``.
        otherwise: Keypoints of the model, for properties that the category does not state.
        convert: Converter for files whose annotations are not COCO keypoints.
    """
    images, names, categories, complete = _read_head(path)
    if not complete:
        raise HaloposeError(f"{path} is not COCO ground truth: it needs images, annotations and categories")
    converted = convert(categories) if convert else None
    if converted is not None:
        categories = converted[0]
    layout, ids = _keypoint_category(path, categories, sigmas, otherwise)
    entries = read_entries(path)
    annotations = (value for key, value in entries if key == "annotations" and value is not LIST)
    if converted is not None:
        annotations = (converted[1](value) for value in annotations)
    return Annotated(_parse(path, images, annotations, layout, ids), images, names, np.sort(ids))


def _read_head(path: Place | str) -> tuple[Array, tuple[str | None, ...], list[Any], bool]:
    """Read image ids, file names and categories, and whether the file has all lists of ground truth."""
    ids: list[Array] = [np.zeros(0, dtype=np.int64)]
    names: list[str | None] = []
    images: list[Any] = []
    categories: list[Any] = []
    lists: set[str] = set()

    def flush() -> None:
        ids.append(_column(path, images, "image", "id", np.int64, first=len(names)))
        named = (entry.get("file_name") for entry in images)
        names.extend(name if isinstance(name, str) else None for name in named)
        images.clear()

    for key, value in read_entries(path):
        if value is LIST:
            lists.add(key)
            if lists >= _LISTS and key == "annotations":
                break  # annotations come last, and the other lists are complete
        elif key == "images":
            images.append(value)
            if len(images) == CHUNK:
                flush()
        elif key == "categories":
            categories.append(value)
    flush()
    return np.concatenate(ids), tuple(names), categories, lists >= _LISTS


def parse_ground_truth(
    path: Place | str,
    content: Any,
    sigmas: Sequence[float] | None = None,
    otherwise: Keypoints | None = None,
) -> GroundTruth:
    """Validate parsed annotations.

    Args:
        path: Name of the file in messages.
        content: Parsed json.
        sigmas: OKS sigmas (K,), as in ``read_ground_truth``.
        otherwise: Keypoints of the model, for properties that the category does not state.
    """
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in _LISTS):
        raise HaloposeError(f"{path} is not COCO ground truth: it needs images, annotations and categories")
    layout, categories = _keypoint_category(path, content["categories"], sigmas, otherwise)
    images = _column(path, content["images"], "image", "id", np.int64)
    return _parse(path, images, content["annotations"], layout, categories)


def _parse(
    path: Place | str, images: Array, annotations: Iterable[Any], layout: Keypoints, categories: list[Any]
) -> GroundTruth:
    """Return the ground truth of images (I,), with at most `CHUNK` annotations in memory at a time."""
    if not len(images):
        raise HaloposeError(f"{path} lists no images: add them to its images")
    if len(np.unique(images)) != len(images):
        raise HaloposeError(f"{path} lists an image id twice: make the ids unique")
    faults, entries, seen = Faults(str(path)), iter(annotations), 0
    parts = [_annotation_columns(path, [], len(layout), 0)]
    while chunk := list(islice(entries, CHUNK)):
        usable = _usable(faults, chunk, categories, seen)
        parts.append(_annotation_columns(path, usable, len(layout), sum(len(part["area"]) for part in parts)))
        seen += len(chunk)
    faults.judge()
    columns: dict[str, Any] = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    _check_known_images(path, "annotation", columns["image_ids"], np.sort(images))
    ignore = columns["crowd"] | ~columns["labelled"].any(1)
    return GroundTruth(images=np.sort(images), ignore=ignore, layout=layout, **columns)


def _annotation_columns(path: Place | str, entries: list[Any], count: int, first: int) -> dict[str, Array]:
    """Return columns of ``GroundTruth`` from annotations; ``first`` is the index of the first one in messages."""
    what = "annotation"
    image_ids = _column(path, entries, what, "image_id", np.int64, first=first)
    keypoints = _matrix(path, entries, what, "keypoints", 3 * count, first).reshape(-1, count, 3)
    labelled = keypoints[..., 2] > 0
    area = _column(path, entries, what, "area", np.float64, first=first)
    bad = np.flatnonzero((area <= 0) & labelled.any(1))
    if len(bad):
        raise HaloposeError(
            f"{path}: annotation {first + bad[0]} has keypoints but area {area[bad[0]]}: give its area in pixels^2"
        )
    return {
        "image_ids": image_ids,
        "class_ids": _column(path, entries, what, "category_id", np.int64, first=first),
        "keypoints": np.ascontiguousarray(keypoints[..., :2]),
        "labelled": labelled,
        "occluded": keypoints[..., 2] == 1,
        "boxes": _matrix(path, entries, what, "bbox", 4, first),
        "area": area,
        "crowd": _column(path, entries, what, "iscrowd", np.int64, default=0, first=first) != 0,
    }


def _usable(faults: Faults, entries: list[Any], categories: list[Any], first: int) -> list[Any]:
    """Return the usable annotations of the given categories; report those without a category or a box."""
    faults.seen(len(entries))
    usable = []
    for index, entry in enumerate(entries, first):
        category = entry.get("category_id") if isinstance(entry, dict) else None
        if not isinstance(entry, dict):
            usable.append(entry)  # the reader of its fields reports it by its index
        elif isinstance(category, bool) or not isinstance(category, (int, float)):
            faults.add("no number as category_id", f"annotation {index}")
        elif category in categories:
            box = _floats(entry.get("bbox"))
            if box is not None and box.shape == (4,) and not (box[2:] > 0).all() and not entry.get("iscrowd"):
                faults.add("a box without width or height", f"annotation {index}")
            else:
                usable.append(entry)
    return usable


def _keypoint_category(
    path: Place | str, entries: list[Any], sigmas: Sequence[float] | None, otherwise: Keypoints | None
) -> tuple[Keypoints, list[Any]]:
    """Return the keypoints and the ids of the categories with keypoints, which must all have the same ones."""
    found = [entry for entry in entries if isinstance(entry, dict) and entry.get("keypoints")]
    if not found:
        raise HaloposeError(f"{path}: no category has keypoints; add their names to the category")
    names = found[0]["keypoints"]
    if not isinstance(names, list) or any(entry["keypoints"] != names for entry in found):
        raise HaloposeError(f"{path}: the categories have different keypoints: split the file by category")
    ids = [entry.get("id") for entry in found]
    if any(not isinstance(identity, int) for identity in ids):
        raise HaloposeError(f"{path}: a category's id is not a whole number: correct it")
    chosen = found[0].get("sigmas") if sigmas is None else sigmas
    values = None if chosen is None else _floats(chosen)
    if chosen is not None and (
        values is None or values.shape != (len(names),) or not ((values > 0) & np.isfinite(values)).all()
    ):
        raise HaloposeError(f"{path}: give {len(names)} positive sigmas, one per keypoint")
    limbs = _limbs(found[0].get("skeleton"), len(names))
    words = [str(name) for name in names]
    return Keypoints.of(len(names), names=words, sigmas=values, limbs=limbs, otherwise=otherwise), ids


def _limbs(skeleton: Any, count: int) -> list[tuple[int, int]] | None:
    """Return the limbs of COCO's skeleton, which counts keypoints from 1; None if it is missing or not valid."""
    pairs = _floats(skeleton) if isinstance(skeleton, list) and skeleton else None
    if pairs is None or pairs.ndim != 2 or pairs.shape[1] != 2 or ((pairs < 1) | (pairs > count)).any():
        return None
    return [(int(a) - 1, int(b) - 1) for a, b in pairs]


@dataclass(frozen=True)
class Numbering:
    """Ids of images and categories in COCO json.

    Attributes:
        images: Image ids by file name without folders.
        classes: Ids of the categories with keypoints, in the order of the model's classes; empty if there are none.
    """

    images: dict[str, int]
    classes: tuple[int, ...]

    def category(self, number: int) -> int:
        """Return the category id of a model's class, which is counted from 1."""
        if self.classes and number > len(self.classes):
            raise HaloposeError(
                f"the ground truth has {len(self.classes)} categories with keypoints, but the model predicts class "
                f"{number}: leave --truth out, or give the ground truth of this model's classes"
            )
        return self.classes[number - 1] if self.classes else number


def read_numbering(path: Place | str) -> Numbering:
    """Read the ids of images and categories of COCO ground truth."""
    ids, names, categories, _ = _read_head(path)
    if not len(ids):
        raise HaloposeError(f"{path} lists no images: give COCO json with images")
    if None in names:
        raise HaloposeError(f"{path}: an image has no file_name: add it, because ids are looked up by file name")
    found = {Path(name).name: identity for name, identity in zip(names, ids.tolist(), strict=True) if name}
    if len(found) < len(ids):
        raise HaloposeError(
            f"{path}: two images have the same file name: rename one, because ids are looked up by file name"
        )
    if not any(isinstance(entry, dict) and entry.get("keypoints") for entry in categories):
        return Numbering(found, ())
    return Numbering(found, tuple(sorted(_keypoint_category(path, categories, None, None)[1])))


def read_predictions(
    path: Place | str, truth: GroundTruth | None = None, classes: Array | None = None, *, constants: bool = False
) -> PoseDistributions:
    """Read COCO keypoint results with covariances.

    Each detection has ``covariance``: K rows [xx, xy, yy] or K matrices. Optional fields of a detection:
        scale, dof: Scale matrices, as covariance, and K degrees of freedom of a Student-t.
        correlation: Correlation (2K x 2K) of the coordinates x1, y1, x2, ...
        keep: K booleans, the pruning mask.
        offset: K rows [x, y], mean of the distribution minus keypoint.
        bbox: Box xywh; default: the extent of the keypoints, as in pycocotools.

    Args:
        path: File.
        truth: Ground truth whose images and keypoints the detections must have.
        classes: Allowed category ids; default: those of the objects in the ground truth.
        constants: Accept a file without covariances. Every keypoint gets a circle of constant size relative to the
            object.
    """
    return parse_predictions(path, read_json(path), truth, classes, constants=constants)


def states_covariance(content: Any) -> bool:
    """Return whether any detection of parsed results has a covariance, or one in the form of RF-DETR."""
    entries = [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []
    return any(entry.get(key) is not None for entry in entries for key in ("covariance", PRECISION_KEY))


def parse_predictions(
    path: Place | str,
    content: Any,
    truth: GroundTruth | None,
    classes: Array | None = None,
    *,
    constants: bool = False,
) -> PoseDistributions:
    """Validate parsed results; arguments as in ``read_predictions``, ``path`` is only used in messages."""
    what = "detection"
    if not isinstance(content, list):
        raise HaloposeError(f"{path} is not COCO results: it should be a list of detections")
    if not content:
        raise HaloposeError(f"{path} holds no detections: predict again with a lower --conf, or give another file")
    constants = constants and not states_covariance(content)
    count = truth.keypoint_count if truth is not None else _keypoints_of_first(path, content, constants)
    keypoints = _matrix(path, content, what, "keypoints", 3 * count).reshape(-1, count, 3)
    covariance = np.zeros((0, count, 2, 2)) if constants else _stated_covariances(path, content, count)
    has_scale = _all_or_none(path, content, "scale")
    has_dof = _all_or_none(path, content, "dof")
    if has_scale != has_dof:
        raise HaloposeError(f"{path}: scale and dof describe a Student-t together: give both or neither")
    image_ids = _column(path, content, what, "image_id", np.int64)
    class_ids = _column(path, content, what, "category_id", np.int64, default=1)
    if truth is not None:
        _check_known_images(path, what, image_ids, truth.images)
        _check_known_classes(path, class_ids, truth.class_ids if classes is None else classes)
    if _all_or_none(path, content, "bbox"):
        boxes = xywh_to_xyxy(_matrix(path, content, what, "bbox", 4))
    else:
        boxes = _extent(keypoints)
    if constants:
        covariance = _constant_covariances(boxes, Keypoints.of(count) if truth is None else truth.layout)
    return PoseDistributions(
        boxes=boxes,
        scores=_column(path, content, what, "score", np.float64),
        keypoints=keypoints[..., :2],
        covariance=covariance,
        scale=_covariances(path, content, "scale", count) if has_scale else covariance,
        dof=_dof(path, content, count) if has_dof else None,
        visibility=keypoints[..., 2],
        keep=_keep(path, content, count) if _all_or_none(path, content, "keep") else None,
        class_ids=class_ids,
        image_ids=image_ids,
        correlation=_correlations(path, content, covariance) if _all_or_none(path, content, "correlation") else None,
        novelty=_column(path, content, what, "novelty", np.float64)
        if content and _all_or_none(path, content, "novelty")
        else None,
        offset=_offset(path, content, count) if _all_or_none(path, content, "offset") else None,
    )


def _extent(keypoints: Array) -> Array:
    """Return boxes (N, 4) around keypoints (N, K, 3); keypoints (0, 0, 0) are not predicted and are ignored."""
    missing = (keypoints == 0).all(-1)
    missing &= ~missing.all(1, keepdims=True)
    low = np.where(missing[..., None], np.inf, keypoints[..., :2]).min(1)
    high = np.where(missing[..., None], -np.inf, keypoints[..., :2]).max(1)
    return np.concatenate([low, high], axis=1)


def _constant_covariances(boxes: Array, layout: Keypoints) -> Array:
    """Return isotropic covariances (N, K, 2, 2): kappa^2 s^2, with s^2 from the box and at least 1 px^2."""
    area = np.maximum(box_area(boxes) * layout.area_factor, 1.0)
    return np.asarray((area[:, None] * layout.kappa**2)[..., None, None] * np.eye(2))


def _offset(path: Place | str, content: list[Any], count: int) -> Array:
    """Read offsets (N, K, 2) of the distributions' means from the keypoints."""
    given = _floats([entry["offset"] for entry in content])
    if given is None or given.shape != (len(content), count, 2) or not np.isfinite(given).all():
        raise HaloposeError(f"{path}: offset is [[x, y], ...] of {count} keypoints in every detection")
    return given


def _correlations(path: Place | str, content: list[Any], covariance: Array) -> Array | None:
    """Convert correlations of coordinates, which must agree with the covariances, to whitened ones (N, 2K, 2K)."""
    if not _all_or_none(path, content, "correlation"):
        return None
    size = 2 * covariance.shape[1]
    given = _floats([entry["correlation"] for entry in content])
    if given is None or given.shape != (len(content), size, size):
        raise HaloposeError(f"{path}: correlation is {size} rows of {size} numbers in every detection")
    deviation = np.sqrt(np.einsum("nkii->nki", covariance)).reshape(-1, size)
    whole = given * deviation[:, :, None] * deviation[:, None]
    definite = np.isfinite(whole).all((1, 2)) & (np.abs(given - np.swapaxes(given, 1, 2)).max((1, 2)) < 1e-6)
    definite &= np.linalg.eigvalsh(np.where(definite[:, None, None], given, -np.eye(size)))[:, 0] > 0
    if not definite.all():
        place = int(np.flatnonzero(~definite)[0])
        raise HaloposeError(f"{path}: correlation of detection {place} is not symmetric and positive definite")
    index = np.arange(covariance.shape[1])
    blocks = given.reshape(len(given), size // 2, 2, size // 2, 2)[:, index, :, index].transpose(1, 0, 2, 3)
    own = covariance / deviation.reshape(-1, size // 2, 2, 1) / deviation.reshape(-1, size // 2, 1, 2)
    apart = np.abs(blocks - own).max((2, 3))
    if apart.max() > 1e-3:
        row, column = np.argwhere(apart > 1e-3)[0]
        raise HaloposeError(
            f"{path}: correlation of detection {row} contradicts its covariance at keypoint {column}: rows are "
            "x1, y1, x2, y2, ..."
        )
    return whitened_correlation(whole)


def _keypoints_of_first(path: Place | str, content: list[Any], constants: bool) -> int:
    """Return the number of keypoints of the first detection."""
    first = content[0].get("covariance") if isinstance(content[0], dict) else None
    if constants or (isinstance(content[0], dict) and content[0].get(PRECISION_KEY) is not None):
        triples = content[0].get("keypoints") if isinstance(content[0], dict) else None
        if not isinstance(triples, list) or not triples or len(triples) % 3:
            raise HaloposeError(f'{path}: detection 0 has no "keypoints": [x, y, score, ...]')
        return len(triples) // 3
    if not isinstance(first, list) or not first:
        raise HaloposeError(f'{path}: detection 0 has no "covariance": [[xx, xy, yy], ...]')
    return len(first)


def _covariances(path: Place | str, content: list[Any], key: str, count: int) -> Array:
    """Read positive definite matrices (N, K, 2, 2) from rows [xx, xy, yy] or [[xx, xy], [xy, yy]]."""
    values = [entry.get(key) if isinstance(entry, dict) else None for entry in content]
    triangle = _floats(values)
    if triangle is not None and triangle.shape == (len(content), count, 2, 2):
        triangle = _upper_triangles(path, key, triangle)
    if triangle is None or triangle.shape != (len(content), count, 3):
        for index, value in enumerate(values):
            row = _floats(value) if isinstance(value, list) else None
            if row is None or row.shape != (count, 3):
                raise HaloposeError(
                    f"{path}: detection {index} needs {key} as {count} rows of [xx, xy, yy] or [[xx, xy], [xy, yy]]"
                )
        raise HaloposeError(
            f"{path}: every detection needs {key} as {count} rows of [xx, xy, yy], in the same form in all detections"
        )
    xx, xy, yy = np.moveaxis(triangle, -1, 0)
    # Infinite and NaN entries fail the comparison as well.
    with np.errstate(over="ignore", invalid="ignore"):
        definite = (xx > 0) & (yy > 0) & (xx * yy - xy**2 > 1e-12 * xx * yy) & np.isfinite(xx * yy)
    if not definite.all():
        row, column = np.argwhere(~definite)[0]
        raise HaloposeError(
            f"{path}: {key} of detection {row}, keypoint {column} is not a finite positive definite "
            f"matrix: {triangle[row, column].tolist()}"
        )
    return np.stack([xx, xy, xy, yy], axis=-1).reshape(len(content), count, 2, 2)


def _stated_covariances(path: Place | str, content: list[Any], count: int) -> Array:
    """Read covariances (N, K, 2, 2); those of RF-DETR are multiplied by the share of the image that the box covers."""
    if not _all_or_none(path, content, PRECISION_KEY):
        return _covariances(path, content, "covariance", count)
    shape = _matrix(path, content, "detection", SHAPE_KEY, 2)
    boxes = xywh_to_xyxy(_matrix(path, content, "detection", "bbox", 4))
    if (shape <= 0).any():
        raise HaloposeError(f"{path}: {SHAPE_KEY} of detection {np.argwhere(shape <= 0)[0][0]} is not positive")
    flat = [np.ravel(entry[PRECISION_KEY]).tolist() for entry in content]
    rows = [{PRECISION_KEY: values} for values in flat]
    precision = _matrix(path, rows, "detection", PRECISION_KEY, 3 * count).reshape(-1, count, 3)
    with np.errstate(all="ignore"):
        covariance = pixel_covariance(precision, shape) * area_share(boxes, shape)[:, None, None, None]
    definite = np.isfinite(covariance).all((-2, -1)) & (covariance[..., 0, 0] > 0) & (covariance[..., 1, 1] > 0)
    if not definite.all():
        raise HaloposeError(f"{path}: {PRECISION_KEY} of detection {np.argwhere(~definite)[0][0]} is out of range")
    log.warning("%s: covariances of RF-DETR are multiplied by the share of the image that each box covers", path)
    return covariance


def _upper_triangles(path: Place | str, key: str, matrices: Array) -> Array:
    """Return rows [xx, xy, yy] (N, K, 3) of symmetric matrices (N, K, 2, 2)."""
    upper, lower = matrices[..., 0, 1], matrices[..., 1, 0]
    skew = ~np.isclose(upper, lower, rtol=1e-6, atol=0, equal_nan=True)
    if skew.any():
        row, column = np.argwhere(skew)[0]
        raise HaloposeError(
            f"{path}: {key} of detection {row}, keypoint {column} is not symmetric: {matrices[row, column].tolist()}"
        )
    return np.stack([matrices[..., 0, 0], upper, matrices[..., 1, 1]], axis=-1)


def _dof(path: Place | str, content: list[Any], count: int) -> Array:
    dof = _matrix(path, content, "detection", "dof", count)
    if (dof <= 0).any():
        raise HaloposeError(f"{path}: dof must be positive, got {dof.min()}")
    return dof


def _keep(path: Place | str, content: list[Any], count: int) -> Array:
    """Read the pruning mask (N, K)."""
    for index, entry in enumerate(content):
        mask = entry["keep"]
        if not isinstance(mask, list) or len(mask) != count or any(type(value) is not bool for value in mask):
            raise HaloposeError(f"{path}: detection {index} needs keep as {count} of true or false")
    return np.array([entry["keep"] for entry in content], dtype=bool).reshape(-1, count)


def _all_or_none(path: Place | str, content: list[Any], key: str) -> bool:
    """Return whether all detections have a field; raise a HaloposeError if only some have it."""
    present = [isinstance(entry, dict) and entry.get(key) is not None for entry in content]
    if any(present) and not all(present):
        raise HaloposeError(f"{path}: detection {present.index(False)} has no {key}, but others have: give all or none")
    return all(present)


def _floats(values: Any) -> Array | None:
    """Convert to a float array; None if the nesting is ragged or an entry is not a number."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        return None
    return array.astype(np.float64) if array.dtype.kind in "iuf" else None


def _matrix(path: Place | str, entries: list[Any], what: str, key: str, width: int, first: int = 0) -> Array:
    """Read finite floats (N, width) from a list-valued field; ``first`` is the index of the first entry in messages."""
    values = [entry.get(key) if isinstance(entry, dict) else None for entry in entries]
    if not values:
        return np.zeros((0, width))
    matrix = _floats(values)
    if matrix is None or matrix.shape != (len(entries), width):
        for index, value in enumerate(values):
            row = _floats(value) if isinstance(value, list) else None
            if row is None or row.shape != (width,):
                length = len(value) if isinstance(value, list) else "none"
                raise HaloposeError(f"{path}: {what} {first + index} needs {key} of {width} numbers, has {length}")
        raise HaloposeError(f"{path}: every {what} needs {key} of {width} numbers")
    _check_finite(path, what, key, matrix, first)
    return matrix


def _column(
    path: Place | str,
    entries: list[Any],
    what: str,
    key: str,
    dtype: Any,
    default: Any = None,
    first: int = 0,
) -> Array:
    """Read the numbers (N,) of a scalar field."""
    values = [entry.get(key, default) if isinstance(entry, dict) else None for entry in entries]
    column = _floats(values)
    if column is None or column.shape != (len(entries),):
        bad = next(
            (i for i, value in enumerate(values) if isinstance(value, bool) or not isinstance(value, (int, float))),
            0,
        )
        raise HaloposeError(f"{path}: {what} {first + bad} needs a number as {key}")
    _check_finite(path, what, key, column, first)
    if dtype is np.int64 and (column != np.round(column)).any():
        raise HaloposeError(f"{path}: {key} must be whole numbers")
    if dtype is np.int64 and (np.abs(column) > 2**53).any():
        raise HaloposeError(f"{path}: {key} is out of range")
    return np.asarray(column.astype(dtype))


def _check_finite(path: Place | str, what: str, key: str, values: Array, first: int = 0) -> None:
    if not np.isfinite(values).all():
        index = first + np.argwhere(~np.isfinite(values))[0][0]
        raise HaloposeError(f"{path}: {what} {index} has a {key} that is not finite")


def _check_known_images(path: Place | str, what: str, image_ids: Array, images: Array) -> None:
    unknown = np.setdiff1d(image_ids, images)
    if len(unknown):
        shown = ", ".join(str(identity) for identity in unknown[:3])
        raise HaloposeError(
            f"{path}: {len(unknown)} image ids of its {what}s are not in the ground truth, e.g. {shown}"
        )


def _check_known_classes(path: Place | str, class_ids: Array, known: Array) -> None:
    unknown = np.setdiff1d(class_ids, known)
    if len(unknown) and len(known):
        raise HaloposeError(f"{path}: category {unknown[0]} has no keypoints in the ground truth: check category_id")
