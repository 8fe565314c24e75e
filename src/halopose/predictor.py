"""The public face: a frozen base with calibrated uncertainty.

In: images from anywhere. Out: a ``PoseDistributions`` per image, in original pixels, whose boxes, scores and
keypoints are the base's own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halopose.arrays import alike, as_array
from halopose.boxes import box_area
from halopose.calibration.calibrators import Calibrations
from halopose.calibration.pruning import keep_mask, localization_confidence
from halopose.data.images import NamedImage, read_source
from halopose.deploy.deployed_model import Deployed, Detecting
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts import model_zoo
from halopose.hosts.base import Host, Selection
from halopose.hosts.loading import load_host
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.types import Array, Family
from halopose.uncertainty.distributions import StudentT
from halopose.uncertainty.novelty import Evidence, Novelty, Pooling, pool_images

SMALLEST, LARGEST = 32, 16384  # input sizes
FAMILIES: tuple[Family, ...] = ("gaussian", "student-t")


class UncertainPose:
    """Predicts poses with a distribution per keypoint.

    >>> model = UncertainPose.load()  # or load("mine.pt", "mine.safetensors")
    >>> poses = model.predict("photo.jpg")[0]
    >>> poses.covariance.shape  # (N, K, 2, 2), squared pixels
    (1, 17, 2, 2)
    """

    novelty: Novelty | None = None
    widen = False

    def __init__(
        self,
        host: Host,
        artifact: Artifact,
        family: Family = "gaussian",
        *,
        uncalibrated: bool = False,
        widen: bool = False,
    ) -> None:
        artifact.check(host)
        if not artifact.calibrated and not uncalibrated:
            raise HaloposeError(
                "these heads are not calibrated: their covariances mean nothing in pixels yet. Calibrate them "
                "with `halopose calibrate`, or insist on them with uncalibrated (--uncalibrated)"
            )
        self.host, self.artifact = host, artifact
        # Weights in the order in which windows are multiplied: else every prediction would copy them.
        self.heads = artifact.heads.to(host.device).eval()
        self.heads.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        on_cpu = host.device.type == "cpu"
        self.few = self.heads.weights(lambda own: own.detach().numpy()) if on_cpu else None
        self.family = _checked(family)
        if artifact.novelty is not None:
            self.novelty = artifact.novelty.as_arrays() if on_cpu else artifact.novelty.to(host.device)
        if widen and self.novelty is None:
            raise HaloposeError("these heads know nothing of novelty to widen by: add it with `halopose novelty`")
        self.widen = widen

    @classmethod
    def load(
        cls,
        base: Path | str | nn.Module | Host | None = None,
        artifact: Path | str | Artifact | None = None,
        *,
        family: Family = "gaussian",
        device: torch.device | str | None = None,
        unsafe: bool = False,
        end2end: bool | None = None,
        uncalibrated: bool = False,
        widen: bool = False,
    ) -> UncertainPose:
        """Load a base (path of a checkpoint, a model, or a host) and the artifact made for it.

        uncalibrated: take heads that nothing has calibrated yet, as ``halopose train`` leaves them. widen: make
        covariances larger where a detection is unlike what was calibrated on.

        A folder is one that ``halopose export`` wrote: it runs in ONNX Runtime and has its calibration in it.
        base and artifact may also be names that ``halopose models`` lists, such as "runway". Without
        arguments: YOLO11n-pose, found or fetched by ``halopose.hosts.model_zoo``, with the heads that ship.
        """
        if isinstance(base, (str, Path)) and Path(base).is_dir():
            if widen:
                raise HaloposeError("a deployed model cannot widen: use the model it was exported from")
            return DeployedPose(Deployed(base), family)
        if base is None or isinstance(base, (str, Path)):
            base, found = model_zoo.resolve(base, artifact if isinstance(artifact, (str, Path)) else None)
            artifact = artifact if isinstance(artifact, Artifact) else found
        if base is None:
            base = model_zoo.find_base()
        if not isinstance(artifact, Artifact):
            artifact = Artifact.load(model_zoo.shipped_artifact() if artifact is None else artifact)
        host = host_for(artifact, base, device=device, unsafe=unsafe, end2end=end2end)
        return cls(host, artifact, family, uncalibrated=uncalibrated, widen=widen)

    def __call__(self, source: Any, **options: Any) -> list[PoseDistributions]:
        """``predict``."""
        return self.predict(source, **options)

    def __repr__(self) -> str:
        count, size = len(self.artifact.layout), self.artifact.imgsz
        return f"UncertainPose({self.host.description}, {count} keypoints, {self.family}, input {size})"

    @property
    def layout(self) -> Keypoints:
        """Which keypoints it predicts."""
        return self.artifact.layout

    @property
    def knows_novelty(self) -> bool:
        """Whether its poses say how unlike the data they are."""
        return self.novelty is not None

    def identity(self) -> list[Any]:
        """All of the model that predictions depend on, for telling runs apart."""
        return [self.artifact.base, self.widen, self.host.half, self.artifact.digest]

    def predict(
        self,
        source: Any,
        *,
        conf: float = 0.25,
        iou: float = 0.7,
        imgsz: int | None = None,
        family: Family | None = None,
        batch: int = 1,
    ) -> list[PoseDistributions]:
        """Poses of every image of a source, as ``stream`` gives them."""
        return [
            poses for _, poses in self.stream(source, conf=conf, iou=iou, imgsz=imgsz, family=family, batch=batch)
        ]

    def stream(
        self,
        source: Any,
        *,
        conf: float = 0.25,
        iou: float = 0.7,
        imgsz: int | None = None,
        family: Family | None = None,
        batch: int = 1,
    ) -> Iterator[tuple[NamedImage, PoseDistributions]]:
        """Images and their poses one by one, for videos and streams that do not fit in memory.

        batch: how many images are read at once; those of one shape run together. It is a matter of speed alone.
        """
        _check(conf, iou, imgsz, batch)
        distribution = None if family is None else _checked(family)
        return self._stream(source, batch, conf, iou, imgsz, distribution)

    def _stream(self, source: Any, batch: int, *settings: Any) -> Iterator[tuple[NamedImage, PoseDistributions]]:
        images = iter(read_source(source))
        while pending := list(islice(images, batch)):
            shapes: dict[tuple[int, ...], list[int]] = {}
            for number, image in enumerate(pending):
                shapes.setdefault(image.pixels.shape, []).append(number)
            found: dict[int, tuple[NamedImage, PoseDistributions]] = {}
            for numbers in shapes.values():
                alike = self._predict_batch([pending[number] for number in numbers], *settings)
                found.update(zip(numbers, alike, strict=True))
            yield from (found[number] for number in range(len(pending)))

    @torch.inference_mode()
    def _predict_batch(
        self, images: list[NamedImage], conf: float, iou: float, imgsz: int | None, family: Family | None
    ) -> list[tuple[NamedImage, PoseDistributions]]:
        batch, boxes = self.host.preprocess(
            [image.pixels for image in images], imgsz or self.artifact.imgsz, rectangular=True
        )
        output = self.host.forward(batch)
        selections = self.host.select(output, conf=conf, iou=iou, letterboxes=boxes)
        counts = [len(selection.scores) for selection in selections]
        cells = selections[0].cell
        numbers = torch.zeros_like(cells)
        if len(selections) > 1:
            numbers = torch.cat([torch.full_like(each.cell, number) for number, each in enumerate(selections)])
            cells = torch.cat([each.cell for each in selections])
        looks_beyond = self.heads.settings.signals and len(cells) > 0
        beyond = self.host.signals(output, numbers, cells) if looks_beyond else None
        pooling = None if self.novelty is None else Pooling(len(cells), self.novelty.widths, output.features[0])
        factors = self.heads.sparse(output.features, numbers, cells, beyond, pooling, self.few)
        size = (int(batch.shape[2]), int(batch.shape[3]))
        found = as_array(factors).astype(np.float64)
        parts = [found[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
        distribution = self.family if family is None else _checked(family)
        poses = [
            describe(
                self.artifact,
                self.host.to_original(selection, box, size),
                box.factors_to_original(part),
                distribution,
            )
            for selection, part, box in zip(selections, parts, boxes, strict=True)
        ]
        if self.novelty is not None and pooling is not None:
            vectors = pool_images(output.features, self.host.strides, [box.area for box in boxes])
            poses = with_novelty(self.novelty, poses, pooling, vectors, conf, self.widen)
        return list(zip(images, poses, strict=True))


class DeployedPose(UncertainPose):
    """The same face for a folder that ``halopose export`` wrote; images run one by one, whatever the batch."""

    def __init__(self, deployed: Deployed, family: Family = "gaussian") -> None:
        self.deployed, self.family = deployed, _checked(family)

    @property
    def layout(self) -> Keypoints:
        return self.deployed.layout

    @property
    def knows_novelty(self) -> bool:
        return self.deployed.facts.novelty is not None

    def __repr__(self) -> str:
        return f"DeployedPose({self.deployed.path}, {len(self.layout)} keypoints, {self.family})"

    def identity(self) -> list[Any]:
        return [self.deployed.digest, self.deployed.facts.visibility_threshold]

    def _predict_batch(
        self, images: list[NamedImage], conf: float, iou: float, imgsz: int | None, family: Family | None
    ) -> list[tuple[NamedImage, PoseDistributions]]:
        distribution, settings = family or self.family, Detecting(conf, iou, imgsz)
        return [(image, self.deployed.predict(image.pixels, settings, distribution)) for image in images]


def host_for(
    artifact: Artifact,
    base: Path | str | nn.Module | Host,
    *,
    device: torch.device | str | None = None,
    unsafe: bool = False,
    end2end: bool | None = None,
) -> Host:
    """The base an artifact was made for; with its one-to-one head if the artifact is for that one.

    A base may have such a head without using it by default.
    """
    host = load_host(base, device=device, unsafe=unsafe, end2end=end2end)
    if end2end is None and not artifact.fits(host):
        with suppress(HaloposeError):
            host = load_host(base, device=device, unsafe=unsafe, end2end=True)
    artifact.check(host)
    return host


def describe(
    artifact: Artifact,
    detections: Selection,
    factors: Array,
    family: Family,
    visibility_threshold: float | None = None,
) -> PoseDistributions:
    """Calibrate uncalibrated factors (N, K, 2, 2) of detections, both in original pixels, and prune (eq. 22).

    visibility_threshold: in place of the artifact's.
    """
    calibrations = artifact.calibrations
    boxes = detections.boxes.cpu().numpy()
    area = box_area(boxes)  # the predicted box's is all there is at inference
    visibility = None if detections.visibility is None else detections.visibility.cpu().numpy()
    dispersion = np.asarray(factors @ factors.swapaxes(-1, -2))
    spread = scale = calibrations.gaussian.covariance(dispersion)
    confidence = localization_confidence(spread, area * artifact.layout.area_factor, artifact.layout.kappa)
    if visibility_threshold is None:
        visibility_threshold = calibrations.visibility_threshold
    keep = keep_mask(confidence, calibrations.threshold, visibility, visibility_threshold)
    dof = offset = None
    if family != "gaussian":
        distribution = calibrations.distribution(torch.from_numpy(factors), family, torch.from_numpy(keep))
        spread, scale = distribution.covariance.numpy(), distribution.scale.numpy()
        dof = distribution.dof.numpy() if isinstance(distribution, StudentT) else None
    if calibrations.offset is not None:
        offset = calibrations.offset.numpy() * np.sqrt(area)[:, None, None]
    return PoseDistributions(
        boxes=boxes,
        scores=detections.scores.cpu().numpy(),
        keypoints=detections.keypoints.cpu().numpy(),
        covariance=spread,
        scale=scale,
        dof=dof,
        visibility=visibility,
        keep=keep,
        class_ids=detections.class_ids.cpu().numpy() + 1,
        offset=offset,
        **_promises(calibrations, dispersion, area),
    )


def _promises(calibrations: Calibrations, dispersion: Array, area: Array) -> dict[str, Any]:
    """What poses of objects of areas (N,) need for regions and the joint law, where the calibration has them."""
    found: dict[str, Any] = {}
    if calibrations.regions is not None:
        found = {"regions": calibrations.regions, "dispersion": dispersion}
    if calibrations.correlation is not None:
        found["correlation"] = calibrations.correlation.of_objects(area)
        found["together"] = calibrations.correlation.dof
    return found


def with_novelty(
    novelty: Novelty,
    poses: Sequence[PoseDistributions],
    pooling: Pooling,
    vectors: Tensor,
    conf: float,
    widen: bool = False,
) -> list[PoseDistributions]:
    """Poses of B images with the p-values of their detections and of themselves, from image vectors (B, D).

    conf: that of the detections, by which calibration detections are chosen. widen: covariances too.
    """
    scores = np.concatenate([each.scores for each in poses])
    counts = [len(each) for each in poses]
    whole, level, window, score = (
        alike(each, novelty.centre)
        for each in (vectors, pooling.level, pooling.window, torch.from_numpy(scores).to(vectors))
    )
    numbers = [number for number, count in enumerate(counts) for _ in range(count)]
    white = novelty.whitened(whole)
    value = novelty.value(Evidence(level, window, whole[numbers], score), white[numbers])
    chance = as_array(novelty.p_value(value, conf))
    images = as_array(novelty.image_p_value(novelty.image_value(whole, white)))
    factor = as_array(novelty.widen(value))[:, None, None, None].astype(np.float64) if widen else None
    result, begin = [], 0
    for number, (each, count) in enumerate(zip(poses, counts, strict=True)):
        part = slice(begin, begin + count)
        begin += count
        wide = {}
        if factor is not None:
            spreads = {name: getattr(each, name) for name in ("covariance", "scale", "dispersion")}
            wide = {name: value * factor[part] for name, value in spreads.items() if value is not None}
        result.append(replace(each, novelty=chance[part], image_novelty=images[number : number + 1], **wide))
    return result


def _check(conf: Any, iou: Any, imgsz: Any, batch: Any) -> None:
    """Refuse thresholds and sizes that are none, in one line."""
    for value in (conf, iou):
        if not isinstance(value, (float, Real)) or not 0 <= float(value) <= 1:
            raise HaloposeError(f"conf and iou lie between 0 and 1, got {conf!r} and {iou!r}")
    fits = imgsz is None or (isinstance(imgsz, (int, Integral)) and SMALLEST <= int(imgsz) <= LARGEST)
    if not fits or not isinstance(batch, (int, Integral)) or int(batch) < 1:
        raise HaloposeError(
            f"batch is 1 or more and imgsz from {SMALLEST} to {LARGEST}, both whole, got {batch!r} and {imgsz!r}"
        )


def _checked(family: str) -> Family:
    for known in FAMILIES:
        if family == known:
            return known
    raise HaloposeError(f"unknown family {family!r}: gaussian or student-t")
