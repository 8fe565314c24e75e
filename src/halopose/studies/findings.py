"""Findings of the paper's ablations, tested by paired differences between rows.

A finding is reproduced, differs here, or is not decided. P-values are of images and seeds together, and adjusted for
the number of tests by Holm's method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from halopose.evaluation.bootstrap import Difference, holm, repeated_difference
from halopose.studies.ablation import DEFAULT, AblationResult

Verdict = Literal["reproduced", "differs here", "not decided"]
ALPHA = 0.05  # probability of a wrong verdict among all implications

# Smaller differences have no practical effect.
MATTERS = {
    "ace": 0.002, "ace_x": 0.002, "ace_y": 0.002, "ence": 0.005, "ence_x": 0.005, "ence_y": 0.005, "nll": 0.01,
    "akp": 0.003, "kept_fraction": 0.02, "spread": 0.002,
}  # fmt: skip
ENOUGH_KEYPOINTS = 2000


@dataclass(frozen=True)
class FindingPart:
    """One implication of a finding: a metric of a row is larger than that of another row, or than a number.

    Attributes:
        text: The implication in words.
        larger: Row and metric.
        smaller: Row and metric, or a number.
    """

    text: str
    larger: tuple[str, str]
    smaller: tuple[str, str] | float

    @property
    def rows(self) -> set[str]:
        sides = [self.larger] if isinstance(self.smaller, float) else [self.larger, self.smaller]
        return {name for name, _ in sides}

    def measure(self, results: dict[str, AblationResult]) -> Difference:
        """The difference larger - smaller; negative if the implication does not hold."""
        row, metric = self.larger
        if isinstance(self.smaller, float):
            return repeated_difference(results[row].values[metric] - self.smaller, results[row].draws[metric])
        other, of_other = self.smaller
        return results[row].minus(results[other], metric, of_other)


@dataclass(frozen=True)
class Finding:
    """A finding of the paper and what it implies."""

    text: str
    parts: tuple[FindingPart, ...]


def _worse(text: str, row: str, metric: str, than: str = DEFAULT) -> FindingPart:
    return FindingPart(text, (row, metric), (than, metric))


FINDINGS = (
    Finding(
        "Importance weighting improves calibration",
        (
            _worse("ACE rises without it", "no-importance-weights", "gaussian.ace"),
            _worse("ENCE rises without it", "no-importance-weights", "gaussian.ence"),
        ),
    ),
    Finding(
        "Scale weights balance calibration across object scales",
        (
            _worse("ACE varies more between object scales without them", "no-scale-weights", "scale.spread"),
            _worse("ACE of the smallest objects rises without them", "no-scale-weights", "scale.0.ace"),
        ),
    ),
    Finding(
        "Full beats diagonal beats isotropic dispersion in NLL",
        (
            _worse("NLL of diagonal exceeds full", "diagonal", "gaussian.nll"),
            _worse("NLL of isotropic exceeds diagonal", "isotropic", "gaussian.nll", "diagonal"),
        ),
    ),
    Finding(
        "Isotropic dispersion is badly calibrated along single axes",
        (
            _worse("ENCE along x rises", "isotropic", "gaussian.ence_x"),
            _worse("ENCE along y rises", "isotropic", "gaussian.ence_y"),
        ),
    ),
    Finding(
        "Last-layer heads are clearly worse",
        (
            _worse("ACE rises", "last-layer", "gaussian.ace"),
            _worse("NLL rises", "last-layer", "gaussian.nll"),
            FindingPart("AKP falls", (DEFAULT, "gaussian.akp"), ("last-layer", "gaussian.akp")),
        ),
    ),
    Finding(
        "The F1 threshold prunes little",
        (
            FindingPart("keeps more than Youden", ("f1", "kept_fraction"), (DEFAULT, "kept_fraction")),
            FindingPart("keeps more than 90 %", ("f1", "kept_fraction"), 0.9),
        ),
    ),
    Finding(
        "Student-t beats Gaussian in ACE and NLL",
        (
            FindingPart(
                "ACE of the Gaussian exceeds the Student-t", (DEFAULT, "gaussian.ace"), (DEFAULT, "student_t.ace")
            ),
            FindingPart(
                "NLL of the Gaussian exceeds the Student-t", (DEFAULT, "gaussian.nll"), (DEFAULT, "student_t.nll")
            ),
        ),
    ),
)


@dataclass(frozen=True)
class MeasuredDifference:
    """An implication of a finding, tested.

    Attributes:
        text: The implication in words.
        difference: Measured difference with its interval.
        p: Its p-value, adjusted for all implications of all findings by Holm's method.
        verdict: Verdict on the implication.
    """

    text: str
    difference: Difference
    p: float
    verdict: Verdict


@dataclass(frozen=True)
class JudgedFinding:
    """A finding with its verdict and its measured implications."""

    text: str
    verdict: Verdict
    parts: list[MeasuredDifference]


def verdict_of(difference: Difference, p: float, *, matters: float = 0.0, enough: bool = True) -> Verdict:
    """Verdict on a difference that should be positive.

    Args:
        difference: The difference.
        p: Its adjusted p-value; NaN decides nothing.
        matters: Smallest negative difference that counts as different from the paper.
        enough: Whether there are enough keypoints to differ from the paper.
    """
    if not p < ALPHA:
        return "not decided"
    if difference.value > 0:
        return "reproduced"
    return "differs here" if -difference.value >= matters and enough else "not decided"


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """A finding is reproduced if all its parts are, and differs if one of them does."""
    if "differs here" in verdicts:
        return "differs here"
    return "not decided" if "not decided" in verdicts or not verdicts else "reproduced"


def judge(results: Sequence[AblationResult], findings: Sequence[Finding] = FINDINGS) -> list[JudgedFinding]:
    """Verdicts on the findings whose rows are present."""
    rows = {result.name: result for result in results}
    present = [finding for finding in findings if all(part.rows <= rows.keys() for part in finding.parts)]
    differences = [[part.measure(rows) for part in finding.parts] for finding in present]
    adjusted = iter(holm(np.array([one.p for each in differences for one in each])).tolist())
    judged = []
    for finding, measured in zip(present, differences, strict=True):
        parts = [
            _measured(part, difference, next(adjusted), rows)
            for part, difference in zip(finding.parts, measured, strict=True)
        ]
        judged.append(JudgedFinding(finding.text, overall([part.verdict for part in parts]), parts))
    return judged


def _measured(
    part: FindingPart, difference: Difference, p: float, rows: dict[str, AblationResult]
) -> MeasuredDifference:
    metric = part.larger[1].rsplit(".", 1)[-1]
    count = min(rows[name].counts["keypoints"] for name in part.rows)
    verdict = verdict_of(difference, p, matters=MATTERS.get(metric, 0.0), enough=count >= ENOUGH_KEYPOINTS)
    return MeasuredDifference(part.text, difference, p, verdict)
