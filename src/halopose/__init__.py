"""Calibrated predictive distributions for the keypoints of trained, frozen pose models.

The names below are the public API. Each is imported on first use, so ``import halopose`` loads neither torch nor
numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halopose.calibration.calibrators import GaussianCalibration, StudentTCalibration
    from halopose.errors import HaloposeError
    from halopose.evaluation.evaluate import evaluate
    from halopose.evaluation.scores import Scores
    from halopose.fitting.artifact import Artifact
    from halopose.fitting.pipeline import fit
    from halopose.fitting.settings import FitSettings
    from halopose.keypoints import Keypoints
    from halopose.poses import GroundTruth, PoseDistributions
    from halopose.prediction.uncertain_pose import UncertainPose
    from halopose.protocol import Protocol
    from halopose.uncertainty.distributions import Gaussian, StudentT

__version__ = "0.1.0"

_HOMES = {
    "Artifact": "halopose.fitting.artifact",
    "FitSettings": "halopose.fitting.settings",
    "Gaussian": "halopose.uncertainty.distributions",
    "GaussianCalibration": "halopose.calibration.calibrators",
    "GroundTruth": "halopose.poses",
    "HaloposeError": "halopose.errors",
    "Keypoints": "halopose.keypoints",
    "PoseDistributions": "halopose.poses",
    "Protocol": "halopose.protocol",
    "Scores": "halopose.evaluation.scores",
    "StudentT": "halopose.uncertainty.distributions",
    "StudentTCalibration": "halopose.calibration.calibrators",
    "UncertainPose": "halopose.prediction.uncertain_pose",
    "evaluate": "halopose.evaluation.evaluate",
    "fit": "halopose.fitting.pipeline",
}

__all__ = [
    "Artifact",
    "FitSettings",
    "Gaussian",
    "GaussianCalibration",
    "GroundTruth",
    "HaloposeError",
    "Keypoints",
    "PoseDistributions",
    "Protocol",
    "Scores",
    "StudentT",
    "StudentTCalibration",
    "UncertainPose",
    "__version__",
    "evaluate",
    "fit",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
