"""Predict poses with calibrated uncertainty from an exported model.

python predict.py photo.jpg            prints one line and draws poses/photo.jpg
python predict.py photo.jpg --json     prints the JSON that `halopose predict` writes

Needs numpy and onnxruntime. OpenCV is optional: it reads and draws images. This file does not import halopose and
can be copied alone. Images are BGR uint8 arrays (h, w, 3); results are ``Poses`` in pixels of the image.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

_GIVEN_PIXELS = os.environ.get("HALOPOSE_MAX_PIXELS", "")
MAX_PIXELS = int(_GIVEN_PIXELS[:18]) if _GIVEN_PIXELS.isdecimal() else 100_000_000  # of one image
if __name__ == "__main__":  # OpenCV takes its limit from the environment when it is imported
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))

try:
    import cv2
except ImportError:  # images are then read with PIL, and none are drawn
    cv2 = None  # type: ignore[assignment]
try:
    from PIL import Image, ImageOps
except ImportError:
    Image = ImageOps = None

Array = Any
Run = Callable[..., Dict[str, Array]]  # (batch (B, 3, H, W), optional areas (B, 4)) -> outputs by name

FORMAT = "halopose-deployed-"
VERSION = 2
OWN = "halopose."  # prefix of metadata keys in a file that has other metadata as well
BLANK = b"0" * 64  # placeholder for the checksum while it is computed
SEAL = re.compile(rb"\n\x08checksum\x12@([0-9a-f]{64})")  # metadata entry in the protobuf encoding
EXTERNAL = b"\n\x08location\x12"  # entry of a tensor whose values are in another file
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
    """User error: one line that states the problem and what to do."""


class ImageProblem(Problem):
    """User error that concerns one image; other images can still be processed."""


class MissingCovarianceWarning(UserWarning):
    """Detections were dropped because the model has no covariance for them."""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e300 < value < 1e300  # also refuses integers too large for a float


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_table(value: Any, shape: Tuple[Optional[int], ...]) -> bool:
    """Whether nested lists are a table of finite numbers of this shape; None allows any length."""
    if value == [] and shape[0] is None:
        return True
    try:
        table = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return False
    fits = table.ndim == len(shape) and all(want in (None, size) for want, size in zip(shape, table.shape))
    return fits and bool(np.isfinite(table).all())


def _are_scales(value: Any, size: int) -> bool:
    """Whether there is a correlation matrix (size, size) for each object scale, with sorted scale edges."""
    if not isinstance(value, dict) or not _is_table(value.get("edges"), (None,)):
        return False
    edges = value["edges"]
    fits = _is_table(value.get("matrices"), (len(edges) + 1, size, size)) and _is_positive(value.get("area_factor"))
    return fits and list(edges) == sorted(edges)


def _is_file(value: Any) -> bool:
    """Whether a value has the properties of a file that heads were added to."""
    if not isinstance(value, dict) or not isinstance(value.get("names"), dict):
        return False
    size, batch = value.get("size"), value.get("batch")
    fits = size is None or (_is_table(size, (2,)) and all(32 <= side <= LARGEST for side in size))
    fits = fits and (batch is None or (type(batch) is int and 1 <= batch <= 4096))
    return fits and all(isinstance(name, str) for name in value["names"].values())


# Metadata of the model file ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """Metadata of a model file: preprocessing, meaning of the outputs, and calibration.

    Attributes:
        layout: Output format of the framework, one of ``LAYOUTS``.
        form: Form of the exported heads: topk or dense.
        precision: Number format of the weights: float, half or int8.
        fingerprint: Fingerprint of the base model.
        strides: Strides of the feature levels, finest first.
        imgsz: Default input size.
        fewest_cells: Smallest number of cells that the graph accepts.
        visibility: Whether the model predicts keypoint visibility.
        class_names: Names of the classes.
        keypoint_names: Names of the K keypoints.
        sigmas: OKS sigmas (K,).
        area_factor: Object area over box area.
        threshold: Pruning threshold on the localization confidence, or None.
        visibility_threshold: Pruning threshold on the visibility, or None.
        temperature: Gaussian temperature (K,), already contained in the factors of the graph.
        student_dof: Degrees of freedom (K,) of the Student-t.
        student_scale: Student-t scale factors over the graph's factors (K,).
        student_moment: Student-t covariance factors over the graph's factors (K,). None: the covariance follows
            from the scale and the degrees of freedom.
        pruned_dof: Degrees of freedom (K,) of pruned keypoints, or None. If set, ``student_dof`` and
            ``student_scale`` apply to kept keypoints only.
        pruned_scale: Scale factors (K,) of pruned keypoints, or None.
        regions: Squared radii of the conformal regions, or None.
        correlation: Correlation between keypoint errors, or None.
        novelty: Calibration values of the out-of-distribution model, sorted by value, or None.
        offset: Offset (K, 2) of the distribution's mean from the keypoint in units of the square root of the box
            area, or None.
        file: For heads added to an existing ONNX file, properties of that file: ``names`` (names of its outputs by
            the names of the layout), ``size`` (fixed height and width), ``batch`` (fixed batch), ``half`` (input in
            half precision), ``transposed``, ``corners`` and ``preparation``. None otherwise.
        fixed: For the end2end form, what the graph decides itself: ``conf``, ``iou`` and ``family``. None otherwise.
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
    file: Optional[Dict[str, Any]] = None
    fixed: Optional[Dict[str, Any]] = None

    @property
    def preparation(self) -> str:
        """Letterbox: ``yolonas`` or ``ultralytics``."""
        own = (self.file or {}).get("preparation")
        return str(own) if own else "yolonas" if self.layout == "yolonas" else "ultralytics"

    @property
    def fixed_size(self) -> Optional[Tuple[int, int]]:
        """Height and width that the graph takes, or None."""
        size = (self.file or {}).get("size")
        return (int(size[0]), int(size[1])) if size else None

    @classmethod
    def read(cls, properties: Mapping[str, str], where: str) -> Facts:
        """Read the metadata from key-value pairs; all values but ``format`` are JSON."""
        kind = properties.get("format", "")
        if not kind.startswith(FORMAT):
            raise Problem(f"{where} was not written by `halopose export`: export the model with it")
        if kind[len(FORMAT) :] != str(VERSION):
            raise Problem(
                f"{where} has format {kind}, this program reads {FORMAT}{VERSION}: use the predict.py next to it"
            )
        values = {}
        for field in fields(cls):
            key = OWN + field.name if OWN + field.name in properties else field.name
            if key not in properties and field.default is None:
                continue
            if key not in properties:
                raise Problem(f"{where} lacks the metadata key {field.name!r}: export it again")
            try:
                values[field.name] = json.loads(properties[key])
            except ValueError:
                raise Problem(f"{where}: the metadata key {field.name!r} is damaged: export it again") from None
        facts = cls(**values)
        facts._check(where)
        return facts

    def _check(self, where: str) -> None:
        """Raise ``Problem`` if the metadata are unusable for prediction."""
        for name in ("strides", "class_names", "keypoint_names"):
            kind = int if name == "strides" else str
            entries = getattr(self, name)
            if not isinstance(entries, list) or not entries or not all(type(entry) is kind for entry in entries):
                raise Problem(f"{where}: the metadata key {name!r} is damaged: export it again")
        count = len(self.keypoint_names)
        tables = {name: getattr(self, name) for name in _TABLES}
        given = {name: table for name, table in tables.items() if table is not None or name not in _OPTIONAL}
        if any(not isinstance(table, list) or len(table) != count for table in given.values()):
            raise Problem(f"{where}: its metadata have different numbers of keypoints: export it again")
        known = self.novelty if isinstance(self.novelty, dict) else {}
        joint = self.correlation if isinstance(self.correlation, dict) else {}
        sound = {name: all(_is_positive(value) for value in table) for name, table in given.items()}
        sound.update((name, _is_positive(getattr(self, name))) for name in ("area_factor", "imgsz", "fewest_cells"))
        for name in ("threshold", "visibility_threshold"):
            sound[name] = getattr(self, name) is None or _is_number(getattr(self, name))
        sound["layout"] = self.layout in LAYOUTS
        sound["strides"] = all(1 <= stride <= 1024 for stride in self.strides)
        sound["imgsz"] = type(self.imgsz) is int and 1 <= self.imgsz <= LARGEST
        sound["regions"] = self.regions is None or isinstance(self.regions, dict)
        sound["correlation"] = self.correlation is None or (
            _is_table(joint.get("matrix"), (2 * count, 2 * count))
            and ("scales" not in joint or _are_scales(joint["scales"], 2 * count))
        )
        sound["file"] = self.file is None or _is_file(self.file)
        sound["offset"] = self.offset is None or _is_table(self.offset, (count, 2))
        sound["novelty"] = self.novelty is None or (
            _is_table(known.get("known"), (None, 2)) and _is_table(known.get("known_images"), (None,))
        )
        damaged = [name for name, good in sound.items() if not good]
        if damaged:
            raise Problem(f"{where}: the metadata key {damaged[0]!r} is damaged: export it again")

    def write(self) -> Dict[str, str]:
        """Return the key-value pairs to store in a model file."""
        prefix = "" if self.file is None else OWN  # a file may have metadata of the same names
        pairs = {prefix + field.name: json.dumps(getattr(self, field.name)) for field in fields(self)}
        return {"format": f"{FORMAT}{VERSION}", **pairs}


