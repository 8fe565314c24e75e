"""Association: the expected runway is selected among all detections."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.geometry.camera import Camera, Mount
from halopose.landing.association import (
    AMBIGUOUS,
    NO_RUNWAY,
    NOT_WHERE_EXPECTED,
    Association,
    CornerDetections,
    Viewpoint,
    as_pose_distributions,
    associate,
    detect_runways,
    expected_corners,
)
from halopose.landing.runway import runway_corners
from halopose.poses import PoseDistributions
from halopose.types import Array

CAMERA = Camera.from_fov(640, 384, np.radians(30))
MOUNT = Mount.looking(pitch=np.radians(-6))
CORNERS = runway_corners(2500.0, 45.0)
PARALLEL = CORNERS + np.array([0.0, 229.0, 0.0])
PLACE = expected_corners(CAMERA, MOUNT, np.array([[-2000.0, 10.0, 120.0]]), np.zeros((1, 3)), CORNERS)[0]


def detections(*keypoints: Any) -> PoseDistributions:
    """Detections with these corners (4, 2) each, scored in falling order."""
    points = np.array(keypoints).reshape(-1, 4, 2)
    count = len(points)
    spread = np.broadcast_to(np.eye(2), (count, 4, 2, 2)).copy()
    boxes = np.concatenate([points.min(1), points.max(1)], axis=1) if count else np.zeros((0, 4))
    keep = np.ones((count, 4), dtype=bool)
    keep[:, 2] = False
    return PoseDistributions(boxes, np.linspace(0.9, 0.5, count), points, spread, spread, keep=keep)


def model(*answers: PoseDistributions) -> Any:
    """Stands in for a detector: one answer per image."""
    left = list(answers)
    return SimpleNamespace(predict=lambda image, conf: [left.pop(0)])


def seen_from(distance: float, *, lateral: float = 0.0, runway: Array = CORNERS) -> Array:
    """Corners (4, 2) of a runway as an aircraft sees them that is on its path, off by ``lateral`` to the left."""
    place = np.array([[-distance, lateral, (distance + 300.0) * np.tan(np.radians(3))]])
    return expected_corners(CAMERA, MOUNT, place, np.zeros((1, 3)), runway)[0]


def believed(distance: float, sigma: float = 5.0, heading: float = 3.5e-3) -> Viewpoint:
    """A viewpoint on the path, as sure as that."""
    place = np.array([-distance, 0.0, (distance + 300.0) * np.tan(np.radians(3))])
    turned = np.diag(np.square([9e-4, 9e-4, heading]))
    return Viewpoint(CAMERA, MOUNT, place, sigma**2 * np.eye(3), np.zeros(3), turned)


@given(st.integers(0, 3), st.integers(0, 2**32 - 1), st.floats(1000.0, 6000.0))
def test_the_expected_runway_is_chosen(place: int, seed: int, distance: float) -> None:
    rng = np.random.default_rng(seed)
    mine = seen_from(distance)
    others = [mine + rng.choice([-1, 1], 2) * rng.uniform(60, 200, 2) for _ in range(3)]
    others.insert(place, mine + rng.normal(0, 1, (4, 2)))
    assert associate(detections(*others), believed(distance), CORNERS).index == place


@pytest.mark.parametrize("distance", [1000.0, 2000.0, 3000.0, 4500.0, 6000.0])
def test_a_parallel_runway_does_not_pass_where_the_own_one_is_missed(distance: float) -> None:
    """One 229 m beside was inside the old gate, of three runway sizes, at every distance."""
    beside = seen_from(distance, runway=PARALLEL)
    found = associate(detections(beside), believed(distance), CORNERS)
    assert found.index is None
    assert found.reason == NOT_WHERE_EXPECTED
    both = detections(beside, seen_from(distance))
    assert associate(both, believed(distance), CORNERS, [PARALLEL]).index == 1


def test_where_two_runways_fit_it_is_ambiguous() -> None:
    """With only a position of 300 m uncertainty, a detection may be either runway."""
    view = believed(4000.0, sigma=300.0)
    for lateral in (0.0, -100.0, -229.0):
        alone = associate(detections(seen_from(4000.0, lateral=lateral)), view, CORNERS, [PARALLEL])
        assert (alone.index, alone.reason) == (None, AMBIGUOUS)
    two = detections(seen_from(4000.0), seen_from(4000.0, runway=PARALLEL))
    assert associate(two, view, CORNERS).reason == AMBIGUOUS
    twins = detections(seen_from(4000.0), seen_from(4000.0) + 0.5)
    assert associate(twins, view, CORNERS).index is not None


def test_one_wrong_corner_is_left_to_the_integrity_check() -> None:
    mine = seen_from(2000.0)
    mine[2] += 30.0
    assert associate(detections(mine), believed(2000.0), CORNERS).index == 0


def test_runways_are_distinguished_by_shape_without_an_attitude() -> None:
    view = believed(2000.0)
    lost = replace(view, attitude_covariance=np.radians(10.0) ** 2 * np.eye(3))
    turned = np.array([[np.radians(5), np.radians(-2), np.radians(1)]])
    mine, other = (
        expected_corners(CAMERA, MOUNT, np.array([[-2000.0, y, 120.5]]), turned, CORNERS)[0] for y in (0.0, 410.0)
    )
    assert associate(detections(other, mine), lost, CORNERS).index == 1
    assert associate(detections(mine), view, CORNERS).index is None


def test_expected_corners_of_a_level_aircraft_on_the_centreline_are_symmetric() -> None:
    (corners,) = expected_corners(CAMERA, MOUNT, np.array([[-1500.0, 0.0, 90.0]]), np.zeros((1, 3)), CORNERS)
    assert corners[:, 0] - CAMERA.cx == pytest.approx(-(corners[[1, 0, 3, 2], 0] - CAMERA.cx))
    assert corners[0, 1] > corners[3, 1]  # the near end is lower in the picture


def test_frames_without_the_runway_hold_nothing() -> None:
    found = detect_runways(model(detections(PLACE), detections(), detections(PLACE)), [None] * 3)
    associations = Association(0), Association(None, NO_RUNWAY), Association(None, NOT_WHERE_EXPECTED)
    corner_detections = CornerDetections.concatenate(
        [CornerDetections.of_frame(poses, one) for poses, one in zip(found, associations, strict=True)]
    )
    assert corner_detections.seen.tolist() == [True, False, False]
    assert np.isfinite(corner_detections.pixels[0]).all()
    assert np.isnan(corner_detections.pixels[1:]).all()
    assert corner_detections.keep[0].tolist() == [True, True, False, True]
    assert not corner_detections.keep[1:].any()
    assert len(corner_detections.select(corner_detections.seen)) == 1
    again = as_pose_distributions(corner_detections)
    assert [len(each) for each in again] == [1, 0, 0]
    np.testing.assert_array_equal(again[0].keypoints[0], PLACE)
