"""Splits of images: whole images, even parts, independent of the order of the data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.data.splits import check_unseen, hashed_order, image_folds, part_of_images, split_validation
from halopose.errors import HaloposeError

IDS = st.lists(st.integers(0, 2**53), min_size=2, max_size=60)


@given(IDS, st.integers(2, 7))
def test_folds_are_by_image_and_even(ids: list[int], folds: int) -> None:
    images = np.array(ids)
    if len(np.unique(images)) < 2:
        with pytest.raises(HaloposeError, match="different images"):
            image_folds(images, folds)
        return
    fold = image_folds(images, folds)
    by_image = {image: {int(f) for f in fold[images == image]} for image in ids}
    assert all(len(numbers) == 1 for numbers in by_image.values())
    sizes = np.bincount([numbers.pop() for numbers in by_image.values()], minlength=folds)
    assert sizes.max() - sizes.min() <= 1
    # The order of the data does not matter.
    order = np.argsort(images, kind="stable")
    np.testing.assert_array_equal(image_folds(images[order], folds), fold[order])


@given(st.sets(st.integers(0, 2**53), min_size=2, max_size=60), st.floats(0.01, 0.99))
def test_a_split_leaves_something_on_both_sides(ids: set[int], share: float) -> None:
    first, second = split_validation(np.array(list(ids)), share)
    assert set(first) | set(second) == ids
    assert len(first) + len(second) == len(ids)
    assert len(first) == min(max(round(share * len(ids)), 1), len(ids) - 1)
    np.testing.assert_array_equal(split_validation(np.array(sorted(ids)), share)[0], first)


@given(st.sets(st.integers(0, 2**53), min_size=1, max_size=60), st.floats(0.01, 1))
def test_a_larger_part_holds_the_smaller(ids: set[int], fraction: float) -> None:
    images = np.array(list(ids))
    part = part_of_images(images, fraction)
    assert len(part) == max(1, round(fraction * len(ids)))
    assert set(part) <= set(part_of_images(images, min(1.0, 2 * fraction))) <= ids


def test_order_has_nothing_to_do_with_ids() -> None:
    order = hashed_order(np.arange(1000))
    assert sorted(order) == list(range(1000))
    assert abs(np.corrcoef(np.arange(1000), order)[0, 1]) < 0.1


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5, float("nan")])
def test_no_such_part(fraction: float) -> None:
    with pytest.raises(HaloposeError, match="at most 1"):
        part_of_images(np.arange(5), fraction)


def test_one_image_cannot_be_split() -> None:
    with pytest.raises(HaloposeError, match="at least two"):
        split_validation(np.array([7, 7]), 0.5)


def test_seen_images_are_refused_and_coinciding_ids_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = np.arange(0, 1000, 10)
    check_unseen(np.arange(1, 10), seen, "seen")
    assert not caplog.text
    check_unseen(np.arange(40), seen, "seen")  # as anybody's images that are counted from 0
    assert "4 of 40 images" in caplog.text
    with pytest.raises(HaloposeError, match="seen: give other"):
        check_unseen(np.arange(0, 400, 10), seen, "seen")
