"""Poses with calibrated uncertainty from an exported model: needs numpy and onnxruntime, OpenCV where it is there.

python predict.py photo.jpg            prints a line and draws poses/photo.jpg
python predict.py photo.jpg --json     prints what `halopose predict` writes

In: BGR uint8 images (h, w, 3). Out: ``Poses`` in pixels of the image. This file is all there is: copy it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import sys
import warnings
from dataclasses import dataclass, fields, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

try:
    import cv2
except ImportError:  # then photographs are read with PIL, and nothing is drawn
    cv2 = None  # type: ignore[assignment]
try:
    from PIL import Image, ImageOps
except ImportError:
    Image = ImageOps = None

Array = Any
Run = Callable[..., Dict[str, Array]]  # input batch (B, 3, H, W), with novelty also areas (B, 4), to named outputs

FORMAT = "halopose-deployed-"
VERSION = 2
BLANK = b"0" * 64  # what stands for the checksum while it is taken
SEAL = re.compile(rb"\n\x08checksum\x12@([0-9a-f]{64})")  # an entry of the metadata, as protobuf has it
FAMILIES = ("gaussian", "student-t")
COCO_LIMBS = (
    (15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9),
    (8, 10), (0, 1), (0, 2), (1, 3), (2, 4),
)  # fmt: skip
IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".npy")


LARGEST = 16384  # input size
LAYOUTS = ("ultralytics", "ultralytics-end2end", "yolonas")
_OPTIONAL = ("student_moment", "pruned_dof", "pruned_scale")
_TABLES = ("sigmas", "temperature", "student_dof", "student_scale", *_OPTIONAL)


class Problem(ValueError):
    """A user's mistake, in one line that says what to do."""


class LeftOut(UserWarning):
    """Detections without a covariance, which are left out."""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e300 < value < 1e300  # which whole numbers of any length are held to


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_table(value: Any, shape: Tuple[Optional[int], ...]) -> bool:
    """Whether nested lists hold finite numbers in a shape; None stands for any length."""
    if value == [] and shape[0] is None:
        return True
    try:
        table = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return False
    fits = table.ndim == len(shape) and all(want in (None, size) for want, size in zip(shape, table.shape))
    return fits and bool(np.isfinite(table).all())


def _are_scales(value: Any, size: int) -> bool:
    """Whether there is a correlation (size, size) for every object scale, parted by rising edges."""
    if not isinstance(value, dict) or not _is_table(value.get("edges"), (None,)):
        return False
    edges = value["edges"]
    fits = _is_table(value.get("matrices"), (len(edges) + 1, size, size)) and _is_positive(value.get("area_factor"))
    return fits and list(edges) == sorted(edges)


