"""The three laws to compare: as given, calibrated as a Gaussian, calibrated as a Student-t.

In: true positives, and what was fitted elsewhere if anything was. Out: a law each over (M, K) and the pruning
mask, none of them fitted on the images it is used on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from halopose.data.splits import image_folds
from halopose.errors import HaloposeError
from halopose.evaluation.promises import Promises
from halopose.evaluation.protocol import Protocol
from halopose.evaluation.side_by_side import by_blocks, side_by_side
from halopose.evaluation.true_positives import MatchedPoses
from halopose.keypoints import Keypoints
from halopose.types import Array
from halopose.uncertainty.calibration import Calibrations, GaussianCalibration, StudentTCalibration
from halopose.uncertainty.conformal import Regions, fit_regions
from halopose.uncertainty.correlation import Correlation, fit_correlation
from halopose.uncertainty.distributions import Bivariate, Gaussian, StudentT
from halopose.uncertainty.pruning import (
    keep_mask,
    localization_confidence,
    promise_of,
    promised_threshold,
    select_threshold,
)
from halopose.uncertainty.tails import Tails

_BIASED, _FEWEST = 3.0, 8  # standard errors from which a mean counts as a bias, and objects it takes

# The laws to compare, and what people are told they are called.
LAWS = {"uncalibrated": "Uncalibrated", "gaussian": "Gaussian", "student_t": "Student-t"}


@dataclass(frozen=True)
class Laws:
    """The laws to compare, each over (M, K), what is pruned (M, K) and by which thresholds (M,), folds differ.

    confidence: of the Gaussian's covariance (M, K), by which pruning goes. source: where all this came from.
    promises: what regions and the joint law say of the same true positives.
    """

    laws: dict[str, Bivariate]
    confidence: Array
    threshold: Array
    visibility_threshold: Array | None
    source: str
    promises: Promises | None = None

    def select(self, index: Array) -> Laws:
        """The laws of the true positives at the given indices."""
        visible = self.visibility_threshold
        return replace(
            self,
            laws={name: _selected(law, index) for name, law in self.laws.items()},
            confidence=self.confidence[index],
            threshold=self.threshold[index],
            visibility_threshold=None if visible is None else visible[index],
            promises=None if self.promises is None else self.promises.select(index),
        )

    def kept(self, matched: MatchedPoses) -> Array:
        """Keypoints (M, K) that stay (eq. 22)."""
        visible = None if self.visibility_threshold is None else self.visibility_threshold[:, None]
        return keep_mask(self.confidence, self.threshold[:, None], matched.visibility, visible)


def given_law(matched: MatchedPoses, covariance: Literal["moment", "paper"] = "moment") -> Bivariate:
    """The predictions' own law over (M, K): Student-t if they have degrees of freedom, else Gaussian."""
    scale_tril = torch.from_numpy(matched.scale_tril)
    if matched.dof is None:
        return Gaussian(scale_tril)
    moment = torch.from_numpy(matched.covariance) if covariance == "moment" else None
    return StudentT(scale_tril, torch.from_numpy(matched.dof), moment)


def fit_gaussian(matched: MatchedPoses, min_samples: float = 50.0) -> GaussianCalibration:
    """Calibrate the predicted covariances on true positives."""
    calibration = GaussianCalibration(matched.labelled.shape[1], min_samples=min_samples)
    if matched.covariance is matched.scale:
        return calibration.fit_sample(matched.sample)
    return calibration.fit(*_residuals(matched, matched.covariance_tril), torch.from_numpy(matched.labelled))


def fit_student(
    matched: MatchedPoses, covariance: Literal["moment", "paper"] = "moment", min_samples: float = 50.0
) -> StudentTCalibration:
    """Calibrate scale and tails of the predicted scale matrices on true positives."""
    calibration = StudentTCalibration(matched.labelled.shape[1], min_samples=min_samples, covariance=covariance)
    return calibration.fit_sample(matched.sample)


