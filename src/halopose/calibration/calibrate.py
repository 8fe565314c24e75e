"""Calibrate true positives: the given distribution, the calibrated Gaussian, and the calibrated Student-t, with pruning
masks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halopose.calibration.calibrators import Calibrations, GaussianCalibration, StudentTCalibration
from halopose.calibration.conformal import fit_regions
from halopose.calibration.correlation import Correlation, fit_directions
from halopose.calibration.estimation import Sample
from halopose.calibration.split_student_t import SplitStudentT
from halopose.calibration.thresholds import guaranteed_threshold, select_threshold
from halopose.data.splits import image_folds
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.matching.matched_poses import MatchedPoses
from halopose.parallel import map_blocks, run_parallel, single_threaded
from halopose.protocol import CovarianceKind, Protocol
from halopose.types import Array
from halopose.uncertainty.distributions import Bivariate, Gaussian, StudentT
from halopose.uncertainty.missing_keypoints import places_among
from halopose.uncertainty.pruning import Scalarisation, keep_mask, localization_confidence, risk_guarantee
from halopose.uncertainty.regions import Regions

log = logging.getLogger(__name__)

FEW_OBJECTS = 50  # with fewer samples a keypoint's calibration is mostly noise
ENOUGH_TO_NARROW = 400  # objects needed to measure the coverage of a 95 % ellipse within one percentage point
_BIASED, _FEWEST = 3.0, 8  # significance of a bias in standard errors, and smallest number of objects

# The distributions to compare, with their titles.
DISTRIBUTIONS = {"uncalibrated": "Uncalibrated", "gaussian": "Gaussian", "student_t": "Student-t"}


@dataclass(frozen=True)
class FoldRegions:
    """Conformal regions and correlations of F folds, and the fold of each of M true positives.

    Attributes:
        fold: Index (M,) of the regions and the correlation that apply; they were fitted on other images.
        regions: Regions of each fold.
        correlations: Correlation of each fold.
    """

    fold: Array
    regions: tuple[Regions, ...]
    correlations: tuple[Correlation, ...]

    @classmethod
    def of(
        cls, fold: Array, regions: Sequence[Regions | None], correlations: Sequence[Correlation | None]
    ) -> FoldRegions | None:
        """Collect the regions and correlations of all folds; None if one of them is missing."""
        known = tuple(each for each in regions if each is not None)
        joint = tuple(each for each in correlations if each is not None)
        return cls(fold, known, joint) if len(known) == len(joint) == len(regions) else None

    def select(self, index: Array) -> FoldRegions:
        """Select true positives by index."""
        return replace(self, fold=self.fold[index])


@dataclass(frozen=True)
class DistributionSet:
    """The distributions to compare, each over (M, K), with pruning.

    Attributes:
        distributions: distributions by name.
        confidence: localization confidence (M, K) from the Gaussian's covariance.
        threshold: threshold (M,) of the confidence; it differs between folds.
        visibility_threshold: threshold (M,) of the visibility score, or None.
        source: where the calibrations come from, in words.
        fold_regions: conformal regions and correlations fitted on other images than those of each true positive.
    """

    distributions: dict[str, Bivariate]
    confidence: Array
    threshold: Array
    visibility_threshold: Array | None
    source: str
    fold_regions: FoldRegions | None = None

    def select(self, index: Array) -> DistributionSet:
        """Return the distributions of the true positives at the given indices."""
        visible = self.visibility_threshold
        return replace(
            self,
            distributions={name: _selected(distribution, index) for name, distribution in self.distributions.items()},
            confidence=self.confidence[index],
            threshold=self.threshold[index],
            visibility_threshold=None if visible is None else visible[index],
            fold_regions=None if self.fold_regions is None else self.fold_regions.select(index),
        )

    def kept(self, matched: MatchedPoses) -> Array:
        """Return which keypoints (M, K) pruning keeps (eq. 22)."""
        visible = None if self.visibility_threshold is None else self.visibility_threshold[:, None]
        return keep_mask(self.confidence, self.threshold[:, None], matched.visibility, visible)


def stated_distribution(matched: MatchedPoses, covariance: CovarianceKind = "auto") -> Bivariate:
    """Return the given distribution over (M, K): Student-t if the predictions have degrees of freedom, else
    Gaussian.
    """
    scale_tril = torch.from_numpy(matched.scale_tril)
    if matched.dof is None:
        return Gaussian(scale_tril)
    moment = torch.from_numpy(matched.covariance) if covariance != "paper" else None
    return StudentT(scale_tril, torch.from_numpy(matched.dof), moment)


def scale_sample(matched: MatchedPoses) -> Sample:
    """Squared distances of labelled keypoints under the given scale matrices."""
    return Sample.of_distances(torch.from_numpy(matched.distance), torch.from_numpy(matched.labelled))


def covariance_sample(matched: MatchedPoses) -> Sample:
    """Squared distances of labelled keypoints under the given covariances."""
    return Sample.of_distances(torch.from_numpy(matched.covariance_distance), torch.from_numpy(matched.labelled))


def fit_gaussian(matched: MatchedPoses, min_samples: float = 50.0) -> GaussianCalibration:
    """Calibrate the predicted covariances on true positives."""
    return _gaussian(covariance_sample(matched), min_samples)


def _gaussian(sample: Sample, min_samples: float) -> GaussianCalibration:
    return GaussianCalibration(sample.mahalanobis.shape[1], min_samples=min_samples).fit_sample(sample)


def fit_student(
    matched: MatchedPoses, covariance: CovarianceKind = "auto", min_samples: float = 50.0
) -> StudentTCalibration:
    """Calibrate scale and degrees of freedom of the predicted scale matrices on true positives."""
    return _student(scale_sample(matched), covariance, min_samples)


def _student(sample: Sample, covariance: CovarianceKind, min_samples: float) -> StudentTCalibration:
    keypoints = sample.mahalanobis.shape[1]
    return StudentTCalibration(keypoints, min_samples=min_samples, covariance=covariance).fit_sample(sample)


def fit_offset(matched: MatchedPoses) -> Tensor:
    """Return means (K, 2) of the residuals relative to the square root of the box area; 0 without a bias.

    They maximise the likelihood under the given dispersions. A plain mean would be dominated by small objects, whose
    relative errors are large. A mean counts as a bias if it differs from 0 by more than three standard errors, with
    independent objects.
    """
    size = np.sqrt(matched.box_area)[:, None, None]
    inverse = np.linalg.inv(matched.scale_tril)
    precision = np.swapaxes(inverse, -1, -2) @ inverse * matched.labelled[..., None, None]
    residual = np.where(matched.labelled[..., None], matched.residual, 0.0)[..., None]
    pull = (size[..., None] * precision @ residual)[..., 0]
    information = (np.square(size)[..., None] * precision).sum(0)
    known = matched.labelled.sum(0)[:, None] >= _FEWEST
    information = np.where(known[..., None], information, np.eye(2))
    share = np.linalg.solve(information, pull.sum(0)[..., None])[..., 0]
    left = pull - (np.square(size)[..., None] * precision @ share[..., None])[..., 0]
    turned = np.linalg.solve(information, np.swapaxes(left, 0, 1).swapaxes(1, 2))
    biased = (np.abs(share) > _BIASED * np.sqrt(np.square(turned).sum(-1))) & known
    alone = pull.sum(0) / np.diagonal(information, axis1=1, axis2=2)  # with the other coordinate fixed at 0
    return torch.from_numpy(np.where(biased, np.where(biased.all(1, keepdims=True), share, alone), 0.0))


@dataclass(frozen=True)
class _Source:
    """True positives that a calibration is fitted on: all, or those in some rows (m,)."""

    matched: MatchedPoses
    rows: Array | None = None

    def of(self, values: Array) -> Array:
        """Return the rows of values (M, ...)."""
        return values if self.rows is None else values.take(self.rows, 0)

    def sample(self, distance: Array) -> Sample:
        """Select their rows of squared distances (M, K)."""
        distance, labelled = self.of(distance), self.of(self.matched.labelled)
        return Sample.of_distances(torch.from_numpy(distance), torch.from_numpy(labelled))

    @cached_property
    def places(self) -> Array:
        """Return the places (n,) of the labelled keypoints by rising distance."""
        every, shape = self.matched.places, self.matched.labelled.shape
        return every if self.rows is None else places_among(every, self.rows, (shape[0], shape[1]))


@dataclass(frozen=True)
class _Known:
    """Calibrations fitted on other data, which are used instead of fitted ones."""

    gaussian: GaussianCalibration | None = None
    student: StudentTCalibration | None = None
    threshold: float | None = None


def warn_of_few(matched: MatchedPoses, images: int) -> None:
    """Warn if a calibration has too few objects, and say how many images it needs."""
    names, objects = matched.layout.names, matched.labelled.sum(0)
    few = [name for name, count in zip(names, objects, strict=True) if count < FEW_OBJECTS]
    if few:
        least = int(objects.min())
        need = f"about {math.ceil(images * FEW_OBJECTS / least)} images" if least else "images that show it"
        log.warning(
            "calibrated on few objects: %d of %s (%d of %d keypoints have under %d); a calibration that can be "
            "trusted takes %s like these",
            least, names[int(objects.argmin())], len(few), len(names), FEW_OBJECTS, need,
        )  # fmt: skip


def fit_calibrations(
    matched: MatchedPoses,
    protocol: Protocol,
    *,
    gaussian: GaussianCalibration | None = None,
    student: StudentTCalibration | None = None,
    threshold: float | None = None,
) -> Calibrations:
    """Calibrate on true positives, then choose the thresholds on the calibrated covariances.

    A visibility score that does not improve on the confidence gets no threshold.

    Args:
        matched: true positives.
        protocol: settings.
        gaussian: calibration to use instead of a fitted one; the same for ``student`` and ``threshold``.
    """
    with single_threaded():
        _ = matched.places  # needed by both
        source, known = _Source(matched), _Known(gaussian, student, threshold)
        pieces: list[Callable[[], Any]] = [
            partial(_fit_alone, source, protocol, known, _entries(matched)),
            partial(_fit_correlation, source, protocol),
        ]
        alone, together = run_parallel(pieces)
    return replace(alone, correlation=together)


def limit_narrowing(
    fitted: Calibrations, before: Calibrations, matched: MatchedPoses, protocol: Protocol
) -> Calibrations:
    """Limit how far calibrations on few true positives narrow the previous dispersions.

    Frames of one film have correlated errors, so a few frames can show that a dispersion is too small, but hardly that
    it is too large. A temperature above the previous one is used as fitted. A lower one moves, in the logarithm, only
    by the share objects / ``ENOUGH_TO_NARROW``.
    """
    share = torch.from_numpy(np.minimum(matched.labelled.sum(0) / ENOUGH_TO_NARROW, 1.0))
    factor = (before.gaussian.tau_ / fitted.gaussian.tau_).clamp(min=1.0) ** (1 - share)
    if not bool((factor > 1).any()):
        return fitted
    log.warning(
        "calibration on %d objects widens dispersions fully and narrows them in part: full narrowing takes %d objects",
        len(matched), ENOUGH_TO_NARROW,
    )  # fmt: skip
    wider = fit_calibrations(matched, protocol, gaussian=fitted.gaussian.widened(factor))
    split_student = None if wider.split_student is None else wider.split_student.widened(factor)
    return replace(wider, student=wider.student.widened(factor), split_student=split_student)


def _fit_alone(source: _Source, protocol: Protocol, known: _Known, entries: Array) -> Calibrations:
    """Fit everything except the correlation. ``entries`` (3, M, K) are the entries of all factors."""
    matched = source.matched
    labelled = source.of(matched.labelled)
    gaussian, student, threshold = known.gaussian, known.student, known.threshold
    if gaussian is None:
        gaussian = _gaussian(source.sample(matched.covariance_distance), protocol.min_samples)
    if student is None:
        student = _student(source.sample(matched.distance), protocol.covariance, protocol.min_samples)
    own = entries if source.rows is None else entries.take(source.rows, 1)
    area, kappa = source.of(matched.confidence_area(protocol)), matched.layout.kappa
    every = _confidence(own, gaussian.tau_.double().numpy(), area, kappa, protocol.scalarisation)
    confidence = every[labelled]
    correct = source.of(matched.similarity)[labelled] >= protocol.gamma_ks
    image_ids = source.of(matched.image_ids)
    if threshold is None:
        images = np.broadcast_to(image_ids[:, None], labelled.shape)
        threshold = _threshold(confidence, correct, images, labelled, protocol)
    visibility = None if matched.visibility is None else source.of(matched.visibility)
    visible = None
    # With a guarantee only the confidence decides, because only that was tested.
    if protocol.visibility and visibility is not None and not risk_guarantee(protocol.threshold_rule):
        shown, among = visibility[labelled], confidence >= threshold
        best = select_threshold(shown, correct, protocol.threshold_rule, among=among)
        if best > shown[among].min(initial=np.inf):
            visible = best
    keep = keep_mask(every, threshold, visibility, visible)
    regions = None
    if protocol.extended:
        scales = _object_scales(source.of(matched.box_area), matched.layout, protocol)
        distance = source.of(matched.distance)
        regions = fit_regions(distance, labelled, image_ids, keep=keep, places=source.places, **scales)
    split_student = None
    if protocol.split_student and known.student is None:
        parts = source.of(matched.residual), source.of(matched.scale_tril), labelled, keep
        split_student = SplitStudentT.fit(student, *map(torch.from_numpy, parts))
    return Calibrations(gaussian, student, threshold, visible, regions, None, split_student)


def fit_regions_of(matched: MatchedPoses, keep: Array, protocol: Protocol) -> Regions:
    """Conformal regions of true positives, of which pruning keeps ``keep`` (M, K)."""
    scales = _object_scales(matched.box_area, matched.layout, protocol)
    return fit_regions(
        matched.distance, matched.labelled, matched.image_ids, keep=keep, places=matched.places, **scales
    )


def _fit_correlation(source: _Source, protocol: Protocol) -> Correlation:
    """Fit the correlation of keypoints."""
    matched = source.matched
    direction, labelled, area = map(source.of, (matched.direction, matched.labelled, matched.box_area))
    scales = _object_scales(area, matched.layout, protocol)
    return fit_directions(direction, labelled, source.places, matched.layout.mirror, **scales)


def _object_scales(area: Array, layout: Keypoints, protocol: Protocol) -> dict[str, Any]:
    """Return the arguments that separate regions and correlation by object scale, if requested."""
    edges = protocol.scale_edges if protocol.region_scales else ()
    return {"area": area, "edges": edges, "area_factor": layout.area_factor}


def _threshold(confidence: Array, correct: Array, images: Array, labelled: Array, protocol: Protocol) -> float:
    """Choose the threshold of the confidence (n,) of labelled keypoints (M, K) on images (M, K) by the
    protocol's rule.
    """
    guarantee = risk_guarantee(protocol.threshold_rule)
    if guarantee is None:
        return select_threshold(confidence, correct, protocol.threshold_rule)
    threshold = guaranteed_threshold(confidence, correct, images[labelled], *guarantee)
    if threshold == float("inf"):
        raise HaloposeError(
            f"no threshold meets the guarantee {protocol.threshold_rule} on these images: allow more risk, or give "
            "more images"
        )
    return threshold


def _entries(matched: MatchedPoses) -> Array:
    """Return the entries l11, l21, l22 (3, M, K) of the factors of the given covariances."""
    factors = matched.covariance_tril
    return np.stack([factors[..., i, j] for i, j in ((0, 0), (1, 0), (1, 1))])


def _confidence(entries: Array, tau: Array, area: Array, kappa: Array, scalarisation: Scalarisation) -> Array:
    """Return the localization confidence (M, K) of calibrated covariances.

    Args:
        entries: entries (3, M, K) of the given factors.
        tau: temperatures (K,) or (M, K).
        area: object areas (M,).
        kappa: tolerances (K,).
        scalarisation: size of a covariance.
    """
    tau = np.broadcast_to(tau, entries.shape[1:])

    def confidence(rows: slice) -> Array:
        first, shear, second = entries[:, rows] * tau[rows]
        matrices = np.empty((2, 2, *first.shape))
        matrices[0, 0], matrices[1, 1] = np.square(first), np.square(shear) + np.square(second)
        matrices[0, 1] = matrices[1, 0] = first * shear
        return localization_confidence(matrices.transpose(2, 3, 0, 1), area[rows], kappa, scalarisation)

    return map_blocks(confidence, len(area))


def apply_calibrations(
    matched: MatchedPoses, fitted: Calibrations, protocol: Protocol, source: str = ""
) -> DistributionSet:
    """Return the distributions of true positives that were not used for fitting."""
    fold = np.zeros(len(matched), dtype=np.int64)
    distributions = _distributions_of_folds(matched, fold, [fitted], protocol, _entries(matched))
    return replace(
        distributions, source=source, fold_regions=FoldRegions.of(fold, [fitted.regions], [fitted.correlation])
    )


def _distributions_of_folds(
    matched: MatchedPoses, fold: Array, fitted: Sequence[Calibrations], protocol: Protocol, entries: Array
) -> DistributionSet:
    """Return the distributions of true positives under what was fitted on other folds than theirs (M,).

    ``entries`` (3, M, K) are the entries of the factors of their covariances.
    """
    by_fold = torch.from_numpy(fold)
    tau = torch.stack([each.gaussian.tau_.to(torch.float64) for each in fitted])[by_fold]
    area, kappa = matched.confidence_area(protocol), matched.layout.kappa
    confidence = _confidence(entries, tau.numpy(), area, kappa, protocol.scalarisation)
    threshold = np.array([each.threshold for each in fitted])[fold]
    seen = [each.visibility_threshold for each in fitted]
    visible = None
    if any(each is not None for each in seen):
        visible = np.array([-np.inf if each is None else each for each in seen])[fold]
    keep = keep_mask(confidence, threshold[:, None], matched.visibility, None if visible is None else visible[:, None])
    return DistributionSet(
        distributions={
            "uncalibrated": stated_distribution(matched, fitted[0].student.covariance),
            "gaussian": Gaussian(torch.from_numpy(matched.covariance_tril) * tau[..., None, None]),
            "student_t": _students_of_folds(matched, by_fold, fitted, torch.from_numpy(keep)),
        },
        confidence=confidence,
        threshold=threshold,
        visibility_threshold=visible,
        source="",
    )


def _students_of_folds(
    matched: MatchedPoses, by_fold: Tensor, fitted: Sequence[Calibrations], keep: Tensor
) -> StudentT:
    """Return the Student-t over (M, K) by fold (M,), for kept and pruned keypoints (``keep`` (M, K))."""
    factors = torch.from_numpy(matched.scale_tril)

    def distribution(calibrations: Sequence[StudentTCalibration]) -> StudentT:
        tau, nu, moment = (
            torch.stack([getattr(each, name).to(factors.dtype) for each in calibrations])[by_fold]
            for name in ("tau_", "nu_", "moment_tau_")
        )
        own = Gaussian(factors * moment[..., None, None]).covariance if calibrations[0].covariance != "paper" else None
        return StudentT(factors * tau[..., None, None], nu, own)

    if all(each.split_student is None for each in fitted):
        return distribution([each.student for each in fitted])
    return SplitStudentT.joined(
        distribution([each.student if each.split_student is None else each.split_student.kept for each in fitted]),
        distribution([each.student if each.split_student is None else each.split_student.pruned for each in fitted]),
        keep,
    )


@dataclass(frozen=True)
class CrossFit:
    """Calibrations by fold of images, each fitted on the images of the other folds.

    Attributes:
        images: Ids (I,) of the images that calibrations were fitted on, rising.
        fold: Fold (I,) of each of these images.
        fitted: Calibrations by fold.
        protocol: Protocol they were fitted by.
        source: Where they come from, in words.
    """

    images: Array
    fold: Array
    fitted: tuple[Calibrations, ...]
    protocol: Protocol
    source: str

    def apply(self, matched: MatchedPoses, protocol: Protocol | None = None) -> DistributionSet:
        """Distributions of true positives, none fitted on the image it is applied to."""
        # An image without matches was not fitted on, so any fold will do.
        place = np.searchsorted(self.images, matched.image_ids).clip(max=len(self.images) - 1)
        fold = np.where(self.images[place] == matched.image_ids, self.fold[place], 0)
        distributions = _distributions_of_folds(
            matched, fold, self.fitted, protocol or self.protocol, _entries(matched)
        )
        regions, joint = ([getattr(each, name) for each in self.fitted] for name in ("regions", "correlation"))
        return replace(distributions, source=self.source, fold_regions=FoldRegions.of(fold, regions, joint))


def cross_fit(
    matched: MatchedPoses,
    protocol: Protocol,
    *,
    gaussian: GaussianCalibration | None = None,
    student: StudentTCalibration | None = None,
    threshold: float | None = None,
) -> CrossFit:
    """Calibrate each fold of images on the others; given calibrations were fitted elsewhere and are used unchanged."""
    images, first = np.unique(matched.image_ids, return_index=True)
    chooses_visibility = protocol.visibility and matched.visibility is not None
    if gaussian is not None and student is not None and threshold is not None and not chooses_visibility:
        given = Calibrations(gaussian, student, threshold)
        fold = np.zeros(len(images), dtype=np.int64)
        return CrossFit(images, fold, (given,), protocol, "given: gaussian, student, threshold")
    numbers, fold = np.unique(image_folds(matched.image_ids, protocol.folds), return_inverse=True)
    # Computed once for all folds.
    _ = matched.scale_tril, matched.covariance_tril
    shared = ("places", "direction") if protocol.extended else ()
    run_parallel([partial(getattr, matched, name) for name in (*shared, "covariance_distance", "similarity")])
    entries, known = _entries(matched), _Known(gaussian, student, threshold)
    others = [_Source(matched, np.flatnonzero(fold != number)) for number in range(len(numbers))]
    pieces: list[Callable[[], Any]] = [partial(_fit_alone, other, protocol, known, entries) for other in others]
    # The correlation of a fold is a separate task, for better load balance.
    pieces += [partial(_fit_correlation, other, protocol) for other in others if protocol.extended]
    found = run_parallel(pieces)
    fitted, correlations = found[: len(numbers)], found[len(numbers) :] or [None] * len(numbers)
    names = [name for name, value in vars(known).items() if value is not None]
    source = f"{len(fitted)} folds of images, each scored with what was fitted on the others"
    if names:
        source = f"given: {', '.join(names)}; {source}"
    whole = tuple(replace(one, correlation=joint) for one, joint in zip(fitted, correlations, strict=True))
    return CrossFit(images, fold[first], whole, protocol, source)


def cross_fitted(
    matched: MatchedPoses,
    protocol: Protocol,
    *,
    gaussian: GaussianCalibration | None = None,
    student: StudentTCalibration | None = None,
    threshold: float | None = None,
) -> DistributionSet:
    """Return the distributions with each image under what was fitted on the other folds, or is given."""
    return cross_fit(matched, protocol, gaussian=gaussian, student=student, threshold=threshold).apply(matched)


def _selected(distribution: Bivariate, index: Array) -> Bivariate:
    """Return the distribution (n, K) of the true positives at the given indices."""
    rows = torch.from_numpy(index)
    if not isinstance(distribution, StudentT):
        return Gaussian(distribution.scale_tril[rows])
    dof = distribution.dof.expand(distribution.scale_tril.shape[:-2])[rows]
    return StudentT(
        distribution.scale_tril[rows], dof, None if distribution.moment is None else distribution.moment[rows]
    )
