"""Verdict on an evaluation in a few sentences, the top of the report. Deviations within chance are not mentioned."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import NormalDist, median

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.evaluation.scores import Scores
from halopose.reports.match_report import match_sentences

MIN_SAMPLES = 100
TOLERANCE = 0.01  # deviations of coverage up to this need no action
_STANDARD_ERRORS = 3.0
_HEAVY_DOF = 10.0  # with more degrees of freedom a Student-t differs little from a Gaussian
_ACE_MATTERS = 0.005
_ACE_EQUAL = 0.001


def verdict(scores: Scores) -> list[str]:
    """Sentences on calibration, tails, ranking and pruning, the most important first."""
    count = scores.keypoints
    if count < MIN_SAMPLES:
        return [f"Too few keypoints for a verdict: {count} matched, at least {MIN_SAMPLES} are needed."]
    sentences = [
        *_uncalibrated(scores),
        *_worst_groups(scores),
        *_calibration(scores),
        *_remaining_error(scores),
        *match_sentences(scores),
        *_ranking(scores),
        *_pruning(scores),
    ]
    return sentences or ["No verdict: the metrics are empty."]


def better_family(scores: Scores) -> str | None:
    """Family whose calibration has the lower ACE, if it improves the given predictions by an amount that matters."""
    found = {name: scores.distribution(name).ace for name in ("gaussian", "student_t", "uncalibrated")}
    if scores.keypoints < MIN_SAMPLES or not all(map(math.isfinite, found.values())):
        return None
    best = "student_t" if found["student_t"] <= found["gaussian"] else "gaussian"
    return best.replace("_", "-") if found["uncalibrated"] - found[best] > _ACE_MATTERS else None


def is_miscalibrated(scores: Scores) -> bool:
    """Whether the calibrated Student-t's 95 % ellipses hold another share than 95 %, beyond chance."""
    held = coverage_at(scores, "student_t", 95)
    return scores.keypoints >= MIN_SAMPLES and held is not None and abs(held - 0.95) > _margin(0.95, scores.keypoints)


def coverage_at(scores: Scores, distribution: str, level: int) -> float | None:
    """Joint coverage of the ellipses; None if unknown.

    Args:
        scores: The scores.
        distribution: Name of the distribution.
        level: Nominal probability in per cent.
    """
    curve = _curve(scores, distribution)
    return curve[level - 1] if curve else None


def _curve(scores: Scores, distribution: str) -> list[float] | None:
    """Joint coverage (99,) at 1 to 99 %; None if a level is missing."""
    curve = [float(value) for value in scores.distribution(distribution).curves.coverage["joint"]]
    return curve if len(curve) == 99 and all(map(math.isfinite, curve)) else None


def _percent(share: float) -> str:
    """A share in per cent; one decimal close to 0 and 100 %, where rounding would claim none or all."""
    if 0 < share < 0.0005:
        return "less than 0.1 %"
    if 0.9995 <= share < 1:
        return "more than 99.9 %"
    return f"{100 * share:.{1 if 0 < share < 0.01 or 0.99 < share < 1 else 0}f} %"


def _ace(value: float) -> str:
    return f"{value:.{3 if value >= 0.001 else 4}f}"


def _margin(level: float, count: float, comparisons: int = 1) -> float:
    """Largest deviation of coverage that chance explains: three standard errors, Bonferroni-corrected."""
    tail = NormalDist().cdf(-_STANDARD_ERRORS) / max(comparisons, 1)
    return max(TOLERANCE, -NormalDist().inv_cdf(tail) * math.sqrt(level * (1 - level) / count))


# --- calibration of all keypoints -----------------------------------------------------------------------


