"""Drawing: positions of ellipses, limbs, legends and alarms, and unchanged inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from halopose.drawing import Truth, draw_poses
from halopose.errors import HaloposeError
from halopose.poses import PoseDistributions
from halopose.types import Array
from halopose.uncertainty.distributions import Gaussian

PLAIN = np.full((120, 160, 3), 30, np.uint8)
COVARIANCE = np.array([[90.0, 40.0], [40.0, 60.0]])


def poses(
    places: Any, covariance: Array = COVARIANCE, dof: Array | None = None, keep: Array | None = None
) -> PoseDistributions:
    places = np.asarray(places, dtype=float)
    n, k = places.shape[:2]
    matrices = np.broadcast_to(covariance, (n, k, 2, 2)).copy()
    return PoseDistributions(
        boxes=np.zeros((n, 4)), scores=np.ones(n), keypoints=places, covariance=matrices, scale=matrices,
        dof=dof, keep=keep,
    )  # fmt: skip


def changed(picture: np.ndarray, image: np.ndarray = PLAIN) -> np.ndarray:
    return (picture != image).any(2)


def test_ellipse_lies_where_the_distribution_says() -> None:
    found = poses([[[80, 60]]])
    rows, columns = np.indices(PLAIN.shape[:2])
    offset = torch.from_numpy(np.stack([columns - 80.0, rows - 60.0], -1))
    distribution = Gaussian(torch.linalg.cholesky(torch.from_numpy(COVARIANCE)))
    for probability in (0.5, 0.95):
        mask = changed(draw_poses(PLAIN, found, probability=probability))
        distance = distribution.mahalanobis(offset).sqrt().numpy()
        edge = distance - np.sqrt(-2 * np.log1p(-probability))  # chi-square with two degrees of freedom
        assert mask[edge < -0.3].all()
        assert not mask[edge > 0.4].any()


def test_student_t_ellipse_is_wider() -> None:
    areas = [changed(draw_poses(PLAIN, poses([[[80, 60]]], dof=dof))).sum() for dof in (None, np.array([2.5]))]
    assert areas[1] > 1.5 * areas[0]


@pytest.mark.parametrize("shape", [(120, 160, 3), (1, 1, 3), (3, 700, 3)])
def test_shape_dtype_and_input_stay(shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    image.setflags(write=False)
    before = image.copy()
    for source in (image, image[:, ::-1]):
        picture = poses([[[1, 1], [5, 2]]]).plot(source)
        assert picture.shape == shape
        assert picture.dtype == np.uint8
        assert not np.shares_memory(picture, image)
    assert np.array_equal(image, before)


def test_nothing_to_draw_is_the_image() -> None:
    empty = poses(np.zeros((0, 17, 2)))
    assert np.array_equal(draw_poses(PLAIN, empty), PLAIN)
    assert np.array_equal(empty.plot(PLAIN, truth=Truth(np.zeros((0, 17, 2)), np.zeros((0, 17), bool))), PLAIN)


def test_pruned_keypoints_are_grey_or_left_out() -> None:
    found = poses([[[40, 60], [120, 60]]], keep=np.array([[True, False]]))
    shown, hidden = draw_poses(PLAIN, found), draw_poses(PLAIN, found, show_pruned=False)
    right = np.index_exp[:, 80:]
    assert changed(hidden)[:, :80].any()
    assert not changed(hidden)[right].any()
    pixels = shown[right][changed(shown)[right]].astype(int)
    assert len(pixels)
    assert (pixels.max(1) - pixels.min(1)).max() <= 2  # grey
    assert np.array_equal(shown[:, :80], hidden[:, :80])
    truth = Truth(np.array([[[40.0, 60.0], [150.0, 100.0]]]), np.ones((1, 2), bool))
    assert not changed(draw_poses(PLAIN, found, show_pruned=False, truth=truth))[:, 100:].any()


def test_residual_line_and_label() -> None:
    found = poses([[[40, 60]]], covariance=np.eye(2) * 4)
    for labelled in (True, False):
        truth = Truth(np.array([[[110.0, 60.0]]]), np.array([[labelled]]))
        mask = changed(draw_poses(PLAIN, found, truth=truth))
        assert mask[60, 52:108].all() == labelled
        assert mask[40:80, 108:].any() == labelled


def test_limbs_join_kept_keypoints_only() -> None:
    found = poses([[[20, 60], [140, 60]]], covariance=np.eye(2))
    assert not changed(draw_poses(PLAIN, found))[60, 40:120].any()
    assert changed(draw_poses(PLAIN, found, limbs=((0, 1),)))[60, 40:120].all()
    pruned = replace(found, keep=np.array([[True, False]]))
    assert not changed(draw_poses(PLAIN, pruned, limbs=((0, 1),)))[60, 40:120].any()


def test_coco_skeleton_and_sides() -> None:
    places = np.stack([np.linspace(10, 150, 17), np.full(17, 60.0)], -1)[None]
    picture = draw_poses(PLAIN, poses(places, covariance=np.eye(2)))
    assert changed(picture)[60, 12:44].all()  # the head
    assert changed(picture)[60, 56:148].all()  # the body
    named = [draw_poses(PLAIN, poses([[[80, 60]]]), names=(name,)) for name in ("left_eye", "right_eye", "nose")]
    centres = {tuple(picture[60, 80].tolist()) for picture in named}
    assert len(centres) == 3


@pytest.mark.parametrize("far", [1e3, 1e7, 1e12, -1e12])
def test_keypoints_far_outside(far: float) -> None:
    found = poses([[[far, 60], [80, far], [80, 60]]])
    truth = Truth(np.array([[[far, far], [80, 60], [far, 2.0]]]), np.ones((1, 3), bool))
    picture = draw_poses(PLAIN, found, truth=truth, limbs=((0, 1), (1, 2)))
    assert changed(picture)[50:70, 70:90].any()


@pytest.mark.parametrize("size", [1e-12, 1e6, 1e12, 1e18])
def test_tiny_and_huge_covariances(size: float) -> None:
    picture = draw_poses(PLAIN, poses([[[80, 60]]], covariance=np.eye(2) * size))
    assert picture.shape == PLAIN.shape
    assert changed(picture)[60, 80]
    assert bool(changed(picture)[5, 5]) is (size > 1)


@pytest.mark.parametrize("probability", [0, 1, 2, -0.5, float("nan")])
def test_a_probability_that_is_none_is_refused(probability: float) -> None:
    with pytest.raises(HaloposeError, match="between 0 and 1"):
        draw_poses(PLAIN, poses([[[80, 60]]]), probability=probability)


def test_boxes_and_legend_are_options() -> None:
    found = replace(poses([[[80, 60]]]), boxes=np.array([[20.0, 30.0, 140.0, 110.0]]))
    plain, boxed = draw_poses(PLAIN, found), draw_poses(PLAIN, found, boxes=True)
    different = changed(boxed, plain)
    assert different[110, 30:130].all()
    assert not different[:25].any()
    assert changed(draw_poses(PLAIN, found, legend=True), plain)[:60, :60].any()


def test_pruned_keypoints_are_faint() -> None:
    one = poses([[[80, 60]]], keep=np.array([[False]]))
    picture = draw_poses(PLAIN, one)
    assert changed(picture).any()
    assert int(picture.max()) < 140 * 0.75  # of the grey that an outline would have
    assert not changed(draw_poses(PLAIN, one, show_pruned=False)).any()


def test_alarms_are_framed_in_red() -> None:
    one = replace(poses([[[80, 60]]]), boxes=np.array([[40.0, 30.0, 120.0, 90.0]]), novelty=np.array([0.02]))
    red = changed(draw_poses(PLAIN, one, alarm=0.05), draw_poses(PLAIN, one))
    assert red[30, 40:120].all()
    assert not red[:20].any()
    assert not changed(draw_poses(PLAIN, one, alarm=0.01), draw_poses(PLAIN, one)).any()
    unlike = replace(one, image_novelty=np.array([0.01]))
    assert changed(draw_poses(PLAIN, unlike, alarm=0.05))[0].all()
    assert changed(draw_poses(PLAIN, unlike[:0], alarm=0.05))[0].all()  # a foggy image may hold no detection
    assert not changed(draw_poses(PLAIN, unlike[:0])).any()
