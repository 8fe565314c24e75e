"""Causal tracker: undetected objects, and constant cost per frame."""

from unittest.mock import Mock

import numpy as np
import pytest

from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.tracking import tracker as module
from halopose.tracking.motion import predict
from halopose.tracking.synthetic_films import Film, synthesize_film
from halopose.tracking.tracker import Track, Tracker
from halopose.tracking.tracks import track

LAYOUT = Keypoints.of(17)
FILM = synthesize_film(Film(frames=8, persons=2, missed=0.0, hidden=0.0))


def nobody() -> PoseDistributions:
    return FILM.frames[0][np.zeros(0, dtype=np.int64)]


def test_hidden_persons_have_no_score() -> None:
    tracker = Tracker(LAYOUT, 30.0)
    for poses in FILM.frames[:5]:
        identities, known = tracker.update(poses)
    assert identities.tolist() == [1, 2]
    assert (known.scores > 0).all()
    _, known = tracker.update(FILM.frames[5][np.array([0])])
    assert (known.scores > 0).sum() == 1
    _, known = tracker.update(nobody())
    assert known.scores.tolist() == [0.0, 0.0]


def test_frames_without_persons_need_few_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Mock(side_effect=predict)
    monkeypatch.setattr(module, "predict", counted)
    frames = [*FILM.frames, *[nobody()] * 5000, *FILM.frames]
    found = track(frames, LAYOUT, rate=30.0)
    assert set(found.track_ids.tolist()) == {1, 2, 3, 4}
    assert found.frames.max() == len(frames) - 1
    assert 0 < counted.call_count < 200
    identities, known = Tracker(LAYOUT, 30.0).update(nobody())
    assert (len(identities), len(known), known.dof) == (0, 0, None)


def test_a_track_counts_as_frames_come() -> None:
    one = Track(1, 0, [4])
    for row in (-1, 0, -1, -1):
        one.add(row)
    assert (one.seen, one.unseen, one.span) == (2, 2, [4, -1, 0])
    assert one.rows == [4, -1, 0, -1, -1]