def _uncalibrated(scores: Scores) -> list[str]:
    """Calibration of the given distribution: too narrow, too wide, of the wrong shape, or right."""
    curve, count = _curve(scores, "uncalibrated"), scores.keypoints
    if curve is None:
        return []
    deviation = {level: curve[level - 1] - level / 100 for level in range(1, 100)}
    worst = max(deviation, key=lambda level: abs(deviation[level]))
    if abs(deviation[worst]) <= TOLERANCE:
        return ["The given predictions are well calibrated: coverage is within 1 % of nominal at every level."]
    sign = {
        level: (value > margin) - (value < -margin)
        for level, value in deviation.items()
        for margin in [_margin(level / 100, count, 1 if level in (50, 95) else 99)]
    }
    centre, tail = sign[50], sign[95]
    if not (centre or tail or sign[worst]):
        return [
            f"The given predictions show no significant miscalibration on {count:,} keypoints "
            f"(largest deviation of coverage {_percent(abs(deviation[worst]))})."
        ]
    if centre * tail < 0:
        first, second = ("underconfident", "overconfident") if centre > 0 else ("overconfident", "underconfident")
        return [
            f"The given predictions are {first} in the centre and {second} in the tails: 50 % ellipses contain "
            f"{_percent(curve[49])} of the true keypoints, 95 % ellipses {_percent(curve[94])}."
        ]
    level = 95 if tail else 50 if centre else worst
    kind = "overconfident" if sign[level] < 0 else "underconfident"
    return [
        f"The given predictions are {kind}: {level} % ellipses contain {_percent(curve[level - 1])} "
        "of the true keypoints."
    ]


def _calibration(scores: Scores) -> list[str]:
    """Effect of both calibrations on ACE, and heavy tails."""
    given, gaussian, student = scores.uncalibrated.ace, scores.gaussian.ace, scores.student_t.ace
    if not all(map(math.isfinite, (given, gaussian, student))):
        return []
    if max(abs(given - gaussian), abs(gaussian - student)) <= _ACE_MATTERS:
        values = f"{_ace(given)} uncalibrated, {_ace(gaussian)} Gaussian, {_ace(student)} Student-t"
        return [f"Calibration changes little: ACE {values}."]
    tails = "The residuals have heavy tails. " if gaussian - student > _ACE_MATTERS and _heavy_tails(scores) else ""
    (best, first), (other, second) = sorted([(gaussian, "Gaussian"), (student, "Student-t")])
    return [f"{tails}{first} calibration {_change(given, best)}, {second} calibration {_change(given, other)}."]


def _heavy_tails(scores: Scores) -> bool:
    nu = scores.calibration.nu
    dof = [] if nu is None else [float(value) for value in nu if math.isfinite(value)]
    return bool(dof) and median(dof) < _HEAVY_DOF


def _change(before: float, after: float) -> str:
    if abs(before - after) <= _ACE_EQUAL:
        return f"leaves ACE at {_ace(after)}"
    return f"{'lowers' if after < before else 'raises'} ACE from {_ace(before)} to {_ace(after)}"


# --- calibration by keypoint and object scale -----------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Keypoints of one kind on objects of one scale, and the coverage of their 95 % ellipses."""

    name: str
    count: float
    coverage: float

    @property
    def deviation(self) -> float:
        return self.coverage - 0.95

    def __str__(self) -> str:
        return f"{self.name} (95 % ellipses contain {_percent(self.coverage)})"


def _worst_groups(scores: Scores) -> list[str]:
    groups = _miscalibrated(scores, "uncalibrated")
    sentences = []
    if groups and groups[0].deviation < 0:
        sentences.append(f"Most overconfident: {groups[0]}.")
    if groups and groups[-1].deviation > 0:
        sentences.append(f"Most underconfident: {groups[-1]}.")
    return sentences


def _remaining_error(scores: Scores) -> list[str]:
    """Largest error of a group after the better of the two calibrations."""
    ace = {name: scores.distribution(name).ace for name in ("gaussian", "student_t")}
    known = {name: value for name, value in ace.items() if math.isfinite(value)}
    if not known:
        return []
    best = min(known, key=lambda name: known[name])
    groups = _miscalibrated(scores, best)
    if not groups:
        return []
    worst = max(groups, key=lambda group: abs(group.deviation))
    kind = "overconfident" if worst.deviation < 0 else "underconfident"
    return [f"After {DISTRIBUTIONS[best]} calibration the largest remaining error: {kind} for {worst}."]


def _miscalibrated(scores: Scores, distribution: str) -> list[_Group]:
    """Groups with a significant deviation, the most overconfident first. A single group is not compared."""
    groups = [group for group in _groups(scores, distribution) if group.count >= MIN_SAMPLES]
    if len(groups) < 2:
        return []
    found = [group for group in groups if abs(group.deviation) > _margin(0.95, group.count, len(groups))]
    return sorted(found, key=lambda group: group.deviation)