def fit_offset(matched: MatchedPoses) -> Tensor:
    """Means (K, 2) of the residuals of true positives as shares of the root of the box area; 0 without a bias.

    The likeliest shares under the dispersions as given: a plain mean of shares is made by small objects, whose
    errors of some pixels are large shares, and moves large ones by too much. There is a bias where the share is
    more than three standard errors off, objects taken as independent of each other.
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
    alone = pull.sum(0) / np.diagonal(information, axis1=1, axis2=2)  # the other coordinate held at 0
    return torch.from_numpy(np.where(biased, np.where(biased.all(1, keepdims=True), share, alone), 0.0))


def _residuals(matched: MatchedPoses, scale_tril: Array) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(matched.residual), torch.from_numpy(scale_tril)


def fit_calibrations(
    matched: MatchedPoses,
    protocol: Protocol,
    *,
    gaussian: GaussianCalibration | None = None,
    student: StudentTCalibration | None = None,
    threshold: float | None = None,
) -> Calibrations:
    """Calibrate on true positives, then choose the thresholds on the calibrated covariances.

    What is given was fitted on other data and takes the place of what would be fitted. A visibility score by which
    nothing is worth pruning beside the confidence has no threshold.
    """
    _ = matched.scale_tril  # which both need
    pieces: list[Callable[[], Any]] = [
        partial(_fit_alone, matched, protocol, gaussian, student, threshold),
        partial(_fit_correlation, matched, protocol),
    ]
    alone, together = side_by_side(pieces)
    return replace(alone, correlation=together)


def _fit_alone(
    matched: MatchedPoses,
    protocol: Protocol,
    gaussian: GaussianCalibration | None,
    student: StudentTCalibration | None,
    threshold: float | None,
) -> Calibrations:
    """``fit_calibrations`` but for the correlation: all that looks at one keypoint at a time."""
    given = student is not None
    gaussian = gaussian or fit_gaussian(matched, protocol.min_samples)
    student = student or fit_student(matched, protocol.covariance, protocol.min_samples)
    every = _gaussian_confidence(matched, gaussian, protocol)
    confidence = every[matched.labelled]
    correct = matched.similarity[matched.labelled] >= protocol.gamma_ks
    if threshold is None:
        threshold = _threshold(confidence, correct, matched, protocol)
    visible = None
    # With a promise the confidence decides alone: that is what was tested.
    if protocol.visibility and matched.visibility is not None and not promise_of(protocol.threshold_rule):
        visibility, among = matched.visibility[matched.labelled], confidence >= threshold
        best = select_threshold(visibility, correct, protocol.threshold_rule, among=among)
        if best > visibility[among].min(initial=np.inf):
            visible = best
    keep = keep_mask(every, threshold, matched.visibility, visible)
    scales = _object_scales(matched.box_area, matched.layout, protocol)
    regions = fit_regions(matched.distance, matched.labelled, matched.image_ids, keep=keep, **scales)
    tails = None
    if protocol.tails and not given:
        labelled = torch.from_numpy(matched.labelled)
        tails = Tails.fit(student, *_residuals(matched, matched.scale_tril), labelled, torch.from_numpy(keep))
    return Calibrations(gaussian, student, threshold, visible, regions, None, tails)


def _fit_correlation(matched: MatchedPoses, protocol: Protocol, index: Array | None = None) -> Correlation:
    """How keypoints of true positives, all or those at the given indices, err together."""
    residual, factors, labelled, area = (
        values if index is None else values[index]
        for values in (matched.residual, matched.scale_tril, matched.labelled, matched.box_area)
    )
    scales = _object_scales(area, matched.layout, protocol)
    return fit_correlation(residual, factors, labelled, matched.layout.mirror, **scales)


def _object_scales(area: Array, layout: Keypoints, protocol: Protocol) -> dict[str, Any]:
    """What regions and correlation take to tell object scales apart, if they are asked to."""
    edges = protocol.scale_edges if protocol.region_scales else ()
    return {"area": area, "edges": edges, "area_factor": layout.area_factor}


def _threshold(confidence: Array, correct: Array, matched: MatchedPoses, protocol: Protocol) -> float:
    """Threshold on the confidence (n,) of labelled keypoints by the protocol's rule."""
    promise = promise_of(protocol.threshold_rule)
    if promise is None:
        return select_threshold(confidence, correct, protocol.threshold_rule)
    images = np.broadcast_to(matched.image_ids[:, None], matched.labelled.shape)[matched.labelled]
    threshold = promised_threshold(confidence, correct, images, *promise)
    if threshold == float("inf"):
        raise HaloposeError(
            f"no threshold keeps the promise {protocol.threshold_rule} on these images: allow more risk, or give "
            "more images"
        )
    return threshold


def _gaussian_confidence(matched: MatchedPoses, gaussian: GaussianCalibration, protocol: Protocol) -> Array:
    """Localization confidence (M, K) of the calibrated covariances, whose entries come from the factors' own."""
    factors, area, kappa = matched.covariance_tril, matched.confidence_area(protocol), matched.layout.kappa
    tau = gaussian.tau_.to(torch.float64).numpy()

    def confidence(rows: slice) -> Array:
        first, shear, second = (factors[rows, :, i, j] * tau for i, j in ((0, 0), (1, 0), (1, 1)))
        entries = np.empty((2, 2, *first.shape))
        entries[0, 0], entries[1, 1] = np.square(first), np.square(shear) + np.square(second)
        entries[0, 1] = entries[1, 0] = first * shear
        matrices = entries.transpose(2, 3, 0, 1)
        return localization_confidence(matrices, area[rows], kappa, protocol.scalarisation)

    return by_blocks(confidence, len(matched))


def apply_calibrations(matched: MatchedPoses, fitted: Calibrations, protocol: Protocol, source: str = "") -> Laws:
    """The three laws of true positives that nothing was fitted on."""
    count, visible = len(matched), fitted.visibility_threshold
    confidence = _gaussian_confidence(matched, fitted.gaussian, protocol)
    keep = torch.from_numpy(keep_mask(confidence, fitted.threshold, matched.visibility, visible))
    return Laws(
        laws={
            "uncalibrated": given_law(matched, fitted.student.covariance),
            "gaussian": fitted.gaussian(torch.from_numpy(matched.covariance_tril)),
            "student_t": fitted.law(torch.from_numpy(matched.scale_tril), "student-t", keep),
        },
        confidence=confidence,
        threshold=np.full(count, fitted.threshold),
        visibility_threshold=None if visible is None else np.full(count, visible),
        source=source,
        promises=Promises.of(matched, fitted.regions, fitted.correlation),
    )


