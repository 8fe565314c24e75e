"""The public face: a frozen base with calibrated uncertainty.

In: images from anywhere. Out: a ``PoseDistributions`` per image, in original pixels, whose boxes, scores and
keypoints are the base's own, bit for bit.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halopose.data.images import NamedImage, read_source
from halopose.deploy.deployed import Deployed, Detecting
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts import shipped as hub
from halopose.hosts.base import Host, Letterbox, Selection
from halopose.poses import Array, PoseDistributions
from halopose.uncertainty.calibration import Family
from halopose.uncertainty.distributions import Bivariate, StudentT
from halopose.uncertainty.pruning import keep_mask, localization_confidence

FAMILIES: tuple[Family, ...] = ("gaussian", "student-t")


class UncertainPose:
    """Predicts poses with a distribution per keypoint.

    >>> model = UncertainPose.load()  # or load("mine.pt", "mine.safetensors")
    >>> poses = model.predict("photo.jpg")[0]
    >>> poses.covariance  # (N, K, 2, 2), squared pixels
    """

    def __init__(self, host: Host, artifact: Artifact, family: Family = "gaussian") -> None:
        artifact.check(host)
        self.host, self.artifact = host, artifact
        self.heads = artifact.heads.to(host.device).eval()
        self.family = _checked(family)

    @property
    def keypoint_names(self) -> tuple[str, ...]:
        return self.artifact.keypoint_names

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
    ) -> UncertainPose:
        """Load a base (path of a checkpoint, a model, or a host) and the artifact made for it.

        Without arguments: YOLO11n-pose, found or fetched by ``halopose.hosts.shipped``, with the heads that ship.
        A folder is one that ``halopose export`` wrote: it runs in ONNX Runtime and has its calibration in it.
        """
        if isinstance(base, (str, Path)) and Path(base).is_dir():
            return DeployedPose(Deployed(base), family)
        if not isinstance(artifact, Artifact):
            artifact = Artifact.load(hub.shipped_artifact() if artifact is None else artifact)
        if base is None:
            base = hub.find_base()
        host = load_host(base, device=device, unsafe=unsafe, end2end=end2end)
        if end2end is None and not artifact.fits(host):
            host = _other_head(base, device, unsafe, host)
        return cls(host, artifact, family)

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
        """Images and their poses one by one, for videos and streams that do not fit in memory."""
        if not 0 <= conf <= 1 or not 0 <= iou <= 1:
            raise HaloposeError(f"conf and iou lie between 0 and 1, got {conf} and {iou}")
        pending: list[NamedImage] = []
        for image in read_source(source):
            pending.append(image)
            if len(pending) == batch:
                yield from self._predict_batch(pending, conf, iou, imgsz, family)
                pending = []
        if pending:
            yield from self._predict_batch(pending, conf, iou, imgsz, family)

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
        numbers = torch.repeat_interleave(torch.tensor(counts)).to(batch.device)
        factors = self.heads.sparse(
            output.features, numbers, torch.cat([selection.cell for selection in selections])
        )
        size = (int(batch.shape[2]), int(batch.shape[3]))
        return [
            (image, self._poses(selection, part, box, size, family))
            for image, selection, part, box in zip(images, selections, factors.split(counts), boxes, strict=True)
        ]

    def _poses(
        self,
        selection: Selection,
        factors: Tensor,
        box: Letterbox,
        size: tuple[int, int],
        family: Family | None,
    ) -> PoseDistributions:
        original = self.host.to_original(selection, box, size)
        return describe(
            self.artifact,
            original,
            box.factors_to_original(factors.cpu().double()),
            self.family if family is None else _checked(family),
        )


class DeployedPose(UncertainPose):
    """The same face for a folder that ``halopose export`` wrote; images run one by one, whatever the batch."""

    def __init__(self, deployed: Deployed, family: Family = "gaussian") -> None:
        self.deployed, self.family = deployed, _checked(family)

    @property
    def keypoint_names(self) -> tuple[str, ...]:
        return self.deployed.keypoint_names

    def _predict_batch(
        self, images: list[NamedImage], conf: float, iou: float, imgsz: int | None, family: Family | None
    ) -> list[tuple[NamedImage, PoseDistributions]]:
        law, settings = family or self.family, Detecting(conf, iou, imgsz)
        return [(image, self.deployed.predict(image.pixels, settings, law)) for image in images]


def describe(artifact: Artifact, detections: Selection, factors: Tensor, family: Family) -> PoseDistributions:
    """Calibrate uncalibrated factors (N, K, 2, 2) of detections, both in original pixels."""
    law: Bivariate = artifact.gaussian(factors) if family == "gaussian" else artifact.student(factors)
    covariance = law.covariance.numpy()
    boxes = detections.boxes.cpu().numpy()
    visibility = None if detections.visibility is None else detections.visibility.cpu().numpy()
    return PoseDistributions(
        boxes=boxes,
        scores=detections.scores.cpu().numpy(),
        keypoints=detections.keypoints.cpu().numpy(),
        covariance=covariance,
        scale=law.scale.numpy(),
        dof=law.dof.numpy() if isinstance(law, StudentT) else None,
        visibility=visibility,
        keep=keep_mask(
            _confidence(artifact, artifact.gaussian(factors).covariance.numpy(), boxes), artifact.threshold
        ),
        class_ids=detections.class_ids.cpu().numpy() + 1,
    )


def _confidence(artifact: Artifact, covariance: Array, boxes: Array) -> Array:
    """Localization confidence with the predicted box's area, which is all there is at inference."""
    area = np.maximum((boxes[:, 2:] - boxes[:, :2]).prod(1), 1.0) * artifact.area_factor
    return localization_confidence(covariance, area, np.asarray(artifact.sigmas))


