"""Study of distribution shift: calibration and alarms under image corruptions and on other data sets.

Results of each step: coverage, ACE, AKP, errors, predicted standard deviations, and alarms. Coverage and ACE are also
given without the flagged detections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from halopose.boxes import box_area
from halopose.data.dataset import Dataset
from halopose.errors import HaloposeError
from halopose.evaluation.metrics import average_coverage_error, coverage
from halopose.fitting.artifact import Artifact
from halopose.fitting.corruptions import FITTED, HELD_OUT, corrupted
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.novelty_evaluation import held_share
from halopose.fitting.novelty_fitting import OUTSIDE, Rows, rows_of
from halopose.fitting.pipeline import collect_validation, evaluate_artifact, settings_for
from halopose.hosts.base import Host
from halopose.protocol import Protocol
from halopose.types import Array, Progress, prefixed

CLEAN = "unchanged"
GROUPS = {"fitted kinds": FITTED, "held-out kinds": HELD_OUT}
RANKED_BY = ("novelty", "score", "covariance")


@dataclass(frozen=True)
class ShiftSettings:
    """Settings of the study.

    Attributes:
        kinds: Kinds of corruptions.
        severities: Severities of each kind.
        conf: Lowest score of a detection.
        alarm: Nominal false-alarm rate.
        draws: Number of bootstrap draws.
    """

    kinds: tuple[str, ...] = (*FITTED, *HELD_OUT)
    severities: tuple[int, ...] = (1, 3, 5)
    conf: float = 0.25
    alarm: float = 0.05
    draws: int = 200


@dataclass(frozen=True)
class ShiftStep:
    """Results of one step. Names ending in ``_kept`` exclude flagged detections.

    Attributes:
        name: Kind of corruption, or name of the data set.
        severity: Severity of the corruption, 0 for none.
        images: Number of images.
        detections: Number of detections.
        coverage: Share of labelled keypoints of matched detections inside their 95 % ellipse.
        ace: Average coverage error.
        akp: Average keypoint precision.
        error: Median distance to the true keypoint in pixels.
        sigma: Median of the stated root mean square distance in pixels.
        alarms: Share of detections flagged.
        image_alarms: Share of images flagged.
        wrong: Share of wrong detections: no object, or most keypoints outside their 99 % ellipse.
    """

    name: str
    severity: int
    images: int
    detections: int
    coverage: float
    coverage_kept: float
    ace: float
    ace_kept: float
    akp: float
    error: float
    sigma: float
    alarms: float
    image_alarms: float
    wrong: float
    wrong_kept: float


@dataclass(frozen=True)
class RankingAuroc:
    """AUROC of a ranking for keypoints outside their 99 % ellipse, with a 95 % interval over images.

    Attributes:
        group: Name of the group of steps.
        signal: What the keypoints are ranked by: "novelty", "score" or "covariance".
        auroc: Area under the ROC curve.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    group: str
    signal: str
    auroc: float
    low: float
    high: float


@dataclass(frozen=True)
class ShiftResult:
    """Results of the study.

    Attributes:
        rows: Results of the steps.
        rankings: AUROC of the rankings of keypoints by novelty, score and covariance.
        alarm: Nominal false-alarm rate.
        conf: Lowest score of a detection.
    """

    rows: tuple[ShiftStep, ...]
    rankings: tuple[RankingAuroc, ...]
    alarm: float
    conf: float

    def to_json(self) -> dict[str, Any]:
        """The content of ``shift.json``."""
        return asdict(self)

    def of(self, name: str) -> list[ShiftStep]:
        """The unchanged images, then the steps of one kind."""
        return [row for row in self.rows if row.name in (CLEAN, name)]


def run_shift(
    host: Host,
    artifact: Artifact,
    dataset: Dataset,
    work: Path,
    settings: ShiftSettings | None = None,
    others: Mapping[str, Dataset] | None = None,
    progress: Progress | None = None,
) -> ShiftResult:
    """Collect and evaluate every corruption and data set. Resumable.

    Args:
        host: The frozen base model.
        artifact: Heads and calibration, with an out-of-distribution model.
        dataset: Annotated images that were not used to fit the artifact.
        work: Folder for feature caches.
        settings: Settings of the study.
        others: Other data sets by name.
        progress: Called with every step.

    Raises:
        HaloposeError: The artifact has no out-of-distribution model.
    """
    settings = settings or ShiftSettings()
    if artifact.novelty is None:
        raise HaloposeError("this artifact has no out-of-distribution model: add one with `halopose novelty`")
    steps: list[tuple[str, int, Dataset]] = [(CLEAN, 0, dataset)]
    steps += [(k, s, corrupted(dataset, k, s)) for k in settings.kinds for s in settings.severities]
    steps += [(name, 0, other) for name, other in (others or {}).items()]
    how = settings_for(artifact)
    rows, seen = [], {}
    for number, (name, severity, data) in enumerate(steps):
        folder = work / f"{number:02d}-{name.replace(' ', '-')}-{severity}"
        step = prefixed(progress, f"{name} {severity or ''}".strip())
        store = collect_validation(host, data, folder, how, step)
        rows_found = rows_of(artifact, store, settings.conf)
        seen[name, severity] = rows_found
        rows.append(evaluate_step(artifact, host, store, rows_found, name, severity, settings))
    groups = {name: [seen[k, s] for k, s in seen if k == CLEAN or k in kinds] for name, kinds in GROUPS.items()}
    groups |= {name: [seen[CLEAN, 0], seen[name, 0]] for name in others or {}}
    rankings = [
        one
        for name, parts in groups.items()
        if len(parts) > 1
        for one in ranking_aurocs(artifact, name, parts, settings)
    ]
    return ShiftResult(tuple(rows), tuple(rankings), settings.alarm, settings.conf)