def cross_fitted(
    matched: MatchedPoses,
    protocol: Protocol,
    *,
    gaussian: GaussianCalibration | None = None,
    student: StudentTCalibration | None = None,
    threshold: float | None = None,
) -> Laws:
    """The three laws, each image under what was fitted on the other folds of images, or is given."""
    chooses_visibility = protocol.visibility and matched.visibility is not None
    if gaussian is not None and student is not None and threshold is not None and not chooses_visibility:
        given = Calibrations(gaussian, student, threshold)
        return apply_calibrations(matched, given, protocol, "given: gaussian, student, threshold")
    numbers, fold = np.unique(image_folds(matched.image_ids, protocol.folds), return_inverse=True)
    # What every fold needs is worked out once.
    _ = matched.scale_tril, matched.covariance_tril, matched.distance, matched.similarity
    inside = [np.flatnonzero(fold == number) for number in range(len(numbers))]
    outside = [np.flatnonzero(fold != number) for number in range(len(numbers))]

    def scored_alone(number: int) -> tuple[Laws, Regions | None]:
        """A fold under what was fitted on the others, but for the correlation."""
        fitted = _fit_alone(matched.select(outside[number]), protocol, gaussian, student, threshold)
        laws = apply_calibrations(matched.select(inside[number]), fitted, protocol)
        del laws.laws["uncalibrated"]  # which is the same for all folds
        return laws, fitted.regions

    pieces: list[Callable[[], Any]] = [partial(scored_alone, number) for number in range(len(numbers))]
    # A fold's correlation is a piece of its own: there are more to share out, and none takes long.
    pieces += [partial(_fit_correlation, matched, protocol, rows) for rows in outside]
    found = side_by_side(pieces)
    parts, regions = zip(*found[: len(numbers)], strict=True)
    given_ones = {"gaussian": gaussian, "student": student, "threshold": threshold}
    names = [name for name, value in given_ones.items() if value is not None]
    source = f"{len(parts)} folds of images, each scored with what was fitted on the others"
    if names:
        source = f"given: {', '.join(names)}; {source}"
    promises = Promises.of_folds(matched.box_area, fold, regions, found[len(numbers) :])
    as_given = given_law(matched, protocol.covariance if student is None else student.covariance)
    joined = _join(parts, inside)
    laws: dict[str, Bivariate] = {"uncalibrated": as_given, **joined.laws}
    return replace(joined, laws=laws, source=source, promises=promises)


def _join(parts: Sequence[Laws], rows: Sequence[Array]) -> Laws:
    """The laws of all folds, whose true positives are at the given rows."""
    visible = [
        np.full(len(part.threshold), -np.inf) if part.visibility_threshold is None else part.visibility_threshold
        for part in parts
    ]
    nothing_visible = all(part.visibility_threshold is None for part in parts)
    return Laws(
        laws={name: _join_laws([part.laws[name] for part in parts], rows) for name in parts[0].laws},
        confidence=_scattered([part.confidence for part in parts], rows),
        threshold=_scattered([part.threshold for part in parts], rows),
        visibility_threshold=None if nothing_visible else _scattered(visible, rows),
        source="",
    )


def _join_laws(laws: Sequence[Bivariate], rows: Sequence[Array]) -> Bivariate:
    factors = torch.from_numpy(_scattered([law.scale_tril.numpy() for law in laws], rows))
    if not isinstance(laws[0], StudentT):
        return Gaussian(factors)
    students = [law for law in laws if isinstance(law, StudentT)]
    dof = _scattered([law.dof.expand(law.scale_tril.shape[:-2]).numpy() for law in students], rows)
    moments = [law.moment.numpy() for law in students if law.moment is not None]
    moment = torch.from_numpy(_scattered(moments, rows)) if moments else None
    return StudentT(factors, torch.from_numpy(dof), moment)


def _scattered(parts: Sequence[Array], rows: Sequence[Array]) -> Array:
    """Rows (M, ...) of which each part has those at its indices."""
    result = np.empty((sum(map(len, rows)), *parts[0].shape[1:]), dtype=parts[0].dtype)
    for part, index in zip(parts, rows, strict=True):
        result[index] = part
    return result


def _selected(law: Bivariate, index: Array) -> Bivariate:
    """The law (n, K) of the true positives at the given indices."""
    rows = torch.from_numpy(index)
    if not isinstance(law, StudentT):
        return Gaussian(law.scale_tril[rows])
    dof = law.dof.expand(law.scale_tril.shape[:-2])[rows]
    return StudentT(law.scale_tril[rows], dof, None if law.moment is None else law.moment[rows])


__all__ = [
    "LAWS",
    "Laws",
    "apply_calibrations",
    "cross_fitted",
    "fit_calibrations",
    "fit_gaussian",
    "fit_offset",
    "fit_student",
    "given_law",
]
