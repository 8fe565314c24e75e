"""A flight in numbers: how far vision and the filter are off, and whether they said so.

In: a ``Flight``. Out: a plain dictionary for the terminal, the page and the log.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy import stats

from halopose.landing.flight import Flight
from halopose.landing.navigation.fusion import consistency
from halopose.landing.requirements import LEVELS, stanford
from halopose.types import Array

AXES = ("x", "y", "z")


def distances(error: Array, covariance: Array) -> Array:
    """Squared Mahalanobis distances (N,) of errors (N, 3); NaN where there is no covariance."""
    result = np.full(len(error), np.nan)
    known = np.isfinite(error).all(1) & np.isfinite(covariance).all((1, 2))
    solved = np.linalg.solve(covariance[known], error[known][..., None])[..., 0]
    result[known] = (error[known] * solved).sum(1)
    return result


def total_covariance(flight: Flight) -> Array:
    """Covariance (N, 3, 3) of a single vision fix, with the bias of the attitude and of the mounting."""
    sensor = flight.settings.sensors.attitude
    variance = np.zeros(3) if sensor is None else np.square(sensor.bias.sigma)
    variance = variance + flight.settings.camera.mounting**2
    carried = flight.fixes.sensitivity
    return np.asarray(flight.fixes.covariance + (carried * variance) @ np.swapaxes(carried, 1, 2))


def summarise(flight: Flight) -> dict[str, Any]:
    """Counts, errors and consistency of a flight."""
    fixes = flight.fixes
    vision, fused = fixes.position - flight.position, flight.fused - flight.position
    limit = float(stats.chi2.ppf(0.95, 3))
    outside = distances(vision, total_covariance(flight)) > limit
    solved, trusted = fixes.solved, fixes.trusted & fixes.solved
    error, required = fixes.error(flight.position), flight.settings.required
    beyond = (np.abs(error) > fixes.levels).any(1)
    judged = consistency(flight.nees, 3) if flight.judged else None
    return {
        "frames": len(flight.frame_times),
        "runway_detected": int(flight.sightings.seen.sum()),
        "position_solved": int(solved.sum()),
        "trusted": int(trusted.sum()),
        "corner_excluded": int((fixes.excluded[trusted] >= 0).sum()),
        "vision_outside_95": _share(outside, solved),
        "trusted_vision_outside_95": _share(outside, trusted),
        "beyond_protection_level": int((beyond & trusted).sum()),
        "available": {
            f"{name} within {limit:g} m ({required.name})": asdict(
                stanford(error[trusted, axis], fixes.levels[trusted, axis], limit)
            )
            for axis, (name, limit) in enumerate(zip(LEVELS, required.limits.tolist(), strict=True))
            if np.isfinite(limit)
        },
        "fused_nees": judged.mean if judged else float("nan"),
        "fused_nees_inside_95": judged.inside if judged else float("nan"),
        "root_mean_square_error": {
            axis: {"vision": _rms(vision[trusted, n]), "fused": _rms(fused[:, n])} for n, axis in enumerate(AXES)
        },
        "rejected_by_filter": dict(flight.track.rejected),
        "frames_not_used_because": dict(
            Counter(why for why, good in zip(fixes.reasons, trusted, strict=True) if not good)
        ),
        "seconds_flagged_because": _flagged(flight),
    }


def _flagged(flight: Flight) -> dict[str, float]:
    """Seconds for which the navigator was not to be relied upon, by reason."""
    count = Counter(word for words in flight.track.answers.flags for word in words)
    return {word: frames / flight.settings.rate for word, frames in count.items()}


def to_text(summary: dict[str, Any]) -> str:
    """The summary for the terminal."""
    errors = summary["root_mean_square_error"]
    lines = [
        f"{summary['frames']} frames: runway detected in {summary['runway_detected']}, position solved in "
        f"{summary['position_solved']}, trusted in {summary['trusted']}",
        f"{'RMSE, metres':16}" + "".join(f"{axis:>10}" for axis in errors),
    ]
    for source, name in (("vision", "trusted vision"), ("fused", "fused")):
        cells = [row[source] for row in errors.values()]
        lines.append(f"{name:16}" + "".join(f"{'-' if np.isnan(cell) else f'{cell:.2f}':>10}" for cell in cells))
    if summary["position_solved"]:
        outside = f"outside its 95 % ellipsoid: {100 * summary['vision_outside_95']:.0f} % of vision"
        if summary["trusted"]:
            outside += f", {100 * summary['trusted_vision_outside_95']:.0f} % of what is trusted"
        lines.append(outside)
    if np.isnan(summary["fused_nees"]):
        lines = [line for line in lines[:1] if line]
        lines.append(
            "nobody knows the truth of this flight: no errors, what positions say of themselves is on the page"
        )
        return "\n".join([*lines, *_reasons(summary)])
    inside = f"{100 * summary['fused_nees_inside_95']:.0f} % inside its 95 % bounds"
    lines.append(f"fused NEES {summary['fused_nees']:.1f}, where 3 is expected, {inside}")
    return "\n".join([*lines, *_reasons(summary)])


def _reasons(summary: dict[str, Any]) -> list[str]:
    lost = [f"{count} frames not used: {why}" for why, count in summary["frames_not_used_because"].items()]
    return lost + [f"flagged for {time:g} s: {why}" for why, time in summary["seconds_flagged_because"].items()]


def _share(flags: Array, among: Array) -> float:
    return float(flags[among].mean()) if among.any() else float("nan")


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if len(values) else float("nan")
