"""Coverage of conformal regions and NLL of the joint distribution, on images that neither was fitted on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from halopose.calibration.calibrate import FoldRegions
from halopose.calibration.conformal import whole_distance
from halopose.calibration.correlation import Correlation
from halopose.evaluation.bootstrap import half_width, resample_images
from halopose.evaluation.region_scores import REGION_LEVELS, CoverageEstimate, JointNll, JointScores, RegionScores
from halopose.matching.matched_poses import MatchedPoses
from halopose.parallel import blocks
from halopose.protocol import Protocol
from halopose.sorting import whole_order
from halopose.types import Array
from halopose.uncertainty.distributions import Bivariate, StudentT
from halopose.uncertainty.joint_distribution import JointDistribution, gains


@dataclass(frozen=True)
class RegionEvaluation:
    """Regions at ``REGION_LEVELS`` and correlations for M true positives, none fitted on the image it applies to.

    Attributes:
        radius: (T, K, 4) squared radii of keypoint regions; one table per fold and object scale. Infinite if there
            are too few images for the level.
        whole: (F, 4) squared radii of whole-object regions by fold.
        whole_kept: (F, 4) the same for the keypoints that pruning keeps.
        table: (M,) index of the table of each true positive.
        fold: (M,) fold of each true positive.
        correlations: F correlations by fold.
    """

    radius: Array
    whole: Array
    whole_kept: Array
    table: Array
    fold: Array
    correlations: tuple[Correlation, ...]

    @classmethod
    def of(cls, matched: MatchedPoses, fitted: FoldRegions | None) -> RegionEvaluation | None:
        """Look up the radii of true positives; None without regions or correlations."""
        if fitted is None:
            return None
        known, fold = fitted.regions, fitted.fold
        levels = [level / 100 for level in REGION_LEVELS]
        tables = [np.stack([each.at(each.keypoint, level) for level in levels], axis=-1) for each in known]
        first = np.cumsum([0, *map(len, tables)])
        table = np.zeros(len(fold), dtype=np.int64)
        for number, each in enumerate(known):
            rows = np.flatnonzero(fold == number)
            table[rows] = first[number] + each.scale_of(matched.box_area[rows])
        whole, kept = (
            np.array([[each.at(getattr(each, name), level) for level in levels] for each in known])
            for name in ("whole", "whole_kept")
        )
        return cls(np.concatenate(tables), whole, kept, table, fold, fitted.correlations)


def score_regions(
    matched: MatchedPoses, fitted: RegionEvaluation, kept: Array, protocol: Protocol, scales: Mapping[str, Array]
) -> RegionScores:
    """Coverage of regions overall, by keypoint, by object scale, and of whole objects.

    Args:
        matched: M true positives.
        fitted: Their regions.
        kept: (M, K) keypoints that pruning keeps.
        protocol: Settings of the evaluation.
        scales: Masks (M,) of the object scales by name.
    """
    labelled = matched.labelled
    instance, keypoint = np.nonzero(labelled)
    images = np.unique(matched.image_ids, return_inverse=True)[1]
    image, table = images.take(instance), fitted.table.take(instance) * labelled.shape[1] + keypoint
    distance = matched.distance[labelled]
    radii = [column.take(table) for column in np.moveaxis(fitted.radius, -1, 0).reshape(len(REGION_LEVELS), -1)]
    held = np.array([distance <= radius for radius in radii])
    finite = np.isfinite(radii)

    def share(hits: Array, known: Array, image: Array) -> CoverageEstimate:
        return _share(hits, known, image, int(images.max()) + 1, protocol.bootstrap, protocol.seed)

    whole = {}
    for name, mask, radius in (
        ("whole", labelled, fitted.whole),
        ("whole_kept", labelled & kept, fitted.whole_kept),
    ):
        rows = np.flatnonzero(mask.any(1))
        largest, of_rows = whole_distance(matched.distance, mask, images)
        of_fold = radius.T[:, fitted.fold[rows]]
        whole[name] = share(largest <= of_fold, np.isfinite(of_fold), of_rows)
    groups = {name: np.flatnonzero(rows.take(instance)) for name, rows in scales.items()}
    order = whole_order(keypoint)
    members = np.split(order, np.cumsum(np.bincount(keypoint, minlength=labelled.shape[1]))[:-1])
    # Geometric mean of the half axes at radius 1: the square root of the determinant of the factor.
    size = np.sqrt((matched.scale_tril[..., 0, 0] * matched.scale_tril[..., 1, 1])[labelled])
    return RegionScores(
        keypoints=share(held, finite, image),
        per_keypoint={
            name: share(held[:, index], finite[:, index], image.take(index))
            for name, index in zip(matched.layout.names, members, strict=True)
        },
        per_scale={name: share(held[:, index], finite[:, index], image.take(index)) for name, index in groups.items()},
        whole=whole["whole"],
        whole_kept=whole["whole_kept"],
        size=tuple(float(np.median(size * np.sqrt(radius))) for radius in radii),
    )


def joint_gains(
    matched: MatchedPoses, distributions: Mapping[str, Bivariate], fitted: RegionEvaluation
) -> dict[str, Array]:
    """Log-likelihood gain (M,) of the joint distribution over independent keypoints, by distribution.

    The uncalibrated distribution is included if the predictions contain a correlation.

    Args:
        matched: M true positives.
        distributions: Distributions by name.
        fitted: Regions and correlations of the true positives.
    """
    names = [name for name in distributions if name != "uncalibrated"]
    found = dict(zip(names, _gains(matched, [distributions[name] for name in names], fitted), strict=True))
    if matched.correlation is None or "uncalibrated" not in distributions:
        return found
    return {"uncalibrated": _given_gain(matched, distributions["uncalibrated"]), **found}


def score_joint(
    matched: MatchedPoses,
    gains_of: Mapping[str, Array],
    independent: Mapping[str, float],
    fitted: RegionEvaluation,
    protocol: Protocol,
) -> JointScores:
    """Joint NLL by distribution.

    Args:
        matched: M true positives.
        gains_of: Log-likelihood gains (M,) from ``joint_gains``, by distribution.
        independent: NLL per keypoint for independent keypoints, by distribution.
        fitted: Regions and correlations of the true positives.
        protocol: Settings of the evaluation.
    """
    images, image = np.unique(matched.image_ids, return_inverse=True)
    count = np.bincount(image, matched.labelled.sum(1))
    scores = {}
    for name, gain in gains_of.items():
        by_image = np.bincount(image, gain)
        better = float(by_image.sum() / count.sum())
        draws = resample_images(len(images), protocol.bootstrap, protocol.seed)
        margin = half_width([float(by_image[pick].sum() / max(count[pick].sum(), 1)) for pick in draws])
        scores[name] = JointNll(independent[name] - better, independent[name], better, margin)
    folds = fitted.correlations
    return JointScores(
        distributions=scores,
        correlation=np.mean([each.matrix for each in folds], axis=0),
        dof=float(np.median([each.dof for each in folds])),
        shrinkage=float(np.mean([each.shrinkage for each in folds])),
    )


def _gains(matched: MatchedPoses, distributions: Sequence[Bivariate], fitted: RegionEvaluation) -> list[Array]:
    """Log-likelihood gain (M,) of each distribution over independent keypoints, fold by fold."""
    factors = [distribution.scale_tril.numpy() for distribution in distributions]
    dofs = [
        distribution.dof.expand(distribution.scale_tril.shape[:2]).numpy()
        if isinstance(distribution, StudentT)
        else None
        for distribution in distributions
    ]
    result = [np.zeros(len(matched)) for _ in distributions]
    for number, correlation in enumerate(fitted.correlations):
        inside = np.flatnonzero(fitted.fold == number)
        for block in blocks(len(inside)):
            rows = inside[block]
            matrix = (
                correlation.matrix if correlation.scales is None else correlation.of_objects(matched.box_area[rows])
            )
            joint = [
                JointDistribution(factor[rows], matrix, None if dof is None else dof[rows], correlation.dof)
                for factor, dof in zip(factors, dofs, strict=True)
            ]
            parts = gains(joint, matched.residual[rows], matched.labelled[rows])
            for whole, part in zip(result, parts, strict=True):
                whole[rows] = part
    return result


def _given_gain(matched: MatchedPoses, distribution: Bivariate) -> Array:
    assert matched.correlation is not None
    dof = (
        distribution.dof.expand(distribution.scale_tril.shape[:2]).numpy()
        if isinstance(distribution, StudentT)
        else None
    )
    joint = JointDistribution(distribution.scale_tril.numpy(), matched.correlation, dof)
    return joint.gain(matched.residual, matched.labelled)


def _share(hits: Array, finite: Array, image: Array, images: int, draws: int, seed: int) -> CoverageEstimate:
    """Share of hits (4, n), with intervals by bootstrap over images (n,); NaN at levels with an infinite region."""
    count = len(image)
    if not count:
        nothing = (math.nan,) * len(REGION_LEVELS)
        return CoverageEstimate(nothing, nothing, 0)
    known = [bool(np.all(row)) for row in finite]
    held = tuple(
        int(np.count_nonzero(row)) / count if sure else math.nan for row, sure in zip(hits, known, strict=True)
    )
    if not draws:
        return CoverageEstimate(held, (math.nan,) * len(held), count)
    total = np.bincount(image, minlength=images)
    sums = np.stack([np.bincount(image, row, minlength=images) for row in hits], axis=1)
    picks = resample_images(images, draws, seed)
    drawn = total[picks].sum(1)
    shares = sums[picks].sum(1)[drawn > 0] / drawn[drawn > 0, None]  # a draw may contain no image of a group
    margins = (half_width(column) if sure else math.nan for column, sure in zip(shares.T, known, strict=True))
    return CoverageEstimate(held, tuple(margins), count)
