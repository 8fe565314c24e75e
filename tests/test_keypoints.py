"""Keypoints: stated values, defaults from names and counts, and the JSON round trip."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.keypoints import COCO_LIMBS, COCO_NAMES, COCO_SIGMAS, Keypoints, mirrored_order

NAMES = st.lists(st.sampled_from(["left_eye", "right_eye", "Left_Ear", "right_ear", "nose", "tip"]), min_size=1)


def test_seventeen_are_cocos_unless_denied() -> None:
    person = Keypoints.of(17)
    assert (person.names, person.limbs, person.area_factor) == (COCO_NAMES, COCO_LIMBS, 0.53)
    np.testing.assert_array_equal(person.kappa, 2 * COCO_SIGMAS)
    assert person.mirror == (0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15)
    assert Keypoints.of(17, coco=False).sigmas == (1 / 17,) * 17


def test_other_counts_are_numbers() -> None:
    four = Keypoints.of(4)
    assert four == Keypoints(tuple(f"keypoint_{k}" for k in range(4)), (0.25,) * 4, 1.0, None, ())
    assert len(four) == 4


def test_missing_values_come_from_the_model() -> None:
    model = Keypoints.of(2, names=("left", "right"), sigmas=(0.1, 0.2), area_factor=0.7, limbs=[(0, 1)])
    assert Keypoints.of(2, otherwise=model) == model
    assert Keypoints.of(2, sigmas=(0.3, 0.3), otherwise=model).sigmas == (0.3, 0.3)
    assert Keypoints.of(3, otherwise=model) == Keypoints.of(3)  # of something else


@given(NAMES)
def test_a_mirror_swaps_sides_and_is_its_own_inverse(names: list[str]) -> None:
    mirror = mirrored_order(names)
    lower = [name.lower() for name in names]
    if mirror is None:
        lonely = any(name.replace("left", "right") not in lower for name in lower)
        lonely |= any(name.replace("right", "left") not in lower for name in lower)
        sided = any("left" in name or "right" in name for name in lower)
        assert lonely or not sided or len(set(lower)) < len(lower)
        return
    for k, partner in enumerate(mirror):
        assert mirror[partner] == k
        swap = {"left": "right", "right": "left"}
        side = next((side for side in swap if side in lower[k]), None)
        assert lower[partner] == (lower[k] if side is None else lower[k].replace(side, swap[side]))


@given(NAMES, st.floats(0.1, 2))
def test_json_and_back_is_the_same(names: list[str], factor: float) -> None:
    limbs = [(0, len(names) - 1)]
    one = Keypoints.of(len(names), names=names, area_factor=factor, limbs=limbs)
    assert Keypoints.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize(
    "changes",
    [
        {"mirror": [0, 0]},
        {"mirror": [1, 2]},
        {"mirror": [0]},
        {"limbs": [[0, 2]]},
        {"limbs": [[-1, 0]]},
        {"limbs": [[0]]},
        {"area_factor": 0},
        {"area_factor": float("inf")},
        {"area_factor": None},
        {"sigmas": [0.1]},
        {"sigmas": [0.1, 0.0]},
        {"names": 3},
    ],
)
def test_damaged_content_is_refused(changes: dict[str, Any]) -> None:
    content = Keypoints.of(2, names=("left", "right")).to_json()
    with pytest.raises((ValueError, KeyError, TypeError, HaloposeError)):
        Keypoints.from_json(content | changes)
    with pytest.raises(KeyError):
        Keypoints.from_json({key: value for key, value in content.items() if key != next(iter(changes))})


@pytest.mark.parametrize("sigmas", [(0.1,), (0.1, -0.1), (0.1, float("nan")), (0.1, float("inf"))])
def test_sigmas_are_positive_and_one_each(sigmas: tuple[float, ...]) -> None:
    with pytest.raises(HaloposeError, match="positive keypoint sigmas"):
        Keypoints.of(2, sigmas=sigmas)
