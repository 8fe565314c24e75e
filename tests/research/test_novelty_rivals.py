"""Published out-of-distribution scores on several levels against pytorch-ood, and the spread over views."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from research.novelty_rivals import box_size, neighbours, relative, relative_spread, stated_size
from torch.nn.functional import normalize

from halopose.fitting.novelty_fitting import Rows, ledoit_wolf
from halopose.poses import PoseDistributions
from halopose.uncertainty.novelty import Evidence
from tests.helpers.outliers import detector, fitted

pytestmark = pytest.mark.usefixtures("one_thread")
LEVELS = 3


def rows(count: int, seed: int, scale: float = 1.0) -> Rows:
    """Detections with random features around a different mean per level."""
    generator = torch.Generator().manual_seed(seed)
    level = torch.arange(count) % LEVELS
    window = scale * torch.randn(count, 6, generator=generator) + level[:, None] + torch.arange(6) / 3
    rng, image = np.random.default_rng(seed), np.arange(count)
    low = rng.uniform(0, 50, (count, 2))
    spread = np.tile(np.diag([4.0, 9.0]), (count, 4, 1, 1))
    poses = PoseDistributions(
        boxes=np.concatenate([low, low + rng.uniform(10, 90, (count, 2))], axis=1),
        scores=rng.random(count),
        keypoints=rng.uniform(0, 100, (count, 4, 2)),
        covariance=spread,
        scale=spread,
        image_ids=image,
    )
    evidence = Evidence(level, window, torch.zeros(count, 9), torch.from_numpy(poses.scores))
    known = np.ones((count, 4))
    return Rows(evidence, poses, known, np.zeros((count, 4, 2)), image, torch.zeros(count, 9))


def test_neighbours_equal_those_of_pytorch_ood() -> None:
    usual, new = rows(120, 0), rows(60, 1, scale=2.0)
    found = neighbours(usual, count=10)(new)
    for level in range(LEVELS):
        known, at = usual.evidence.level == level, new.evidence.level == level
        oracle = fitted("KNN", usual.evidence.window[known].double(), k=10)  # which normalises by itself
        expected = oracle.predict_features(new.evidence.window[at].double()).numpy()
        np.testing.assert_allclose(found[at.numpy()], expected, rtol=1e-4, atol=1e-6)


def test_relative_distances_equal_those_of_pytorch_ood() -> None:
    """Of the same means and covariances: its own are not shrunk."""
    usual, train, new = rows(120, 0), rows(300, 2, scale=1.5), rows(60, 1, scale=2.0)
    found = relative(train, usual)(new)
    for level in range(LEVELS):
        near, far, unit = (
            normalize(one.evidence.window[one.evidence.level == level], dim=1).double() for one in (usual, train, new)
        )
        oracle = detector("RMD")
        oracle.mu, oracle.precision = near.mean(0)[None], torch.linalg.inv(ledoit_wolf(near))
        oracle.background_mu, oracle.background_precision = far.mean(0), torch.linalg.inv(ledoit_wolf(far))
        expected = oracle.predict_features(unit).numpy()
        np.testing.assert_allclose(found[(new.evidence.level == level).numpy()], expected, rtol=1e-6, atol=1e-6)


def test_a_level_with_too_few_samples_is_out_of_distribution() -> None:
    usual, new = rows(120, 0), rows(6, 1)
    some = usual.select(np.flatnonzero(usual.evidence.level.numpy() > 0))
    for rule in (neighbours(some), relative(some, some)):
        assert (np.isinf(rule(new)) == (new.evidence.level.numpy() == 0)).all()


def test_spread_is_the_worst_corner_and_a_view_without_it_counts_a_side_of_the_box() -> None:
    one = rows(3, 0)
    side = box_size(one)[:, 0]
    views = np.tile(one.poses.keypoints, (4, 1, 1, 1))
    views[0, 0, 2] += [3.0, 4.0]  # 5 px off, in one view of four
    views[1:, 1] = np.nan
    views[:, 2] = np.nan
    found = relative_spread(one, views, box_size(one))
    np.testing.assert_allclose(found, [2.5 / side[0], np.sqrt(3) / 2, 1.0])
    np.testing.assert_allclose(stated_size(one), np.sqrt(13))
    assert relative_spread(one, views, stated_size(one))[0] == pytest.approx(2.5 / np.sqrt(13))
