"""Conformal coverage and the covariance of the Student-t over repeated splits of COCO val, for the shipped heads.

    python -m research.repeated_splits --store work/val -o results/

The store is the feature cache of val (`research.shipped_data`). Each split has three parts. The bound on dispersions is
fitted on a fifth of the images; radii and calibrations on two fifths; the rest is scored. Nothing in the dispersion was
then fitted on the images of the radii, so the finite-sample guarantee is exact. The heads are the shipped ones without
their feature-conditional scale, which was fitted on all of val.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from halopose.calibration.calibrate import apply_calibrations, fit_calibrations, fit_student, scale_sample
from halopose.calibration.conformal import fit_regions
from halopose.calibration.estimation import likeliest_bound
from halopose.cli.terminal import say
from halopose.data.files import write_text
from halopose.evaluation.keypoint_statistics import KeypointStatistics, summaries
from halopose.fitting.artifact import Artifact
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.pipeline import true_positives
from halopose.hosts.model_zoo import shipped_artifact
from halopose.matching.matched_poses import MatchedPoses
from halopose.protocol import CovarianceKind, Protocol
from halopose.types import Array
from halopose.uncertainty.heads import with_bound, without_conditional_scale
from research.tables import markdown

PROTOCOL = Protocol()
LEVELS = (0.8, 0.9, 0.95, 0.99)
PRUNED_SPLITS = 20
VARIANTS = ((False, 0.5), (False, 0.3), (True, 0.5), (True, 0.3))  # kept / pruned Student-t split, and gamma_KS
KINDS: tuple[CovarianceKind, ...] = ("auto", "paper", "moment")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True, help="feature cache of val with context features")
    parser.add_argument("--splits", type=int, default=100)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    artifact, store = Artifact.load(shipped_artifact()), MatchStore(given.store)
    heads = without_conditional_scale(artifact.heads)
    free = true_positives(with_bound(heads, np.zeros(heads.keypoints)), store, None, PROTOCOL, artifact.layout)
    images = np.unique(free.image_ids)
    held: list[list[tuple[float, ...]]] = []
    scored: list[list[tuple[float, float]]] = []
    pruned: list[list[tuple[float, ...]]] = []
    for number in range(given.splits):
        order = np.random.default_rng(number).permutation(images)
        first, second = len(images) // 5, 3 * len(images) // 5
        bounding, fitting, scoring = (
            free.select(np.flatnonzero(np.isin(free.image_ids, part))) for part in np.split(order, [first, second])
        )
        fitting, scoring = bounded_by(bounding, [fitting, scoring])
        held.append(coverage(fitting, scoring))
        scored.append([covariance_scores(fitting, scoring, kind) for kind in KINDS])
        if number < PRUNED_SPLITS:
            pruned.append([pruned_scores(fitting, scoring, *variant) for variant in VARIANTS])
    text = "\n\n".join(
        [region_table(np.array(held)), covariance_table(np.array(scored)), pruning_table(np.array(pruned))]
    )
    write_text(given.output / "repeated_splits.md", text + "\n")
    say(text)


def bounded_by(known: MatchedPoses, others: list[MatchedPoses]) -> list[MatchedPoses]:
    """True positives under the bound that is likeliest for the known ones, as ``pipeline.bound_heads`` fits it."""
    unit = 2 * known.layout.kappa**2 * known.layout.area_factor

    def variance(matched: MatchedPoses) -> Array:
        return np.trace(matched.scale, axis1=2, axis2=3) / (unit * matched.box_area[:, None])

    bound = likeliest_bound(scale_sample(known), torch.from_numpy(variance(known)))
    found = []
    for matched in others:
        share = 1 / (1 + variance(matched) / bound)[..., None, None]
        found.append(replace(matched, scale=matched.scale * share, covariance=matched.scale * share))
    return found


def coverage(fitting: MatchedPoses, scoring: MatchedPoses) -> list[tuple[float, ...]]:
    """Coverage at LEVELS: of keypoints weighted by keypoint and by image, and of whole persons, weighted likewise."""
    regions = fit_regions(fitting.distance, fitting.labelled, fitting.image_ids)
    image = np.unique(scoring.image_ids, return_inverse=True)[1]
    rows: list[tuple[float, ...]] = []
    for level in LEVELS:
        inside = scoring.distance <= regions.of_objects(level, scoring.box_area)
        whole = np.where(scoring.labelled, scoring.distance, 0).max(1) <= regions.whole_radius(level)
        labelled = scoring.labelled
        by_image = np.bincount(image, (inside & labelled).sum(1)) / np.bincount(image, labelled.sum(1))
        persons = np.bincount(image, whole) / np.bincount(image)
        rows.append((inside[labelled].mean(), by_image.mean(), whole.mean(), persons.mean()))
    return rows


def covariance_scores(fitting: MatchedPoses, scoring: MatchedPoses, kind: CovarianceKind) -> tuple[float, float]:
    """ENCE and AKP of the Student-t with one kind of covariance."""
    student = fit_student(fitting, kind)(torch.from_numpy(scoring.scale_tril))
    statistics = KeypointStatistics.of(student, scoring, PROTOCOL)
    [found] = summaries(statistics, np.zeros(len(statistics.nll), dtype=np.int64), 1)
    return found.ence, found.akp


def pruned_scores(fitting: MatchedPoses, scoring: MatchedPoses, split: bool, gamma_ks: float) -> tuple[float, ...]:
    """Share kept, and ACE of the Student-t before and after pruning."""
    protocol = replace(PROTOCOL, split_student=split, gamma_ks=gamma_ks)
    distributions = apply_calibrations(scoring, fit_calibrations(fitting, protocol), protocol)
    statistics = KeypointStatistics.of(distributions.distributions["student_t"], scoring, protocol)
    kept = distributions.kept(scoring)[scoring.labelled]
    parts = statistics, statistics.take(kept)
    ace = [summaries(one, np.zeros(len(one.nll), dtype=np.int64), 1)[0].ace for one in parts]
    return float(kept.mean()), *ace


def pruning_table(pruned: Array) -> str:
    """Means over splits by variant."""
    rows = []
    for number, (split, gamma_ks) in enumerate(VARIANTS):
        kept, whole, after = pruned[:, number].mean(0)
        name = "kept / pruned Student-t split" if split else "single Student-t"
        change = pruned[:, number, 2] - pruned[:, number, 1]
        cells = [
            f"{100 * kept:.0f} %",
            f"{whole:.4f}",
            f"{after:.4f}",
            f"{change.mean():+.4f} ± {change.std(ddof=1):.4f}",
        ]
        rows.append([f"{name}, gamma_KS {gamma_ks:g}", *cells])
    return markdown([f"{len(pruned)} splits", "kept", "ACE", "ACE after pruning", "change"], rows)


def region_table(held: Array) -> str:
    """Mean coverage over splits, with the range of 95 % of the splits."""
    names = ("keypoints", "keypoints, each image counts once", "whole persons", "whole persons, each image counts once")
    rows = []
    for column, name in enumerate(names):
        cells = []
        for level in range(len(LEVELS)):
            values = 100 * held[:, level, column]
            low, high = np.percentile(values, [2.5, 97.5])
            cells.append(f"{values.mean():.1f} ({low:.1f} to {high:.1f})")
        rows.append([name, *cells])
    return markdown([f"{len(held)} splits", *(f"{100 * level:.0f} %" for level in LEVELS)], rows)


def covariance_table(scored: Array) -> str:
    """ENCE and AKP by kind of covariance, and paired differences to eq. 17."""
    rows = []
    for number, kind in enumerate(KINDS):
        gap = scored[:, number] - scored[:, KINDS.index("paper")]
        rows.append(
            [
                {"auto": "eq. 17 unless nu < 2.5 (default)", "paper": "eq. 17", "moment": "second moment"}[kind],
                *(f"{scored[:, number, column].mean():.4f}" for column in (0, 1)),
                *(f"{gap[:, column].mean():+.4f} ± {gap[:, column].std(ddof=1):.4f}" for column in (0, 1)),
            ]
        )
    return markdown(["covariance", "ENCE", "AKP", "ENCE - eq. 17", "AKP - eq. 17"], rows)


if __name__ == "__main__":
    main()
