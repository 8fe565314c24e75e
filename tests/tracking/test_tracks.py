"""Tracks of synthetic films: calibrated errors, bridged gaps, identities."""

import csv
import io

import numpy as np
import pytest
from scipy.stats import chi2

from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.tracking.synthetic_films import Film, SyntheticFilm, synthesize_film
from halopose.tracking.tracker import Tracker, TrackSettings
from halopose.tracking.tracks import PoseTracks, track

LAYOUT = Keypoints.of(17)


@pytest.fixture(scope="module")
def alone() -> tuple[SyntheticFilm, PoseTracks]:
    film = synthesize_film(Film(frames=150, missed=0.05, seed=3))
    return film, track(film.frames, LAYOUT, rate=30.0)


def test_smoothing_reduces_errors_and_states_their_covariance(alone: tuple[SyntheticFilm, PoseTracks]) -> None:
    film, tracks = alone
    assert set(tracks.track_ids.tolist()) == {1}
    truth = film.truth[tracks.frames, 0]
    seen = np.array([len(owner) > 0 for owner in film.owners])
    raw = np.array([film.frames[n].keypoints[0] - film.truth[n, 0] for n in np.flatnonzero(seen)])
    error = tracks.poses.keypoints - truth
    part = seen[tracks.frames]
    assert np.sqrt(np.square(error[part]).mean()) < 0.6 * np.sqrt(np.square(raw).mean())
    distance = np.einsum("tki,tkij,tkj->tk", error, np.linalg.inv(tracks.poses.covariance), error)
    assert 0.91 < (distance < chi2.ppf(0.95, 2)).mean() < 0.985
    early = np.square(tracks.filtered.keypoints - truth).mean()
    assert np.square(error).mean() < early < np.square(raw).mean()


def test_gaps_are_bridged_with_growing_ellipses(alone: tuple[SyntheticFilm, PoseTracks]) -> None:
    film, tracks = alone
    missing = np.array([len(owner) == 0 for owner in film.owners])[tracks.frames]
    assert missing.any()
    assert not tracks.observed[missing].any()
    assert (tracks.poses.scores[missing] == 0).all()
    area = np.linalg.det(tracks.filtered.covariance)
    inside = np.flatnonzero(missing[1:] & ~missing[:-1]) + 1
    assert (area[inside] > area[inside - 1]).mean() > 0.95


def test_files_and_supervision(alone: tuple[SyntheticFilm, PoseTracks]) -> None:
    _, tracks = alone
    entries = tracks.to_json()
    assert len(entries) == len(tracks)
    assert entries[0]["track_id"] == 1
    assert len(entries[0]["observed"]) == 17
    rows = list(csv.DictReader(io.StringIO(tracks.to_csv())))
    assert len(rows) == 17 * len(tracks)
    assert float(rows[20]["x"]) == pytest.approx(tracks.poses.keypoints[1, 3, 0], rel=1e-5)
    assert rows[17]["time"] == "0.0333"
    points, boxes = tracks.to_supervision(5), tracks.to_detections(5)
    assert points.data["tracker_id"].tolist() == boxes.tracker_id.tolist() == [1]
    assert points.data["covariance"].shape == (1, 17, 2, 2)


def test_persons_who_cross_keep_their_identities() -> None:
    film = synthesize_film(Film(frames=120, persons=4, crossing=True, hidden=0.05, seed=1))
    tracker = Tracker(LAYOUT, 30.0, TrackSettings(gap=1.5))
    for poses in film.frames:
        tracker.update(poses)
    owners = [{film.owners[one.first + n][row] for n, row in enumerate(one.rows) if row >= 0} for one in tracker.tracks]
    assert len(owners) == 4
    assert all(len(owner) == 1 for owner in owners)


def test_invalid_inputs_are_refused() -> None:
    empty = PoseDistributions(
        np.zeros((0, 4)), np.zeros(0), np.zeros((0, 17, 2)), np.zeros((0, 17, 2, 2)), np.zeros((0, 17, 2, 2))
    )
    with pytest.raises(HaloposeError, match="track"):
        track([empty] * 5, LAYOUT, rate=25.0)
    with pytest.raises(HaloposeError, match="warp"):
        track([empty], LAYOUT, rate=25.0, warps=[])
    with pytest.raises(HaloposeError, match="frame rate"):
        Tracker(LAYOUT, 0.0)
    with pytest.raises(HaloposeError, match="3 keypoints"):
        Tracker(Keypoints.of(3), 25.0).update(empty)
    with pytest.raises(HaloposeError, match="confirm"):
        TrackSettings(confirm=0)
