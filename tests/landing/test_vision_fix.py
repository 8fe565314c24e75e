"""Vision fixes for the navigator: linearised at the most likely position, for any initial error."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2

from halopose.landing.association import CornerDetections, expected_corners
from halopose.landing.flight import true_trajectory, vision_model_of
from halopose.landing.landing_settings import CameraErrors, CornerCorrelation, LandingSettings
from halopose.landing.navigation.sensors import ATTITUDE, GaussMarkov, Measurement, Sensors
from halopose.landing.vision_fix import VisionModel, solve
from halopose.landing.world.approach import fly
from halopose.types import Array

STEADY = replace(ATTITUDE, noise=(1e-6,) * 3, bias=GaussMarkov((1e-6,) * 3))
SETTINGS = LandingSettings(
    camera=CameraErrors(0, 0, 0, 0, 0, 0), corner_correlation=CornerCorrelation(0, 0, 0), corner_variance_factor=1.0,
    persistent_share=(0.0, 0.0, 0.0), flicker_share=0.0,
    variance_factor=(1.0, 1.0, 1.0), sensors=Sensors(attitude=STEADY), prune=False,
)  # fmt: skip
START = np.array([150.0, 150.0, 60.0])  # standard deviations of the position before the first fix
FRAMES, DRAWS = 3, 120
LOOKS, FLIGHTS, PIXELS, MEMORY = 25, 80, 2.0, np.exp(-1 / 22.0)


@pytest.fixture(scope="module")
def watched() -> tuple[VisionModel, Array, Array]:
    """An eye at some frames from 2 km on, the positions (N, 3) and where the corners are (N, 4, 2)."""
    approach = fly(0, "clear", 20.0)
    truth = true_trajectory(approach)
    near = float(np.interp(-2000.0, truth.positions[:, 0], truth.times))
    times = near + np.arange(float(FRAMES))
    eye = replace(vision_model_of(approach, [], times, SETTINGS), attitudes=truth.attitude(times))
    position = truth.position(times)
    return eye, position, expected_corners(eye.camera, eye.mount, position, eye.attitudes, eye.corners)


def sighted(pixels: Array, sigma: float = 1.0) -> CornerDetections:
    """One frame with corners (4, 2) of some pixels each."""
    spread = np.broadcast_to(sigma**2 * np.eye(2), (1, 4, 2, 2)).copy()
    return CornerDetections(pixels[None], spread, spread, np.ones((1, 4), dtype=bool), np.ones(1))


def followed(watched: tuple[VisionModel, Array, Array], rng: np.random.Generator, *, again: bool) -> float:
    """NEES after all frames of a filter that knows how the aircraft moves between them."""
    eye, position, exact = watched
    error, covariance = START * rng.standard_normal(3), np.diag(START**2)
    for n in range(FRAMES):
        seen = sighted(exact[n] + rng.standard_normal((4, 2)))
        fix = solve(seen, eye.select(slice(n, n + 1)), FRAMES)
        taken: Measurement
        if again:
            taken = eye.linearised_measurement(n, 0.0, seen, fix, position[n] + error, covariance)
        else:
            taken = eye.measurement(n, 0.0, seen, fix, position[n] + error)
        gain = covariance @ np.linalg.inv(covariance + taken.covariance)
        error = error + gain @ (taken.value - position[n] - error)
        covariance = (np.eye(3) - gain) @ covariance
    return float(error @ np.linalg.solve(covariance, error))


def test_a_filter_that_was_far_off_knows_how_far_off_it_is_after_some_fixes(
    watched: tuple[VisionModel, Array, Array],
) -> None:
    """Linear about where it was expected, crossing lines of sight made the distance look sure."""
    nees = {
        again: np.mean([followed(watched, np.random.default_rng([seed, 5]), again=again) for seed in range(DRAWS)])
        for again in (True, False)
    }
    low, high = chi2.ppf([0.005, 0.995], 3 * DRAWS) / DRAWS
    assert nees[False] > 2 * high
    assert low < nees[True] < 1.15 * high  # what is left is the bend of the distance within its own sigma


def lingered(eye: VisionModel, position: Array, exact: Array, seed: int) -> float:
    """Error along, in its own sigma, of a filter that has looked at corners (4, 2) many times from one position.

    Half of the corners' variance lasts, and is followed as the navigator does.
    """
    rng = np.random.default_rng([seed, 6])
    fix = solve(sighted(exact, PIXELS), eye.select(slice(0, 1)), LOOKS)
    error = np.append(START * rng.standard_normal(3), np.zeros(3))
    covariance = np.diag(np.append(START**2, np.ones(3)))
    lasting = rng.standard_normal((4, 2))
    for _ in range(LOOKS):
        seen = sighted(exact + PIXELS * np.sqrt(0.5) * (lasting + rng.standard_normal((4, 2))), PIXELS)
        taken = eye.linearised_measurement(0, 0.0, seen, fix, position + error[:3], covariance[:3, :3])
        assert taken.drift is not None
        observed = np.hstack([np.eye(3), taken.drift])
        gain = covariance @ observed.T @ np.linalg.inv(observed @ covariance @ observed.T + taken.covariance)
        error = error + gain @ (taken.value - position - observed @ error)
        covariance = (np.eye(6) - gain @ observed) @ covariance
        lasting = MEMORY * lasting + np.sqrt(1 - MEMORY**2) * rng.standard_normal((4, 2))
        stays = np.diag(np.append(np.ones(3), np.full(3, MEMORY)))
        error, covariance = stays @ error, stays @ covariance @ stays
        covariance[3:, 3:] += (1 - MEMORY**2) * np.eye(3)
    return float(error[0] / np.sqrt(covariance[0, 0]))


def test_persistent_errors_leave_the_filter_unbiased_along_track(watched: tuple[VisionModel, Array, Array]) -> None:
    """Weights taken from the measured distance itself would bias the filter towards the runway."""
    eye, position, exact = watched
    eye = replace(eye, settings=replace(SETTINGS, persistent_share=(0.5, 0.5, 0.5)))
    along = [lingered(eye, position[0], exact[0], seed) for seed in range(FLIGHTS)]
    assert abs(np.mean(along)) < 3 / np.sqrt(FLIGHTS)


def test_where_the_filter_knows_the_place_a_frame_is_linearised_once(
    watched: tuple[VisionModel, Array, Array],
) -> None:
    eye, position, exact = watched
    seen = sighted(exact[0] + 1.0)
    fix = solve(seen, eye.select(slice(0, 1)), FRAMES)
    once = eye.measurement(0, 0.0, seen, fix, position[0])
    taken = eye.linearised_measurement(0, 0.0, seen, fix, position[0], np.eye(3))
    np.testing.assert_array_equal(taken.value, once.value)
    np.testing.assert_array_equal(taken.covariance, once.covariance)
