"""Regions, joint distribution and alarms in the report: tables, and the correlation drawn on a skeleton."""

from __future__ import annotations

import math
from dataclasses import dataclass

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.evaluation.region_scores import REGION_LEVELS
from halopose.evaluation.scores import Scores
from halopose.keypoints import COCO_NAMES
from halopose.reports.html import number

_WEAK = 0.15  # weaker correlations are not drawn
_HEIGHT = 1.5
# A person facing the viewer, with an enlarged head.
_PERSON = (
    (50, 20), (59, 10), (41, 10), (69, 15), (31, 15), (68, 40), (32, 40), (78, 63), (22, 63), (84, 85), (16, 85),
    (61, 87), (39, 87), (64, 115), (36, 115), (66, 143), (34, 143),
)  # fmt: skip


@dataclass(frozen=True)
class Link:
    """A correlation between two keypoints, drawn as a line.

    Attributes:
        x1: Start, x.
        y1: Start, y.
        x2: End, x.
        y2: End, y.
        value: Correlation.
        text: Names of the keypoints.
    """

    x1: float
    y1: float
    x2: float
    y2: float
    value: float
    text: str


@dataclass(frozen=True)
class Skeleton:
    """Correlations along one direction, drawn on a skeleton. Positions are in units of the picture's width.

    Attributes:
        title: Title.
        height: Height of the picture.
        points: Position and name of each keypoint.
        bones: Ends of each limb.
        links: Correlations.
    """

    title: str
    height: float
    points: tuple[tuple[float, float, str], ...]
    bones: tuple[tuple[float, float, float, float], ...]
    links: tuple[Link, ...]


def region_rows(scores: Scores) -> list[tuple[str, list[tuple[str, str]], str]]:
    """Name, coverage with its margin at every level, and count: overall, whole objects, object scales, keypoints."""
    if scores.regions is None:
        return []
    found = scores.regions
    groups = [("All keypoints", found.keypoints), ("Whole objects", found.whole)]
    groups += [("Whole objects, kept keypoints", found.whole_kept)]
    groups += [(f"Scale: {name}", one) for name, one in found.per_scale.items() if one.count]
    groups += [(name.replace("_", " "), one) for name, one in found.per_keypoint.items() if one.count]
    return [(name, _cells(one.held, one.margin), f"{one.count:,}") for name, one in groups]


def _cells(shares: tuple[float, ...], margins: tuple[float, ...]) -> list[tuple[str, str]]:
    """Shares in per cent, each with its margin."""
    return [
        (number(100 * share, 1), f"± {number(100 * margin, 1)}" if math.isfinite(margin) else "")
        for share, margin in zip(shares, margins, strict=True)
    ]


def missing_guarantees(scores: Scores) -> str:
    """Sentence about the levels at which there were too few images for regions of finite size; empty if none."""
    if scores.regions is None:
        return ""
    levels = zip(REGION_LEVELS, scores.regions.keypoints.held, scores.regions.whole.held, strict=True)
    missing = [f"{level} %" for level, *shares in levels if not all(map(math.isfinite, shares))]
    if not missing or not scores.keypoints:
        return ""
    return (
        f"No guarantee is possible at {', '.join(missing)} from {scores.images} images for the rows without a value: "
        "their regions would be infinitely large. Calibrate on more images."
    )


def rows_before_keypoints(scores: Scores) -> int:
    """Number of ``region_rows`` before those of single keypoints."""
    return 0 if scores.regions is None else 3 + sum(one.count > 0 for one in scores.regions.per_scale.values())


def region_sizes(scores: Scores) -> list[str]:
    """Median radius of the keypoint regions in pixels, by level."""
    return [] if scores.regions is None else [number(size, 1) for size in scores.regions.size]


def joint_rows(scores: Scores) -> list[tuple[str, str, str, str]]:
    """Distribution, NLL of independent keypoints, joint NLL, and the gain with its margin."""
    if scores.joint is None:
        return []
    return [
        (
            DISTRIBUTIONS[name],
            number(one.independent, 3),
            number(one.nll, 3),
            number(one.gain, 3) + (f" ± {number(one.margin, 3)}" if math.isfinite(one.margin) else ""),
        )
        for name, one in scores.joint.distributions.items()
    ]


def alarm_rows(scores: Scores) -> list[tuple[str, list[tuple[str, str]], str]]:
    """Name, share flagged with its standard error at every rate, and count, for detections and images."""
    if scores.novelty is None:
        return []
    found = scores.novelty
    groups = [(f"Detections, confidence ≥ {found.confidence:g}", found.detections), ("Images", found.images)]
    return [(name, _cells(one.share, one.error), f"{one.count:,}") for name, one in groups]


def held_rows(scores: Scores) -> list[tuple[str, list[str]]]:
    """Coverage of the 95 % ellipses at every rate, over detections that are not flagged and that are."""
    if scores.novelty is None:
        return []
    groups = {"Not flagged": scores.novelty.held_kept, "Flagged": scores.novelty.held_flagged}
    return [(name, [number(100 * held, 1) for held in values]) for name, values in groups.items()]


def skeletons(scores: Scores) -> list[Skeleton]:
    """The correlation of whitened residuals along x and along y."""
    if scores.joint is None or len(scores.keypoint_names) < 2:
        return []
    names, matrix = scores.keypoint_names, scores.joint.correlation
    places, height = _places(names)
    drawn = []
    for axis, title in enumerate(("Along x", "Along y")):
        links = [
            Link(*places[a], *places[b], float(matrix[2 * a + axis, 2 * b + axis]), f"{names[a]}, {names[b]}")
            for a in range(len(names))
            for b in range(a)
            if abs(matrix[2 * a + axis, 2 * b + axis]) >= _WEAK
        ]
        links.sort(key=lambda link: abs(link.value))
        points = tuple((*place, name.replace("_", " ")) for place, name in zip(places, names, strict=True))
        bones = tuple((*places[a], *places[b]) for a, b in scores.limbs)
        drawn.append(Skeleton(title, height, points, bones, tuple(links)))
    return drawn


def _places(names: tuple[str, ...]) -> tuple[list[tuple[float, float]], float]:
    """Positions of the keypoints and height of the picture, over its width: a person, or a circle."""
    if names == COCO_NAMES:
        return [(x / 100, y / 100) for x, y in _PERSON], _HEIGHT
    turns = [math.pi * (0.75 - 2 * k / len(names)) for k in range(len(names))]
    return [(0.5 + 0.4 * math.cos(turn), 0.5 + 0.4 * math.sin(turn)) for turn in turns], 1.0
