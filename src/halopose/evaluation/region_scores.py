"""What an evaluation finds of regions, the joint law and alarms, as plain frozen dataclasses with their json."""

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
    """Share that regions of ``REGION_LEVELS`` hold, half the width of its 95 % interval, and of how many."""

    held: tuple[float, ...]
    margin: tuple[float, ...]
    count: int

    def at(self, level: int) -> float:
        """What a region of ``level`` per cent holds."""
        return self.held[REGION_LEVELS.index(level)]

    def to_json(self) -> dict[str, Any]:
        """Held and margin by level, and the count."""
        tables = {name: _named(REGION_LEVELS, getattr(self, name)) for name in ("held", "margin")}
        return {**tables, "count": self.count}

    @classmethod
    def from_json(cls, content: Any) -> CoverageEstimate:
        """The inverse of ``to_json``."""
        held, margin = (_values(REGION_LEVELS, content[name]) for name in ("held", "margin"))
        return cls(held, margin, int(content["count"]))


@dataclass(frozen=True)
class RegionScores:
    """Coverage of conformal regions: of keypoints, each of them and each object scale, and of whole objects.

    whole: all labelled keypoints of an object at once; whole_kept: those that pruning keeps. size: median radius
    in pixels of a circle as large as a keypoint's region, by level.
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
    """Nats a keypoint: of the joint law, of independent keypoints, the gain and half its interval's width."""

    nll: float
    independent: float
    gain: float
    margin: float


@dataclass(frozen=True)
class JointScores:
    """Joint NLL by law, and the correlation (2K, 2K) behind it, its dof and shrinkage, averages over folds."""

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
            raise ValueError("a correlation of another number of keypoints")
        return cls(distributions, matrix, _number(content["dof"], math.inf), _number(content["shrinkage"]))


@dataclass(frozen=True)
class FlaggedShare:
    """Share that novelty flags at ``ALARM_RATES``, its standard error over images, and of how many."""

    share: tuple[float, ...]
    error: tuple[float, ...]
    count: int

    @classmethod
    def of(cls, chance: Array, image: Array) -> FlaggedShare:
        """From p-values (n,) and the image (n,) of each."""
        found = [clustered_share(chance <= rate / 100, image) for rate in ALARM_RATES]
        return cls(tuple(share for share, _ in found), tuple(error for _, error in found), len(chance))

    def to_json(self) -> dict[str, Any]:
        """Share and error by rate, and the count."""
        tables = {name: _named(ALARM_RATES, getattr(self, name)) for name in ("share", "error")}
        return {**tables, "count": self.count}

    @classmethod
    def from_json(cls, content: Any) -> FlaggedShare:
        """The inverse of ``to_json``."""
        share, error = (_values(ALARM_RATES, content[name]) for name in ("share", "error"))
        return cls(share, error, int(content["count"]))


@dataclass(frozen=True)
class NoveltyScores:
    """What novelty flags of detections of at least a confidence, and of images, none of which it has seen.

    held_kept and held_flagged: share of labelled keypoints in their 95 % ellipse, of detections that are not
    flagged at each of ``ALARM_RATES`` and of those that are.
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
    """A number; json has null for those that are not finite."""
    return missing if value is None else float(value)