def evaluate_step(
    artifact: Artifact,
    host: Host,
    store: MatchStore,
    rows_found: Rows,
    name: str,
    severity: int,
    settings: ShiftSettings,
) -> ShiftStep:
    """Evaluate one step.

    Args:
        artifact: Heads and calibration, with an out-of-distribution model.
        host: The frozen base model.
        store: Feature cache of the images.
        rows_found: Detections of the images.
        name: Kind of corruption, or name of the data set.
        severity: Severity of the corruption, 0 for none.
        settings: Settings of the study.

    Returns:
        The results; NaN without detections.
    """
    novelty = artifact.novelty
    assert novelty is not None
    p_value = novelty.p_value(novelty.value(rows_found.evidence), settings.conf).numpy()
    images = novelty.image_p_value(novelty.image_value(rows_found.vectors)).numpy()
    kept, wrong = p_value > settings.alarm, rows_found.wrong > 0.5
    spread = np.sqrt(np.trace(rows_found.poses.covariance, axis1=2, axis2=3))[rows_found.labelled]
    error = np.linalg.norm(rows_found.residual, axis=-1)[rows_found.labelled]
    # Alarms are counted above, at the rate of the settings.
    scores = evaluate_artifact(replace(artifact, novelty=None), host, store, None, Protocol(area="box"))
    return ShiftStep(
        name=name,
        severity=severity,
        images=len(rows_found.ids),
        detections=len(rows_found.poses),
        coverage=held_share(rows_found.square),
        coverage_kept=held_share(rows_found.square[kept]),
        ace=_ace(rows_found.square),
        ace_kept=_ace(rows_found.square[kept]),
        akp=scores.gaussian.akp,
        error=_median(error),
        sigma=_median(spread),
        alarms=_mean(~kept),
        image_alarms=_mean(images <= settings.alarm),
        wrong=_mean(wrong),
        wrong_kept=_mean(wrong & kept),
    )


def _ace(square: Array) -> float:
    known = square[np.isfinite(square)]
    return float(average_coverage_error(coverage(-np.expm1(-known / 2)))) if len(known) else float("nan")


def _mean(values: Array) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _median(values: Array) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def ranking_aurocs(
    artifact: Artifact, group: str, parts: Sequence[Rows], settings: ShiftSettings
) -> list[RankingAuroc]:
    """AUROC of each ranking of keypoints outside their 99 % ellipse.

    Args:
        artifact: Heads and calibration, with an out-of-distribution model.
        group: Name of the group of steps.
        parts: Detections of the steps.
        settings: Settings of the study.
    """
    assert artifact.novelty is not None
    values_by: dict[str, list[Array]] = {name: [] for name in RANKED_BY}
    outside, image = [], []
    for rows in parts:
        known = rows.labelled
        value = artifact.novelty.value(rows.evidence).numpy()
        values_by["novelty"].append(np.broadcast_to(value[:, None], known.shape)[known])
        values_by["score"].append(np.broadcast_to(-rows.poses.scores[:, None], known.shape)[known])
        values_by["covariance"].append(_relative_size(rows)[known])
        outside.append(rows.square[known] > OUTSIDE)
        image.append(np.broadcast_to(rows.image[:, None], known.shape)[known])
    label, images = np.concatenate(outside), np.unique(np.concatenate(image), return_inverse=True)[1]
    weights = np.random.default_rng(0).multinomial(
        images.max() + 1, np.full(images.max() + 1, 1 / (images.max() + 1)), settings.draws
    )
    result = []
    for name in RANKED_BY:
        values = np.concatenate(values_by[name])
        draws = [auroc(values, label, weight[images]) for weight in weights]
        finite = [draw for draw in draws if np.isfinite(draw)]
        low, high = np.quantile(finite, [0.025, 0.975]) if finite else (np.nan, np.nan)
        result.append(RankingAuroc(group, name, auroc(values, label), float(low), float(high)))
    return result


def _relative_size(rows: Rows) -> Array:
    """Stated root mean square distance (N, K), relative to the side of the box."""
    return np.asarray(
        np.sqrt(np.trace(rows.poses.covariance, axis1=2, axis2=3) / box_area(rows.poses.boxes).clip(1.0)[:, None])
    )


def auroc(signal: Array, label: Array, weight: Array | None = None) -> float:
    """Area under the ROC curve; ties count half.

    Args:
        signal: (N,) values.
        label: (N,) whether the sample is positive.
        weight: (N,) number of copies of each sample.

    Example:
        >>> auroc(np.array([1.0, 2.0, 3.0]), np.array([False, True, True]))
        1.0
    """
    if weight is not None:
        keep = np.repeat(np.arange(len(signal)), weight)
        signal, label = signal[keep], label[keep]
    positive = int(label.sum())
    negative = len(label) - positive
    if not positive or not negative:
        return float("nan")
    ranks = rankdata(signal)[label]
    return float((ranks.sum() - positive * (positive + 1) / 2) / (positive * negative))
