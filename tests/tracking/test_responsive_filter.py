"""The responsive filter: little lag and jitter, with covariances that hold where most of the error lasts."""

import numpy as np
import pytest
from research.smoothing import lag, one_euro
from scipy.stats import chi2

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.tracking.live_tracking import track_live
from halopose.tracking.tracker import TrackSettings
from halopose.types import Array

LAYOUT, RATE, FRAMES = Keypoints.of(17), 30.0, 150
RESTING, MOVING = slice(0, 8), slice(8, 17)


def person(seed: int) -> tuple[list[PoseDistributions], Array, Array]:
    """A person who swings half of the keypoints; most of the error lasts. Returns frames, seen and true keypoints."""
    rng = np.random.default_rng(seed)
    still = rng.uniform([200, 100], [400, 500], (17, 2))
    seconds = np.arange(FRAMES) / RATE
    truth = np.tile(still, (FRAMES, 1, 1))
    truth[:, MOVING] += 60 * np.sin(2 * np.pi * 0.8 * seconds + 1)[:, None, None]
    keep = np.exp(-1 / RATE / 1.0)
    lasting = rng.normal(size=(FRAMES, 17, 2))
    for n in range(1, FRAMES):
        lasting[n] = keep * lasting[n - 1] + np.sqrt(1 - keep**2) * lasting[n]
    sigma = 8.0
    seen = truth + sigma * (np.sqrt(0.9) * lasting + np.sqrt(0.1) * rng.normal(size=truth.shape))
    spread = np.tile(sigma**2 * np.eye(2), (1, 17, 1, 1))
    box = np.array([[180.0, 80.0, 420.0, 520.0]])
    frames = [PoseDistributions(box, np.ones(1), one[None], spread, spread) for one in seen]
    return frames, seen, truth


def test_lag_is_below_that_of_one_euro_and_ellipses_hold_where_errors_last() -> None:
    figures = []
    for seed in range(4):
        frames, seen, truth = person(seed)
        found = track_live(frames, LAYOUT, rate=RATE, settings=TrackSettings(responsive=1, confirm=1))
        ours, others = found.poses.keypoints, one_euro(seen, RATE, 1.0, 0.007)
        error = ours - truth
        inside = np.einsum("tki,tkij,tkj->tk", error, np.linalg.inv(found.poses.covariance), error) <= chi2.ppf(0.95, 2)
        figures.append([
            *(np.std(np.diff(places[:, RESTING], 2, axis=0)) for places in (ours, seen)),
            *(lag(places[:, MOVING], truth[:, MOVING]) for places in (ours, others)),
            inside.mean(),
        ])  # fmt: skip
    jitter, raw_jitter, late, euro_late, held = np.mean(figures, axis=0)
    assert jitter < 0.4 * raw_jitter
    assert late < 0.5 * euro_late
    assert 0.94 <= held <= 0.995


def test_pruned_keypoints_are_followed_and_missing_ones_are_not() -> None:
    frames, seen, truth = person(7)
    keep = np.ones((1, 17), dtype=bool)
    keep[0, [9, 3]] = False
    pruned = [PoseDistributions(f.boxes, f.scores, f.keypoints, f.covariance, f.scale, keep=keep) for f in frames]
    for each in pruned[20:]:
        each.keypoints[0, 3] = 0.0  # how other tools write a keypoint that they did not find
    found = track_live(pruned, LAYOUT, rate=RATE, settings=TrackSettings(responsive=1, confirm=1)).poses.keypoints
    assert np.abs(found[20:, 9] - seen[20:, 9]).mean() < 20
    assert np.abs(found[20:50, 3] - truth[20:50, 3]).mean() < 40


def test_a_negative_factor_is_refused() -> None:
    with pytest.raises(HaloposeError, match="responsive"):
        TrackSettings(responsive=-1)
