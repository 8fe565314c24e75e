"""Triangulation: against OpenCV and scipy, covariances against actual errors, rejection of views."""

import cv2
import numpy as np
import pytest
from scipy.optimize import least_squares

from halopose.geometry.camera import normalise
from halopose.multiview.triangulation import ViewObservations, triangulate_points
from tests.helpers.approaches import covariances
from tests.helpers.rigs import rig

VIEWS = rig()


def sight(count: int, seed: int, low: float = 1.0, high: float = 6.0) -> tuple[ViewObservations, np.ndarray]:
    rng = np.random.default_rng(seed)
    points = rng.normal([0.0, 0.0, 1.0], 0.5, (count, 3))
    exact = np.stack([view.project(points) for view in VIEWS], axis=1)
    spread = covariances(rng, count * 4, low, high).reshape(count, 4, 2, 2)
    pixels = exact + (np.linalg.cholesky(spread) @ rng.normal(size=(*exact.shape, 1)))[..., 0]
    return ViewObservations(pixels, spread, np.ones((count, 4), dtype=bool)), points


def test_exact_pixels_give_exact_points_as_opencv_does() -> None:
    seen, points = sight(20, 0)
    exact = np.stack([view.project(points) for view in VIEWS], axis=1)
    pair = np.array([True, True, False, False])
    for used in (np.ones((20, 4), dtype=bool), np.tile(pair, (20, 1))):
        found = triangulate_points(VIEWS, ViewObservations(exact, seen.covariance, used))
        np.testing.assert_allclose(found.place, points, atol=1e-7)
    matrices = [np.column_stack([v.rotation, -v.rotation @ v.position]) for v in VIEWS[:2]]
    rays = [normalise(view.camera, exact[:, n]).T for n, view in enumerate(VIEWS[:2])]
    theirs = np.asarray(cv2.triangulatePoints(matrices[0], matrices[1], rays[0], rays[1]))
    np.testing.assert_allclose((theirs[:3] / theirs[3]).T, points, atol=1e-6)


@pytest.mark.parametrize("nu", [None, 4.0])
def test_the_minimum_equals_scipy(nu: float | None) -> None:
    seen, _ = sight(5, 1)
    tails = None if nu is None else np.full((5, 4), nu)
    seen = ViewObservations(seen.pixels, seen.covariance, seen.used, seen.covariance, tails)
    found = triangulate_points(VIEWS, seen, consistent=None)
    for n in range(5):
        factor = np.linalg.inv(np.linalg.cholesky(seen.covariance[n]))

        def residuals(place: np.ndarray, n: int = n, factor: np.ndarray = factor) -> np.ndarray:
            apart = seen.pixels[n] - np.stack([view.project(place[None])[0] for view in VIEWS])
            white = (factor @ apart[..., None])[..., 0]
            if nu is None:
                return white.ravel()
            distance = np.square(white).sum(1)
            return (white * np.sqrt((nu + 2) * np.log1p(distance / nu) / distance)[:, None]).ravel()

        best = least_squares(residuals, found.place[n] + 0.01, xtol=1e-14, ftol=1e-14)
        assert np.abs((best.x - found.place[n]) / np.sqrt(np.diag(found.covariance[n]))).max() < 1e-2


def test_errors_are_as_large_as_stated_and_weights_make_them_smaller() -> None:
    seen, points = sight(3000, 2, 1.0, 20.0)
    errors = {}
    for weighted in (True, False):
        found = triangulate_points(VIEWS, seen, consistent=None, weighted=weighted)
        error = found.place - points
        squared = np.einsum("ni,nij,nj->n", error, np.linalg.inv(found.covariance), error)
        assert squared.mean() == pytest.approx(3, rel=0.07)
        errors[weighted] = np.sqrt(np.square(error).mean())
    assert errors[True] < 0.85 * errors[False]


def test_a_view_that_contradicts_the_others_is_left_out() -> None:
    seen, points = sight(200, 3)
    wrong = seen.pixels.copy()
    wrong[:, 2] += 150.0
    found = triangulate_points(VIEWS, ViewObservations(wrong, seen.covariance, seen.used))
    assert (~found.used[:, 2]).mean() > 0.98
    assert found.used[:, [0, 1, 3]].mean() > 0.98
    assert np.median(np.linalg.norm(found.place - points, axis=1)) < 0.03
    kept = triangulate_points(VIEWS, seen)
    assert kept.used.mean() > 0.995
    assert (kept.cost.mean() / kept.dof.mean()) == pytest.approx(1.0, abs=0.1)


def test_one_view_gives_no_point_and_nothing_breaks() -> None:
    seen, _ = sight(3, 4)
    used = np.array([[True, False, False, False], [False] * 4, [True, True, False, False]])
    pixels = np.where(used[..., None], seen.pixels, np.nan)
    found = triangulate_points(VIEWS, ViewObservations(pixels, seen.covariance, used))
    assert np.isnan(found.place[:2]).all()
    assert np.isfinite(found.place[2]).all()