# What is written in the model file --------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """The model file's metadata: how to prepare an image, what the outputs mean, and the calibration.

    Factors come out of the graph with the Gaussian's ``temperature`` (K,) in them. A Student-t has ``student_dof``
    (K,) and the scale factors times ``student_scale`` (K,); its covariance is that of the factors times
    ``student_moment`` (K,), or the law's own where that is null. ``pruned_dof`` and ``pruned_scale`` (K,), unless
    null, are of keypoints that pruning takes out; ``student_dof`` and ``student_scale`` are then of the rest.
    ``regions``: squared radii of regions that hold whatever the law; ``correlation``: how keypoints err together;
    both as `halopose` writes them, or null. ``novelty``: scores and values of calibration detections and values of
    calibration images, both by rising value, or null. ``offset`` (K, 2): by how many roots of the box area the
    law's mean is off the keypoint, or null.
    """

    layout: str
    form: str
    precision: str
    fingerprint: str
    strides: List[int]
    imgsz: int
    fewest_cells: int
    visibility: bool
    class_names: List[str]
    keypoint_names: List[str]
    sigmas: List[float]
    area_factor: float
    threshold: Optional[float]
    visibility_threshold: Optional[float]
    temperature: List[float]
    student_dof: List[float]
    student_scale: List[float]
    student_moment: Optional[List[float]]
    pruned_dof: Optional[List[float]] = None
    pruned_scale: Optional[List[float]] = None
    regions: Optional[Dict[str, Any]] = None
    correlation: Optional[Dict[str, Any]] = None
    novelty: Optional[Dict[str, Any]] = None
    offset: Optional[List[List[float]]] = None

    @classmethod
    def read(cls, properties: Mapping[str, str], where: str) -> Facts:
        """From the file's key-value pairs, each but ``format`` in json."""
        kind = properties.get("format", "")
        if not kind.startswith(FORMAT):
            raise Problem(f"{where} was not written by `halopose export`: export your model with it")
        if kind[len(FORMAT) :] != str(VERSION):
            raise Problem(f"{where} has format {kind}, this program reads {FORMAT}{VERSION}: use the one beside it")
        values = {}
        for field in fields(cls):
            if field.name not in properties and field.default is None:
                continue
            if field.name not in properties:
                raise Problem(f"{where} lacks the metadata key {field.name!r}: export it again")
            try:
                values[field.name] = json.loads(properties[field.name])
            except ValueError:
                raise Problem(f"{where}: the metadata key {field.name!r} is damaged: export it again") from None
        facts = cls(**values)
        facts._check(where)
        return facts

    def _check(self, where: str) -> None:
        """Refuse what nothing could be predicted with."""
        for name in ("strides", "class_names", "keypoint_names"):
            kind = int if name == "strides" else str
            entries = getattr(self, name)
            if not isinstance(entries, list) or not entries or not all(type(entry) is kind for entry in entries):
                raise Problem(f"{where}: the metadata key {name!r} is damaged: export it again")
        count = len(self.keypoint_names)
        tables = {name: getattr(self, name) for name in _TABLES}
        given = {name: table for name, table in tables.items() if table is not None or name not in _OPTIONAL}
        if any(not isinstance(table, list) or len(table) != count for table in given.values()):
            raise Problem(f"{where}: its metadata speak of different numbers of keypoints: export it again")
        novel = self.novelty if isinstance(self.novelty, dict) else {}
        together = self.correlation if isinstance(self.correlation, dict) else {}
        sound = {name: all(_is_positive(value) for value in table) for name, table in given.items()}
        sound.update((name, _is_positive(getattr(self, name))) for name in ("area_factor", "imgsz", "fewest_cells"))
        for name in ("threshold", "visibility_threshold"):
            sound[name] = getattr(self, name) is None or _is_number(getattr(self, name))
        sound["layout"] = self.layout in LAYOUTS
        sound["strides"] = all(1 <= stride <= 1024 for stride in self.strides)
        sound["imgsz"] = type(self.imgsz) is int and 1 <= self.imgsz <= LARGEST
        sound["regions"] = self.regions is None or isinstance(self.regions, dict)
        sound["correlation"] = self.correlation is None or (
            _is_table(together.get("matrix"), (2 * count, 2 * count))
            and ("scales" not in together or _are_scales(together["scales"], 2 * count))
        )
        sound["offset"] = self.offset is None or _is_table(self.offset, (count, 2))
        sound["novelty"] = self.novelty is None or (
            _is_table(novel.get("known"), (None, 2)) and _is_table(novel.get("known_images"), (None,))
        )
        wrong = [name for name, good in sound.items() if not good]
        if wrong:
            raise Problem(f"{where}: the metadata key {wrong[0]!r} is damaged: export it again")

    def write(self) -> Dict[str, str]:
        """Key-value pairs for a model file."""
        pairs = {field.name: json.dumps(getattr(self, field.name)) for field in fields(self)}
        return {"format": f"{FORMAT}{VERSION}", **pairs}


# Results ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Poses:
    """N detections of K keypoints, in pixels of the image.

    boxes (N, 4) xyxy; scores (N,); class_ids (N,), from 1; keypoints (N, K, 2); visibility (N, K) or None;
    covariance and scale (N, K, 2, 2); dof (N, K) of a Student-t, else None; keep (N, K), false where pruned.
    dispersion (N, K, 2, 2): as the heads gave it, which ``regions`` are multiples of; correlation (N, 2K, 2K) of
    whitened residuals, in the order x1, y1, x2, ..., or None. novelty (N,): the share of calibration detections
    that are as unlike the data, image_novelty (1,): the same of images, or None. offset (N, K, 2),
    by which the law's mean is off the keypoints, or None.
    """

    boxes: Array
    scores: Array
    class_ids: Array
    keypoints: Array
    visibility: Optional[Array]
    covariance: Array
    scale: Array
    dof: Optional[Array]
    keep: Array
    dispersion: Optional[Array] = None
    regions: Optional[Dict[str, Any]] = None
    correlation: Optional[Array] = None
    novelty: Optional[Array] = None
    image_novelty: Optional[Array] = None
    offset: Optional[Array] = None

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def mean(self) -> Array:
        """Where keypoints are expected (N, K, 2): the base's own, unless its errors were found to be biased."""
        return self.keypoints if self.offset is None else self.keypoints + self.offset

    def region(self, probability: float, whole: bool = False) -> Array:
        """M (N, K, 2, 2): (y - mean)' M^-1 (y - mean) <= 1 holds the truth; all of an object's if whole.

        With at least that probability, whatever the law, for a detection that matches an object, on images like
        those of calibration.
        """
        if self.regions is None:
            raise Problem("this model file has no regions: export it again from a newer calibration")
        levels = np.append(np.arange(1, 100) / 100, [0.995, 0.999])
        place = int(np.searchsorted(levels, probability - 1e-9))
        if not 0 < probability < 1:
            raise Problem(f"a region's probability lies between 0 and 1, got {probability}")
        table = np.array(self.regions["whole" if whole else "keypoint"], dtype=float)
        size = np.maximum((self.boxes[:, 2:] - self.boxes[:, :2]).prod(1), 1.0) * self.regions["area_factor"]
        scale = np.searchsorted(np.array(self.regions["edges"], dtype=float), size)
        radius = table[..., place] if place < len(levels) else np.full(table.shape[:-1], np.nan)
        if np.isnan(radius).any():
            raise Problem(f"the calibration has too few images for regions of {probability:g}: ask for less")
        return self.dispersion * (radius if whole else radius[scale][..., None, None])

    def joint_covariance(self) -> Array:
        """Covariance (N, 2K, 2K) of x1, y1, x2, y2, ..., whose diagonal blocks are ``covariance``."""
        count = self.covariance.shape[1]
        factor = np.linalg.cholesky(self.covariance)
        wide = np.zeros((len(self), count, 2, count, 2))
        wide[:, range(count), :, range(count)] = factor.transpose(1, 0, 2, 3)
        wide = wide.reshape(len(self), 2 * count, 2 * count)
        inner = np.eye(2 * count) if self.correlation is None else self.correlation
        return wide @ inner @ wide.transpose(0, 2, 1)

    def to_json(self, image_id: int = 0, file_name: Optional[str] = None) -> List[Dict[str, Any]]:
        """COCO results entries with covariances, as `halopose predict` writes them."""
        seen = np.ones(self.keypoints.shape[:2]) if self.visibility is None else self.visibility
        triples = np.concatenate([self.keypoints, seen[..., None]], axis=2).reshape(len(self), 3 * seen.shape[1])
        columns = {
            "image_id": [image_id] * len(self),
            "category_id": self.class_ids.tolist(),
            "bbox": np.concatenate([self.boxes[:, :2], self.boxes[:, 2:] - self.boxes[:, :2]], axis=1).tolist(),
            "score": self.scores.tolist(),
            "keypoints": triples.tolist(),
            "covariance": _triangle(self.covariance).tolist(),
            "keep": self.keep.tolist(),
        }
        if self.dof is not None:
            columns["scale"] = _triangle(self.scale).tolist()
            columns["dof"] = self.dof.tolist()
        if self.novelty is not None:
            columns["novelty"] = self.novelty.tolist()
        if self.offset is not None:
            columns["offset"] = self.offset.tolist()
        if file_name is not None:
            columns["file_name"] = [file_name] * len(self)
        return [dict(zip(columns, row)) for row in zip(*columns.values())]


