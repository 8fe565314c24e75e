"""Recommended settings, by rules on the content of analysis.json. The constants of the rules are at the top."""

from __future__ import annotations

from typing import Any

import numpy as np

from halopose.calibration.estimation import NU_MAX
from halopose.uncertainty.pruning import GAMMA_KS

NU_HEAVY = 10.0  # Student-t below this nu, if its gain in likelihood is significant
MIN_RATIO, MIN_CORRELATION, MIN_SHARE = 1.1, 0.05, 0.25  # effect that justifies a parameter, in this share of keypoints
SCALE_RATIO = 2.0  # residuals in pixels of large over small objects; above it, scale weights help
MIN_EFFECTIVE = 0.1  # smallest effective share of samples under importance weights
UNRELIABLE = (0.03, 0.4)  # share of keypoints below the pruning similarity
DEPENDENT = 0.2  # largest correlation with another keypoint; from here on keypoints are not independent


def recommend(result: dict[str, Any]) -> list[dict[str, str]]:
    """Recommended settings, each with ``setting``, ``value`` and ``why``."""
    rules = (_distribution, _dispersion, _alpha, _scale_weight, _pruning_similarity, _joint)
    return [rule(result) for rule in rules]


def _distribution(result: dict[str, Any]) -> dict[str, str]:
    tail = result["tails"]["binned"]
    low = tail["gain_interval"][0]
    heavy = tail["nu_median"] < NU_HEAVY and low > 0
    why = (
        f"With the residuals scaled by bins of visibility and object scale, the median nu is "
        f"{_nu(tail['nu_median'])}. A Student-t gains {tail['gain_mean']:.3f} nats per keypoint over a Gaussian "
        f"(at least {max(low, 0):.3f} at 95 %). {100 * tail['beyond_3']['empirical']:.2f} % of the residuals exceed "
        f"3 standard deviations; {100 * tail['beyond_3']['gaussian']:.2f} % are expected for a Gaussian."
    )
    return {"setting": "distribution", "value": "student-t" if heavy else "gaussian", "why": why}


def _nu(value: float) -> str:
    return "unbounded" if value >= NU_MAX else f"{value:.1f}"


def _dispersion(result: dict[str, Any]) -> dict[str, str]:
    image = result["shape"]["image"]
    tested = max(int(image["judged"].sum()), 1)
    correlated = np.zeros(len(image["judged"]), dtype=bool)
    for frame in result["shape"].values():
        correlated |= frame["correlation_significant"] & (np.abs(frame["correlation"]) >= MIN_CORRELATION)
    anisotropic = image["ratio_significant"] & (np.maximum(image["ratio"], 1 / image["ratio"]) >= MIN_RATIO)
    value = "isotropic"
    if correlated.sum() >= MIN_SHARE * tested:
        value = "full"
    elif anisotropic.sum() >= MIN_SHARE * tested:
        value = "diagonal"
    why = (
        f"{int(correlated.sum())} of {tested} keypoints have correlated errors in x and y, in the image or relative to "
        f"the limb. {int(anisotropic.sum())} have different errors in x and y."
    )
    return {"setting": "dispersion", "value": value, "why": why}


def _alpha(result: dict[str, Any]) -> dict[str, str]:
    rows = result["shift"]["weights"]
    allowed = [row for row in rows if row["effective"] >= MIN_EFFECTIVE] or rows[:1]
    best = min(allowed, key=lambda row: (round(row["distance"], 3), row["alpha"]))
    why = (
        f"With these weights the distribution of the residual radius in training differs from inference by "
        f"{best['distance']:.3f} (Kolmogorov distance; {rows[0]['distance']:.3f} without weights). "
        f"{100 * best['effective']:.0f} % of the samples remain effective."
    )
    return {"setting": "alpha", "value": f"{best['alpha']:g}", "why": why}


def _scale_weight(result: dict[str, Any]) -> dict[str, str]:
    ratio = result["dependence"]["scale"]["pixels_ratio"]
    why = (
        f"Between small and large objects the residuals differ {ratio:.1f}-fold in pixels and "
        f"{result['dependence']['scale']['normalized_ratio']:.1f}-fold in units of object scale. "
        f"Scale weights are recommended above {SCALE_RATIO:g}-fold in pixels."
    )
    return {"setting": "scale-weight", "value": "on" if ratio > SCALE_RATIO else "off", "why": why}


def _pruning_similarity(result: dict[str, Any]) -> dict[str, str]:
    thresholds, below = (np.asarray(result["similarity"][key]) for key in ("threshold", "below"))
    share = float(np.interp(GAMMA_KS, thresholds, below))
    fits = (below >= UNRELIABLE[0]) & (below <= UNRELIABLE[1])
    value = GAMMA_KS
    if not UNRELIABLE[0] <= share <= UNRELIABLE[1] and fits.any():
        value = float(min(thresholds[fits], key=lambda threshold: abs(threshold - GAMMA_KS)))
    why = (
        f"{100 * float(np.interp(value, thresholds, below)):.1f} % of the keypoints are below it "
        f"({100 * share:.1f} % below {GAMMA_KS:g}). A threshold can be learnt if this share is between "
        f"{100 * UNRELIABLE[0]:g} and {100 * UNRELIABLE[1]:g} %."
    )
    return {"setting": "pruning similarity", "value": f"{value:g}", "why": why}


def _joint(result: dict[str, Any]) -> dict[str, str]:
    correlation = result["keypoint_correlation"]["best_partner"]
    dependent = correlation >= DEPENDENT  # False for NaN
    why = f"The error of a keypoint has a correlation of {correlation:.2f} with that of its closest partner (mean)."
    if not np.isfinite(correlation):
        why = "Too few instances have two labelled keypoints."
    elif dependent:
        why += " Methods that assume independent keypoints (PnP, filters) will be overconfident."
    return {"setting": "keypoints", "value": "dependent" if dependent else "independent", "why": why}
