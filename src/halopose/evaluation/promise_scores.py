"""What an evaluation finds of regions and of the joint law, as plain frozen dataclasses with their json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from halopose.types import Array
from halopose.uncertainty.conformal import CONDITION

REGION_LEVELS = (80, 90, 95, 99)  # per cent


@dataclass(frozen=True)
class Promise:
    """Share that regions of ``REGION_LEVELS`` hold, half the width of its 95 % interval, and of how many."""

    held: tuple[float, ...]
    margin: tuple[float, ...]
    count: int

    def at(self, level: int) -> float:
        """What a region of ``level`` per cent holds."""
        return self.held[REGION_LEVELS.index(level)]

    def to_json(self) -> dict[str, Any]:
        """Held and margin by level, and the count."""
        tables = {
            name: dict(zip(map(str, REGION_LEVELS), values, strict=True))
            for name, values in (("held", self.held), ("margin", self.margin))
        }
        return {**tables, "count": self.count}

    @classmethod
    def from_json(cls, content: Any) -> Promise:
        """The inverse of ``to_json``."""
        held, margin = (
            tuple(_number(content[name][str(level)]) for level in REGION_LEVELS) for name in ("held", "margin")
        )
        return cls(held, margin, int(content["count"]))


@dataclass(frozen=True)
class RegionScores:
    """Coverage of conformal regions: of keypoints, each of them and each object scale, and of whole objects.

    whole: all labelled keypoints of an object at once; whole_kept: those that pruning keeps. size: median radius
    in pixels of a circle as large as a keypoint's region, by level.
    """

    keypoints: Promise
    per_keypoint: Mapping[str, Promise]
    per_scale: Mapping[str, Promise]
    whole: Promise
    whole_kept: Promise
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
            "size": dict(zip(map(str, REGION_LEVELS), self.size, strict=True)),
        }

    @classmethod
    def from_json(cls, content: Any) -> RegionScores:
        """The inverse of ``to_json``."""
        groups: dict[str, Any] = {
            group: {str(name): Promise.from_json(one) for name, one in content[group].items()}
            for group in ("per_keypoint", "per_scale")
        }
        single: dict[str, Any] = {
            name: Promise.from_json(content[name]) for name in ("keypoints", "whole", "whole_kept")
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

    laws: Mapping[str, JointNll]
    correlation: Array
    dof: float
    shrinkage: float

    def to_json(self) -> dict[str, Any]:
        """The ``joint`` of metrics.json."""
        laws = {name: dict(vars(one)) for name, one in self.laws.items()}
        return {**laws, "correlation": self.correlation, "dof": self.dof, "shrinkage": self.shrinkage}

    @classmethod
    def from_json(cls, content: Any, keypoints: int) -> JointScores:
        """The inverse of ``to_json``."""
        rest = ("correlation", "dof", "shrinkage")
        laws = {
            str(name): JointNll(*(_number(one[key]) for key in ("nll", "independent", "gain", "margin")))
            for name, one in content.items()
            if name not in rest
        }
        matrix = np.array(content["correlation"], dtype=float)
        if matrix.shape != (2 * keypoints, 2 * keypoints):
            raise ValueError("a correlation of another number of keypoints")
        return cls(laws, matrix, _number(content["dof"], math.inf), _number(content["shrinkage"]))


def _number(value: Any, missing: float = math.nan) -> float:
    """A number; json has null for those that are not finite."""
    return missing if value is None else float(value)


__all__ = ["REGION_LEVELS", "JointNll", "JointScores", "Promise", "RegionScores"]
