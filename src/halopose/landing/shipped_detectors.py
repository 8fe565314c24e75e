"""The shipped runway detectors and their artifacts, as files of the distribution ``halopose_models``."""

from __future__ import annotations

from pathlib import Path

# Scenes that the artifact of the runway detector is fitted on; the detector was trained on scenes of another seed.
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
    """Return the path of its artifact, calibrated on scenes that look like frames of real cameras."""
    return _packaged("runway-footage-heads.safetensors")


def _packaged(name: str) -> Path:
    from halopose.hosts.model_zoo import packaged_file

    return packaged_file(name)
