"""Predicted poses with their distributions, and annotated poses, as NumPy arrays in pixels of the original image."""

from __future__ import annotations

import base64
import difflib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halopose.boxes import box_area, xyxy_to_xywh
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.origin import Origin, Speed, of_one_layout
from halopose.rfdetr_units import SHAPE_KEY, area_share, from_rfdetr_data, lacks_area
from halopose.types import Array
from halopose.uncertainty.distributions import Bivariate, Gaussian, StudentT, scale_tril_from_covariance
from halopose.uncertainty.joint_distribution import JointDistribution, joint_covariance
from halopose.uncertainty.regions import Regions
from halopose.uncertainty.whitening import factors

# Metadata of dataclass fields.
_SHARED = {"shared": True}  # one value for all detections
_BY_IMAGE = {"by image": True}  # one entry for every image
_NO_VALUE = {"no value": True}  # excluded from equality

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
_NOTEBOOK_SIDE = 1280  # longest side in pixels of pictures in notebooks


@dataclass(frozen=True, eq=False, repr=False)
class PoseDistributions:
    """N detections of K keypoints in one image, or in several images if ``image_ids`` is given.

    Attributes:
        boxes: Boxes (N, 4), x1 y1 x2 y2.
        scores: Detection scores (N,).
        keypoints: Keypoints (N, K, 2) of the base model.
        covariance: Covariances (N, K, 2, 2).
        scale: Scale matrices (N, K, 2, 2); the covariances if the distribution is Gaussian.
        dof: Degrees of freedom (N, K) of a Student-t, or (K,) if all detections share them; None for a Gaussian.
        visibility: Visibility scores (N, K), or None.
        keep: Keypoints (N, K) that pruning keeps; a pruned keypoint keeps its coordinates.
        class_ids: Class (N,) counted from 1 as COCO categories are, or None.
        image_ids: Image (N,), or None.
        dispersion: Dispersions (N, K, 2, 2) of the heads before calibration, or None; ``regions`` are multiples of it.
        correlation: Correlation (N, 2K, 2K) of whitened residuals in the order x1, y1, x2, ..., or None.
        regions: Conformal regions, or None.
        joint_dof: Degrees of freedom of the joint Student-t.
        novelty: Out-of-distribution p-values (N,), small for unusual detections, or None.
        image_novelty: Out-of-distribution p-values of the images (I,), or None.
        offset: Mean (N, K, 2) of the distribution minus the keypoint, or None where it is zero.
        origin: Image, file, keypoint layout and speed, or None; excluded from equality.

    Example:
        >>> spread = np.tile(4 * np.eye(2), (1, 3, 1, 1))  # one detection, three keypoints, 2 px in x and y
        >>> box, score = np.array([[0.0, 0.0, 10.0, 20.0]]), np.array([0.9])
        >>> poses = PoseDistributions(box, score, np.zeros((1, 3, 2)), covariance=spread, scale=spread)
        >>> len(poses), poses.keypoint_count, bool(poses.keep.all())
        (1, 3, True)
        >>> poses.to_json()[0]["covariance"][0]  # xx, xy, yy
        [4.0, 0.0, 4.0]
    """

    boxes: Array
    scores: Array
    keypoints: Array
    covariance: Array
    scale: Array
    dof: Array | None = None
    visibility: Array | None = None
    keep: Array | None = None
    class_ids: Array | None = None
    image_ids: Array | None = None
    dispersion: Array | None = None
    correlation: Array | None = None
    regions: Regions | None = field(default=None, metadata=_SHARED)
    joint_dof: float = field(default=math.inf, metadata=_SHARED)
    novelty: Array | None = None
    image_novelty: Array | None = field(default=None, metadata=_BY_IMAGE)
    offset: Array | None = None
    origin: Origin | None = field(default=None, metadata=_NO_VALUE)

    def __post_init__(self) -> None:
        n, k = self.keypoints.shape[:2] if self.keypoints.ndim == 3 else (-1, -1)
        if self.keep is None and n >= 0:
            object.__setattr__(self, "keep", np.ones((n, k), dtype=bool))
        if self.dof is not None and self.dof.shape == (k,):
            object.__setattr__(self, "dof", np.tile(self.dof, (n, 1)))
        expected: dict[str, tuple[int, ...]] = {
            "boxes": (n, 4),
            "scores": (n,),
            "keypoints": (n, k, 2),
            "covariance": (n, k, 2, 2),
            "scale": (n, k, 2, 2),
            "dof": (n, k),
            "visibility": (n, k),
            "keep": (n, k),
            "class_ids": (n,),
            "image_ids": (n,),
            "dispersion": (n, k, 2, 2),
            "correlation": (n, 2 * k, 2 * k),
            "novelty": (n,),
            "offset": (n, k, 2),
            "image_novelty": (-1,) if self.image_novelty is None else (self.image_novelty.size,),
        }
        for name, shape in expected.items():
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise HaloposeError(f"{name} should have shape {shape}, got {value.shape}")

    def __len__(self) -> int:
        return int(self.scores.shape[0])

    def __iter__(self) -> Iterator[PoseDistributions]:
        """Iterate over single detections as ``PoseDistributions`` with N = 1."""
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Compare all values exactly; the origin is ignored."""
        if not isinstance(other, PoseDistributions):
            return NotImplemented
        names = [each.name for each in fields(self) if each.metadata != _NO_VALUE]
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        return all(a is b is None or np.array_equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]  # arrays inside may change

    def __repr__(self) -> str:
        distribution = "Gaussian" if self.dof is None else "Student-t"
        kept = int(np.asarray(self.keep).sum())
        images = "" if self.image_ids is None else f" in {len(np.unique(self.image_ids))} images"
        return (
            f"PoseDistributions({len(self)} detections of {self.keypoint_count} keypoints{images}, {distribution}, "
            f"{kept} of {len(self) * self.keypoint_count} kept)"
        )

    def __getitem__(self, index: Any) -> PoseDistributions:
        """Select detections or keypoints.

        Args:
            index: Number, slice or mask of detections, or the name of a keypoint, or a list of names.

        Returns:
            The chosen detections with all keypoints, or all detections with the chosen keypoints.

        Example:
            >>> spread = np.tile(np.eye(2), (1, 17, 1, 1))
            >>> poses = PoseDistributions(np.zeros((1, 4)), np.ones(1), np.zeros((1, 17, 2)), spread, spread)
            >>> poses["left_wrist"].keypoints.shape
            (1, 1, 2)
        """
        if isinstance(index, str):
            return self._of_keypoints([index])
        if isinstance(index, (list, tuple)) and index and all(isinstance(name, str) for name in index):
            return self._of_keypoints(index)
        index = [index] if isinstance(index, (int, np.integer)) else index
        chosen: dict[str, Any] = {
            each.name: value[index] if value is not None and not each.metadata else value
            for each in fields(self)
            for value in [getattr(self, each.name)]
        }
        return replace(self, **chosen)

    def _of_keypoints(self, names: Sequence[str]) -> PoseDistributions:
        """Select keypoints by name; regions of whole objects keep the (conservative) radii of all keypoints."""
        layout = self.layout
        for name in names:
            if name not in layout.names:
                near = difflib.get_close_matches(name, layout.names, 1)
                advice = f"did you mean {near[0]!r}?" if near else f"they are {', '.join(layout.names)}"
                raise HaloposeError(f"there is no keypoint {name!r}: {advice}")
        rows = [layout.names.index(name) for name in names]
        by_keypoint = ("keypoints", "covariance", "scale", "dof", "visibility", "keep", "dispersion", "offset")
        chosen: dict[str, Any] = {
            name: value[:, rows] for name in by_keypoint for value in [getattr(self, name)] if value is not None
        }
        if self.correlation is not None:
            axes = [2 * row + axis for row in rows for axis in (0, 1)]
            chosen["correlation"] = self.correlation[:, axes][:, :, axes]
        if self.regions is not None:
            radii, images = self.regions.keypoint[:, rows], self.regions.images[:, rows]
            chosen["regions"] = replace(self.regions, keypoint=radii, images=images)
        limbs = tuple((rows.index(a), rows.index(b)) for a, b in layout.limbs if a in rows and b in rows)
        sigmas = tuple(layout.sigmas[row] for row in rows)
        fewer = replace(layout, names=tuple(names), sigmas=sigmas, mirror=None, limbs=limbs)
        return replace(self, **chosen, origin=replace(self.origin or Origin(), layout=fewer))

    @property
    def keypoint_count(self) -> int:
        """Number of keypoints K."""
        return int(self.keypoints.shape[1])

    # --- where the poses come from --------------------------------------------------------------------------

    @property
    def image(self) -> Array:
        """The image (h, w, 3) in BGR, read again if it comes from a file.

        Raises:
            HaloposeError: The poses come from no image, or from several, or its file cannot be read.
        """
        return (self.origin or Origin()).image()

    @property
    def path(self) -> Path | None:
        """File of the image or film, if any."""
        return None if self.origin is None else self.origin.path

    @property
    def layout(self) -> Keypoints:
        """Keypoint layout of the model; COCO's for 17 keypoints of unknown layout, else numbered names."""
        if self.origin is not None and self.origin.layout is not None:
            return self.origin.layout
        return Keypoints.of(self.keypoint_count)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the K keypoints."""
        return self.layout.names

    @property
    def speed(self) -> Speed | None:
        """Duration of the prediction in ms per image, if it was measured."""
        return None if self.origin is None else self.origin.speed

    # --- distribution of each keypoint ----------------------------------------------------------------------

    @property
    def distribution(self) -> Bivariate:
        """Distribution of truth minus ``mean``, with batch shape (N, K), as torch tensors."""
        factors = scale_tril_from_covariance(torch.from_numpy(self.scale.astype(np.float64)))
        if self.dof is None:
            return Gaussian(factors)
        return StudentT(factors, torch.from_numpy(self.dof.astype(np.float64)))

    @property
    def std(self) -> Array:
        """Standard deviations (N, K, 2) along x and y in pixels, the roots of the covariances' diagonals."""
        return np.sqrt(np.einsum("nkii->nki", self.covariance))

    def ellipse(self, probability: float = 0.95) -> tuple[Array, Array]:
        """Ellipses around ``mean`` that hold the true keypoints with the given probability.

        Args:
            probability: Probability between 0 and 1.

        Returns:
            Semi-axes (N, K, 2) in pixels, the longer first, and the angle (N, K) of the longer one in radians, from
            the x axis towards the y axis.

        Example:
            >>> spread = np.diag([9.0, 1.0])[None, None]
            >>> poses = PoseDistributions(np.zeros((1, 4)), np.ones(1), np.zeros((1, 1, 2)), spread, spread)
            >>> axes, angle = poses.ellipse(0.95)
            >>> axes.round(1).tolist(), angle.tolist()
            ([[[7.3, 2.4]]], [[0.0]])
        """
        if not 0 < probability < 1:
            raise HaloposeError(f"probability must lie between 0 and 1, got {probability}")
        axes, angle = (value.numpy() for value in self.distribution.ellipse(probability))
        known = (self.scale == 0).all((-2, -1))
        return np.where(known[..., None], 0.0, axes), np.where(known, 0.0, angle)

    @property
    def mean(self) -> Array:
        """Mean (N, K, 2) of the distributions: the keypoints, plus ``offset`` if calibration found a bias."""
        return self.keypoints if self.offset is None else np.asarray(self.keypoints + self.offset)

    @classmethod
    def concatenate(cls, parts: Sequence[PoseDistributions]) -> PoseDistributions:
        """Join detections of several images.

        Args:
            parts: Poses with the same keypoints, distribution and optional fields.

        Raises:
            HaloposeError: There are no parts, or they differ in their optional fields.
        """
        if not parts:
            raise HaloposeError("nothing to concatenate: give at least one PoseDistributions")
        joined: dict[str, Any] = {}
        for each in fields(cls):
            values = [getattr(part, each.name) for part in parts]
            if each.metadata == _NO_VALUE:
                joined[each.name] = of_one_layout(values)
                continue
            if any((value is None) != (values[0] is None) for value in values):
                raise HaloposeError(f"{each.name} is given in some parts and missing in others")
            if "shared" in each.metadata:
                if any(not np.array_equal(value, values[0]) for value in values):
                    what = "degrees of freedom" if each.name == "joint_dof" else each.name
                    raise HaloposeError(f"the parts have different {what}")
                joined[each.name] = values[0]
            elif values[0] is not None:
                joined[each.name] = np.concatenate(values)
        return cls(**joined)

    # --- regions with a guarantee ---------------------------------------------------------------------------

    def region(self, probability: float) -> Array:
        """Conformal regions of single keypoints.

        The region of a keypoint is (y - mean)' M^-1 (y - mean) <= 1. It contains the true keypoint with at least the
        given probability, whatever the distribution, for a detection that matches an object on images like those
        of calibration.

        Args:
            probability: Coverage between 0 and 1.

        Returns:
            Matrices M (N, K, 2, 2).

        Raises:
            HaloposeError: The poses have no regions, or calibration had too few images for this probability.
        """
        regions, dispersion = self._calibrated_regions()
        return np.asarray(dispersion * regions.of_objects(probability, box_area(self.boxes))[..., None, None])

    def whole_region(self, probability: float, *, kept: bool = False) -> Array:
        """Conformal regions that contain all keypoints of an object at once.

        Args:
            probability: Coverage between 0 and 1.
            kept: Count only the keypoints that pruning keeps.

        Returns:
            Matrices (N, K, 2, 2) as in ``region``.
        """
        regions, dispersion = self._calibrated_regions()
        return np.asarray(dispersion * regions.whole_radius(probability, kept))

    def _calibrated_regions(self) -> tuple[Regions, Array]:
        if self.regions is None or self.dispersion is None:
            raise HaloposeError("these poses come without regions: calibrate the heads again with `halopose calibrate`")
        return self.regions, self.dispersion

    # --- joint distribution -----------------------------------------------------------------------------

    @property
    def joint(self) -> JointDistribution:
        """Joint distribution of each detection's residuals; keypoints are independent if there is no correlation."""
        size = 2 * self.keypoint_count
        correlation = np.eye(size) if self.correlation is None else self.correlation
        return JointDistribution(factors(self.scale), correlation, self.dof, self.joint_dof)

    @property
    def joint_covariance(self) -> Array:
        """Covariance (N, 2K, 2K) of x1, y1, x2, y2, ...; its diagonal blocks are ``covariance``."""
        return joint_covariance(self.covariance, self.joint.correlation)

    def sample(self, count: int, seed: int = 0) -> Array:
        """Draw whole poses from the joint distribution.

        Args:
            count: Number of draws.
            seed: Seed of the random generator.

        Returns:
            Keypoints (count, N, K, 2).
        """
        return self.mean + self.joint.sample(count, np.random.default_rng(seed))

    def given(self, known: Array) -> PoseDistributions:
        """Condition the joint distribution on known keypoints.

        Args:
            known: True positions (N, K, 2) of the known keypoints; NaN elsewhere.

        Returns:
            Detections with Gaussian conditional means and covariances; the covariance of a known keypoint is zero.
            Regions and correlation are removed.
        """
        if known.shape != self.keypoints.shape:
            raise HaloposeError(f"known should have shape {self.keypoints.shape}, got {known.shape}")
        mask = np.asarray(np.isfinite(known).all(-1))
        mean, spread = self.joint.given(known - self.mean, mask).moments()
        place = np.where(mask[..., None], known, self.mean + mean)
        spread = np.where(mask[..., None, None], 0.0, spread)
        removed: dict[str, Any] = {"dof": None, "dispersion": None, "correlation": None, "regions": None}
        removed["offset"] = None
        return replace(self, keypoints=place, covariance=spread, scale=spread, joint_dof=math.inf, **removed)

    # --- out of distribution ------------------------------------------------------------------------------

    def in_distribution(self, alarm: float = 0.05) -> Array:
        """Detections that are in distribution.

        Args:
            alarm: False-alarm rate: the share of in-distribution detections that are flagged.

        Returns:
            Mask (N,), False for out-of-distribution detections.

        Example:
            >>> spread = np.tile(np.eye(2), (2, 1, 1, 1))
            >>> given = np.zeros((2, 4)), np.ones(2), np.zeros((2, 1, 2)), spread, spread
            >>> PoseDistributions(*given, novelty=np.array([0.4, 0.01])).in_distribution(alarm=0.05).tolist()
            [True, False]
        """
        if not 0 <= alarm <= 1:
            raise HaloposeError(f"an alarm rate lies between 0 and 1, got {alarm}")
        if self.novelty is None:
            raise HaloposeError("these poses have no novelty p-values: add them with `halopose novelty`")
        return np.asarray(self.novelty > alarm)

    def plot(
        self,
        image: Array | None = None,
        *,
        probability: float = 0.95,
        boxes: bool = False,
        legend: bool = False,
        show_pruned: bool = True,
        **options: Any,
    ) -> Array:
        """Draw the poses with their ellipses on a copy of the image.

        Args:
            image: BGR image (h, w, 3); default: the image that the poses were predicted for.
            probability: Probability that an ellipse holds the keypoint.
            boxes: Draw boxes and scores.
            legend: Explain the colours.
            show_pruned: Draw pruned keypoints as well, thin and grey.
            options: More options of ``drawing.draw_poses``: alarm, labels, limbs, names, truth.

        Returns:
            BGR image (h, w, 3).
        """
        from halopose.drawing import draw_poses

        settings: dict[str, Any] = {"boxes": boxes, "legend": legend, "show_pruned": show_pruned, **options}
        return draw_poses(self.image if image is None else image, self, probability=probability, **settings)

    def show(self, image: Array | None = None, **options: Any) -> None:
        """Show the annotated image in a window until a key is pressed or the window is closed.

        Args:
            image: BGR image (h, w, 3); default: the image that the poses were predicted for.
            options: Options of ``plot``.

        Raises:
            HaloposeError: OpenCV has no windows, or there is no screen.
        """
        from halopose.display import Window, check_screen

        check_screen()
        picture = self.plot(image, **options)
        with Window((self.origin.name if self.origin else "") or "halopose") as window:
            window.show(picture, wait=True)

    def _repr_png_(self) -> bytes | None:
        """Annotated picture for notebooks; None if there is no image."""
        import cv2

        if self.origin is None or self.origin.read is None:
            return None
        try:
            picture = self.plot()
        except HaloposeError:  # the file is gone
            return None
        shrink = _NOTEBOOK_SIDE / max(picture.shape[:2])
        if shrink < 1:
            picture = cv2.resize(picture, None, fx=shrink, fy=shrink, interpolation=cv2.INTER_AREA)
        return bytes(cv2.imencode(".png", picture)[1])

    def _repr_html_(self) -> str:
        """Annotated picture and table of detections for notebooks."""
        from halopose.pose_tables import to_html

        picture = self._repr_png_()
        return to_html(self, None if picture is None else base64.b64encode(picture).decode())

    def summary(self) -> list[dict[str, Any]]:
        """Describe each detection in plain Python values: class, score, box, and place and spread of each keypoint.

        Example:
            >>> spread = np.tile(4 * np.eye(2), (1, 17, 1, 1))
            >>> poses = PoseDistributions(np.zeros((1, 4)), np.ones(1), np.zeros((1, 17, 2)), spread, spread)
            >>> wrist = poses.summary()[0].get("keypoints").get("left_wrist")
            >>> wrist.get("std_x")
            2.0
        """
        from halopose.pose_tables import summary

        return summary(self)

    def to_json(self, correlation: bool = False) -> list[dict[str, Any]]:
        """COCO results entries with covariances and the pruning mask, as ``halopose score`` reads them.

        Args:
            correlation: Add the correlation (2K, 2K) of all coordinates, if there is one.
        """
        n, k = self.keypoints.shape[:2]
        visibility = np.ones((n, k)) if self.visibility is None else self.visibility
        triples = np.concatenate([self.keypoints, visibility[..., None]], axis=2).reshape(n, 3 * k)
        columns: dict[str, list[Any]] = {
            "image_id": [0] * n if self.image_ids is None else self.image_ids.tolist(),
            "category_id": [1] * n if self.class_ids is None else self.class_ids.tolist(),
            "bbox": xyxy_to_xywh(self.boxes).tolist(),
            "score": self.scores.tolist(),
            "keypoints": triples.tolist(),
            "covariance": triangle(self.covariance).tolist(),
            "keep": np.asarray(self.keep, dtype=bool).tolist(),
        }
        if self.dof is not None:
            columns["scale"] = triangle(self.scale).tolist()
            columns["dof"] = self.dof.tolist()
        if correlation and self.correlation is not None:
            joint = self.joint_covariance
            deviation = np.sqrt(np.einsum("nii->ni", joint))
            columns["correlation"] = (joint / deviation[:, :, None] / deviation[:, None]).tolist()
        if self.novelty is not None:
            columns["novelty"] = self.novelty.tolist()
        if self.offset is not None:
            columns["offset"] = self.offset.tolist()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def save(self, path: Path | str, image: Array | None = None, **options: Any) -> None:
        """Write the poses to a file; the suffix chooses the format.

        Args:
            path: ``.json`` for a file that ``halopose score`` reads, ``.csv`` for a table of keypoints, ``.txt`` for
                YOLO labels, or the suffix of a picture, such as ``.jpg``, for the annotated image.
            image: BGR image (h, w, 3) for pictures and labels; default: the image that the poses were predicted for.
            options: Options of ``plot`` for pictures.

        Raises:
            HaloposeError: The suffix is unknown, or a picture needs an image that is not known.
        """
        from halopose.pose_tables import keypoint_columns, to_csv

        path = Path(path)
        suffix = path.suffix.lower()
        content: bytes
        if suffix in PICTURE_SUFFIXES:
            import cv2

            content = bytes(cv2.imencode(suffix, self.plot(image, **options))[1])
        elif suffix == ".json":
            content = f"{json.dumps(self.to_json())}\n".encode()
        elif suffix == ".csv":
            content = to_csv(keypoint_columns(self)).encode()
        elif suffix == ".txt":
            content = self.to_yolo(image).encode()
        else:
            known = ", ".join((".json", ".csv", ".txt", *PICTURE_SUFFIXES))
            raise HaloposeError(f"cannot save poses as {path.name}: the suffix must be one of {known}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise HaloposeError(f"cannot write {path}: {error.strerror or error}") from None

    def to_yolo(self, image: Array | None = None) -> str:
        """YOLO pose label lines, one for each detection: class from 0, box, and x, y, visibility of each keypoint.

        Args:
            image: Image (h, w, ...) that states the size; default: the image that the poses were predicted for.
        """
        from halopose.pose_tables import to_yolo

        height, width = (self.image if image is None else image).shape[:2]
        return to_yolo(self, width, height)

    def to_pandas(self, names: Sequence[str] | None = None) -> Any:
        """A pandas table with one row per keypoint.

        Args:
            names: Names of the K keypoints; default: those of the model.

        Returns:
            A DataFrame with image, detection, class, keypoint, x, y, covariance xx, xy, yy, keep and score, and
            visibility, image_id, novelty, offset_x, offset_y and dof where the poses have them.
        """
        from halopose.pose_tables import keypoint_columns

        try:
            import pandas
        except ImportError:
            raise HaloposeError("to_pandas needs pandas: pip install pandas") from None
        return pandas.DataFrame(keypoint_columns(self, names))

    def to_supervision(self) -> Any:
        """Convert to ``supervision.KeyPoints`` with the covariance (N, K, 2, 2) in ``data["covariance"]``.

        ``data`` also contains scale, dof, image_id, novelty and offset if available. Regions and the joint distribution
        are not copied.
        """
        try:
            import supervision
        except ImportError:
            raise HaloposeError("to_supervision needs the supervision package: pip install supervision") from None
        data: dict[str, Array] = {"covariance": self.covariance, "scale": self.scale, "xyxy": self.boxes}
        if self.dof is not None:
            data["dof"] = self.dof
        if self.image_ids is not None:
            data["image_id"] = self.image_ids
        if self.novelty is not None:
            data["novelty"] = self.novelty
        if self.offset is not None:
            data["offset"] = self.offset
        return supervision.KeyPoints(
            xy=self.keypoints.astype(np.float32),
            class_id=np.zeros(len(self), dtype=int) if self.class_ids is None else self.class_ids - 1,
            keypoint_confidence=self.visibility,
            detection_confidence=self.scores,
            visible=self.keep,
            data={**data, "keypoints": self.keypoints},
        )

    @classmethod
    def from_supervision(cls, key_points: Any) -> PoseDistributions:
        """Convert from ``supervision.KeyPoints`` with ``data["covariance"]``.

        Key points of RF-DETR are converted by ``from_rfdetr``.
        """
        data = key_points.data
        if from_rfdetr_data(data):
            return cls.from_rfdetr(key_points)
        return cls._from_key_points(key_points)

    @classmethod
    def from_rfdetr(
        cls, key_points: Any, *, times_area: bool | None = None, version: str | None = None
    ) -> PoseDistributions:
        """Convert the key points of RF-DETR, with covariances in pixels.

        Up to version 1.11 its covariances lack a factor, the share of the image that the object's box covers.

        Args:
            key_points: A ``supervision.KeyPoints`` of ``RFDETR.predict``.
            times_area: Multiply by this share; default: if the version needs it.
            version: Version of rfdetr that predicted; default: the installed one.

        Raises:
            HaloposeError: Boxes or image sizes are missing, or it is unknown whether the version needs the factor.
        """
        data = key_points.data
        if SHAPE_KEY not in data or "xyxy" not in data:
            raise HaloposeError(
                f'these key points lack data["xyxy"] or data["{SHAPE_KEY}"]: give the result of RFDETR.predict'
            )
        poses = cls._from_key_points(key_points)
        if not (lacks_area(version) if times_area is None else times_area):
            return poses
        share = area_share(poses.boxes, np.asarray(data[SHAPE_KEY]))[:, None, None, None]
        return replace(poses, covariance=poses.covariance * share, scale=poses.scale * share)

    @classmethod
    def _from_key_points(cls, key_points: Any) -> PoseDistributions:
        data = key_points.data
        if "covariance" not in data:
            raise HaloposeError('these key points have no data["covariance"]: add covariances of shape (N, K, 2, 2)')
        keypoints = np.asarray(data.get("keypoints", key_points.xy), dtype=float)
        n = keypoints.shape[0]
        covariance = np.asarray(data["covariance"], dtype=float)
        scores = key_points.detection_confidence
        low, high = (keypoints.min(1), keypoints.max(1)) if n else (np.zeros((0, 2)),) * 2
        return cls(
            boxes=np.asarray(data.get("xyxy", np.concatenate([low, high], axis=1)), dtype=float),
            scores=np.ones(n) if scores is None else np.asarray(scores, dtype=float),
            keypoints=keypoints,
            covariance=covariance,
            scale=np.asarray(data.get("scale", covariance), dtype=float),
            dof=np.asarray(data["dof"], dtype=float) if "dof" in data else None,
            visibility=key_points.keypoint_confidence,
            keep=key_points.visible,
            class_ids=None if key_points.class_id is None else np.asarray(key_points.class_id) + 1,
            image_ids=data.get("image_id"),
            novelty=data.get("novelty"),
            offset=np.asarray(data["offset"], dtype=float) if "offset" in data else None,
        )


@dataclass(frozen=True)
class GroundTruth:
    """M annotated objects of K keypoints, with the fields of COCO.

    Attributes:
        images: Ids of all annotated images (I,), with or without objects.
        image_ids: Image of each object (M,).
        class_ids: Class of each object (M,).
        keypoints: Keypoints (M, K, 2).
        labelled: Whether each keypoint is labelled (M, K), COCO's v > 0.
        boxes: Boxes (M, 4) xywh.
        area: Object areas (M,).
        crowd: Whether each object is a crowd (M,).
        ignore: Whether each object is ignored in matching (M,).
        layout: Layout of the K keypoints.
        occluded: Whether each keypoint is occluded (M, K), COCO's v = 1; None if unknown.
        truncated: Whether each box touches the border of its image (M,); None if unknown.

    Example:
        >>> from halopose.data.coco import parse_ground_truth
        >>> from halopose.data.synthetic_poses import World, synthesize
        >>> truth = parse_ground_truth("truth.json", synthesize(World(images=9, persons=20))[0])
        >>> len(truth), truth.keypoints.shape
        (20, (20, 17, 2))
        >>> truth.select_images(truth.images[:3]).images.tolist()
        [1, 2, 3]
    """

    images: Array
    image_ids: Array
    class_ids: Array
    keypoints: Array
    labelled: Array
    boxes: Array
    area: Array
    crowd: Array
    ignore: Array
    layout: Keypoints
    occluded: Array | None = None
    truncated: Array | None = None

    def __len__(self) -> int:
        return int(self.area.shape[0])

    @property
    def keypoint_count(self) -> int:
        return int(self.keypoints.shape[1])

    def select_images(self, images: Array) -> GroundTruth:
        """Return the given images (I,) and their objects."""
        chosen = np.isin(self.image_ids, images)
        shared = {"images", "layout"}
        columns = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in shared}
        objects: dict[str, Any] = {name: None if column is None else column[chosen] for name, column in columns.items()}
        return replace(self, images=np.intersect1d(self.images, images), **objects)


def triangle(matrices: Array) -> Array:
    """Return the entries xx, xy, yy (..., 3) of symmetric matrices (..., 2, 2)."""
    return np.stack([matrices[..., 0, 0], matrices[..., 0, 1], matrices[..., 1, 1]], axis=-1)
