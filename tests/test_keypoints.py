"""Keypoints: what is stated wins, what is not comes from the model or COCO, and json brings back the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.keypoints import COCO_LIMBS, COCO_NAMES, COCO_SIGMAS, Keypoints, mirrored_order


def test_seventeen_are_coco() -> None:
    person = Keypoints.of(17)
    assert person.names == COCO_NAMES
    assert np.array_equal(person.kappa, 2 * COCO_SIGMAS)
    assert (person.area_factor, person.limbs) == (0.53, COCO_LIMBS)
    assert person.mirror is not None
    assert [person.names[k] for k in person.mirror][1:3] == ["right_eye", "left_eye"]
    assert Keypoints.of(17, coco=False).sigmas == (1 / 17,) * 17


def test_others_have_numbers() -> None:
    assert Keypoints.of(3) == Keypoints(("keypoint_0", "keypoint_1", "keypoint_2"), (1 / 3,) * 3)


@given(st.integers(1, 20), st.data())
def test_json_brings_back_the_same(count: int, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.text(), min_size=count, max_size=count))
    sigmas = data.draw(st.lists(st.floats(1e-6, 1e6), min_size=count, max_size=count))
    mirror = data.draw(st.none() | st.permutations(range(count)))
    layout = Keypoints.of(count, names=names, sigmas=sigmas, mirror=mirror, limbs=[(0, count - 1)])
    assert Keypoints.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize("sigmas", [[0.1], [0.1, 0.0], [0.1, float("nan")], [0.1, -1.0], [0.1, float("inf")]])
def test_sigmas_that_are_none_are_refused(sigmas: list[float]) -> None:
    with pytest.raises(HaloposeError, match="give 2 positive keypoint sigmas"):
        Keypoints.of(2, sigmas=sigmas)


def test_mirrored_order() -> None:
    assert mirrored_order(["nose", "left_eye", "right_eye"]) == (0, 2, 1)
    assert mirrored_order(["near_left", "near_right", "far_right", "far_left"]) == (1, 0, 3, 2)
    assert mirrored_order(["keypoint_0", "keypoint_1"]) is None
    assert mirrored_order(["left", "middle"]) is None
