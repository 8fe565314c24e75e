"""Result types of one kind of match: calibration with noise floors, proper scores and groups of keypoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from halopose.evaluation.metrics.selective import SelectiveEstimate, SelectiveScores
from halopose.types import Array

MATCH_LEVELS = (50, 90, 95, 99)  # per cent
CONDITIONS = {
    "oks": "detections that match an object with OKS >= {oks_threshold:g}",
    "box": "detections with score >= {score_threshold:g} whose box matches an object with IoU >= {iou_threshold:g}",
}


@dataclass(frozen=True)
class NoiseFloor:
    """Calibration error that a perfectly calibrated model shows on the same images: its mean and 95 % range.

    >>> NoiseFloor(0.004, 0.002, 0.007).compatible(0.006)
    True
    """

    expected: float
    low: float
    high: float

    def compatible(self, value: float) -> bool:
        """Whether a measured error is compatible with perfect calibration: not above the 95 % range."""
        return bool(value <= self.high)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> NoiseFloor:
        """The inverse of ``vars``."""
        high = content["high"]
        return cls(_number(content["expected"]), _number(content["low"]), np.inf if high is None else float(high))


UNKNOWN_FLOOR = NoiseFloor(float("nan"), float("nan"), float("inf"))


@dataclass(frozen=True)
class ProperScores:
    """Proper scores (losses), sharpness and PIT histogram of one distribution.

    Attributes:
        energy: Mean energy score in pixels.
        crps_x: Mean CRPS along x in pixels.
        crps_y: Mean CRPS along y in pixels.
        nll_relative: Mean NLL in nats of residuals divided by the object scale s, which weights objects of all sizes
            equally.
        sharpness: Median area of the 90 % ellipse over s^2.
        pit: Histogram (20,) of the probability of the smallest ellipse that contains the true keypoint.
    """

    energy: float
    crps_x: float
    crps_y: float
    nll_relative: float
    sharpness: float
    pit: Array


@dataclass(frozen=True)
class MatchedDistribution:
    """Calibration of one distribution.

    Attributes:
        ace: ACE.
        ence: ENCE.
        nll: NLL in nats, in pixels.
        coverage: Coverage of ellipses by level in per cent.
        floors: Noise floors by metric.
        proper: Proper scores.
    """

    ace: float
    ence: float
    nll: float
    coverage: Mapping[int, float]
    floors: Mapping[str, NoiseFloor]
    proper: ProperScores

    def compatible(self, metric: str = "ace") -> bool:
        """Whether an error is compatible with perfect calibration."""
        return self.floors[metric].compatible(float(getattr(self, metric)))


@dataclass(frozen=True)
class GroupCalibration:
    """Calibration of a group of keypoints under one distribution: ACE, its floor, and coverage by level."""

    ace: float
    floor: NoiseFloor
    coverage: Mapping[int, float]


@dataclass(frozen=True)
class KeypointGroup:
    """A group of keypoints.

    Attributes:
        kind: Property that defines the groups, such as "visibility flag".
        name: Value of the property, such as "occluded".
        count: Number of keypoints.
        images: Number of images they are in.
        distributions: Calibration by distribution.
    """

    kind: str
    name: str
    count: int
    images: int
    distributions: Mapping[str, GroupCalibration]


@dataclass(frozen=True)
class MatchScores:
    """Calibration on one kind of true positives.

    Attributes:
        condition: Which detections are true positives, in words.
        images: Number of images.
        instances: Number of true positives.
        keypoints: Number of labelled keypoints.
        distributions: Calibration by distribution.
        groups: Conditional calibration by groups of keypoints.
        selective: How well the localization confidence separates correct from wrong keypoints.
        regions: Coverage of conformal regions by level in per cent; None without regions.
    """

    condition: str
    images: int
    instances: int
    keypoints: int
    distributions: Mapping[str, MatchedDistribution]
    groups: tuple[KeypointGroup, ...]
    selective: SelectiveScores
    regions: Mapping[int, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """An entry of ``matches`` in metrics.json."""
        return _texts(asdict(self))

    @classmethod
    def from_json(cls, content: Any) -> MatchScores:
        """The inverse of ``to_json``."""
        selective = dict(content["selective"])
        wrong = _number(selective.pop("wrong"))
        estimates = {
            name: SelectiveEstimate(_number(one["value"]), _number(one["margin"])) for name, one in selective.items()
        }
        regions = content["regions"]
        return cls(
            condition=str(content["condition"]),
            **{name: int(content[name]) for name in ("images", "instances", "keypoints")},
            distributions={str(name): _distribution(one) for name, one in content["distributions"].items()},
            groups=tuple(_group(one) for one in content["groups"]),
            selective=SelectiveScores(**estimates, wrong=wrong),
            regions=None if regions is None else _levels(regions),
        )


def _texts(content: Any) -> Any:
    """JSON content: keys as strings, tuples as lists."""
    if isinstance(content, Mapping):
        return {str(key): _texts(value) for key, value in content.items()}
    return [_texts(value) for value in content] if isinstance(content, (list, tuple)) else content


def _distribution(content: Any) -> MatchedDistribution:
    proper = content["proper"]
    names = ("energy", "crps_x", "crps_y", "nll_relative", "sharpness")
    return MatchedDistribution(
        **{name: _number(content[name]) for name in ("ace", "ence", "nll")},
        coverage=_levels(content["coverage"]),
        floors={str(name): NoiseFloor.from_json(one) for name, one in content["floors"].items()},
        proper=ProperScores(**{name: _number(proper[name]) for name in names}, pit=np.array(proper["pit"], float)),
    )


def _group(content: Any) -> KeypointGroup:
    distributions = {
        str(name): GroupCalibration(_number(one["ace"]), NoiseFloor.from_json(one["floor"]), _levels(one["coverage"]))
        for name, one in content["distributions"].items()
    }
    counts = int(content["count"]), int(content["images"])
    return KeypointGroup(str(content["kind"]), str(content["name"]), *counts, distributions)


def _levels(content: Mapping[Any, Any]) -> dict[int, float]:
    return {int(level): _number(value) for level, value in content.items()}


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
