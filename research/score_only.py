"""Figures of docs/evidence/other-tools.md: covariances from scores alone against those of heads.

    python -m research.score_only predictions.json person_keypoints_val.json

The predictions carry covariances of heads, which the score-only model does not see. Images are divided at random into
a part to fit on and the rest to measure on; both kinds of covariances are calibrated on the same part. Every figure is
a mean over the divisions, with its range.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from halopose.calibration.calibration_file import distributions_under, only_images
from halopose.calibration.dispersion_features import Feature
from halopose.calibration.dispersion_model import match_predicted
from halopose.calibration.feature_recalibration import recalibrate_predictions, with_dispersions
from halopose.cli.terminal import say
from halopose.data.coco import read_annotated, read_predictions
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.leaderboard import noise_floor
from halopose.evaluation.metrics.akp import average_keypoint_precision
from halopose.matching.matched_poses import MatchedPoses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Family
from research.tables import markdown

PROTOCOL = Protocol()
FAMILIES: tuple[Family, ...] = ("gaussian", "student-t")
KINDS = ("score-only", "heads", "heads and features")


@dataclass(frozen=True)
class Division:
    """Figures of one division of the images.

    Attributes:
        ace: Student-t average calibration error.
        floor: ACE of a perfectly calibrated model from sampling noise alone, 95th percentile.
        held: Share of keypoints in the 95 % ellipses of the Student-t.
        held_gaussian: Share of keypoints in the 95 % ellipses of the Gaussian.
        ence: Expected normalised calibration error of the Gaussian.
        akp: Average keypoint precision.
        nll: Mean negative log-likelihood of the Student-t, nats per keypoint.
    """

    ace: float
    floor: float
    held: float
    held_gaussian: float
    ence: float
    akp: float
    nll: float


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("predictions", type=Path)
    parser.add_argument("truth", type=Path)
    parser.add_argument("--divisions", type=int, default=10)
    parser.add_argument("--images", type=int, nargs="+", default=[500, 200, 100, 50])
    arguments = parser.parse_args()
    annotated = read_annotated(arguments.truth)
    predictions = read_predictions(arguments.predictions, annotated.truth, annotated.classes)
    for count in arguments.images:
        rows = []
        for kind in KINDS:
            found = [measure(predictions, annotated.truth, count, seed, kind) for seed in range(arguments.divisions)]
            rows.append([kind, *(_range([getattr(one, field.name) for one in found]) for field in fields(Division))])
        say(f"\n{count} images to fit on, {arguments.divisions} divisions\n")
        say(markdown(["covariances", *(field.name for field in fields(Division))], rows))
    matched = match_predicted(predictions, annotated.truth, PROTOCOL)
    say(f"\n{len(matched)} matched objects")
    say(f"AKP of visibility {_visibility(matched):.3f}, of constants {_constants(matched):.3f}")


def measure(predictions: PoseDistributions, truth: GroundTruth, count: int, seed: int, kind: str) -> Division:
    """Fit on ``count`` random images and measure on the others."""
    order = np.random.default_rng(seed).permutation(truth.images)
    fitted, rest = np.sort(order[:count]), np.sort(order[count:])
    features: Sequence[Feature] = ("score", "visibility", "size") if kind == "heads and features" else ()
    part = only_images(predictions, truth, fitted)
    found = {}
    for family in FAMILIES:
        file = recalibrate_predictions(*part, fitted, family, PROTOCOL, features, stated=kind != "score-only").file
        matched = match_predicted(*only_images(with_dispersions(predictions, [file]), truth, rest), PROTOCOL)
        found[family] = matched, distributions_under([file], matched, PROTOCOL)
    inside = {}
    for family, (matched, distributions) in found.items():
        own = distributions.distributions[family.replace("-", "_")]
        inside[family] = own.mahalanobis_cdf(own.mahalanobis(torch.from_numpy(matched.residual))).numpy()
    matched = found["student-t"][0]
    student = evaluate(*found["student-t"], PROTOCOL).student_t
    gaussian = evaluate(*found["gaussian"], PROTOCOL).gaussian
    return Division(
        ace=student.ace,
        floor=noise_floor(inside["student-t"], matched),
        held=float((inside["student-t"] <= 0.95)[matched.labelled].mean()),
        held_gaussian=float((inside["gaussian"] <= 0.95)[matched.labelled].mean()),
        ence=gaussian.ence,
        akp=gaussian.akp,
        nll=student.nll,
    )


def _visibility(matched: MatchedPoses) -> float:
    assert matched.visibility is not None
    return average_keypoint_precision(matched.visibility[matched.labelled], matched.similarity[matched.labelled])


def _constants(matched: MatchedPoses) -> float:
    """AKP of constant dispersions per keypoint, relative to the size of the box."""
    share = np.square(matched.residual).sum(-1) / matched.box_area[:, None]
    level = np.array([np.median(share[matched.labelled[:, k], k]) for k in range(share.shape[1])])
    confidence = -level * matched.box_area[:, None] / matched.area[:, None] / matched.layout.kappa**2
    return average_keypoint_precision(confidence[matched.labelled], matched.similarity[matched.labelled])


def _range(values: list[float]) -> str:
    return f"{np.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


if __name__ == "__main__":
    main()
