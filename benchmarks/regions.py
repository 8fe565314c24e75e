"""What regions add to a prediction, and the time to fit the correlation of a person's keypoints."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.interleave import Comparison, compare
from benchmarks.overhead import PHOTOGRAPH
from halopose.calibration.correlation import fit_correlation
from halopose.data.images import read_image
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.prediction.uncertain_pose import UncertainPose

PERSONS, KEYPOINTS = 20_000, 17


def compare_regions(rounds: int = 40) -> Comparison:
    """Predicting persons without and with regions of keypoints and of persons, and joint covariances."""
    model, image = UncertainPose.load(find_base(), shipped_artifact()), read_image(PHOTOGRAPH)

    def with_regions() -> None:
        poses = model.predict(image)[0]
        _ = poses.region(0.9), poses.whole_region(0.9), poses.joint_covariance

    return compare(lambda: model.predict(image), with_regions, rounds)


def correlation_seconds() -> float:
    """Seconds to fit the correlation of 17 keypoints to 20,000 persons; 70 % of the keypoints are labelled."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal((PERSONS, 1, 2))
    residual = 3 * (common + rng.standard_normal((PERSONS, KEYPOINTS, 2)))
    factors = np.broadcast_to(4 * np.eye(2), (PERSONS, KEYPOINTS, 2, 2))
    labelled = rng.random((PERSONS, KEYPOINTS)) < 0.7
    began = time.perf_counter()
    fit_correlation(residual, factors, labelled)
    return time.perf_counter() - began
