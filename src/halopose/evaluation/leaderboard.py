"""Leaderboard: compare methods by the calibration of their keypoint covariances, one row per prediction file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halopose.calibration.calibrate import DistributionSet, cross_fitted
from halopose.data.files import read_json, write_json
from halopose.errors import HaloposeError
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.metrics import LEVELS
from halopose.matching.matched_poses import MatchedPoses
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.distributions import Bivariate

FORMAT = "halopose-leaderboard-1"

_DRAWS = 200  # resampled sets of images for the noise floor
_SAMPLES = 64  # pairs of draws for the energy score


@dataclass(frozen=True)
class LeaderboardRow:
    """Figures of one method on one set of images. Calibrations are cross-fitted over images.

    Attributes:
        name: Name of the method.
        cost: Cost in words, such as the number of forward passes per image.
        objects: Number of matched objects.
        held: Share of keypoints inside the 95 % ellipses of the Student-t.
        ace: Average calibration error of the Student-t.
        floor: Noise floor of the ACE: its 95th percentile over resampled images for perfect calibration.
        ence: Expected normalised calibration error of the Gaussian.
        energy: Mean energy score of the Student-t in pixels; smaller is better.
        nll: Mean negative log-likelihood of the Student-t in nats per keypoint.
        akp: Average keypoint precision of the ranking by covariance.
        auroc: Area under the ROC curve for the detection of correct keypoints (similarity >= 0.5) by covariance.
    """

    name: str
    cost: str
    objects: int
    held: float
    ace: float
    floor: float
    ence: float
    energy: float
    nll: float
    akp: float
    auroc: float


def leaderboard_row(name: str, cost: str, matched: MatchedPoses, protocol: Protocol) -> LeaderboardRow:
    """Evaluate one method.

    Args:
        name: Name of the method.
        cost: Its cost in words.
        matched: True positives of its predictions.
        protocol: Settings of matching and evaluation.
    """
    distributions = cross_fitted(matched, protocol)
    scores = evaluate(matched, distributions, protocol)
    student = distributions.distributions["student_t"]
    inside = student.mahalanobis_cdf(student.mahalanobis(torch.from_numpy(matched.residual))).numpy()
    return LeaderboardRow(
        name=name,
        cost=cost,
        objects=len(matched),
        held=float((inside <= 0.95)[matched.labelled].mean()),
        ace=scores.student_t.ace,
        floor=noise_floor(inside, matched),
        ence=scores.gaussian.ence,
        energy=energy_score(student, matched),
        nll=scores.student_t.nll,
        akp=scores.gaussian.akp,
        auroc=_auroc(distributions, matched, protocol),
    )


def noise_floor(probability: Array, matched: MatchedPoses, seed: int = 0) -> float:
    """Noise floor of the ACE: its 95th percentile over resampled images for perfect calibration.

    Args:
        probability: Probability (M, K) of the smallest ellipse that contains the true keypoint.
        matched: The true positives.
        seed: Seed of the resampling.
    """
    images, image = np.unique(matched.image_ids, return_inverse=True)
    below = (probability[..., None] <= np.asarray(LEVELS)) & matched.labelled[..., None]
    held = np.zeros((len(images), len(LEVELS)))
    np.add.at(held, image, below.sum(1))
    count = np.bincount(image, matched.labelled.sum(1))
    whole = held.sum(0) / count.sum()
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(_DRAWS):
        times = np.bincount(rng.integers(0, len(images), len(images)), minlength=len(images))
        draws.append(np.abs(times @ held / (times @ count) - whole).mean())
    return float(np.quantile(draws, 0.95))


def energy_score(distribution: Bivariate, matched: MatchedPoses, seed: int = 0) -> float:
    """Mean energy score E|X - r| - E|X - X'| / 2 of labelled keypoints; X and X' are drawn from the distribution of r.

    Args:
        distribution: Distribution of the residuals r.
        matched: The true positives.
        seed: Seed of the draws.

    Reference: Gneiting and Raftery, Strictly Proper Scoring Rules, 2007.
    """
    generator = torch.Generator().manual_seed(seed)
    first, second = (distribution.sample(_SAMPLES, generator).numpy() for _ in range(2))
    apart = np.linalg.norm(first - matched.residual, axis=-1).mean(0)
    spread = np.linalg.norm(first - second, axis=-1).mean(0)
    return float((apart - spread / 2)[matched.labelled].mean())


def _auroc(distributions: DistributionSet, matched: MatchedPoses, protocol: Protocol) -> float:
    """Area under the ROC curve: probability that a correct keypoint has a higher confidence than a wrong one."""
    from scipy.stats import rankdata

    confidence = distributions.confidence[matched.labelled]
    correct = matched.similarity[matched.labelled] >= 0.5
    positives, negatives = int(correct.sum()), int((~correct).sum())
    if not positives or not negatives:
        return float("nan")
    ranks = rankdata(confidence)
    return float((ranks[correct].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def read_rows(path: Path | str) -> list[LeaderboardRow]:
    """Read rows that ``write_rows`` wrote."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise HaloposeError(f"{path} is not a leaderboard file: write one with `halopose leaderboard`")
    try:
        return [_row(entry) for entry in content["rows"]]
    except (KeyError, TypeError, ValueError):
        raise HaloposeError(f"{path} is damaged: write it again with `halopose leaderboard`") from None


def _row(entry: dict[str, Any]) -> LeaderboardRow:
    figures = ("held", "ace", "floor", "ence", "energy", "nll", "akp", "auroc")
    numbers = {name: float("nan") if entry[name] is None else float(entry[name]) for name in figures}
    return LeaderboardRow(str(entry["name"]), str(entry["cost"]), int(entry["objects"]), **numbers)


def write_rows(path: Path | str, rows: Sequence[LeaderboardRow]) -> None:
    """Write rows as json."""
    write_json(path, {"format": FORMAT, "rows": [asdict(row) for row in rows]}, indent=1)


def leaderboard_table(rows: Sequence[LeaderboardRow]) -> str:
    """The rows as a markdown table, in descending order of AKP."""
    head = (
        "method", "passes", "objects", "95 % ellipse holds", "ACE (floor)", "ENCE", "energy score, px",
        "NLL", "AKP", "AUROC",
    )  # fmt: skip
    lines = [head, ("---",) * len(head)]
    for row in sorted(rows, key=lambda row: -row.akp):
        figures = (
            f"{100 * row.held:.1f} %", f"{row.ace:.4f} ({row.floor:.4f})", f"{row.ence:.3f}", f"{row.energy:.2f}",
            f"{row.nll:.2f}", f"{row.akp:.3f}", f"{row.auroc:.3f}",
        )  # fmt: skip
        lines.append((row.name.replace("|", "/"), row.cost.replace("|", "/"), str(row.objects), *figures))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
