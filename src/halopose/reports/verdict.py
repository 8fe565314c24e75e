"""The evaluation in a few sentences of plain English, the top of the report.

In: ``Scores``. Out: sentences, the most important first. What the samples cannot tell from chance is left unsaid.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import NormalDist, median

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.evaluation.scores import Scores

MIN_SAMPLES = 100
TOLERANCE = 0.01  # a deviation of coverage that nobody needs to act on
_STANDARD_ERRORS = 3.0
_HEAVY_DOF = 10.0  # a Student-t of more degrees of freedom differs little from a Gaussian
_ACE_MATTERS = 0.005
_IRREGULAR = {"foot": "feet", "tooth": "teeth"}


def verdict(scores: Scores) -> list[str]:
    """Sentences on calibration, tails, ranking and pruning."""
    count = scores.keypoints
    if count < MIN_SAMPLES:
        return [f"Too few keypoints to judge: {count} matched, at least {MIN_SAMPLES} are needed."]
    sentences = [
        *_as_given(scores),
        *_places_as_given(scores),
        *_calibration(scores),
        *_place_left(scores),
        *_ranking(scores),
        *_pruning(scores),
    ]
    return sentences or ["There is nothing to judge: the metrics are empty."]


def coverage_at(scores: Scores, distribution: str, level: int) -> float | None:
    """Share of the truth inside the joint region of ``level`` per cent."""
    curve = _curve(scores, distribution)
    return curve[level - 1] if curve else None


def _curve(scores: Scores, distribution: str) -> list[float] | None:
    """Joint coverage (99,) at 1 to 99 %, or None where any of it is missing."""
    curve = [float(value) for value in scores.distribution(distribution).curves.coverage["joint"]]
    return curve if len(curve) == 99 and all(map(math.isfinite, curve)) else None


def _percent(share: float) -> str:
    """84 %; with a decimal close to the ends, where rounding would claim all or nothing."""
    decimals = 1 if (0 < share < 0.01 or 0.99 < share < 1) else 0
    text = f"{100 * share:.{decimals}f}"
    if share < 1 and text.startswith("100"):
        return "more than 99.9 %"
    if share > 0 and text == "0.0":
        return "less than 0.1 %"
    return f"{text} %"


def _short(value: float, decimals: int | None = None) -> str:
    """.103, .0008, 1.25"""
    if decimals is None:
        decimals = 2 if abs(value) >= 1 else 3 if abs(value) >= 0.001 else 4
    return re.sub(r"^(-?)0\.", r"\1.", f"{value:.{decimals}f}")


def _margin(level: float, count: float, comparisons: int = 1) -> float:
    """Deviation of coverage beyond which it is not chance.

    Three standard errors for one comparison. The worst of many must stand out further (Bonferroni).
    """
    tail = NormalDist().cdf(-_STANDARD_ERRORS) / max(comparisons, 1)
    return max(TOLERANCE, -NormalDist().inv_cdf(tail) * math.sqrt(level * (1 - level) / count))


# --- calibration of the whole ---------------------------------------------------------------------------


def _as_given(scores: Scores) -> list[str]:
    """Is the uncalibrated law too narrow, too wide, of the wrong shape, or right?"""
    curve, count = _curve(scores, "uncalibrated"), scores.keypoints
    if curve is None:
        return []
    deviation = {level: curve[level - 1] - level / 100 for level in range(1, 100)}
    worst = max(deviation, key=lambda level: abs(deviation[level]))
    if abs(deviation[worst]) <= TOLERANCE:
        return ["As given, the predictions are well calibrated: every region holds what it promises to within 1 %."]
    sign = {
        level: (value > margin) - (value < -margin)
        for level, value in deviation.items()
        for margin in [_margin(level / 100, count, 1 if level in (50, 95) else 99)]
    }
    if not any(sign[level] for level in (50, 95, worst)):
        return [
            "As given, the predictions show no miscalibration that "
            f"{count:,} keypoints could tell from chance (at most {_percent(abs(deviation[worst]))})."
        ]
    return [_describe(curve, sign, worst)]


def _describe(curve: list[float], sign: dict[int, int], worst: int) -> str:
    centre, edge = sign[50], sign[95]
    if centre * edge < 0:
        inner, outer = ("cautious", "confident") if centre > 0 else ("confident", "cautious")
        return (
            f"As given, the predictions are too {inner} in the centre and too {outer} in the tails: "
            f"a 50 % ellipse holds the truth {_percent(curve[49])} of the time, "
            f"a 95 % ellipse {_percent(curve[94])}."
        )
    level = 95 if edge else 50 if centre else worst
    kind = "overconfident" if sign[level] < 0 else "underconfident"
    return (
        f"As given, the predictions are {kind}: "
        f"a {level} % ellipse holds the truth {_percent(curve[level - 1])} of the time."
    )


def _calibration(scores: Scores) -> list[str]:
    """What the two calibrations do, and what that says about the tails."""
    given, gaussian, student = scores.uncalibrated.ace, scores.gaussian.ace, scores.student_t.ace
    if not all(map(math.isfinite, (given, gaussian, student))):
        return []
    if gaussian - student > _ACE_MATTERS:
        opening = "The residuals have heavy tails: " if _heavy(scores) else ""
        return [_tidy(f"{opening}{_change('Student-t', given, student)}, {_aside('Gaussian', given, gaussian)}.")]
    if student - gaussian > _ACE_MATTERS:
        return [_tidy(f"{_change('Gaussian', given, gaussian)}, {_aside('Student-t', given, student)}.")]
    if abs(given - gaussian) <= _ACE_MATTERS:
        values = f"{_short(given)} as given, {_short(gaussian)} Gaussian, {_short(student)} Student-t"
        return [f"Calibration changes little: ACE {values}."]
    better = "a Student-t does about as well"
    return [_tidy(f"{_change('Gaussian', given, gaussian)}; {better} ({_short(student)}).")]


def _heavy(scores: Scores) -> bool:
    nu = scores.calibration.nu
    dof = [] if nu is None else [float(value) for value in nu if math.isfinite(value)]
    return bool(dof) and median(dof) < _HEAVY_DOF


def _change(name: str, before: float, after: float) -> str:
    if abs(before - after) <= 0.001:
        return f"{name} calibration leaves ACE at {_short(after)}"
    verb = "lowers" if after < before else "raises"
    return f"{name} calibration {verb} ACE from {_short(before)} to {_short(after)}"


def _aside(name: str, before: float, after: float) -> str:
    if abs(before - after) <= 0.001:
        return f"{name} calibration leaves it at {_short(after)}"
    return f"{name} calibration {'only lowers' if after < before else 'raises'} it to {_short(after)}"


def _tidy(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


# --- calibration by place -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A kind of keypoint at an object scale, with what its 95 % ellipse holds."""

    words: str
    count: float
    coverage: float

    @property
    def deviation(self) -> float:
        return self.coverage - 0.95

    def __str__(self) -> str:
        return f"{self.words} (95 % ellipse holds {_percent(self.coverage)})"


