"""Calibration by kind of match, with noise floors, and by groups of keypoints: table rows, text and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.evaluation.match_scores import KeypointGroup, MatchedDistribution, MatchScores, NoiseFloor
from halopose.evaluation.scores import Scores
from halopose.reports.html import number, percent

MIN_GROUP = 100  # smallest number of keypoints of a group with a verdict
NAMED = 3  # groups that the verdict names
MATCH_NAMES = {"oks": "matched by OKS", "box": "matched by box"}
_LEVELS = (50, 90, 95, 99)


@dataclass(frozen=True)
class MatchTable:
    """Tables of one kind of match.

    Attributes:
        title: Kind of match.
        condition: Which detections are true positives.
        rows: Name and calibration metrics of each distribution.
        proper: Name and proper scores of each distribution.
        groups: Name and calibration metrics of each group of keypoints.
        selective: AUROC, AURC and AUGRC as text.
        regions: Coverage of conformal regions as text; empty without regions.
    """

    title: str
    condition: str
    rows: list[tuple[str, list[str]]]
    proper: list[tuple[str, list[str]]]
    groups: list[tuple[str, list[str]]]
    selective: str
    regions: str


def match_tables(scores: Scores) -> list[MatchTable]:
    """Tables by kind of match, those of the protocol first."""
    return [
        MatchTable(
            MATCH_NAMES.get(kind, kind).capitalize(),
            f"{match.keypoints:,} labelled keypoints of {match.instances:,} {match.condition}, {match.images:,} images",
            [(DISTRIBUTIONS[name], _cells(one)) for name, one in match.distributions.items()],
            [(DISTRIBUTIONS[name], _proper_cells(one)) for name, one in match.distributions.items()],
            [(f"{group.kind}: {_readable(group.name)}", _group_cells(group)) for group in match.groups],
            selective_text(match),
            regions_text(match),
        )
        for kind, match in scores.matches.items()
    ]


def match_text(scores: Scores) -> list[str]:
    """Lines for the terminal: calibration of both kinds of matches."""
    lines = []
    for kind, match in scores.matches.items():
        lines.append(f"{MATCH_NAMES.get(kind, kind)}: {match.keypoints} keypoints, {match.instances} {match.condition}")
        for name in ("gaussian", "student_t"):
            one = match.distributions[name]
            held = ", ".join(f"{level} % {percent(one.coverage[level])}" for level in (95, 99))
            lines.append(
                f"  {DISTRIBUTIONS[name]:10} ACE {number(one.ace, 4)} ({floor_text(one.floors['ace'], one.ace)}), "
                f"ENCE {number(one.ence, 3)} ({floor_text(one.floors['ence'], one.ence, 3)}), "
                f"NLL {number(one.nll, 2)}, ellipses hold {held}"
            )
        if match.regions:
            lines.append(f"  {regions_text(match)}")
        lines.append(f"  {selective_text(match)}")
    return lines


def match_sentences(scores: Scores) -> Iterator[str]:
    """Whether the Student-t is compatible with perfect calibration, by kind of match, and the worst groups."""
    for kind, match in scores.matches.items():
        one = match.distributions["student_t"]
        if not math.isfinite(one.ace) or match.keypoints < MIN_GROUP:
            continue
        state = "is" if one.compatible() else "is not"
        yield (
            f"For detections {MATCH_NAMES.get(kind, kind)} the Student-t {state} compatible with perfect calibration "
            f"(ACE {one.ace:.4f}, noise floor up to {one.floors['ace'].high:.4f}): its 95 % ellipses hold "
            f"{percent(one.coverage[95])}, its 99 % ellipses {percent(one.coverage[99])}."
        )
        worst = worst_groups(match)
        if worst:
            named = ", ".join(
                f"{group.kind} {_readable(group.name)} ({percent(group.distributions['student_t'].coverage[95])} in "
                "95 % ellipses)"
                for group in worst
            )
            yield f"Worst groups {MATCH_NAMES.get(kind, kind)}: {named}."


def worst_groups(match: MatchScores, distribution: str = "student_t", count: int = NAMED) -> list[KeypointGroup]:
    """Groups of keypoints whose ACE is above the noise floor, the largest excess first.

    Args:
        match: Calibration on one kind of match.
        distribution: Distribution to look at.
        count: Largest number of groups.
    """

    def excess(group: KeypointGroup) -> float:
        one = group.distributions[distribution]
        return one.ace - one.floor.high

    judged = [group for group in match.groups if group.count >= MIN_GROUP and excess(group) > 0]
    return sorted(judged, key=excess, reverse=True)[:count]


def regions_text(match: MatchScores) -> str:
    """Coverage of conformal regions in one line; empty without regions."""
    if match.regions is None:
        return ""
    return "regions hold " + ", ".join(f"{level} % {percent(share)}" for level, share in match.regions.items())


def floor_text(floor: NoiseFloor, value: float, decimals: int = 4) -> str:
    """Noise floor as a 95 % range, and whether the value is compatible with it.

    Args:
        floor: The noise floor.
        value: The measured metric.
        decimals: Decimals of the range.
    """
    if not math.isfinite(floor.high):
        return "too few images for a noise floor"
    state = "compatible with" if floor.compatible(value) else "above"
    return f"{state} the noise floor, {number(floor.low, decimals)} to {number(floor.high, decimals)}"


def selective_text(match: MatchScores) -> str:
    """AUROC, AURC and AUGRC in one line."""
    found = match.selective
    parts = [
        f"{label} {number(one.value, 3)}" + (f" ± {number(one.margin, 3)}" if math.isfinite(one.margin) else "")
        for label, one in (("AUROC", found.auroc), ("AURC", found.aurc), ("AUGRC", found.augrc))
    ]
    return f"detection of wrong keypoints by covariance: {', '.join(parts)} ({percent(found.wrong)} are wrong)"


def _cells(one: MatchedDistribution) -> list[str]:
    cells = [number(one.ace, 4), floor_text(one.floors["ace"], one.ace), number(one.ence, 3)]
    cells += [floor_text(one.floors["ence"], one.ence, 3), number(one.nll, 2)]
    return cells + [percent(one.coverage[level]) for level in _LEVELS]


def _proper_cells(one: MatchedDistribution) -> list[str]:
    proper = one.proper
    return [
        *(number(value, 2) for value in (proper.energy, proper.crps_x, proper.crps_y, proper.nll_relative)),
        number(proper.sharpness, 4),
    ]


def _group_cells(group: KeypointGroup) -> list[str]:
    one = group.distributions["student_t"]
    state = floor_text(one.floor, one.ace)
    return [f"{group.count:,}", number(one.ace, 4), state, *(percent(one.coverage[level]) for level in (50, 95, 99))]


def _readable(name: str) -> str:
    return name.replace("_", " ")