@dataclass(frozen=True)
class Detections:
    """What the model says of one image: as in ``Poses``, and Gaussian factors (N, K, 3) of l11, l21, l22.

    novelty (N,) and image_novelty (1,) are p-values, among calibration detections of the confidence asked for.
    """

    boxes: Array
    scores: Array
    class_ids: Array
    keypoints: Array
    visibility: Optional[Array]
    factors: Array
    novelty: Optional[Array] = None
    image_novelty: Optional[Array] = None  # (1,)

    def __getitem__(self, index: Array) -> Detections:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        image = values.pop("image_novelty")
        each = {name: None if value is None else value[index] for name, value in values.items()}
        return Detections(**each, image_novelty=image)


def _triangle(matrices: Array) -> Array:
    return np.stack([matrices[..., 0, 0], matrices[..., 0, 1], matrices[..., 1, 1]], axis=-1)


# The model --------------------------------------------------------------------------------------------------


class Model:
    """An exported model. ``run`` may replace ONNX Runtime by another runtime that has loaded the same file."""

    def __init__(self, path: str, run: Optional[Run] = None, facts: Optional[Facts] = None) -> None:
        if run is None or facts is None:
            run, facts = _open(path)
        self.run, self.facts = run, facts

    def predict(
        self,
        image: Array,
        conf: float = 0.25,
        iou: float = 0.7,
        family: str = "gaussian",
        imgsz: Optional[int] = None,
    ) -> Poses:
        """Poses of a BGR uint8 image (h, w, 3)."""
        return describe(self.facts, self.detect(image, conf, iou, imgsz), family)

    def detect(
        self,
        image: Array,
        conf: float = 0.25,
        iou: float = 0.7,
        imgsz: Optional[int] = None,
        max_detections: int = 300,
    ) -> Detections:
        """The framework's own post-processing, and the factors of what it keeps, in pixels of the image."""
        if not 0 <= conf <= 1 or not 0 <= iou <= 1:
            raise Problem(f"conf and iou lie between 0 and 1, got {conf} and {iou}")
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
            raise Problem(f"give images as uint8 arrays (h, w, 3), got {image.dtype} {image.shape}")
        imgsz = self.facts.imgsz if imgsz is None else imgsz
        if not 1 <= imgsz <= LARGEST:
            raise Problem(f"imgsz lies between 1 and {LARGEST}, got {imgsz}")
        pixels, box = prepare(image, self.facts, imgsz)
        area = [] if self.facts.novelty is None else [np.array([box.area], dtype=np.float32)]
        outputs = self.run(pixels[None], *area)
        select = _select_yolonas if self.facts.layout == "yolonas" else _select_ultralytics
        try:
            cell, found = select(self.facts, outputs, box, conf, iou, max_detections)
        except (ValueError, IndexError, KeyError) as error:
            raise Problem(f"the model's outputs do not fit its metadata ({error}): export it again") from None
        factors = outputs["factors"][0]
        cells = outputs["cells"][0] if "cells" in outputs else np.arange(len(factors))
        if self.facts.novelty is not None:
            found = _with_novelty(found, cell, cells, outputs, self.facts.novelty, conf)
        return _with_factors(found, cell, cells, factors, box)


