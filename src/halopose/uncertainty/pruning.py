"""Pruning of unreliable keypoints by their predicted covariance (paper, section 3.3).

Pruning is a mask: coordinates do not change.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import numpy as np

from halopose.errors import HaloposeError
from halopose.types import Array

Scalarisation = Literal["trace", "determinant", "eigenvalue"]
ThresholdRule = Literal["youden", "distance", "f1"]
RULES = (*get_args(ThresholdRule), "risk:0.05@0.95")
_RISK_RULE = re.compile(r"risk:([0-9.]+)@([0-9.]+)")

GAMMA_KS = 0.5  # a keypoint is reliable if its similarity reaches this, COCO's lowest threshold


def scalarise(covariance: Array, scalarisation: Scalarisation = "trace") -> Array:
    """Return the size (...) of covariances (..., 2, 2): trace, square root of the determinant, or larger eigenvalue."""
    xx, xy, yy = covariance[..., 0, 0], covariance[..., 0, 1], covariance[..., 1, 1]
    if scalarisation == "trace":
        return np.asarray(xx + yy)
    if scalarisation == "determinant":
        return np.asarray(np.sqrt(np.maximum(xx * yy - xy**2, 0)))
    if scalarisation == "eigenvalue":
        return np.asarray((xx + yy) / 2 + np.hypot((xx - yy) / 2, xy))
    raise HaloposeError(f"unknown scalarisation {scalarisation!r}: trace, determinant or eigenvalue")


def localization_confidence(
    covariance: Array, area: Array, kappa: Array, scalarisation: Scalarisation = "trace"
) -> Array:
    """Return c (..., K) = -phi(covariance) / (s^2 kappa^2) of covariances (..., K, 2, 2) and areas (...) (eq. 19)."""
    return -scalarise(covariance, scalarisation) / (np.asarray(area)[..., None] * np.asarray(kappa) ** 2)


def risk_guarantee(rule: str) -> tuple[float, float] | None:
    """Return risk and certainty of a rule such as ``risk:0.05@0.95``; None for the rules of ``select_threshold``."""
    if rule in get_args(ThresholdRule):
        return None
    found = _RISK_RULE.fullmatch(rule)
    try:
        risk, certainty = (float(part) for part in found.groups()) if found else (0.0, 0.0)
    except ValueError:
        risk = certainty = 0.0
    if not (0 < risk < 1 and 0.5 <= certainty < 1):
        raise HaloposeError(
            f"unknown threshold rule {rule!r}: {', '.join(RULES[:-1])}, or a guarantee such as {RULES[-1]}: at most "
            "5 % of the kept keypoints are wrong, with 95 % certainty"
        )
    return risk, certainty


def keep_mask(
    confidence: Array,
    threshold: float | Array,
    visibility: Array | None = None,
    visibility_threshold: float | Array | None = None,
) -> Array:
    """Return which keypoints (..., K) to keep: visible enough and confident enough (eq. 22).

    Without a visibility score, or without a threshold for it, only the confidence decides.
    """
    keep = confidence >= threshold
    if visibility is not None and visibility_threshold is not None:
        keep = keep & (visibility >= visibility_threshold)
    return np.asarray(keep)