def _places_as_given(scores: Scores) -> list[str]:
    places = _remarkable(scores, "uncalibrated")
    sentences = []
    if places and places[0].deviation < 0:
        sentences.append(f"Most overconfident {places[0]}.")
    if places and places[-1].deviation > 0:
        sentences.append(f"Most underconfident {places[-1]}.")
    return sentences


def _place_left(scores: Scores) -> list[str]:
    """The largest local error of the better calibration."""
    ace = {name: scores.distribution(name).ace for name in ("gaussian", "student_t")}
    known = {name: value for name, value in ace.items() if math.isfinite(value)}
    if not known:
        return []
    best = min(known, key=lambda name: known[name])
    places = _remarkable(scores, best)
    if not places:
        return []
    worst = max(places, key=lambda place: abs(place.deviation))
    kind = "overconfidence" if worst.deviation < 0 else "underconfidence"
    return [f"After {DISTRIBUTIONS[best]} calibration the largest error left is {kind} {worst}."]


def _remarkable(scores: Scores, distribution: str) -> list[_Place]:
    """Places off by more than chance, the most overconfident first; a single place is the whole."""
    places = [place for place in _places(scores, distribution) if place.count >= MIN_SAMPLES]
    if len(places) < 2:
        return []
    found = [place for place in places if abs(place.deviation) > _margin(0.95, place.count, len(places))]
    return sorted(found, key=lambda place: place.deviation)


def _places(scores: Scores, distribution: str) -> list[_Place]:
    """Every kind of keypoint at every scale, left and right pooled."""
    counts, coverage = scores.cells.count, scores.cells.coverage[distribution][95]
    places = []
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
                places.append(_Place(f"for {kind}{_on(scale.name, len(scores.scales))}", total, held))
    return places


