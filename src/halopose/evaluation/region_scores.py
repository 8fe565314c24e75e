"""Result types for conformal regions, the joint distribution and out-of-distribution alarms, with their json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from halopose.evaluation.bootstrap import clustered_share
from halopose.types import Array
from halopose.uncertainty.regions import CONDITION

REGION_LEVELS = (80, 90, 95, 99)  # per cent
ALARM_RATES = (1, 5, 10)  # per cent


@dataclass(frozen=True)
class CoverageEstimate:
    """Coverage of regions at ``REGION_LEVELS``.

    Attributes:
        held: (4,) share of samples inside the region, by level; NaN where calibration had too few images for a
            region of finite size.
        margin: (4,) half the width of the 95 % interval of each share.
        count: Number of samples.
    """

    held: tuple[float, ...]
    margin: tuple[float, ...]
    count: int

    def at(self, level: int) -> float:
        """Coverage of the region of ``level`` per cent."""
        return self.held[REGION_LEVELS.index(level)]

    def to_json(self) -> dict[str, Any]:
        """Shares and margins by level, and the count."""
        tables = {name: _named(REGION_LEVELS, getattr(self, name)) for name in ("held", "margin")}
        return {**tables, "count": self.count}

    @classmethod
    def from_json(cls, content: Any) -> CoverageEstimate:
        """The inverse of ``to_json``."""
        held, margin = (_values(REGION_LEVELS, content[name]) for name in ("held", "margin"))
        return cls(held, margin, int(content["count"]))


@dataclass(frozen=True)
class RegionScores:
    """Coverage of conformal regions.

    Attributes:
        keypoints: Coverage of single keypoints.
        per_keypoint: The same by keypoint name.
        per_scale: The same by object scale.
        whole: Coverage of all labelled keypoints of an object at once.
        whole_kept: The same over the keypoints that pruning keeps.
        size: (4,) median radius in pixels of a circle with the area of the region, by level.
    """

    keypoints: CoverageEstimate
    per_keypoint: Mapping[str, CoverageEstimate]
    per_scale: Mapping[str, CoverageEstimate]
    whole: CoverageEstimate
    whole_kept: CoverageEstimate
    size: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """The ``regions`` of metrics.json."""
        return {
            "condition": CONDITION,
            "keypoints": self.keypoints.to_json(),
            "per_keypoint": {name: one.to_json() for name, one in self.per_keypoint.items()},
            "per_scale": {name: one.to_json() for name, one in self.per_scale.items()},
            "whole": self.whole.to_json(),
            "whole_kept": self.whole_kept.to_json(),
            "size": _named(REGION_LEVELS, self.size),
        }

    @classmethod
    def from_json(cls, content: Any) -> RegionScores:
        """The inverse of ``to_json``."""
        groups: dict[str, Any] = {
            group: {str(name): CoverageEstimate.from_json(one) for name, one in content[group].items()}
            for group in ("per_keypoint", "per_scale")
        }
        single: dict[str, Any] = {
            name: CoverageEstimate.from_json(content[name]) for name in ("keypoints", "whole", "whole_kept")
        }
        size = tuple(_number(content["size"][str(level)], math.inf) for level in REGION_LEVELS)
        return cls(**groups, **single, size=size)


@dataclass(frozen=True)
class JointNll:
    """NLL in nats per keypoint.

    Attributes:
        nll: NLL of the joint distribution.
        independent: NLL with independent keypoints.
        gain: ``independent`` - ``nll``.
        margin: Half the width of the 95 % interval of the gain.
    """

    nll: float
    independent: float
    gain: float
    margin: float


@dataclass(frozen=True)
class JointScores:
    """Scores of the joint distribution of all keypoints of an object.

    Attributes:
        distributions: Joint NLL by distribution.
        correlation: (2K, 2K) correlation of whitened residuals, mean over folds.
        dof: Degrees of freedom, median over folds.
        shrinkage: Shrinkage of the correlation, mean over folds.
    """

    distributions: Mapping[str, JointNll]
    correlation: Array
    dof: float
    shrinkage: float

    def to_json(self) -> dict[str, Any]:
        """The ``joint`` of metrics.json."""
        distributions = {name: dict(vars(one)) for name, one in self.distributions.items()}
        return {**distributions, "correlation": self.correlation, "dof": self.dof, "shrinkage": self.shrinkage}

    @classmethod
    def from_json(cls, content: Any, keypoints: int) -> JointScores:
        """The inverse of ``to_json``."""
        rest = ("correlation", "dof", "shrinkage")
        distributions = {
            str(name): JointNll(*(_number(one[key]) for key in ("nll", "independent", "gain", "margin")))
            for name, one in content.items()
            if name not in rest
        }
        matrix = np.array(content["correlation"], dtype=float)
        if matrix.shape != (2 * keypoints, 2 * keypoints):
            raise ValueError("the correlation has a different number of keypoints")
        return cls(distributions, matrix, _number(content["dof"], math.inf), _number(content["shrinkage"]))


@dataclass(frozen=True)
class FlaggedShare:
    """Share flagged as out of distribution at ``ALARM_RATES``.

    Attributes:
        share: (3,) share of samples with a p-value at or below the rate.
        error: (3,) standard error of each share, with images as clusters.
        count: Number of samples.
    """

    share: tuple[float, ...]
    error: tuple[float, ...]
    count: int

    @classmethod
    def of(cls, p_value: Array, image: Array) -> FlaggedShare:
        """Compute from p-values (n,) and the image (n,) of each."""
        found = [clustered_share(p_value <= rate / 100, image) for rate in ALARM_RATES]
        return cls(tuple(share for share, _ in found), tuple(error for _, error in found), len(p_value))

    def to_json(self) -> dict[str, Any]:
        """Shares and standard errors by rate, and the count."""
        tables = {name: _named(ALARM_RATES, getattr(self, name)) for name in ("share", "error")}
        return {**tables, "count": self.count}

    @classmethod
    def from_json(cls, content: Any) -> FlaggedShare:
        """The inverse of ``to_json``."""
        share, error = (_values(ALARM_RATES, content[name]) for name in ("share", "error"))
        return cls(share, error, int(content["count"]))


@dataclass(frozen=True)
class NoveltyScores:
    """Out-of-distribution alarms on images that were not used to calibrate them.

    Attributes:
        confidence: Lowest confidence of the detections.
        detections: Share of detections flagged.
        images: Share of images flagged.
        held_kept: (3,) share of labelled keypoints inside the 95 % ellipse, over detections not flagged at each of
            ``ALARM_RATES``.
        held_flagged: (3,) the same over flagged detections.
    """

    confidence: float
    detections: FlaggedShare
    images: FlaggedShare
    held_kept: tuple[float, ...]
    held_flagged: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """The ``novelty`` of metrics.json."""
        return {
            "confidence": self.confidence,
            "detections": self.detections.to_json(),
            "images": self.images.to_json(),
            "held_kept": _named(ALARM_RATES, self.held_kept),
            "held_flagged": _named(ALARM_RATES, self.held_flagged),
        }

    @classmethod
    def from_json(cls, content: Any) -> NoveltyScores:
        """The inverse of ``to_json``."""
        return cls(
            float(content["confidence"]),
            FlaggedShare.from_json(content["detections"]),
            FlaggedShare.from_json(content["images"]),
            _values(ALARM_RATES, content["held_kept"]),
            _values(ALARM_RATES, content["held_flagged"]),
        )


def _named(levels: tuple[int, ...], values: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(map(str, levels), values, strict=True))


def _values(levels: tuple[int, ...], content: Any) -> tuple[float, ...]:
    return tuple(_number(content[str(level)]) for level in levels)


def _number(value: Any, missing: float = math.nan) -> float:
    """A number; null in json stands for a value that is not finite."""
    return missing if value is None else float(value)
