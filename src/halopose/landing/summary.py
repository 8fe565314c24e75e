"""Summary of a flight: counts, errors, and consistency of errors with covariances."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy import stats

from halopose.landing.association import NO_RUNWAY
from halopose.landing.flight import Flight
from halopose.landing.navigation.fusion import consistency
from halopose.landing.requirements import LEVEL_AXES, count_stanford
from halopose.types import Array

AXES = ("x", "y", "z")


def distances(error: Array, covariance: Array) -> Array:
    """Return squared Mahalanobis distances (N,) of errors (N, 3); NaN without a covariance."""
    result = np.full(len(error), np.nan)
    known = np.isfinite(error).all(1) & np.isfinite(covariance).all((1, 2))
    solved = np.linalg.solve(covariance[known], error[known][..., None])[..., 0]
    result[known] = (error[known] * solved).sum(1)
    return result


def total_covariance(flight: Flight) -> Array:
    """Return the covariance (N, 3, 3) of single vision fixes, including the bias of attitude and mounting."""
    sensor = flight.settings.sensors.attitude
    variance = np.zeros(3) if sensor is None else np.square(sensor.bias.sigma)
    variance = variance + flight.settings.camera.turn_variance(flight.scenario.camera)
    carried = flight.vision_fixes.sensitivity
    return np.asarray(flight.vision_fixes.covariance + (carried * variance) @ np.swapaxes(carried, 1, 2))


def summarise(flight: Flight) -> dict[str, Any]:
    """Return counts, errors and consistency of a flight, as written to ``log.json``."""
    fixes = flight.vision_fixes
    vision, fused = fixes.position - flight.position, flight.fused - flight.position
    limit = float(stats.chi2.ppf(0.95, 3))
    outside = distances(vision, total_covariance(flight)) > limit
    solved, trusted = fixes.solved, fixes.trusted & fixes.solved
    true = np.isfinite(flight.position).all(1)  # a log of true positions may cover a part of the flight
    error, required = fixes.error(flight.position), flight.settings.approach_requirement
    beyond = (np.abs(error) > fixes.levels).any(1)
    judged = consistency(flight.nees, 3) if flight.has_truth else None
    return {
        "frames": len(flight.frame_times),
        "frames_with_detections": len(flight.frame_times)
        - sum(reason == NO_RUNWAY for reason in flight.corner_detections.reasons),
        "runway_detected": int(flight.corner_detections.seen.sum()),
        "position_solved": int(solved.sum()),
        "trusted": int(trusted.sum()),
        **({"truth_known": int(true.sum())} if flight.has_truth and not true.all() else {}),
        "corner_excluded": int((fixes.excluded[trusted] >= 0).sum()),
        "vision_outside_95": _share(outside, solved & true),
        "trusted_vision_outside_95": _share(outside, trusted & true),
        "beyond_protection_level": int((beyond & trusted).sum()),
        "available": {
            f"{name} within {limit:g} m ({required.name})": asdict(
                count_stanford(error[trusted, axis], fixes.levels[trusted, axis], limit)
            )
            for axis, (name, limit) in enumerate(zip(LEVEL_AXES, required.limits.tolist(), strict=True))
            if np.isfinite(limit)
        },
        "fused_nees": judged.mean if judged else float("nan"),
        "fused_nees_inside_95": judged.inside if judged else float("nan"),
        "root_mean_square_error": {
            axis: {"vision": _rms(vision[trusted & true, n]), "fused": _rms(fused[true, n])}
            for n, axis in enumerate(AXES)
        },
        "rejected_by_filter": dict(flight.track.rejected),
        "frames_not_used_because": dict(
            Counter(why for why, good in zip(fixes.reasons, trusted, strict=True) if not good)
        ),
        "levels_overdrawn": bool(trusted.any() and np.isinf(fixes.levels[trusted]).all()),
        "valid": float(flight.track.output.valid(required).mean()),
        "seconds_flagged_because": _flagged(flight),
    }


def _flagged(flight: Flight) -> dict[str, float]:
    """Return the seconds for which the position was flagged, by reason."""
    count = Counter(word for words in flight.track.output.flags for word in words)
    return {word: frames / flight.settings.rate for word, frames in count.items()}


def _share(flags: Array, among: Array) -> float:
    return float(flags[among].mean()) if among.any() else float("nan")


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if len(values) else float("nan")