def _on(scale: str, count: int) -> str:
    if count < 2:
        return ""
    return f" on objects of {scale}" if scale.startswith("scale ") else f" on {scale} objects"


# --- names ----------------------------------------------------------------------------------------------


def _kinds(names: list[str]) -> dict[str, list[int]]:
    """Indices by plain name; a left and a right one become a plural."""
    sides: dict[tuple[str, ...], dict[str, int]] = {}
    for index, name in enumerate(names):
        side, words = _side(name)
        # A name given twice has no one partner: it stays on its own.
        alone = side is None or names.count(name) > 1
        sides.setdefault(("", name) if alone else words, {})[str(index) if alone else str(side)] = index
    result: dict[str, list[int]] = {}
    for words, members in sides.items():
        if set(members) == {"left", "right"}:
            result.setdefault(_plural(words), []).extend(members.values())
        else:
            for index in members.values():
                result.setdefault(_plain(names[index]), []).append(index)
    return result


def _side(name: str) -> tuple[str | None, tuple[str, ...]]:
    """left_ankle, LeftAnkle, ankle_l and ankle.left are the left ("ankle",)."""
    words = _words(name)
    for position in (0, len(words) - 1):
        if len(words) > 1 and words[position] in ("left", "l", "right", "r"):
            side = "left" if words[position].startswith("l") else "right"
            return side, tuple(words[:position] + words[position + 1 :])
    return None, tuple(words)


def _words(name: str) -> list[str]:
    parted = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return [word for word in re.split(r"[\s_.\-]+", parted.lower()) if word]


def _plain(name: str) -> str:
    return name.replace("_", " ").strip() or "unnamed keypoints"


def _plural(words: tuple[str, ...]) -> str:
    last = words[-1]
    if not last.isalpha() or not last.isascii():
        return f"left and right {' '.join(words)}"
    if last in _IRREGULAR:
        last = _IRREGULAR[last]
    elif re.search(r"[^aeiou]y$", last):
        last = last[:-1] + "ies"
    elif re.search(r"(ss|x|ch|sh)$", last):
        last += "es"
    elif not last.endswith("s"):
        last += "s"
    return " ".join((*words[:-1], last))


# --- ranking and pruning --------------------------------------------------------------------------------


def _ranking(scores: Scores) -> list[str]:
    """How well the predicted covariance tells good keypoints from bad ones."""
    akp, chance = scores.gaussian.akp, scores.akp_random
    if not (math.isfinite(akp) and math.isfinite(chance)):
        return []
    visibility = scores.akp_visibility if math.isfinite(scores.akp_visibility) else None
    skill = scores.akp_skill if math.isfinite(scores.akp_skill) else None
    others = f"{_short(chance)} for a random ranking"
    if visibility is not None:
        others = f"{_short(visibility)} for the visibility score and {others}"
    opening = "The ranking by predicted covariance " + _worth(akp, chance, visibility, skill)
    ending = "" if skill is None else f" (skill {_short(skill, 2)})"
    return [f"{opening}: AKP {_short(akp)} against {others}{ending}."]


def _worth(akp: float, chance: float, visibility: float | None, skill: float | None) -> str:
    if skill is None or skill < 0.02:
        return "is no better than chance" if akp <= chance + 0.005 else "is better than chance"
    if visibility is not None and visibility > akp:
        return "helps, but the visibility score ranks better"
    return "is strong" if skill >= 0.5 else "helps" if skill >= 0.2 else "helps a little"


def _pruning(scores: Scores) -> list[str]:
    kept = scores.pruned.kept_fraction
    if not math.isfinite(kept):
        return []
    if kept >= 1:
        return ["Pruning at the threshold removes nothing."]
    if kept <= 0:
        return ["Pruning at the threshold removes every keypoint: choose a lower threshold."]
    removed = f"Pruning at the threshold removes {_percent(1 - kept)} of keypoints"
    before, after = scores.gaussian.nll, scores.pruned.gaussian.nll
    if not (math.isfinite(before) and math.isfinite(after)):
        return [f"{removed}."]
    change = _short(abs(before - after), 2)
    if change == ".00":
        return [f"{removed} and leaves NLL as it is."]
    return [f"{removed} and {'lowers' if after < before else 'raises'} NLL by {change}."]
