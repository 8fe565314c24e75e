"""The shipped runway detectors and their artifacts, as files of the distribution ``halopose_models``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from halopose.errors import HaloposeError

if TYPE_CHECKING:
    from halopose.prediction.predictor import Predictor

# Number of scenes that the heads were fitted on; the detector was trained on another seed.
RUNWAY_IMAGES = {"train": 1800, "val": 900}
RUNWAY_SEED = 2


def runway_detector() -> Path:
    """Return the path of the shipped runway detector."""
    return _packaged("runway.safetensors")


def runway_artifact() -> Path:
    """Return the path of the artifact for the runway detector."""
    return _packaged("runway-heads.safetensors")


def footage_detector() -> Path:
    """Return the path of the shipped runway detector for real cameras."""
    return _packaged("runway-footage.safetensors")


def footage_artifact() -> Path:
    """Return the path of the artifact for the runway detector for real cameras, calibrated on scenes in the style of
    footage.
    """
    return _packaged("runway-footage-heads.safetensors")


def check_model_options(
    base: Path | None, artifact: Path | None, *, device: str | None = None, widen: bool = False
) -> None:
    """Raise an error for options of a detector that contradict each other.

    Raises:
        HaloposeError: A checkpoint without its artifact, or an exported folder with options that it does not take.
    """
    if base is None:
        return
    if base.is_dir():
        given = {"artifact": artifact is not None, "device": device is not None, "widen": widen}
        unused = next((name for name, used in given.items() if used), None)
        if unused:
            raise HaloposeError(f"{base} is an exported folder, which does not take --{unused}: remove the option")
    elif artifact is None:
        raise HaloposeError("give --base and --artifact together: an artifact belongs to one detector")


def load_detector(
    base: Path | None = None,
    artifact: Path | None = None,
    *,
    footage: bool = False,
    device: str | None = None,
    widen: bool = False,
) -> Predictor:
    """Load a runway detector with its artifact.

    Args:
        base: checkpoint, or a folder that ``halopose export`` wrote; default: the shipped detector.
        artifact: artifact made for the detector; default: the shipped one.
        footage: which shipped detector: the one for real cameras, or the one for simulated flights.
        device: torch device such as "cpu" or "cuda:0".
        widen: enlarge the covariances of out-of-distribution detections.
    """
    from halopose.prediction.uncertain_pose import UncertainPose

    check_model_options(base, artifact, device=device, widen=widen)
    if base is not None and base.is_dir():
        return UncertainPose.load(base, family="gaussian")
    detector, heads = (footage_detector, footage_artifact) if footage else (runway_detector, runway_artifact)
    return UncertainPose.load(base or detector(), artifact or heads(), family="gaussian", device=device, widen=widen)


def _packaged(name: str) -> Path:
    from halopose.hosts.model_zoo import packaged_file

    return packaged_file(name)
