"""Similarity of keypoint distributions against sampling, and optimal pairs."""

import numpy as np

from halopose.tracking.detection_pairing import Similarity, pair, similarity
from tests.helpers.approaches import covariances


def test_expected_oks_is_the_mean_of_sampled_oks() -> None:
    rng = np.random.default_rng(0)
    place, seen = rng.normal(0, 5, (2, 3, 2)), rng.normal(0, 5, (4, 3, 2))
    spread, covariance = (
        covariances(rng, 6, 1, 6).reshape(2, 3, 2, 2),
        covariances(rng, 12, 1, 6).reshape(4, 3, 2, 2),
    )
    used, tolerance = rng.random((4, 3)) < 0.7, rng.uniform(3, 9, (4, 3))
    used[:, 0] = True
    found = similarity(place, spread, seen, covariance, used, tolerance)
    for i in range(2):
        for j in range(4):
            a, b = (np.linalg.cholesky(c) @ rng.normal(size=(40000, 3, 2, 1)) for c in (spread[i], covariance[j]))
            apart = seen[j] + b[..., 0] - place[i] - a[..., 0]
            close = np.exp(-np.square(apart).sum(-1) / (2 * tolerance[j] ** 2))
            assert abs(found.expected[i, j] - close[:, used[j]].mean()) < 0.01
    assert (found.near >= found.expected).all()


def test_without_uncertainty_similarity_is_oks() -> None:
    rng = np.random.default_rng(1)
    place, seen, nothing = rng.normal(0, 5, (1, 3, 2)), rng.normal(0, 5, (1, 3, 2)), np.zeros((1, 3, 2, 2))
    found = similarity(place, nothing, seen, nothing, np.ones((1, 3), dtype=bool), np.full((1, 3), 4.0))
    oks = np.exp(-np.square(place - seen).sum(-1) / 32).mean()
    np.testing.assert_allclose([found.expected[0, 0], found.near[0, 0]], oks)


def test_pairs_are_optimal_and_distant_detections_stay_unpaired() -> None:
    expected = np.array([[0.9, 0.8, 0.0], [0.85, 0.1, 0.0]])
    assert pair(Similarity(expected, expected), 0.05) == [(0, 1), (1, 0)]
    assert pair(Similarity(expected, expected), 0.86) == [(0, 0)]
    assert pair(Similarity(np.zeros((0, 2)), np.zeros((0, 2))), 0.3) == []