def load_host(
    base: Path | str | nn.Module | Host,
    *,
    device: torch.device | str | None = None,
    unsafe: bool = False,
    end2end: bool | None = None,
    sigmas: Sequence[float] | Array | None = None,
) -> Host:
    """The host for a base, told by the model's class or by the names of the weights in a checkpoint."""
    if isinstance(base, Host):
        return base
    _check_device(device)
    options: dict[str, Any] = {"device": device, "end2end": end2end, "sigmas": sigmas}
    if is_yolonas(base):
        from halopose.hosts.yolonas.host import YoloNASHost

        if isinstance(base, nn.Module):
            return YoloNASHost(base, **options)
        return YoloNASHost.load(base, unsafe=unsafe, **options)
    from halopose.hosts.ultralytics.host import UltralyticsHost

    if isinstance(base, nn.Module):
        return UltralyticsHost(base, **options)
    return UltralyticsHost.load(base, unsafe=unsafe, **options)


def _check_device(device: torch.device | str | None) -> None:
    """Put nothing there, to see whether anything could be."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # the latter where torch was built without CUDA
        raise HaloposeError(
            f"no device {str(device)!r} here: give cpu, or cuda, cuda:1, mps where torch has them"
        ) from None


def is_yolonas(base: Path | str | nn.Module) -> bool:
    """Whether a base is of that framework. Looks at bytes: a checkpoint's pickle lies in its file uncompressed."""
    if isinstance(base, nn.Module):
        return type(base).__module__.startswith("libreyolo.")
    path = Path(base)
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"heads.head1.cls_pred.weight") >= 0


def _other_head(base: Any, device: Any, unsafe: bool, host: Host) -> Host:
    """The base with its one-to-one head, which it may have without using it by default."""
    try:
        return load_host(base, device=device, unsafe=unsafe, end2end=True)
    except HaloposeError:
        return host


def _checked(family: str) -> Family:
    for known in FAMILIES:
        if family == known:
            return known
    raise HaloposeError(f"unknown family {family!r}: gaussian or student-t")


__all__ = ["UncertainPose", "describe", "is_yolonas", "load_host"]