def _groups(scores: Scores, distribution: str) -> list[_Group]:
    """Keypoints by kind and object scale; left and right keypoints are pooled."""
    counts, coverage = scores.cells.count, scores.cells.coverage[distribution][95]
    groups = []
    for kind, members in _kinds(list(scores.keypoint_names)).items():
        for index, scale in enumerate(scores.scales):
            cells = [
                (float(counts[k, index]), float(coverage[k, index]))
                for k in members
                if counts[k, index] > 0 and math.isfinite(coverage[k, index])
            ]
            total = sum(count for count, _ in cells)
            if total:
                held = sum(count * share for count, share in cells) / total
                groups.append(_Group(f"{kind}{_on(scale.name, len(scores.scales))}", total, held))
    return groups


def _on(scale: str, count: int) -> str:
    if count < 2:
        return ""
    return f" on objects of {scale}" if scale.startswith("scale ") else f" on {scale} objects"


def _kinds(names: list[str]) -> dict[str, list[int]]:
    """Keypoint indices by readable name. left_ankle and right_ankle become "ankle (left and right)"."""
    sides: dict[tuple[str, ...], dict[str, int]] = {}
    for index, name in enumerate(names):
        side, rest = _side(name)
        if side is not None and names.count(name) == 1:
            sides.setdefault(rest, {})[side] = index
    pooled = {index: rest for rest, found in sides.items() if len(found) == 2 for index in found.values()}
    result: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        readable = name.replace("_", " ").strip() or "unnamed keypoints"
        kind = f"{' '.join(pooled[index])} (left and right)" if index in pooled else readable
        result.setdefault(kind, []).append(index)
    return result


def _side(name: str) -> tuple[str | None, tuple[str, ...]]:
    """Side and remaining words: left_ankle, LeftAnkle, ankle_l and ankle.left give left and ("ankle",)."""
    parted = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    words = [word for word in re.split(r"[\s_.\-]+", parted.lower()) if word]
    for position in (0, len(words) - 1):
        if len(words) > 1 and words[position] in ("left", "l", "right", "r"):
            side = "left" if words[position].startswith("l") else "right"
            return side, tuple(words[:position] + words[position + 1 :])
    return None, tuple(words)


# --- ranking and pruning --------------------------------------------------------------------------------


def _ranking(scores: Scores) -> list[str]:
    """How well the predicted covariance ranks keypoints by correctness."""
    akp, chance, visibility, skill = (
        value if math.isfinite(value) else None
        for value in (scores.gaussian.akp, scores.akp_random, scores.akp_visibility, scores.akp_skill)
    )
    if akp is None or chance is None:
        return []
    if skill is None or skill < 0.02:
        quality = "is no better than random" if akp <= chance + 0.005 else "is better than random"
    elif visibility is not None and visibility > akp:
        quality = "helps, but the visibility score ranks better"
    else:
        quality = "is strong" if skill >= 0.5 else "helps" if skill >= 0.2 else "helps a little"
    others = f"{chance:.3f} for a random ranking"
    if visibility is not None:
        others = f"{visibility:.3f} for the visibility score and {others}"
    ending = "" if skill is None else f" (skill {skill:.2f})"
    return [f"The ranking by predicted covariance {quality}: AKP {akp:.3f}, against {others}{ending}."]


def _pruning(scores: Scores) -> list[str]:
    kept = scores.pruned.kept_fraction
    if not math.isfinite(kept):
        return []
    if kept >= 1:
        return ["Pruning at the threshold removes no keypoints."]
    if kept <= 0:
        return ["Pruning at the threshold removes all keypoints: choose a lower threshold."]
    removed = f"Pruning at the threshold removes {_percent(1 - kept)} of the keypoints"
    change = scores.pruned.gaussian.nll - scores.gaussian.nll
    if not math.isfinite(change):
        return [f"{removed}."]
    if abs(change) < 0.005:
        return [f"{removed} and leaves the NLL of the others unchanged."]
    return [f"{removed} and {'lowers' if change < 0 else 'raises'} the Gaussian NLL by {abs(change):.2f}."]
