"""Ranks and quadratic forms of partly labelled objects against one object at a time."""

import numpy as np
import pytest

from halopose.uncertainty.missing_keypoints import (
    distances,
    log_shares,
    pairings,
    places_among,
    rising_places,
)


@pytest.mark.parametrize("own", [False, True])
def test_forms_equal_those_of_each_object_alone(own: bool) -> None:
    rng = np.random.default_rng(0)
    objects, keypoints = 40, 5
    root = rng.normal(size=(objects if own else 1, 2 * keypoints, 2 * keypoints))
    matrices = np.broadcast_to(root @ np.swapaxes(root, 1, 2) + np.eye(2 * keypoints), (objects, 10, 10))
    labelled = rng.random((objects, keypoints)) < 0.6
    labelled[0], labelled[1] = False, True
    first, second = rng.normal(size=(2, objects, keypoints, 2))
    found, log_det = distances([first, second], matrices if own else matrices[0], labelled)
    direction = first / np.linalg.norm(first, axis=-1, keepdims=True)
    length = np.linalg.norm(second, axis=-1)
    forms = pairings(direction, matrices if own else matrices[0], labelled)
    for number in range(objects):
        chosen = np.repeat(labelled[number], 2)
        inner = matrices[number][np.ix_(chosen, chosen)]

        def form(v: np.ndarray, inner: np.ndarray = inner, chosen: np.ndarray = chosen) -> float:
            flat = v.ravel()[chosen]
            return float(flat @ np.linalg.solve(inner, flat)) if chosen.any() else 0.0

        assert found[0][number] == pytest.approx(form(first[number]))
        assert found[1][number] == pytest.approx(form(second[number]))
        assert log_det[number] == pytest.approx(np.linalg.slogdet(inner)[1] / 2 if chosen.any() else 0.0)
        stretched = direction[number] * length[number][:, None]
        assert length[number] @ forms[number] @ length[number] == pytest.approx(form(stretched))


def test_ranks_equal_those_of_each_keypoint_alone() -> None:
    rng = np.random.default_rng(1)
    length, labelled = rng.random((60, 4)).round(1), rng.random((60, 4)) < 0.6
    found = log_shares(rising_places(length, labelled), labelled)
    for k in range(4):
        rows = np.flatnonzero(labelled[:, k])
        order = rows[np.argsort(length[rows, k], kind="stable")]
        expected = np.zeros(60)
        expected[order] = np.log1p(-(np.arange(len(rows)) + 0.5) / len(rows))
        np.testing.assert_array_equal(found[:, k], expected)


def test_places_among_some_rows_equal_those_of_these_rows_alone() -> None:
    rng = np.random.default_rng(2)
    length, labelled = rng.random((60, 4)).round(1), rng.random((60, 4)) < 0.6
    rows = np.flatnonzero(rng.random(60) < 0.5)
    found = places_among(rising_places(length, labelled), rows, labelled.shape)
    np.testing.assert_array_equal(found, rising_places(length[rows], labelled[rows]))