# Results ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Poses:
    """N detections of K keypoints, in pixels of the image.

    Attributes:
        boxes: Boxes (N, 4), xyxy.
        scores: Detection confidences (N,).
        class_ids: Classes (N,), counted from 1.
        keypoints: Keypoints (N, K, 2).
        visibility: Visibility scores (N, K), or None.
        covariance: Covariances (N, K, 2, 2).
        scale: Scale matrices (N, K, 2, 2); equal to ``covariance`` for the Gaussian.
        dof: Degrees of freedom (N, K) of the Student-t, or None.
        keep: Whether each keypoint is kept (N, K); False where pruned.
        dispersion: Uncalibrated dispersions (N, K, 2, 2) of the heads; ``regions`` are multiples of them.
        regions: Squared radii of the conformal regions, or None.
        correlation: Correlations (N, 2K, 2K) of whitened residuals in the order x1, y1, x2, ..., or None.
        novelty: Out-of-distribution p-values (N,) of the detections, or None.
        image_novelty: Out-of-distribution p-value (1,) of the image, or None.
        offset: Offsets (N, K, 2) of the distribution's mean from the keypoints, or None.
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
        """Means of the distributions (N, K, 2): the keypoints plus ``offset``."""
        return self.keypoints if self.offset is None else self.keypoints + self.offset

    def region(self, probability: float, whole: bool = False) -> Array:
        """Conformal regions M (N, K, 2, 2): the true keypoint y satisfies (y - mean)' M^-1 (y - mean) <= 1.

        The probability is guaranteed without distributional assumptions for detections that match an object, on
        images exchangeable with the calibration images.

        Args:
            probability: Probability that a region contains the keypoint.
            whole: Whether the probability applies to all keypoints of an object jointly.

        Raises:
            Problem: The model file has no regions, or too few calibration images for this probability.
        """
        if self.regions is None:
            raise Problem("this model file has no conformal regions: calibrate the artifact and export it again")
        levels = np.append(np.arange(1, 100) / 100, [0.995, 0.999])
        place = int(np.searchsorted(levels, probability - 1e-9))
        if not 0 < probability < 1:
            raise Problem(f"the probability of a region must lie between 0 and 1, got {probability}")
        table = np.array(self.regions["whole" if whole else "keypoint"], dtype=float)
        size = np.maximum((self.boxes[:, 2:] - self.boxes[:, :2]).prod(1), 1.0) * self.regions["area_factor"]
        scale = np.searchsorted(np.array(self.regions["edges"], dtype=float), size)
        radius = table[..., place] if place < len(levels) else np.full(table.shape[:-1], np.nan)
        if np.isnan(radius).any():
            raise Problem(
                f"the calibration has too few images for regions of {probability:g}: use a smaller probability"
            )
        return self.dispersion * (radius if whole else radius[scale][..., None, None])

    def joint_covariance(self) -> Array:
        """Joint covariance (N, 2K, 2K) of x1, y1, x2, y2, ...; its diagonal blocks are ``covariance``."""
        count = self.covariance.shape[1]
        factor = np.linalg.cholesky(self.covariance)
        wide = np.zeros((len(self), count, 2, count, 2))
        wide[:, range(count), :, range(count)] = factor.transpose(1, 0, 2, 3)
        wide = wide.reshape(len(self), 2 * count, 2 * count)
        inner = np.eye(2 * count) if self.correlation is None else self.correlation
        return wide @ inner @ wide.transpose(0, 2, 1)

    def to_json(self, image_id: int = 0, file_name: Optional[str] = None) -> List[Dict[str, Any]]:
        """Return COCO result entries with covariances, as `halopose predict` writes them."""
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
    """Detections of one image before calibration.

    Attributes:
        boxes, scores, class_ids, keypoints, visibility: As in ``Poses``.
        factors: Gaussian Cholesky factors (N, K, 3) as l11, l21, l22.
        novelty: Out-of-distribution p-values (N,) among calibration detections above the confidence threshold.
        image_novelty: Out-of-distribution p-value (1,) of the image.
    """

    boxes: Array
    scores: Array
    class_ids: Array
    keypoints: Array
    visibility: Optional[Array]
    factors: Array
    novelty: Optional[Array] = None
    image_novelty: Optional[Array] = None

    def __getitem__(self, index: Array) -> Detections:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        image_novelty = values.pop("image_novelty")
        chosen = {name: None if value is None else value[index] for name, value in values.items()}
        return Detections(**chosen, image_novelty=image_novelty)


def _triangle(matrices: Array) -> Array:
    return np.stack([matrices[..., 0, 0], matrices[..., 0, 1], matrices[..., 1, 1]], axis=-1)


# The model --------------------------------------------------------------------------------------------------


class Model:
    """An exported model.

    Args:
        path: Model file.
        run: Function that runs the graph in another runtime that has loaded the same file; default ONNX Runtime.
        facts: Metadata of the file; needed with ``run``.
    """

    def __init__(self, path: str, run: Optional[Run] = None, facts: Optional[Facts] = None) -> None:
        if run is None or facts is None:
            run, facts = _open(path)
        self.run, self.facts = run, facts

    def predict(
        self,
        image: Array,
        conf: float = 0.25,
        iou: float = 0.7,
        family: str = "student-t",
        imgsz: Optional[int] = None,
    ) -> Poses:
        """Predict poses of one image.

        Args:
            image: BGR uint8 image (h, w, 3).
            conf: Confidence threshold.
            iou: IoU threshold of non-maximum suppression.
            family: Output distribution: gaussian or student-t.
            imgsz: Input size; default that of the model.
        """
        if self.facts.fixed is not None:
            return self._end_to_end(image, conf, family, imgsz)
        return describe(self.facts, self.detect(image, conf, iou, imgsz), family)

    def _end_to_end(self, image: Array, conf: float, family: str, imgsz: Optional[int]) -> Poses:
        """Run a graph that gives calibrated detections itself; only a higher confidence can be asked for."""
        fixed = self.facts.fixed or {}
        if family != fixed["family"] or conf < fixed["conf"]:
            raise Problem(
                f"this graph was exported for the {fixed['family']} distribution and a confidence of at least "
                f"{fixed['conf']}: ask for these, or export it again"
            )
        pixels, box = prepare(image, self.facts, imgsz or self.facts.imgsz)
        letterbox = np.array([[*box.gain, *box.pad, box.shape[1], box.shape[0]]], np.float32)
        found = self._in_batch(pixels[None], letterbox)
        kept = (found["scores"] > conf) & (found["image"] == 0)
        rows = {name: values[kept] for name, values in found.items() if len(values) == len(kept)}
        count = rows["keypoints"].shape[1]
        full = {name: rows[name][..., [0, 1, 1, 2]].reshape(-1, count, 2, 2) for name in ("covariance", "scale")}
        return Poses(
            boxes=rows["boxes"],
            scores=rows["scores"],
            class_ids=rows["classes"],
            keypoints=rows["keypoints"],
            visibility=rows.get("visibility"),
            covariance=full["covariance"],
            scale=full["scale"],
            dof=None if family == "gaussian" else rows["dof"],
            keep=rows["keep"],
            novelty=rows.get("novelty"),
            image_novelty=found["image_novelty"][:1] if "image_novelty" in found else None,
        )

    def detect(
        self,
        image: Array,
        conf: float = 0.25,
        iou: float = 0.7,
        imgsz: Optional[int] = None,
        max_detections: int = 300,
    ) -> Detections:
        """Run the model and the framework's post-processing; return the kept detections with their factors."""
        if not 0 <= conf <= 1 or not 0 <= iou <= 1:
            raise Problem(f"conf and iou must lie between 0 and 1, got {conf} and {iou}")
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
            raise ImageProblem(f"images must be uint8 arrays (h, w, 3), got {image.dtype} {image.shape}")
        imgsz = self.facts.imgsz if imgsz is None else imgsz
        if not 1 <= imgsz <= LARGEST:
            raise Problem(f"imgsz must lie between 1 and {LARGEST}, got {imgsz}")
        pixels, box = prepare(image, self.facts, imgsz)
        area = [] if self.facts.novelty is None else [np.array([box.area], dtype=np.float32)]
        outputs = self._outputs(pixels[None], *area)
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

    def _in_batch(self, batch: Array, *rest: Array) -> Dict[str, Array]:
        """Run the graph in its own number format, on as many images as it takes; the last one is repeated."""
        file = self.facts.file or {}
        given = [batch.astype(np.float16 if file.get("half") else np.float32), *rest]
        missing = (file.get("batch") or len(batch)) - len(batch)
        if missing > 0:
            given = [np.concatenate([each, np.repeat(each[-1:], missing, axis=0)]) for each in given]
        return self.run(*given)

    def _outputs(self, batch: Array, *rest: Array) -> Dict[str, Array]:
        """Run the graph; outputs of a file that heads were added to get the names and the form of the layout."""
        file, count = self.facts.file, len(batch)
        outputs = self._in_batch(batch, *rest)
        if file is None:
            return outputs
        outputs = {name: values[:count] for name, values in outputs.items()}
        for name, own in file.get("names", {}).items():
            outputs[name] = outputs[own].astype(np.float32)
        if file.get("transposed"):
            outputs["output0"] = outputs["output0"].transpose(0, 2, 1)
        return outputs


