"""A PyTorch pose model with uncertainty heads.

Boxes, scores and keypoints are bit-identical to those of the base model, in pixels of the original image.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from halopose.calibration.calibrated_poses import calibrated_poses
from halopose.data.images import NamedImage, read_source
from halopose.deploy.deployed_model import Detecting
from halopose.deploy.runtimes import (
    WINDOWS,
    Runtime,
    cached_export,
    open_exported,
    resolve_exported,
    resolve_runtime,
)
from halopose.errors import HaloposeError
from halopose.family import DEFAULT_FAMILY, Family
from halopose.fitting.artifact import Artifact, host_for
from halopose.hosts import model_zoo
from halopose.hosts.base import Host, Selection, on_host
from halopose.keypoints import Keypoints
from halopose.origin import Origin, Speed
from halopose.poses import PoseDistributions
from halopose.prediction.deployed_pose import DeployedPose
from halopose.prediction.out_of_distribution import add_p_values
from halopose.prediction.predictor import Predictor, checked_family, with_origin
from halopose.types import Array
from halopose.uncertainty.novelty import Pooling, pool_images


class UncertainPose(Predictor):
    """A frozen PyTorch model with calibrated uncertainty heads.

    >>> model = UncertainPose.load()  # or load("mine.pt", "mine.safetensors")
    >>> poses = model.predict("photo.jpg")[0]
    >>> poses.covariance.shape  # (N, K, 2, 2), squared pixels
    (1, 17, 2, 2)
    """

    def __init__(
        self,
        host: Host,
        artifact: Artifact,
        family: Family = DEFAULT_FAMILY,
        *,
        uncalibrated: bool = False,
        widen: bool = False,
    ) -> None:
        """Combine a loaded base model with the artifact made for it.

        Args:
            host: The frozen base model.
            artifact: Heads and calibrations fitted for this base model.
            family: Default distribution, "student-t" or "gaussian". ``covariance`` is that of the family.
            uncalibrated: Accept heads without calibration, as ``halopose train`` writes them.
            widen: Enlarge the covariances of out-of-distribution detections.
        """
        artifact.check(host)
        if not artifact.calibrated and not uncalibrated:
            raise HaloposeError(
                "these heads are not calibrated, so their covariances have no unit yet: calibrate them with "
                "`halopose calibrate`, or accept them with --uncalibrated (uncalibrated=True)"
            )
        if widen and artifact.novelty is None:
            raise HaloposeError(
                "this artifact has no out-of-distribution model, which --widen needs: add one with `halopose novelty`"
            )
        self.host, self.artifact = host, artifact
        # Channels-last weights match the layout of the feature windows; others would be copied in every prediction.
        self.heads = artifact.heads.to(host.device).eval()
        self.heads.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.family = checked_family(family)
        self.novelty = None if artifact.novelty is None else artifact.novelty.to(host.device)
        self.widen = widen

    @classmethod
    def load(
        cls,
        base: Path | str | nn.Module | Host | None = None,
        artifact: Path | str | Artifact | None = None,
        *,
        family: Family = DEFAULT_FAMILY,
        visibility_threshold: float | None = None,
        device: torch.device | str | None = None,
        unsafe: bool = False,
        end2end: bool | None = None,
        uncalibrated: bool = False,
        widen: bool = False,
        runtime: Runtime | None = None,
    ) -> UncertainPose | DeployedPose:
        """Load a base model and the artifact made for it, or a folder that ``halopose export`` wrote.

        Without arguments this is YOLO11n-pose, which is downloaded if necessary, with the shipped heads.

        Args:
            base: Path of a checkpoint, a model, a host, a name that ``halopose models`` lists, or an exported
                folder. A folder accepts only ``family``, ``visibility_threshold`` and ``runtime``.
            artifact: Path of the artifact, the artifact itself, or a name; default: the shipped heads.
            family: Default distribution, "student-t" or "gaussian". ``covariance`` is that of the family.
            visibility_threshold: Prune keypoints of lower visibility, instead of below the artifact's own
                threshold; 0 disables this rule.
            device: Torch device of the model, such as "cpu" or "cuda:0".
            unsafe: Allow checkpoints that may run code when they are loaded; for trusted files only.
            end2end: Head of a YOLO26 that has both; default: the one the artifact was made for.
            uncalibrated: Accept heads without calibration, as ``halopose train`` writes them.
            widen: Enlarge the covariances of out-of-distribution detections.
            runtime: "torch", whose detections equal the framework's bit for bit; "onnx" or "openvino", which export
                the model once into a cache and run it there; "auto" for a faster one that is installed. Default:
                ``$HALOPOSE_RUNTIME``, else the user's settings, else "torch". The result is a ``DeployedPose``
                unless PyTorch runs the model.
        """
        of_torch = {
            "device": device is not None and not str(device).startswith("cpu"),
            "uncalibrated": uncalibrated,
            "widen": widen,
        }
        needed = [name for name, used in of_torch.items() if used]
        if isinstance(base, (str, Path)) and Path(base).is_dir():
            given = {
                **of_torch,
                "artifact": artifact is not None,
                "device": device is not None,
                "unsafe": unsafe,
                "end2end": end2end is not None,
                "runtime torch": runtime == "torch",
            }
            ignored = [name for name, used in given.items() if used]
            if ignored:
                raise HaloposeError(
                    f"{base} is an exported folder, which does not support {', '.join(ignored)}: leave them out, "
                    "or load the model it was exported from"
                )
            return DeployedPose(open_exported(base, resolve_exported(runtime), visibility_threshold), family)
        chosen = resolve_runtime(runtime, needed)
        if chosen != "torch":
            folder = cls.exported(base, artifact, unsafe=unsafe, end2end=end2end)
            return DeployedPose(open_exported(folder, chosen, visibility_threshold), family)
        return cls.load_base(
            base,
            artifact,
            family=family,
            visibility_threshold=visibility_threshold,
            device=device,
            unsafe=unsafe,
            end2end=end2end,
            uncalibrated=uncalibrated,
            widen=widen,
        )

    @classmethod
    def load_base(
        cls,
        base: Path | str | nn.Module | Host | None = None,
        artifact: Path | str | Artifact | None = None,
        *,
        family: Family = DEFAULT_FAMILY,
        visibility_threshold: float | None = None,
        device: torch.device | str | None = None,
        unsafe: bool = False,
        end2end: bool | None = None,
        uncalibrated: bool = False,
        widen: bool = False,
    ) -> UncertainPose:
        """Like ``load``, but never an exported folder: the result has a ``host`` and an ``artifact``."""
        base, artifact = _model_of(base, artifact)
        if not isinstance(artifact, Artifact):
            artifact = Artifact.load(artifact)
        if visibility_threshold is not None:
            calibrations = replace(artifact.calibrations, visibility_threshold=visibility_threshold or None)
            artifact = replace(artifact, calibrations=calibrations)
        host = host_for(artifact, base, device=device, unsafe=unsafe, end2end=end2end)
        return cls(host, artifact, family, uncalibrated=uncalibrated, widen=widen)

    @classmethod
    def exported(
        cls,
        base: Path | str | nn.Module | Host | None = None,
        artifact: Path | str | Artifact | None = None,
        *,
        unsafe: bool = False,
        end2end: bool | None = None,
        windows: int = WINDOWS,
    ) -> Path:
        """Return the cached folder with the exported model, and export the model if the cache lacks it.

        Args:
            base: As in ``load``.
            artifact: As in ``load``.
            unsafe: As in ``load``.
            end2end: As in ``load``.
            windows: Number of cells per level that get covariances.
        """
        base, artifact = _model_of(base, artifact)

        def load() -> tuple[Host, Artifact]:
            pose = cls.load_base(base, artifact, unsafe=unsafe, end2end=end2end)
            return pose.host, pose.artifact

        return cached_export(base, artifact, load, end2end=end2end, windows=windows)

    def __repr__(self) -> str:
        count = len(self.layout)
        return f"UncertainPose({self.host.description}, {count} keypoints, {self.family}, input {self.imgsz})"

    @property
    def layout(self) -> Keypoints:
        """Names, sigmas and limbs of the predicted keypoints."""
        return self.artifact.layout

    @property
    def imgsz(self) -> int:
        """Default input size in pixels."""
        return self.artifact.imgsz

    @property
    def novelty_size(self) -> int | None:
        """Number of calibration images behind the p-values of images, or None."""
        return None if self.novelty is None else len(self.novelty.known_images)

    def identity(self) -> list[Any]:
        """Everything that predictions depend on, as JSON content; it differs between models."""
        return [self.artifact.base, self.widen, self.host.half, self.artifact.digest]

    def _stream(
        self, source: Any, settings: Detecting, family: Family, batch: int
    ) -> Iterator[tuple[NamedImage, PoseDistributions]]:
        images = iter(read_source(source))
        while True:
            began = time.perf_counter()
            pending = list(islice(images, batch))
            if not pending:
                return
            read = 1000 * (time.perf_counter() - began) / len(pending)
            shapes: dict[tuple[int, ...], list[int]] = {}
            for number, image in enumerate(pending):
                shapes.setdefault(image.pixels.shape, []).append(number)
            found: dict[int, PoseDistributions] = {}
            for numbers in shapes.values():
                same_shape = self._predict_batch([pending[number].pixels for number in numbers], settings, family)
                found.update(zip(numbers, same_shape, strict=True))
            yield from ((image, with_origin(found[number], image, read)) for number, image in enumerate(pending))

    @torch.inference_mode()
    def _predict_batch(self, images: list[Array], settings: Detecting, family: Family) -> list[PoseDistributions]:
        began = time.perf_counter()
        batch, letterboxes = self.host.preprocess(images, settings.imgsz or self.imgsz, rectangular=True)
        output = self.host.forward(batch)
        selections = self.host.select(output, conf=settings.conf, iou=settings.iou, letterboxes=letterboxes)
        found = time.perf_counter()  # non-maximum suppression has synchronised the device
        counts = [len(selection.scores) for selection in selections]
        cells = torch.cat([each.cell for each in selections])
        numbers = torch.repeat_interleave(torch.tensor(counts))  # on the host, where the counts are known
        needed = self.heads.settings.context_features and len(cells) > 0
        context = self.host.context_features(output, numbers, cells) if needed else None
        pooling = None if self.novelty is None else Pooling(len(cells), self.novelty.widths, output.features[0])
        factors = self.heads.sparse(output.features, numbers, cells, context, pooling)
        size = (int(batch.shape[2]), int(batch.shape[3]))
        parts = np.split(factors.cpu().numpy().astype(np.float64), np.cumsum(counts)[:-1])
        selections = on_host(selections) if self.host.device != torch.device("cpu") else selections
        poses = [
            calibrated_poses(
                _detections(self.host.to_original(selection, letterbox, size)),
                letterbox.factors_to_original(part),
                self.artifact.calibrations,
                self.layout,
                family,
            )
            for selection, part, letterbox in zip(selections, parts, letterboxes, strict=True)
        ]
        if self.novelty is not None and pooling is not None:
            vectors = pool_images(output.features, self.host.strides, [box.area for box in letterboxes])
            poses = add_p_values(self.novelty, poses, pooling, vectors, settings.conf, self.widen)
        durations = found - began, time.perf_counter() - found
        speed = Speed(0.0, *(1000 * duration / len(images) for duration in durations))
        origin = Origin(layout=self.layout, speed=speed)
        return [replace(each, origin=origin) for each in poses]


def _model_of(
    base: Path | str | nn.Module | Host | None, artifact: Path | str | Artifact | None
) -> tuple[Path | str | nn.Module | Host, Path | str | Artifact]:
    """Base model and artifact, with those that are shipped where none is given."""
    if isinstance(base, (nn.Module, Host)):
        return base, model_zoo.shipped_artifact() if artifact is None else artifact
    if isinstance(artifact, Artifact):
        return model_zoo.resolve(base, None)[0] or model_zoo.find_base(), artifact
    return model_zoo.model_files(base, artifact)


def _detections(selection: Selection) -> PoseDistributions:
    """Detections in pixels of the image, with zero covariances until they are calibrated."""
    keypoints = selection.keypoints.cpu().numpy()
    zero = np.zeros((*keypoints.shape, 2))
    return PoseDistributions(
        boxes=selection.boxes.cpu().numpy(),
        scores=selection.scores.cpu().numpy(),
        keypoints=keypoints,
        covariance=zero,
        scale=zero,
        visibility=None if selection.visibility is None else selection.visibility.cpu().numpy(),
        class_ids=selection.class_ids.cpu().numpy() + 1,
    )
