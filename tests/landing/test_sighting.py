"""Sightings: the runway that geometry expects is chosen, whatever else is in view."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.geometry.camera import Camera, Mount, runway_corners
from halopose.landing.sighting import choose, expected_corners, sight
from halopose.poses import PoseDistributions

CAMERA = Camera.from_fov(640, 384, np.radians(30))
MOUNT = Mount.looking(pitch=np.radians(-6))
CORNERS = runway_corners(2500.0, 45.0)
PLACE = expected_corners(CAMERA, MOUNT, np.array([[-2000.0, 10.0, 120.0]]), np.zeros((1, 3)), CORNERS)[0]


def detections(*keypoints):
    """Detections with these corners (4, 2) each, scored in falling order."""
    points = np.array(keypoints).reshape(-1, 4, 2)
    count = len(points)
    spread = np.broadcast_to(np.eye(2), (count, 4, 2, 2)).copy()
    boxes = np.concatenate([points.min(1), points.max(1)], axis=1) if count else np.zeros((0, 4))
    keep = np.ones((count, 4), dtype=bool)
    keep[:, 2] = False
    return PoseDistributions(boxes, np.linspace(0.9, 0.5, count), points, spread, spread, keep=keep)


def model(*answers):
    """Stands in for a detector: one answer per image."""
    left = list(answers)
    return SimpleNamespace(predict=lambda image, conf: [left.pop(0)])


@given(st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_the_expected_runway_is_chosen(place, seed):
    rng = np.random.default_rng(seed)
    size = np.ptp(PLACE, axis=0).max()
    others = [PLACE + rng.choice([-1, 1], 2) * rng.uniform(1, 5, 2) * size for _ in range(3)]
    others.insert(place, PLACE + rng.normal(0, 0.05 * size, (4, 2)))
    assert choose(detections(*others), PLACE) == place


def test_a_runway_far_from_the_expected_one_is_none():
    assert choose(detections(PLACE + 2000.0), PLACE) is None
    assert choose(detections(), PLACE) is None


def test_without_an_attitude_the_shape_tells_runways_apart():
    level = expected_corners(CAMERA, MOUNT, np.array([[-2000.0, 10.0, 120.0]]), np.zeros((1, 3)), CORNERS)[0]
    turned = np.array([[np.radians(5), np.radians(-2), np.radians(1)]])
    mine, other = (
        expected_corners(CAMERA, MOUNT, np.array([[-2000.0, y, 120.0]]), turned, CORNERS)[0] for y in (10.0, 410.0)
    )
    assert choose(detections(other, mine), level, oriented=False) == 1
    assert choose(detections(other, mine + 50.0), mine + 50.0) == 1


def test_expected_corners_of_a_level_aircraft_on_the_centreline_are_symmetric():
    (corners,) = expected_corners(CAMERA, MOUNT, np.array([[-1500.0, 0.0, 90.0]]), np.zeros((1, 3)), CORNERS)
    assert corners[:, 0] - CAMERA.cx == pytest.approx(-(corners[[1, 0, 3, 2], 0] - CAMERA.cx))
    assert corners[0, 1] > corners[3, 1]  # the near end is lower in the picture


def test_frames_without_the_runway_hold_nothing():
    found = sight(
        model(detections(PLACE), detections(), detections(PLACE + 2000.0)), [None] * 3, np.stack([PLACE] * 3)
    )
    assert found.seen.tolist() == [True, False, False]
    assert np.isfinite(found.pixels[0]).all()
    assert np.isnan(found.pixels[1:]).all()
    assert found.keep[0].tolist() == [True, True, False, True]
    assert not found.keep[1:].any()
    assert len(found.select(found.seen)) == 1