def check_seal(path: str) -> None:
    """Raise ``Problem`` unless the file is complete and its checksum matches.

    The checksum covers this file alone, so tensors stored in other files are refused.
    """
    if not os.path.isfile(path):
        raise Problem(f"no model at {path}: give a folder or file written by `halopose export`")
    with open(path, "rb") as file:
        data = file.read()
    if FORMAT.encode() not in data:
        raise Problem(f"{path} is damaged or was not written by `halopose export`: export the model with it")
    found = SEAL.search(data)
    if found is None:
        raise Problem(f"{path} is damaged: it has no checksum, export it again")
    digest = hashlib.sha256(data[: found.start(1)])
    digest.update(BLANK)
    digest.update(memoryview(data)[found.end(1) :])
    if digest.hexdigest().encode() != found.group(1):
        raise Problem(f"{path} is damaged: its checksum does not match, export it again")
    if EXTERNAL in data:
        raise Problem(f"{path} stores tensors as external data, which its checksum does not cover: export it again")


def _open(path: str) -> Tuple[Run, Facts]:
    """Open a file in ONNX Runtime; return the function that runs it and its metadata."""
    import onnxruntime

    check_seal(path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(path, options, providers=onnxruntime.get_available_providers())
        properties = session.get_modelmeta().custom_metadata_map
    except Exception as error:  # noqa: BLE001  ONNX Runtime's errors have no common base class
        raise Problem(f"{path} is damaged or not an ONNX model ({' '.join(str(error).split())[:120]})") from None
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
    """Attach factors in pixels of the image to the detections that have them; drop the others with a warning."""
    row = np.full(max(int(cells.max(initial=0)), int(cell.max(initial=0))) + 1, -1)
    given = np.flatnonzero(cells >= 0)
    row[cells[given]] = given
    known = row[cell] >= 0
    if not known.all():
        warnings.warn(
            f"{(~known).sum()} of {len(cell)} detections are beyond the cells that have covariances and are left "
            "out: raise the confidence, or export with more --windows",
            MissingCovarianceWarning,
            stacklevel=3,
        )
    scale = np.array([box.gain[0], box.gain[1], box.gain[1]])
    whole = factors[row[cell]].astype(np.float64) / scale
    return replace(found, factors=whole)[known]


def _with_novelty(
    found: Detections, cell: Array, cells: Array, outputs: Dict[str, Array], known: Mapping[str, Any], conf: float
) -> Detections:
    """Attach the p-values of the detections and of the image."""
    values = np.zeros(max(int(cells.max(initial=0)), int(cell.max(initial=0))) + 1)
    given = np.flatnonzero(cells >= 0)
    values[cells[given]] = outputs["novelty"][0][given]
    scores, seen = np.array(known["known"], dtype=np.float64).reshape(-1, 2).T
    novelty = _p_values(seen[scores >= conf], values[cell])
    return replace(found, novelty=novelty, image_novelty=_p_values(known["known_images"], outputs["image_novelty"][:1]))


def _p_values(known: Array, value: Array) -> Array:
    """Conformal p-values: (1 + number of calibration values at least as large) / (1 + number of them).

    Args:
        known: Calibration values, sorted.
        value: Values (N,) to rank.
    """
    return (1 + len(known) - np.searchsorted(np.asarray(known, np.float64), value)) / (1 + len(known))


def describe(facts: Facts, found: Detections, family: str) -> Poses:
    """Calibrate detections.

    Args:
        facts: Metadata of the model file.
        found: Detections before calibration.
        family: Output distribution: gaussian or student-t.
    """
    if family not in FAMILIES:
        raise Problem(f"unknown family {family!r}: use {' or '.join(FAMILIES)}")
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
        dof, factor = (_kept_or_pruned(facts, name, keep) for name in ("dof", "scale"))
        scale = gaussian * factor[..., None, None] ** 2
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
        correlation=_correlation_of_objects(facts.correlation, extent),
        novelty=found.novelty,
        image_novelty=found.image_novelty,
        offset=None if facts.offset is None else np.sqrt(extent)[:, None, None] * np.asarray(facts.offset),
    )


