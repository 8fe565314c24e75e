"""Causal tracks: nothing depends on later frames."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.tracking.live_tracking import track_live
from halopose.tracking.synthetic_films import Film, synthesize_film
from halopose.tracking.tracker import Tracker

LAYOUT = Keypoints.of(17)
FILM = synthesize_film(Film(frames=30, persons=2, missed=0.15, seed=4))


def written(frames: list[PoseDistributions], count: int) -> tuple[list[str], list[object]]:
    """CSV rows and JSON entries of the first frames."""
    tracks = track_live(frames, LAYOUT, rate=30.0)
    rows = [row for row in tracks.to_csv().splitlines()[1:] if int(row.split(",")[0]) < count]
    return rows, [entry for entry in tracks.to_json() if entry["frame"] < count]


@settings(max_examples=15, deadline=None)
@given(st.integers(6, 29), st.integers(0, 2**32 - 1))
def test_changing_later_frames_changes_nothing_earlier(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    other = list(FILM.frames)
    for n in range(count, len(other)):
        poses = other[n]
        moved = poses.keypoints + rng.normal(scale=30, size=poses.keypoints.shape)
        wider = poses.covariance * rng.uniform(0.1, 20)
        changed = PoseDistributions(poses.boxes + rng.normal(scale=20), poses.scores, moved, wider, wider)
        other[n] = changed[np.flatnonzero(rng.uniform(size=len(poses)) < 0.7)]
    expected = written(FILM.frames, count)
    assert expected[0]
    assert written(other, count) == expected
    assert written(FILM.frames[:count], count) == expected


def test_tracks_are_the_output_of_the_tracker() -> None:
    tracks, tracker = track_live(FILM.frames, LAYOUT, rate=30.0), Tracker(LAYOUT, 30.0)
    for number, poses in enumerate(FILM.frames):
        identities, known = tracker.update(poses)
        rows = tracks.rows(frame=number)
        assert tracks.track_ids[rows].tolist() == identities.tolist()
        np.testing.assert_array_equal(tracks.poses.keypoints[rows], known.keypoints)
        np.testing.assert_array_equal(tracks.poses.boxes[rows], known.boxes)
        np.testing.assert_array_equal(tracks.observed[rows].any(1), known.scores > 0)


def test_velocities_equal_those_of_the_walk() -> None:
    tracks = track_live(FILM.frames, LAYOUT, rate=30.0)
    one = tracks.rows(identity=1)[10:]
    way = np.diff(tracks.poses.keypoints[one].mean(1), axis=0).sum(0) * 30 / (len(one) - 1)
    assert np.abs(tracks.velocity[one].mean((0, 1)) - way).max() < 0.5 * np.abs(way).max()


def test_a_film_without_tracks_is_refused() -> None:
    with pytest.raises(HaloposeError, match="--confirm"):
        track_live([FILM.frames[0]], LAYOUT, rate=30.0)
