"""A deployed folder used like any base model; it runs with ``predict.py``, the runtime that the folder contains."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from halopose.calibration.correlation import Correlation
from halopose.errors import HaloposeError
from halopose.install_advice import install_command
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.runtime.predict import Detections, Facts, Model, Problem, Run, check_seal, covariances, describe
from halopose.types import Array
from halopose.uncertainty.regions import Regions

MODEL, CARD = "model.onnx", "card.json"


@dataclass(frozen=True)
class Detecting:
    """Detection settings.

    Attributes:
        conf: Confidence threshold.
        iou: IoU threshold of non-maximum suppression.
        imgsz: Input size; None for that of the model.
        detections: Largest number of detections per image.
    """

    conf: float = 0.25
    iou: float = 0.7
    imgsz: int | None = None
    detections: int = 300


class Deployed:
    """An exported model.

    Args:
        path: Deployed folder or model file.
        run: Function that runs the graph in another runtime; default ONNX Runtime.
        visibility: Visibility threshold of pruning; default that of the file, 0 for no pruning.
    """

    def __init__(self, path: Path | str, run: Run | None = None, visibility: float | None = None) -> None:
        path = Path(path)
        self.path = path / MODEL if path.is_dir() else path
        with _user_errors():
            self.model = Model(str(self.path)) if run is None else Model(str(self.path), run, _read_facts(self.path))
        self.runtime = "onnx" if run is None else "other"
        self.facts = self.model.facts
        if self.facts.fixed is not None:
            raise HaloposeError(
                f"{self.path} is an end2end graph, which states no dispersions: export it as topk for this command"
            )
        if visibility is not None:
            self.facts = replace(self.facts, visibility_threshold=visibility or None)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the model file."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    @property
    def layout(self) -> Keypoints:
        """Keypoint layout of the model."""
        facts = self.facts
        names = facts.keypoint_names
        return Keypoints.of(len(names), names=names, sigmas=facts.sigmas, area_factor=facts.area_factor)

    def predict(self, image: Array, settings: Detecting, family: str) -> PoseDistributions:
        """Predict calibrated poses of one image (h, w, 3)."""
        with _user_errors():
            poses = describe(self.facts, self._detect(image, settings), family)
        found = {field.name: getattr(poses, field.name) for field in fields(poses)}
        return PoseDistributions(**found | self._joint)

    @cached_property
    def _joint(self) -> dict[str, Any]:
        """Conformal regions and joint degrees of freedom as types of the package."""
        count, facts = len(self.facts.keypoint_names), self.facts
        try:
            regions = None if facts.regions is None else Regions.from_json(facts.regions, count)
            found = None if facts.correlation is None else Correlation.from_json(facts.correlation, count)
        except (KeyError, TypeError, ValueError):
            raise HaloposeError(f"{self.path}: the regions or the correlation are damaged: export it again") from None
        return {"regions": regions, **({} if found is None else {"joint_dof": found.dof})}

    def uncalibrated(self, image: Array, settings: Detecting) -> PoseDistributions:
        """Predict poses with the uncalibrated dispersions of the heads: the Gaussian temperature is divided out."""
        with _user_errors():
            found = self._detect(image, settings)
        covariance = covariances(found.factors / np.asarray(self.facts.temperature)[:, None])
        return PoseDistributions(
            boxes=found.boxes.astype(np.float64),
            scores=found.scores.astype(np.float64),
            keypoints=found.keypoints.astype(np.float64),
            covariance=covariance,
            scale=covariance,
            visibility=None if found.visibility is None else found.visibility.astype(np.float64),
            class_ids=found.class_ids,
        )

    def _detect(self, image: Array, settings: Detecting) -> Detections:
        return self.model.detect(image, settings.conf, settings.iou, settings.imgsz, settings.detections)


def _read_facts(path: Path) -> Facts:
    """Read the metadata of a model file without a runtime."""
    import onnx

    check_seal(str(path))
    properties = onnx.load(str(path)).metadata_props
    return Facts.read({entry.key: entry.value for entry in properties}, str(path))


@contextmanager
def _user_errors() -> Iterator[None]:
    """Convert user errors of the runtime to ``HaloposeError``."""
    try:
        yield
    except Problem as problem:
        raise HaloposeError(str(problem)) from None
    except ImportError:
        raise HaloposeError(f"this needs the onnx extra: {install_command('onnx')}") from None