def _correlation_of_objects(joint: Optional[Mapping[str, Any]], extent: Array) -> Optional[Array]:
    """Correlations (N, 2K, 2K) for objects with box areas ``extent`` (N,), by object scale if the file has them."""
    if joint is None:
        return None
    parts = joint.get("scales") or {"matrices": [joint["matrix"]], "edges": [], "area_factor": 1.0}
    edges = np.array(parts["edges"], dtype=np.float64)
    return np.array(parts["matrices"])[np.searchsorted(edges, extent * parts["area_factor"])]


def _kept_or_pruned(facts: Facts, name: str, keep: Array) -> Array:
    """Student-t parameter (N, K): that of kept keypoints where ``keep`` (N, K), else that of pruned ones."""
    kept, pruned = (getattr(facts, f"{part}_{name}") for part in ("student", "pruned"))
    return np.where(keep, np.asarray(kept), np.asarray(kept if pruned is None else pruned))


def covariances(factors: Array) -> Array:
    """Covariances L L^T (..., 2, 2) from l11, l21, l22 (..., 3)."""
    a, b, c = np.moveaxis(factors, -1, 0)
    return np.stack([a * a, a * b, a * b, b * b + c * c], axis=-1).reshape(*a.shape, 2, 2)


# Preprocessing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Letterbox:
    """Position of an image of ``shape`` (h, w) in the input: input = gain * original + pad, for x and y."""

    shape: Tuple[int, int]
    gain: Tuple[float, float]
    pad: Tuple[int, int]

    @property
    def area(self) -> Tuple[float, float, float, float]:
        """Left, top, right and bottom edge of the image in the input."""
        (height, width), (left, top) = self.shape, self.pad
        return left, top, left + self.gain[0] * width, top + self.gain[1] * height