def check_seal(path: str) -> None:
    """Refuse a file that is not as `halopose export` wrote it: a flipped bit may change every covariance."""
    if not os.path.isfile(path):
        raise Problem(f"no model at {path}: give the folder or file that `halopose export` wrote")
    with open(path, "rb") as file:
        data = file.read()
    if FORMAT.encode() not in data:
        raise Problem(f"{path} is damaged or was not written by `halopose export`: export your model with it")
    found = SEAL.search(data)
    if found is None:
        raise Problem(f"{path} is damaged: it has no checksum, export it again")
    digest = hashlib.sha256(data[: found.start(1)])
    digest.update(BLANK)
    digest.update(memoryview(data)[found.end(1) :])
    if digest.hexdigest().encode() != found.group(1):
        raise Problem(f"{path} is damaged: its checksum does not match, export it again")


def _open(path: str) -> Tuple[Run, Facts]:
    """A session of ONNX Runtime and the file's metadata."""
    import onnxruntime

    check_seal(path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(path, options, providers=onnxruntime.get_available_providers())
        properties = session.get_modelmeta().custom_metadata_map
    except Exception as error:  # noqa: BLE001  the runtime's errors have no common class but this
        raise Problem(f"{path} is damaged or no ONNX model ({' '.join(str(error).split())[:120]})") from None
    facts = Facts.read(properties, path)
    names = [value.name for value in session.get_inputs()], [value.name for value in session.get_outputs()]

    def run(*given: Array) -> Dict[str, Array]:
        try:
            return dict(zip(names[1], session.run(names[1], dict(zip(names[0], given)))))
        except Exception as error:  # noqa: BLE001  as above
            reason, (height, width) = " ".join(str(error).split())[:120], given[0].shape[2:]
            raise Problem(
                f"{path} cannot run on an input of {width} x {height} ({reason}): give a smaller imgsz"
            ) from None

    return run, facts


def _with_factors(found: Detections, cell: Array, cells: Array, factors: Array, box: Letterbox) -> Detections:
    """Detections that have factors, which are brought to pixels of the image."""
    row = np.full(max(int(cells.max(initial=0)), int(cell.max(initial=0))) + 1, -1)
    given = np.flatnonzero(cells >= 0)
    row[cells[given]] = given
    known = row[cell] >= 0
    if not known.all():
        warnings.warn(
            f"{(~known).sum()} of {len(cell)} detections are beyond the cells that the model gives covariances "
            "for and are left out: raise the confidence, or export with more --windows",
            LeftOut,
            stacklevel=3,
        )
    scale = np.array([box.gain[0], box.gain[1], box.gain[1]])
    whole = factors[row[cell]].astype(np.float64) / scale
    return replace(found, factors=whole)[known]


def _with_novelty(
    found: Detections, cell: Array, cells: Array, outputs: Dict[str, Array], known: Mapping[str, Any], conf: float
) -> Detections:
    """Detections with p-values: the share of calibration detections, and images, whose values are as large."""
    values = np.zeros(max(int(cells.max(initial=0)), int(cell.max(initial=0))) + 1)
    given = np.flatnonzero(cells >= 0)
    values[cells[given]] = outputs["novelty"][0][given]
    scores, seen = np.array(known["known"], dtype=np.float64).reshape(-1, 2).T
    novelty = _share_beyond(seen[scores >= conf], values[cell])
    return replace(
        found, novelty=novelty, image_novelty=_share_beyond(known["known_images"], outputs["image_novelty"][:1])
    )


def _share_beyond(known: Array, value: Array) -> Array:
    """(1 + how many of the known values, rising, are as large) / (1 + all of them)."""
    return (1 + len(known) - np.searchsorted(np.asarray(known, np.float64), value)) / (1 + len(known))


def describe(facts: Facts, found: Detections, family: str) -> Poses:
    """The calibrated law of each keypoint, and which of them to keep."""
    if family not in FAMILIES:
        raise Problem(f"unknown family {family!r}: {' or '.join(FAMILIES)}")
    gaussian = covariances(found.factors)
    extent = np.maximum((found.boxes[:, 2:] - found.boxes[:, :2]).prod(1), 1.0)
    area = extent * facts.area_factor
    trace = gaussian[..., 0, 0] + gaussian[..., 1, 1]
    confidence = -trace / (area[:, None] * (2 * np.asarray(facts.sigmas)) ** 2)
    keep = confidence >= (-math.inf if facts.threshold is None else facts.threshold)
    if facts.visibility_threshold is not None and found.visibility is not None:
        keep = keep & (found.visibility >= facts.visibility_threshold)
    covariance = scale = gaussian
    dof = None
    if family == "student-t":
        dof, wide = (_by_part(facts, name, keep) for name in ("dof", "scale"))
        scale = gaussian * wide[..., None, None] ** 2
        if facts.student_moment is None:
            covariance = scale * (dof / (dof - 2))[..., None, None]
        else:
            covariance = gaussian * np.asarray(facts.student_moment)[:, None, None] ** 2
    return Poses(
        boxes=found.boxes,
        scores=found.scores,
        class_ids=found.class_ids,
        keypoints=found.keypoints,
        visibility=found.visibility,
        covariance=covariance,
        scale=scale,
        dof=dof,
        keep=keep,
        dispersion=covariances(found.factors / np.asarray(facts.temperature)[:, None]),
        regions=facts.regions,
        correlation=_of_objects(facts.correlation, extent),
        novelty=found.novelty,
        image_novelty=found.image_novelty,
        offset=None if facts.offset is None else np.sqrt(extent)[:, None, None] * np.asarray(facts.offset),
    )


def _of_objects(together: Optional[Mapping[str, Any]], extent: Array) -> Optional[Array]:
    """How keypoints of objects with boxes of these areas (N,) err together (N, 2K, 2K), by scale where known."""
    if together is None:
        return None
    parts = together.get("scales") or {"matrices": [together["matrix"]], "edges": [], "area_factor": 1.0}
    edges = np.array(parts["edges"], dtype=np.float64)
    return np.array(parts["matrices"])[np.searchsorted(edges, extent * parts["area_factor"])]


def _by_part(facts: Facts, name: str, keep: Array) -> Array:
    """The Student-t's value (N, K) of kept keypoints where ``keep`` (N, K), else of pruned ones."""
    kept, pruned = (getattr(facts, f"{part}_{name}") for part in ("student", "pruned"))
    return np.where(keep, np.asarray(kept), np.asarray(kept if pruned is None else pruned))


def covariances(factors: Array) -> Array:
    """L L^T (..., 2, 2) of l11, l21, l22 (..., 3)."""
    a, b, c = np.moveaxis(factors, -1, 0)
    return np.stack([a * a, a * b, a * b, b * b + c * c], axis=-1).reshape(*a.shape, 2, 2)


# Before the model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Letterbox:
    """Where an image of ``shape`` (h, w) lies in the input: input = gain * original + pad, x and y."""

    shape: Tuple[int, int]
    gain: Tuple[float, float]
    pad: Tuple[int, int]

    @property
    def area(self) -> Tuple[float, float, float, float]:
        """Left, top, right and bottom of the image in the input."""
        (height, width), (left, top) = self.shape, self.pad
        return left, top, left + self.gain[0] * width, top + self.gain[1] * height


def prepare(image: Array, facts: Facts, imgsz: int) -> Tuple[Array, Letterbox]:
    """The input (3, H, W) that the framework makes of an image, and where the image lies in it."""
    largest = max(facts.strides[-1], 32)
    size = -(-imgsz // largest) * largest
    place = _place_yolonas if facts.layout == "yolonas" else _place_ultralytics
    box, inner, (height, width) = place(image.shape[:2], size, largest)
    cells = sum((height // stride) * (width // stride) for stride in facts.strides)
    if cells < facts.fewest_cells:
        raise Problem(f"an input of {width} x {height} is too small for this model: give a larger imgsz")
    bgr = facts.layout == "yolonas"
    canvas = np.full((height, width, 3), 127 if bgr else 114, dtype=np.uint8)
    left, top = box.pad
    canvas[top : top + inner[1], left : left + inner[0]] = resize(image, inner, antialias=bgr)
    pixels = canvas if bgr else canvas[..., ::-1]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32) / np.float32(255), box


def _place_ultralytics(
    shape: Tuple[int, int], size: int, largest: int
) -> Tuple[Letterbox, Tuple[int, int], Tuple[int, int]]:
    """In the middle, with as little padding as the coarsest level allows."""
    height, width = shape
    ratio = min(size / height, size / width)
    inner = max(round(width * ratio), 1), max(round(height * ratio), 1)
    spare = (size - inner[0]) % largest, (size - inner[1]) % largest
    pad = round(spare[0] / 2 - 0.1), round(spare[1] / 2 - 0.1)
    box = Letterbox(shape, (inner[0] / width, inner[1] / height), pad)
    return box, inner, (inner[1] + spare[1], inner[0] + spare[0])


def _place_yolonas(
    shape: Tuple[int, int], size: int, largest: int
) -> Tuple[Letterbox, Tuple[int, int], Tuple[int, int]]:
    """In the upper left corner of a square, never larger than 640."""
    height, width = shape
    ratio = min(min(size, 640) / height, min(size, 640) / width)
    inner = round(width * ratio), round(height * ratio)
    if not min(inner):
        raise Problem(f"an image of {width} x {height} vanishes at input size {size}: crop it first")
    return Letterbox(shape, (ratio, ratio), (0, 0)), inner, (size, size)


def resize(image: Array, size: Tuple[int, int], antialias: bool) -> Array:
    """Bilinear to (width, height): with antialiasing by PIL, else by OpenCV; without them nearly the same."""
    if size == image.shape[1::-1]:
        return image
    if antialias and Image is not None:
        return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize(size, Image.Resampling.BILINEAR))
    if not antialias and cv2 is not None:
        return cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
    if antialias:
        return _resample(_resample(image, size[0], 1), size[1], 0)
    (left, right, a, b), (upper, lower, c, d) = (
        _neighbours(image.shape[1], size[0]),
        _neighbours(image.shape[0], size[1]),
    )
    whole = image.astype(np.int64)
    rows = (whole[:, left] * a[:, None] + whole[:, right] * b[:, None]) >> 4
    mixed = ((rows[upper] * c[:, None, None]) >> 16) + ((rows[lower] * d[:, None, None]) >> 16)
    return ((mixed + 2) >> 2).astype(np.uint8)


def _neighbours(old: int, count: int) -> Tuple[Array, Array, Array, Array]:
    """The two old pixels beside each new one (count,), and their weights with 11 bits, as OpenCV has them."""
    place = ((np.arange(count) + 0.5) * (old / count) - 0.5).astype(np.float32)
    first = np.clip(np.floor(place).astype(np.int64), 0, old - 1)
    share = np.where(first < old - 1, np.maximum(place - first, 0), 0).astype(np.float32)
    weights = (np.rint(part * np.float32(2048)).astype(np.int64) for part in (1 - share, share))
    return (first, np.minimum(first + 1, old - 1), *weights)


def _resample(image: Array, count: int, axis: int) -> Array:
    """One axis to ``count`` pixels under a triangle as wide as a new pixel.

    In whole numbers with 22 bits, each pass rounded, as PIL does it (which may take the axes in the other order).
    """
    old = image.shape[axis]
    width = max(old / count, 1.0)
    centre = (np.arange(count) + 0.5) * (old / count)
    first = np.maximum((centre - width + 0.5).astype(int), 0)
    last = np.minimum((centre + width + 0.5).astype(int), old)
    taps = first[:, None] + np.arange(int((last - first).max()))
    weight = np.maximum(1 - np.abs(taps - centre[:, None] + 0.5) / width, 0) * (taps < last[:, None])
    whole = (weight / weight.sum(1, keepdims=True) * 2**22 + 0.5).astype(np.int64)
    lines = np.moveaxis(image, axis, 0)
    total = np.full((count, *lines.shape[1:]), 2**21, dtype=np.int64)
    for tap, share in zip(np.minimum(taps, old - 1).T, whole.T):
        total += lines[tap] * share[:, None, None]
    return np.moveaxis(np.clip(total >> 22, 0, 255).astype(np.uint8), 0, axis)


# After the model --------------------------------------------------------------------------------------------


def _select_ultralytics(
    facts: Facts, outputs: Dict[str, Array], box: Letterbox, conf: float, iou: float, most: int
) -> Tuple[Array, Detections]:
    """Cells (N,) and detections that Ultralytics keeps: suppression in input pixels, then clipping."""
    output, count = outputs["output0"][0], len(facts.keypoint_names)
    if facts.layout == "ultralytics-end2end":
        kept = np.flatnonzero(output[:, 4] > conf)[:most]
        cell, rows = outputs["rows"][0][kept], output[kept]
        boxes, scores, classes, rest = rows[:, :4], rows[:, 4], rows[:, 5].astype(np.int64), rows[:, 6:]
    else:
        split = 4 + len(facts.class_names)
        best = output[4:split].max(0)
        cell = np.flatnonzero(best > conf)
        rows, scores = output[:, cell].T, best[cell]
        classes = rows[:, 4:split].argmax(1)
        boxes = np.concatenate([rows[:, :2] - rows[:, 2:4] / 2, rows[:, :2] + rows[:, 2:4] / 2], axis=1)
        kept = suppress(boxes, scores, classes, iou)[:most]
        cell, boxes, scores, classes = cell[kept], boxes[kept], scores[kept], classes[kept]
        rest = rows[kept][:, split:]
    keypoints = rest.reshape(len(scores), count, 3 if facts.visibility else 2)
    (height, width), gain, pad = box.shape, np.array(box.gain, np.float32), np.array(box.pad, np.float32)
    limit = np.array([width, height], np.float32)
    boxes = np.clip((boxes.reshape(-1, 2, 2) - pad) / gain, 0, limit).reshape(-1, 4)
    places = np.clip((keypoints[..., :2] - pad) / gain, 0, limit)
    seen = keypoints[..., 2] if facts.visibility else None
    return cell, Detections(boxes, scores, classes + 1, places, seen, scores)


def _select_yolonas(
    facts: Facts, outputs: Dict[str, Array], box: Letterbox, conf: float, iou: float, most: int
) -> Tuple[Array, Detections]:
    """Cells (N,) and detections that LibreYOLO keeps: clipping in original pixels, then suppression."""
    scores, classes = outputs["scores"][0].max(1), outputs["scores"][0].argmax(1)
    cell = np.flatnonzero(scores >= conf)
    cell = cell[np.argsort(-scores[cell], kind="stable")[:1000]]
    (height, width), gain = box.shape, np.float32(box.gain[0])
    boxes = np.clip(outputs["boxes"][0][cell] / gain, 0, np.array([width, height] * 2, np.float32))
    sound = (boxes[:, 2:] > boxes[:, :2]).all(1)
    cell, boxes = cell[sound], boxes[sound]
    kept = suppress(boxes, scores[cell], classes[cell], iou)[:most]
    cell = cell[kept]
    places = outputs["keypoints_xy"][0][cell] / gain
    seen = outputs["keypoints_conf"][0][cell]
    return cell, Detections(boxes[kept], scores[cell], classes[cell] + 1, places, seen, scores[cell])


def suppress(boxes: Array, scores: Array, classes: Array, iou: float) -> Array:
    """Indices of boxes (N, 4) that no better box of their class overlaps, best first."""
    order = np.argsort(-scores, kind="stable")
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        low = np.maximum(boxes[best, :2], boxes[order, :2])
        high = np.minimum(boxes[best, 2:], boxes[order, 2:])
        shared = np.maximum(high - low, 0).prod(1)
        overlap = shared / np.maximum(area[best] + area[order] - shared, 1e-12)
        order = order[(overlap.astype(np.float64) <= iou) | (classes[order] != classes[best])]
    return np.array(kept, dtype=np.int64)


# Pictures ---------------------------------------------------------------------------------------------------


def ellipses(poses: Poses, probability: float) -> Tuple[Array, Array]:
    """Semi-axes (N, K, 2), longer first, and the longer one's angle (N, K) from x to y, of probability regions."""
    xx, xy, yy = np.moveaxis(_triangle(poses.scale), -1, 0)
    major = (xx + yy) / 2 + np.hypot((xx - yy) / 2, xy)
    minor = (xx * yy - xy**2) / major
    if poses.dof is None:
        radius = np.full(xx.shape, -2 * math.log1p(-probability))
    else:
        radius = poses.dof * np.expm1(-2 / poses.dof * math.log1p(-probability))
    return np.sqrt(np.stack([major, minor], axis=-1) * radius[..., None]), np.arctan2(2 * xy, xx - yy) / 2


def draw(image: Array, poses: Poses, names: Sequence[str], probability: float = 0.95) -> Array:
    """The image with limbs and ellipses; pruned keypoints are thin and grey."""
    canvas, layer, width = image.copy(), image.copy(), max(1, round(max(image.shape[:2]) / 640))
    axes, angles = ellipses(poses, probability)
    centres = poses.mean
    colours = [_colour(name) for name in names]

    def ellipse(target: Array, n: int, k: int, colour: Tuple[int, int, int], line: int) -> None:
        size = tuple(max(1, round(min(float(axis), 1e4) * 16)) for axis in axes[n, k])
        degrees = math.degrees(angles[n, k])
        cv2.ellipse(target, _pixel(centres[n, k]), size, degrees, 0, 360, colour, line, cv2.LINE_AA, 4)

    for n, k in np.argwhere(poses.keep):
        ellipse(layer, n, k, colours[k], cv2.FILLED)
    canvas = cv2.addWeighted(layer, 0.3, canvas, 0.7, 0)
    for n in range(len(poses)):
        for a, b in COCO_LIMBS if len(names) == 17 else ():
            if poses.keep[n, a] and poses.keep[n, b]:
                ends = _pixel(poses.keypoints[n, a]), _pixel(poses.keypoints[n, b])
                cv2.line(canvas, *ends, (225, 225, 225), width, cv2.LINE_AA, 4)
        for k, kept in enumerate(poses.keep[n]):
            ellipse(canvas, n, k, colours[k] if kept else (140, 140, 140), width if kept else 1)
    return canvas


def _colour(name: str) -> Tuple[int, int, int]:
    sides = {"left": (80, 200, 90), "right": (60, 140, 245)}
    return next((colour for side, colour in sides.items() if side in name.lower()), (235, 180, 60))


def _pixel(place: Array) -> Tuple[int, int]:
    return round(float(place[0]) * 16), round(float(place[1]) * 16)


# The command line -------------------------------------------------------------------------------------------


def read_image(path: str) -> Array:
    """BGR uint8 (h, w, 3) of a photograph, or of a .npy file, which needs nothing but numpy."""
    try:
        if path.lower().endswith(".npy"):
            with open(path, "rb") as file:
                array = np.load(file)
            if not isinstance(array, np.ndarray):
                raise ValueError("several arrays")
            return array
        if cv2 is not None:
            image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
            if image is None:
                raise ValueError("no image")
            return image
        if Image is not None:
            with Image.open(path) as file:
                return np.ascontiguousarray(np.asarray(ImageOps.exif_transpose(file).convert("RGB"))[..., ::-1])
    except Exception:  # noqa: BLE001  each reader has errors of its own
        raise Problem(f"cannot read image {path}: it is missing or damaged") from None
    raise Problem(f"to read {path} install opencv-python-headless or pillow; .npy files need neither")


def _images(sources: Sequence[str]) -> List[str]:
    """Files, each once."""
    found: List[str] = []
    for source in sources:
        if os.path.isdir(source):
            names = sorted(name for name in os.listdir(source) if name.lower().endswith(IMAGES))
            found += [os.path.join(source, name) for name in names]
        else:
            found.append(source)
    if not found:
        raise Problem(f"no images in {', '.join(sources)}")
    return list({os.path.abspath(path): path for path in found}.values())


def _names(paths: Sequence[str]) -> List[Tuple[str, str]]:
    """Names for pictures and of files, as `halopose predict` has them: with folders where stems are alike."""
    whole = [os.path.abspath(path) for path in paths]
    try:
        folder = os.path.commonpath([os.path.dirname(path) for path in whole])
    except ValueError:
        raise Problem("images on several drives cannot be named apart: give those of one drive") from None
    below = [os.path.relpath(path, folder).replace(os.sep, "/") for path in whole]
    for files in ([os.path.basename(path) for path in whole], below):
        names = [os.path.splitext(file)[0] for file in files]
        if len({name.casefold() for name in names}) == len(names):
            return list(zip(names, files))
    return list(zip(below, below))


def image_id(name: str) -> int:
    """COCO's number if a file's name is one, else a hash of the name: as `halopose predict` has it."""
    stem = os.path.splitext(name)[0]
    if stem.isascii() and stem.isdigit() and len(stem) <= 15:
        return int(stem)
    return int(hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12], 16)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command line; a user's mistake is one line and exit code 2."""
    parser = argparse.ArgumentParser(description="Poses with calibrated uncertainty, from an exported model.")
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("images", nargs="+", help="photographs, or folders of them")
    parser.add_argument("--model", default=os.path.join(here, "model.onnx"), help="model file; else the one beside")
    parser.add_argument("--output", "-o", default="poses", help="folder for pictures, where OpenCV is there")
    parser.add_argument("--json", action="store_true", help="print detections as json, draw nothing")
    parser.add_argument("--conf", type=float, default=0.25, help="confidence threshold")
    parser.add_argument("--iou", type=float, default=0.7, help="IoU threshold of suppression")
    parser.add_argument("--family", choices=FAMILIES, default="gaussian", help="law")
    parser.add_argument("--imgsz", type=int, help="input size; else the model's")
    parser.add_argument("--probability", type=float, default=0.95, help="probability that an ellipse holds")
    parser.add_argument("--alarm", type=float, help="count detections whose p-value of novelty is as low, e.g. 0.05")
    options = parser.parse_args(arguments)
    problem: Any
    with warnings.catch_warnings():
        warnings.simplefilter("always", LeftOut)
        warnings.showwarning = _show
        try:
            _run(options)
            return 0
        except Problem as error:
            problem = error
        except MemoryError:
            problem = "not enough memory: give a smaller --imgsz"
    sys.stderr.write(f"predict.py: {problem}\n")
    return 2


def _show(message: Any, *_: Any, **__: Any) -> None:
    """A warning is a line too, without the place in the source."""
    sys.stderr.write(f"predict.py: {message}\n")


def _run(options: argparse.Namespace) -> None:
    if not 0 < options.probability < 1:
        raise Problem(f"--probability lies between 0 and 1, got {options.probability}")
    if not options.json and os.path.isfile(options.output):
        raise Problem(f"cannot write into {options.output}: it is a file, name a folder")
    model = Model(options.model)
    if options.alarm is not None and model.facts.novelty is None:
        raise Problem("--alarm: this model knows nothing of novelty: add it with `halopose novelty`, export again")
    paths, results = _images(options.images), []
    for path, (name, file_name) in zip(paths, _names(paths)):
        image = read_image(path)
        poses = model.predict(image, options.conf, options.iou, options.family, options.imgsz)
        if options.json:
            results += _entries(poses, file_name, options.alarm)
            continue
        line = f"{name}: {len(poses)} detections, {int(poses.keep.sum())} of {poses.keep.size} keypoints kept"
        if options.alarm is not None:
            line += f", {int((poses.novelty <= options.alarm).sum())} unlike anything seen"
        sys.stdout.write(line + "\n")
        if cv2 is not None:
            picture = draw(image, poses, model.facts.keypoint_names, options.probability)
            _write_picture(picture, os.path.join(options.output, f"{name}.jpg"), path)
    if options.json:
        sys.stdout.write(json.dumps(results) + "\n")


def _entries(poses: Poses, file_name: str, alarm: Optional[float]) -> List[Dict[str, Any]]:
    """What `halopose predict` writes of an image."""
    entries = poses.to_json(image_id(file_name), file_name)
    if alarm is not None and poses.novelty is not None and poses.image_novelty is not None:
        for entry, novelty in zip(entries, poses.novelty.tolist()):
            entry.update(image_novelty=float(poses.image_novelty[0]), in_distribution=novelty > alarm)
    return entries


def _write_picture(picture: Array, target: str, source: str) -> None:
    if os.path.abspath(target) == os.path.abspath(source):
        raise Problem(f"the picture of {source} would take its place: choose another --output")
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        cv2.imencode(".jpg", picture)[1].tofile(target)
    except OSError as error:
        raise Problem(f"cannot write {target} ({error.strerror or error}): choose another --output") from None


if __name__ == "__main__":
    sys.exit(main())
