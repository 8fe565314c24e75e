"""Settings to begin with, by rules from what an analysis of residuals found.

In: the content of analysis.json as analysed. Out: what to set, to what, and why, in words. Every number that a
rule rests on is a constant at the top.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halopose.calibration.estimation import NU_MAX
from halopose.uncertainty.pruning import GAMMA_KS

NU_HEAVY = 10.0  # Student-t below this, if the likelihood gains beyond its interval
MIN_RATIO, MIN_CORRELATION, MIN_SHARE = 1.1, 0.05, 0.25  # an effect worth a parameter, in a quarter of keypoints
SCALE_RATIO = 2.0  # spread in pixels of large over small objects from which scale weights pay
MIN_EFFECTIVE = 0.1  # weights that leave fewer effective samples are not recommended
UNRELIABLE = (0.03, 0.4)  # share of keypoints that a pruning similarity should call unreliable
DEPENDENT = 0.2  # correlation with the closest partner from which keypoints are not independent


def recommend(result: dict[str, Any]) -> list[dict[str, str]]:
    """Settings to begin with: what, value, why. The rules are the constants above."""
    rules = (_distribution, _dispersion, _alpha, _scale_weight, _pruning_similarity, _joint)
    return [rule(result) for rule in rules]


def _distribution(result: dict[str, Any]) -> dict[str, str]:
    tail = result["tails"]["binned"]
    low = tail["gain_interval"][0]
    heavy = tail["nu_median"] < NU_HEAVY and low > 0
    why = (
        f"with the spread explained by bins, nu is {_nu(tail['nu_median'])} in the median and a Student-t gains "
        f"{tail['gain_mean']:.3f} nats a keypoint (at least {max(low, 0):.3f}); "
        f"{100 * tail['beyond_3']['empirical']:.2f} % of residuals lie beyond 3 deviations, "
        f"a Gaussian expects {100 * tail['beyond_3']['gaussian']:.2f} %"
    )
    return {"setting": "law", "value": "student-t" if heavy else "gaussian", "why": why}


def _nu(value: float) -> str:
    return "unbounded" if value >= NU_MAX else f"{value:.1f}"


def _dispersion(result: dict[str, Any]) -> dict[str, str]:
    image = result["shape"]["image"]
    judged = max(int(image["judged"].sum()), 1)
    turned = np.zeros(len(image["judged"]), dtype=bool)
    for frame in result["shape"].values():
        turned |= frame["correlation_significant"] & (np.abs(frame["correlation"]) >= MIN_CORRELATION)
    stretched = image["ratio_significant"] & (np.maximum(image["ratio"], 1 / image["ratio"]) >= MIN_RATIO)
    value = "isotropic"
    if turned.sum() >= MIN_SHARE * judged:
        value = "full"
    elif stretched.sum() >= MIN_SHARE * judged:
        value = "diagonal"
    why = (
        f"of {judged} keypoints {int(turned.sum())} have errors in x and y that correlate, by themselves or with "
        f"the limb's direction, and {int(stretched.sum())} spread differently in x than in y"
    )
    return {"setting": "dispersion", "value": value, "why": why}


def _alpha(result: dict[str, Any]) -> dict[str, str]:
    rows = result["shift"]["weights"]
    allowed = [row for row in rows if row["effective"] >= MIN_EFFECTIVE] or rows[:1]
    best = min(allowed, key=lambda row: (round(row["distance"], 3), row["alpha"]))
    why = (
        f"the radii of weighted training cells then lie within {best['distance']:.3f} of those at inference "
        f"(unweighted {rows[0]['distance']:.3f}), "
        f"and {100 * best['effective']:.0f} % of the samples stay effective"
    )
    return {"setting": "alpha", "value": f"{best['alpha']:g}", "why": why}


def _scale_weight(result: dict[str, Any]) -> dict[str, str]:
    ratio = result["dependence"]["scale"]["pixels_ratio"]
    why = (
        f"from the smallest to the largest objects the spread changes {ratio:.1f}-fold in pixels, "
        f"{result['dependence']['scale']['normalized_ratio']:.1f}-fold in units of object scale; "
        f"weights pay from {SCALE_RATIO:g}-fold in pixels"
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
        f"{100 * float(np.interp(value, thresholds, below)):.1f} % of the keypoints fall short of it, enough to "
        f"learn a threshold from and not the bulk (at {GAMMA_KS:g}: {100 * share:.1f} %)"
    )
    return {"setting": "pruning similarity", "value": f"{value:g}", "why": why}


def _joint(result: dict[str, Any]) -> dict[str, str]:
    correlation = result["keypoint_correlation"]["best_partner"]
    dependent = correlation >= DEPENDENT  # False for NaN
    why = f"a keypoint's error correlates by {correlation:.2f} with that of its closest partner"
    if not np.isfinite(correlation):
        why = "too few instances have two keypoints to tell"
    elif dependent:
        why += ": what fuses keypoints as independent (PnP, filters) will be overconfident"
    return {"setting": "keypoints", "value": "dependent" if dependent else "independent", "why": why}