def prepare(image: Array, facts: Facts, imgsz: int) -> Tuple[Array, Letterbox]:
    """Prepare an image as the framework does; return the input (3, H, W) and the letterbox."""
    largest = max(facts.strides[-1], 32)
    size = -(-imgsz // largest) * largest
    fixed = facts.fixed_size
    if fixed is not None and size != max(fixed):
        raise Problem(f"this model takes inputs of {fixed[1]} x {fixed[0]} only: give imgsz {max(fixed)}")
    kind = facts.preparation
    box, inner, (height, width) = place(kind, image.shape[:2], fixed or (size, size), None if fixed else largest)
    cells = sum((height // stride) * (width // stride) for stride in facts.strides)
    if cells < facts.fewest_cells:
        raise Problem(f"an input of {width} x {height} is too small for this model: give a larger imgsz")
    canvas = lay(kind, image, box, inner, np.empty((height, width, 3), dtype=np.uint8))
    pixels = canvas if kind == "yolonas" else canvas[..., ::-1]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32) / np.float32(255), box


def place(
    kind: str, shape: Tuple[int, int], sides: Tuple[int, int], multiple: Optional[int]
) -> Tuple[Letterbox, Tuple[int, int], Tuple[int, int]]:
    """Position of an image in the input.

    Args:
        kind: Letterbox of ``ultralytics``, centred, or of ``yolonas``, in the upper left corner.
        shape: Height and width of the image.
        sides: Largest height and width of the input.
        multiple: Trim the padding to multiples of this; None keeps the whole input. ``yolonas`` never trims.

    Returns:
        The letterbox, width and height of the resized image, height and width of the input.
    """
    height, width = shape
    if kind == "yolonas":
        longest = min(*sides, 640)
        ratio = min(longest / height, longest / width)
        inner = round(width * ratio), round(height * ratio)
        if not min(inner):
            raise ImageProblem(
                f"an image of {width} x {height} has no pixels left at input size {longest}: crop it first"
            )
        return Letterbox(shape, (ratio, ratio), (0, 0)), inner, sides
    ratio = min(sides[0] / height, sides[1] / width)
    inner = max(round(width * ratio), 1), max(round(height * ratio), 1)
    spare = sides[1] - inner[0], sides[0] - inner[1]
    if multiple is not None:
        spare = spare[0] % multiple, spare[1] % multiple
    pad = round(spare[0] / 2 - 0.1), round(spare[1] / 2 - 0.1)
    box = Letterbox(shape, (inner[0] / width, inner[1] / height), pad)
    return box, inner, (inner[1] + spare[1], inner[0] + spare[0])


def lay(kind: str, image: Array, box: Letterbox, inner: Tuple[int, int], canvas: Array) -> Array:
    """Lay a BGR image, resized to ``inner`` (width, height), on a canvas (H, W, 3), and return the canvas."""
    left, top = box.pad
    canvas[:] = 127 if kind == "yolonas" else 114
    canvas[top : top + inner[1], left : left + inner[0]] = resize(image, inner, antialias=kind == "yolonas")
    return canvas


def resize(image: Array, size: Tuple[int, int], antialias: bool) -> Array:
    """Resize bilinearly to (width, height).

    With antialiasing PIL resizes, otherwise OpenCV. If they are missing, numpy code gives the same, for PIL to 1 grey
    level.
    """
    if size == image.shape[1::-1]:
        return image
    if antialias and Image is not None:
        return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize(size, Image.Resampling.BILINEAR))
    if not antialias and cv2 is not None:
        return cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
    if antialias:
        return _resample(_resample(image, size[0], 1), size[1], 0)
    (left, right, a, b), (upper, lower, c, d) = (
        _neighbours(image.shape[1], size[0], True),
        _neighbours(image.shape[0], size[1], False),
    )
    whole = image.astype(np.int64)
    rows = (whole[:, left] * a[:, None] + whole[:, right] * b[:, None]) >> 4
    mixed = ((rows[upper] * c[:, None, None]) >> 16) + ((rows[lower] * d[:, None, None]) >> 16)
    return ((mixed + 2) >> 2).astype(np.uint8)


def _neighbours(old: int, count: int, whole: bool) -> Tuple[Array, Array, Array, Array]:
    """The two source pixels next to each target pixel (count,) and their 11-bit weights, as in OpenCV.

    At the border of columns one pixel has the ``whole`` weight; of rows it is taken twice, which rounds otherwise.
    """
    place = ((np.arange(count) + 0.5) * (old / count) - 0.5).astype(np.float32)
    first = np.floor(place).astype(np.int64)
    share = (place - first).astype(np.float32)
    if whole:
        share = np.where((first < 0) | (first >= old - 1), 0, share).astype(np.float32)
    weights = (np.rint(part * np.float32(2048)).astype(np.int64) for part in (1 - share, share))
    return (np.clip(first, 0, old - 1), np.clip(first + 1, 0, old - 1), *weights)


def _resample(image: Array, count: int, axis: int) -> Array:
    """Resample one axis to ``count`` pixels with a triangle filter as wide as a target pixel.

    Uses 22-bit integers and rounds each pass, as PIL does (PIL may process the axes in the other order).
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


# Postprocessing ---------------------------------------------------------------------------------------------


def _select_ultralytics(
    facts: Facts, outputs: Dict[str, Array], box: Letterbox, conf: float, iou: float, most: int
) -> Tuple[Array, Detections]:
    """Cells (N,) and detections kept by Ultralytics: suppression in input pixels, then clipping."""
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
        boxes = rows[:, :4]
        if not (facts.file or {}).get("corners"):
            boxes = np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=1)
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
    """Cells (N,) and detections kept by LibreYOLO: clipping in original pixels, then suppression."""
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
    """Greedy non-maximum suppression per class; return the indices of the kept boxes (N, 4), best first."""
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


# Drawing ----------------------------------------------------------------------------------------------------


def ellipses(poses: Poses, probability: float) -> Tuple[Array, Array]:
    """Ellipses that contain the keypoint with a probability.

    Returns:
        Semi-axes (N, K, 2), longer first, and the angle (N, K) of the longer one from x to y.
    """
    xx, xy, yy = np.moveaxis(_triangle(poses.scale), -1, 0)
    major = (xx + yy) / 2 + np.hypot((xx - yy) / 2, xy)
    minor = (xx * yy - xy**2) / major
    if poses.dof is None:
        radius = np.full(xx.shape, -2 * math.log1p(-probability))
    else:
        radius = poses.dof * np.expm1(-2 / poses.dof * math.log1p(-probability))
    return np.sqrt(np.stack([major, minor], axis=-1) * radius[..., None]), np.arctan2(2 * xy, xx - yy) / 2


def draw(image: Array, poses: Poses, names: Sequence[str], probability: float = 0.95) -> Array:
    """Draw limbs and ellipses on a copy of the image; pruned keypoints are thin and grey."""
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


# Calibration monitor -----------------------------------------------------------------------------------------

SMALL_BETS = ((0.1, 1.0), (0.3, 1.0), (0.5, 1.0), (0.75, 1.0))  # Beta densities: small p-values
_FLOOR = 1e-9  # p-values are kept this far from 0 and 1
_LARGEST_CAPITAL = 1e300


class BettingMartingale:
    """Evidence that a stream of p-values is no longer exchangeable with the calibration values.

    Each p-value is ranked among the calibration values and the stream so far, so that the ranks of an exchangeable
    stream are independent and uniform. The martingale is a mixture over the moment of the change and over bets against
    uniform ranks. Over an exchangeable stream of any length it reaches 1 / alpha with probability alpha at most.

    Attributes:
        count: Number of p-values seen.
        evidence: Value of the martingale.

    Args:
        size: Number n of calibration values behind p-values k / (n + 1); None: p-values are uniform.
        bets: Parameters of Beta densities to bet with.
        seed: Seed of the ranks of equal p-values.
    """

    def __init__(
        self, size: Optional[int] = None, bets: Sequence[Tuple[float, float]] = SMALL_BETS, seed: int = 0
    ) -> None:
        self.count, self.evidence = 0, 1.0
        self._bets = [(a, b, math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) for a, b in bets]
        self._started = [0.0] * len(bets)  # capital of bets that began at an earlier p-value, by bet
        self._unstarted = 1.0  # capital of bets that are still to begin
        self._ranks = None if size is None else _OnlineRanks(size, seed)

    def update(self, p: float) -> float:
        """Take the next p-value, from 0 to 1; return the evidence."""
        self.count += 1
        rank = p if self._ranks is None else self._ranks.uniform(p)
        # Share of the capital kept for later changes: it falls slowly, so that late changes count.
        begin = self._unstarted - 1 / math.log2(2 + self.count / 8)
        self._unstarted -= begin
        share = begin / len(self._bets)
        low, high = math.log(max(rank, _FLOOR)), math.log(max(1 - rank, _FLOOR))
        self._started = [
            min((capital + share) * math.exp(norm + (a - 1) * low + (b - 1) * high), _LARGEST_CAPITAL)
            for capital, (a, b, norm) in zip(self._started, self._bets)
        ]
        self.evidence = self._unstarted + sum(self._started)
        return self.evidence


class _OnlineRanks:
    """Ranks of conformal p-values among n calibration values and the stream so far.

    A p-value k / (n + 1) says that k - 1 calibration values are more extreme. Values of the stream with the same k are
    in an unknown order, which is drawn at random: under exchangeability every order is equally likely.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._tree = [0] * (size + 2)  # Fenwick tree of the stream by k
        self._count = 0
        self._random = random.Random(seed)

    def uniform(self, p: float) -> float:
        """The rank of a p-value as a number from 0 to 1, and remember the value."""
        k = min(max(round(p * (self._size + 1)), 1), self._size + 1)
        before = self._below(k - 1)
        equal = self._below(k) - before
        place = k - 1 + before + self._random.randrange(equal + 1)
        found = (place + self._random.random()) / (self._size + self._count + 1)
        self._count += 1
        while k < len(self._tree):
            self._tree[k] += 1
            k += k & -k
        return found

    def _below(self, k: int) -> int:
        """Number of values of the stream with at most this k."""
        total = 0
        while k > 0:
            total += self._tree[k]
            k -= k & -k
        return total


# Command line -----------------------------------------------------------------------------------------------


def read_image(path: str) -> Array:
    """Read a BGR uint8 image (h, w, 3) from an image file, or from a .npy file, which needs numpy only."""
    if not os.path.isfile(path):  # reading a named pipe would wait for ever
        raise ImageProblem(f"cannot read image {path}: it is missing or damaged")
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
                raise ValueError("not an image")
            return image
        if Image is not None:
            with Image.open(path) as file:
                if file.width * file.height > MAX_PIXELS:
                    raise ValueError("too many pixels")
                return np.ascontiguousarray(np.asarray(ImageOps.exif_transpose(file).convert("RGB"))[..., ::-1])
    except Exception:  # noqa: BLE001  each library raises other errors
        raise ImageProblem(f"cannot read image {path}: it is missing, damaged or too large") from None
    raise ImageProblem(f"to read {path} install opencv-python-headless or pillow; .npy files need neither")


def _images(sources: Sequence[str]) -> List[str]:
    """Image files of the given files and folders, without duplicates."""
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
    """Names of pictures and of files, as in `halopose predict`: with folders if file stems are not unique."""
    whole = [os.path.abspath(path) for path in paths]
    try:
        folder = os.path.commonpath([os.path.dirname(path) for path in whole])
    except ValueError:
        raise Problem("images on several drives have no common folder: give images of one drive") from None
    below = [os.path.relpath(path, folder).replace(os.sep, "/") for path in whole]
    for files in ([os.path.basename(path) for path in whole], below):
        names = [os.path.splitext(file)[0] for file in files]
        if len({name.casefold() for name in names}) == len(names):
            return list(zip(names, files))
    return list(zip(below, below))


def image_ids(names: Sequence[str]) -> Dict[str, int]:
    """Distinct image ids by file name, as in `halopose predict`: the number of the name, or a hash if it is shared."""
    ids = {name: image_id(name) for name in names}
    counts = Counter(ids.values())
    return {name: _hashed(name) if counts[number] > 1 else number for name, number in ids.items()}


def image_id(name: str) -> int:
    """Image id of a file name: the number if the file name is one, else a hash of the name."""
    stem = os.path.splitext(name)[0]
    if stem.isascii() and stem.isdigit() and len(stem) <= 15:
        return int(stem)
    return _hashed(name)


def _hashed(name: str) -> int:
    return int(hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12], 16)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command line.

    Returns:
        Exit code: 0, 1 if some images could not be processed, 2 for a user error.
    """
    parser = argparse.ArgumentParser(description="Poses with calibrated uncertainty, from an exported model.")
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("images", nargs="+", help="image files or folders")
    parser.add_argument(
        "--model",
        default=os.path.join(here, "model.onnx"),
        help="model file; default model.onnx in the folder of this file",
    )
    parser.add_argument("--output", "-o", default="poses", help="folder for the pictures (needs OpenCV)")
    parser.add_argument("--json", action="store_true", help="print detections as JSON, draw nothing")
    parser.add_argument("--conf", type=float, default=0.25, help="confidence threshold")
    parser.add_argument("--iou", type=float, default=0.7, help="IoU threshold of non-maximum suppression")
    parser.add_argument("--family", choices=FAMILIES, default="student-t", help="output distribution")
    parser.add_argument("--imgsz", type=int, help="input size; default that of the model")
    parser.add_argument(
        "--probability", type=float, default=0.95, help="probability that an ellipse contains the keypoint"
    )
    parser.add_argument("--alarm", type=float, help="flag out-of-distribution detections at this rate, e.g. 0.05")
    parser.add_argument(
        "--monitor",
        type=float,
        help="warn when images stop being like those of the calibration, with at most this false-alarm probability "
        "over the whole run, e.g. 0.01",
    )
    options = parser.parse_args(arguments)
    problem: Any
    with warnings.catch_warnings():
        warnings.simplefilter("always", MissingCovarianceWarning)
        warnings.showwarning = _show
        try:
            return _run(options)
        except Problem as error:
            problem = error
        except MemoryError:
            problem = "not enough memory: use a smaller --imgsz"
    _show(problem)
    return 2


def _show(message: Any, *_: Any, **__: Any) -> None:
    """Print a message or a warning as one line, without a source location."""
    sys.stderr.write(_printable(f"predict.py: {message}") + "\n")


def _printable(text: str) -> str:
    """Text with control characters escaped: a file name must not send commands to the terminal."""
    return "".join(sign if sign.isprintable() else f"\\x{ord(sign):02x}" for sign in text)


def _run(options: argparse.Namespace) -> int:
    if not 0 < options.probability < 1:
        raise Problem(f"--probability must lie between 0 and 1, got {options.probability}")
    drawn = not options.json and cv2 is not None
    if not options.json and os.path.isfile(options.output):
        raise Problem(f"cannot write into {options.output}: it is a file, give a folder")
    model = Model(options.model)
    if options.alarm is not None and model.facts.novelty is None:
        raise Problem("--alarm needs an out-of-distribution model: add it with `halopose novelty` and export again")
    monitor = None if options.monitor is None else _Monitor(model.facts, options.monitor)
    paths = _images(options.images)
    names = _names(paths)
    ids = image_ids([file_name for _, file_name in names])
    targets = [os.path.join(options.output, f"{name}.jpg") for name, _ in names]
    if drawn:
        _check_targets(targets, paths)
    results: List[Dict[str, Any]] = []
    skipped = 0
    for path, (name, file_name), target in zip(paths, names, targets):
        try:
            image = read_image(path)
            poses = model.predict(image, options.conf, options.iou, options.family, options.imgsz)
        except ImageProblem as problem:
            _show(f"skipped {path}: {problem}" if path not in str(problem) else f"skipped: {problem}")
            skipped += 1
            continue
        if monitor is not None:
            monitor.update(poses, path)
        if options.json:
            results += _entries(poses, ids[file_name], file_name, options.alarm)
            continue
        line = f"{name}: {len(poses)} detections, {int(poses.keep.sum())} of {poses.keep.size} keypoints kept"
        if options.alarm is not None:
            line += f", {int((poses.novelty <= options.alarm).sum())} unlike anything seen"
        sys.stdout.write(_printable(line) + "\n")
        if drawn:
            _write_picture(draw(image, poses, model.facts.keypoint_names, options.probability), target)
    if skipped == len(paths):
        return 2
    if monitor is not None:
        _show(f"monitor: {monitor.summary}")
    if options.json:
        sys.stdout.write(json.dumps(results) + "\n")
    elif not drawn:
        _show("no pictures were drawn, because OpenCV is missing: pip install opencv-python-headless")
    return 1 if skipped else 0


class _Monitor:
    """Warns once when images stop being like those of the calibration."""

    def __init__(self, facts: Facts, alarm: float) -> None:
        if facts.novelty is None:
            raise Problem("--monitor needs an out-of-distribution model: add it with `halopose novelty`, export again")
        if not 0 < alarm < 1:
            raise Problem(f"--monitor must lie between 0 and 1, got {alarm}")
        self._alarm, self._alarmed_at = alarm, 0
        self._martingale = BettingMartingale(len(facts.novelty["known_images"]))

    def update(self, poses: Poses, path: str) -> None:
        """Take the p-value of the next image."""
        if poses.image_novelty is None:
            return
        evidence = self._martingale.update(float(poses.image_novelty[0]))
        if not self._alarmed_at and evidence >= 1 / self._alarm:
            self._alarmed_at = self._martingale.count
            _show(
                f"monitor: from {path} on, images are no longer like those of the calibration (evidence "
                f"{evidence:.3g} after {self._alarmed_at} images): check camera, lens and weather, then recalibrate"
            )

    @property
    def summary(self) -> str:
        """Whether and when the alarm was raised."""
        found = f"alarm at image {self._alarmed_at}" if self._alarmed_at else "no alarm"
        return f"{found} of {self._martingale.count} (evidence {self._martingale.evidence:.3g})"


def _entries(poses: Poses, identity: int, file_name: str, alarm: Optional[float]) -> List[Dict[str, Any]]:
    """JSON entries of one image, as `halopose predict` writes them."""
    entries = poses.to_json(identity, file_name)
    if alarm is not None and poses.novelty is not None and poses.image_novelty is not None:
        for entry, novelty in zip(entries, poses.novelty.tolist()):
            entry.update(image_novelty=float(poses.image_novelty[0]), in_distribution=novelty > alarm)
    return entries


def _check_targets(targets: Sequence[str], sources: Sequence[str]) -> None:
    """Raise ``Problem`` if a picture would overwrite an input image, also through a symbolic link."""
    given = {os.path.normcase(os.path.realpath(source)): source for source in sources}
    for target in targets:
        source = given.get(os.path.normcase(os.path.realpath(target)))
        if source is not None:
            raise Problem(f"the picture {target} would overwrite the image {source}: choose another --output")


def _write_picture(picture: Array, target: str) -> None:
    """Write a whole picture or none; a symbolic link at ``target`` is replaced, not followed."""
    folder, partial = os.path.dirname(target), None
    try:
        os.makedirs(folder, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=folder, prefix=".", suffix=".jpg")
        with os.fdopen(handle, "wb") as file:
            file.write(cv2.imencode(".jpg", picture)[1].tobytes())
        os.chmod(partial, 0o644)
        os.replace(partial, target)
    except OSError as error:
        if partial is not None and os.path.exists(partial):
            os.unlink(partial)
        raise Problem(f"cannot write {target} ({error.strerror or error}): choose another --output") from None


if __name__ == "__main__":
    sys.exit(main())
