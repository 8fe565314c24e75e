"""Calibration of trained heads for detections matched by OKS and by box, with a feature-conditional scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from halopose.calibration.calibrate import fit_calibrations, fit_regions_of
from halopose.calibration.calibrators import Calibrations
from halopose.calibration.conditional_fit import (
    GROUP_WEIGHTS,
    OCCLUDED_FIRST,
    ConditionalSample,
    fit_scale,
    fit_tails,
)
from halopose.errors import HaloposeError
from halopose.fitting.feature_cache import SHARDS_AT_ONCE, CachedCells, MatchStore, stored_poses
from halopose.matching.matched_poses import MatchedPoses, match_poses, matched_pairs
from halopose.poses import PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.conditional_scale import INPUTS, scale_inputs
from halopose.uncertainty.distributions import Gaussian
from halopose.uncertainty.heads import ProbabilisticHeads, with_conditional_scale, without_conditional_scale
from halopose.uncertainty.pruning import keep_mask


def calibrate_for_both(
    heads: ProbabilisticHeads, store: MatchStore, images: Array, protocol: Protocol, *, occluded_first: bool = False
) -> tuple[ProbabilisticHeads, Calibrations]:
    """Calibrate heads for detections matched by OKS and by box.

    Temperatures of the Gaussian, pruning thresholds and correlations are those of matches by OKS, as in the paper.
    Student-t distributions are fitted to both kinds of matches, conformal regions to matches by box.

    Args:
        heads: Trained heads; an earlier feature-conditional scale is replaced.
        store: Feature cache of the calibration images.
        images: Their ids (I,).
        protocol: Protocol of thresholds and regions.
        occluded_first: Give weight to occluded keypoints matched by box and to each keypoint, at the cost of others.

    Returns:
        The heads, with a feature-conditional scale if they have context features, and all calibrations.
    """
    heads, weights = without_conditional_scale(heads), OCCLUDED_FIRST if occluded_first else GROUP_WEIGHTS
    if heads.settings.context_features:
        sample, by_oks, by_box = matched_sample(heads, store, images, protocol)
        keep = None
        if occluded_first:
            fitted = fit_calibrations(by_oks.matched, protocol)
            keep = np.concatenate([_kept(by_oks, fitted, protocol), _kept(by_box, fitted, protocol)[by_box.alone]])
        heads = with_conditional_scale(heads, fit_scale(sample, keep, weights))
    sample, by_oks, by_box = matched_sample(heads, store, images, protocol)
    fitted = fit_calibrations(by_oks.matched, protocol)
    kept_by_box = _kept(by_box, fitted, protocol)
    keep = np.concatenate([_kept(by_oks, fitted, protocol), kept_by_box[by_box.alone]])
    student, split_student = fit_tails(sample, keep, fitted.student, weights)
    regions = fit_regions_of(by_box.matched, kept_by_box, protocol)
    return heads, replace(
        fitted,
        student=student,
        split_student=split_student if protocol.split_student else None,
        regions=regions,
    )


class MatchedRows:
    """True positives of one kind of match, with the inputs of the scale.

    Attributes:
        matched: M true positives.
        inputs: Inputs (M, K, F).
        alone: Indices of the true positives that do not match by the other criterion.
        both: Whether each true positive matches by both criteria (M,).
    """

    def __init__(self, parts: list[tuple[MatchedPoses, Array, Array]]) -> None:
        if not parts:
            raise HaloposeError("no detection of the calibration images matches an object: give more images")
        # Parts of a cache hold different images in ascending order, so concatenation keeps the order of rows.
        self.matched = MatchedPoses.concatenate([matched for matched, _, _ in parts])
        ids = np.concatenate([matched.image_ids for matched, _, _ in parts])
        objects = np.concatenate([matched.objects for matched, _, _ in parts])
        order = np.lexsort((objects, ids))
        self.inputs = np.concatenate([inputs for _, inputs, _ in parts])[order]
        self.alone = np.flatnonzero(np.concatenate([alone for _, _, alone in parts])[order])
        self.both = np.concatenate([~alone for _, _, alone in parts])[order]


def matched_sample(
    heads: ProbabilisticHeads, store: MatchStore, images: Array, protocol: Protocol
) -> tuple[ConditionalSample, MatchedRows, MatchedRows]:
    """Collect the sample of the scale fit.

    Returns:
        Detections that match by OKS followed by those that match only by box; true positives by OKS; true positives
        by box.
    """
    by_oks: list[tuple[MatchedPoses, Array, Array]] = []
    by_box: list[tuple[MatchedPoses, Array, Array]] = []
    before = 0
    for part in store.parts(SHARDS_AT_ONCE):
        found = _detections(heads, part, images)
        truth = part.ground_truth(images)
        if found is not None:
            poses, inputs = found
            kinds = [replace(protocol, match="oks"), replace(protocol, match="box")]
            pairs = [np.stack(matched_pairs(poses, truth, kind), axis=1) for kind in kinds]
            for kind, own, other, into in zip(kinds, pairs, pairs[::-1], (by_oks, by_box), strict=True):
                matched = match_poses(poses, truth, kind)
                rows = replace(matched, objects=matched.objects + before)
                into.append((rows, inputs[own[:, 0]], ~_among(own, other)))
        before += len(truth)
    first, second = MatchedRows(by_oks), MatchedRows(by_box)
    whole = _sample(first, first.both, True, protocol)
    alone = _sample(second, np.ones(len(second.both), dtype=bool), False, protocol)
    rest = ConditionalSample(*(values[second.alone] for values in vars(alone).values()))
    return ConditionalSample.concatenate([whole, rest]), first, second


def _kept(rows: MatchedRows, fitted: Calibrations, protocol: Protocol) -> Array:
    """Return which keypoints (M, K) pruning keeps."""
    matched = rows.matched
    confidence = matched.confidence(fitted.gaussian.covariance(matched.covariance), protocol)
    return keep_mask(confidence, fitted.threshold, matched.visibility, fitted.visibility_threshold)


def _among(own: Array, other: Array) -> Array:
    """Return which pairs of a detection and an object (M, 2) are among other pairs (N, 2)."""
    known = set(map(tuple, other.tolist()))
    return np.array([tuple(pair) in known for pair in own.tolist()], dtype=bool)


def _sample(rows: MatchedRows, by_box: Array, by_oks: bool, protocol: Protocol) -> ConditionalSample:
    matched = rows.matched
    occluded = np.zeros_like(matched.labelled) if matched.occluded is None else matched.occluded
    return ConditionalSample(
        distance=matched.distance,
        labelled=matched.labelled,
        inputs=rows.inputs,
        by_oks=np.full(len(matched), by_oks),
        by_box=by_box,
        occluded=occluded & matched.labelled,
        small=matched.area < protocol.scale_edges[0] if protocol.scale_edges else np.zeros(len(matched), dtype=bool),
    )


@torch.inference_mode()
def _detections(heads: ProbabilisticHeads, store: MatchStore, images: Array) -> tuple[PoseDistributions, Array] | None:
    """Return detections with uncalibrated covariances, and the inputs (N, K, F) of the scale."""
    poses, inputs, wanted = [], [], np.sort(images)
    for cells in (part.of_images(wanted) for part in store.cells("detected")):
        if len(cells):
            factors = cells.factors(heads).cpu().double()
            covariance = Gaussian(factors / cells.columns["gain"].double()[:, None, :, None]).covariance.numpy()
            poses.append(stored_poses(cells, covariance))
            inputs.append(_inputs(cells, factors.square().sum((-2, -1)).numpy()))
    return (PoseDistributions.concatenate(poses), np.concatenate(inputs)) if poses else None


def _inputs(cells: CachedCells, trace: Array) -> Array:
    names = [f"signal.{name}" for name in ("box", "score", "visibility", "seen")]
    if any(name not in cells.columns for name in names):
        return np.zeros((*trace.shape, len(INPUTS)))
    seen = (cells.columns[name].double() for name in names)
    return np.asarray(scale_inputs(torch.from_numpy(trace), *seen).numpy())
