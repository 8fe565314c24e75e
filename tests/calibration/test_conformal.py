"""Conformal regions: their guarantees on data of a known distribution that the regions do not use."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.calibration.conformal import (
    MIN_IMAGES,
    fit_regions,
    hierarchical_quantiles,
    whole_distance,
)
from halopose.errors import HaloposeError
from halopose.types import Array
from halopose.uncertainty.regions import PROBABILITIES, Regions


def brute_force(scores: list[float], images: list[int], probability: Fraction) -> float:
    """The smallest score that holds enough weight, every image weighing 1 / (n + 1), in exact arithmetic."""
    names = sorted(set(images))
    for candidate in sorted(scores):
        weight = Fraction(0)
        for name in names:
            own = [score for score, image in zip(scores, images, strict=True) if image == name]
            weight += Fraction(sum(score <= candidate for score in own), len(own) * (len(names) + 1))
        if weight >= probability:
            return candidate
    return math.inf


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=25),
    st.integers(1, 99),
)
def test_quantiles_equal_brute_force(data: list[tuple[int, int]], percent: int) -> None:
    scores, images = [float(score) for score, _ in data], [image for _, image in data]
    found = hierarchical_quantiles(np.array(scores), np.array(images), np.array([percent / 100]))[0]
    assert found == brute_force(scores, images, Fraction(percent, 100))


def test_one_score_an_image_is_split_conformal() -> None:
    scores = np.random.default_rng(0).exponential(size=99)
    found = hierarchical_quantiles(scores, np.arange(99), np.array([0.9, 0.99, 0.995]))
    assert found[:2].tolist() == [np.sort(scores)[89], scores.max()]  # the ceil(100 p)-th
    assert found[2] == math.inf


def draw(rng: np.random.Generator, images: int, tails: float, keypoints: int = 3) -> tuple[Array, Array]:
    """Squared distances (M, K) of correlated keypoints under a distribution three times too narrow, and their images.

    An image has one to four objects, all of which share a part of their error.
    """
    counts = rng.integers(1, 5, images)
    image = np.repeat(np.arange(images), counts)
    common = rng.normal(size=(images, 1, 2))[image] + rng.normal(size=(len(image), 1, 2))
    residual = common + rng.normal(size=(len(image), keypoints, 2))
    width = np.sqrt(tails / rng.chisquare(tails, images))[image]
    return 9 * np.square(residual).sum(-1) * width[:, None] ** 2, image


@pytest.mark.parametrize("tails", [3.0, 1e6])
def test_coverage_holds_over_repetitions(tails: float) -> None:
    """1,000 calibrations on 60 images, each tested on a keypoint and an object of another image."""
    rng = np.random.default_rng(1)
    held, repetitions = np.zeros((2, 2)), 1000
    for _ in range(repetitions):
        distance, image = draw(rng, 61, tails)
        labelled = rng.random(distance.shape) < 0.8
        seen = image < 60
        regions = fit_regions(distance[seen], labelled[seen], image[seen])
        rows = np.flatnonzero(~seen & labelled[:, 0])
        new = rng.choice(rows) if len(rows) else -1
        for row, probability in enumerate((0.9, 0.95)):
            own = distance[new, 0] <= regions.radius(probability)[0, 0]
            objects, _ = whole_distance(distance[~seen], labelled[~seen], image[~seen])
            whole = rng.choice(objects) <= regions.whole_radius(probability) if len(objects) else True
            held[row] += [own, whole]
    for row, probability in enumerate((0.9, 0.95)):
        error = math.sqrt(probability * (1 - probability) / repetitions)
        assert np.all(held[row] / repetitions >= probability - error)
        # Coverage exceeds the guarantee by at most 1 / (n + 1) for n images, plus the noise of 1,000 repetitions.
        assert np.all(held[row] / repetitions <= probability + 1 / 49 + 3 * error)


def test_few_images_take_the_radii_of_all_keypoints() -> None:
    rng = np.random.default_rng(2)
    distance, labelled = rng.chisquare(2, (200, 3)), np.ones((200, 3), dtype=bool)
    labelled[MIN_IMAGES - 1 :, 2] = False
    labelled[:, 1] = False
    regions = fit_regions(distance, labelled, np.arange(200))
    pooled = hierarchical_quantiles(
        distance[labelled], np.broadcast_to(np.arange(200)[:, None], labelled.shape)[labelled]
    )
    assert regions.images.tolist() == [[200, 0, MIN_IMAGES - 1]]
    for keypoint in (1, 2):
        assert np.array_equal(regions.keypoint[0, keypoint], pooled)
    assert not np.array_equal(regions.keypoint[0, 0], pooled)


def test_radii_grow_with_the_probability_also_where_others_take_over() -> None:
    rng = np.random.default_rng(3)
    distance = rng.chisquare(2, (80, 2)) * [100.0, 1.0]  # 80 images: 99 % comes from both keypoints together
    regions = fit_regions(distance, np.ones((80, 2), dtype=bool), np.arange(80))
    finite = regions.keypoint[np.isfinite(regions.keypoint)]
    assert len(finite)
    steps = np.diff(np.where(np.isfinite(regions.keypoint), regions.keypoint, 1e9), axis=-1)
    assert (steps >= 0).all()


def test_scales_have_radii_of_their_own() -> None:
    rng = np.random.default_rng(4)
    area = rng.choice([100.0, 10_000.0], 600)
    distance = rng.chisquare(2, (600, 2)) * np.where(area > 1000, 9, 1)[:, None]
    whole = np.ones((600, 2), dtype=bool)
    regions = fit_regions(distance, whole, np.arange(600), area=area, edges=(500.0,), area_factor=0.5)
    small, large = regions.of_objects(0.9, np.array([900.0, 1100.0]))
    assert np.all(large > 5 * small)
    with pytest.raises(HaloposeError, match="need the objects' areas"):
        fit_regions(distance, whole, np.arange(600), edges=(500.0,))


def test_kept_keypoints_alone_have_smaller_whole_regions() -> None:
    rng = np.random.default_rng(5)
    distance = rng.chisquare(2, (300, 4)) * [1.0, 1.0, 1.0, 50.0]
    keep = np.array([True, True, True, False])
    regions = fit_regions(distance, np.ones((300, 4), dtype=bool), np.arange(300), keep=np.tile(keep, (300, 1)))
    assert regions.whole_radius(0.9, kept=True) < regions.whole_radius(0.9) / 5


def test_impossible_guarantees_are_refused() -> None:
    regions = fit_regions(np.ones((60, 1)), np.ones((60, 1), dtype=bool), np.arange(60))
    assert regions.radius(0.98).tolist() == [[1.0]]
    with pytest.raises(HaloposeError, match=r"0\.99: that takes 99"):
        regions.radius(0.99)
    with pytest.raises(HaloposeError, match="too few images"):
        regions.whole_radius(0.9995)
    for probability in (0.0, 1.0, math.nan):
        with pytest.raises(HaloposeError, match="between 0 and 1"):
            regions.radius(probability)


def test_between_two_known_probabilities_the_higher_counts() -> None:
    distance = np.random.default_rng(6).chisquare(2, (500, 1))
    regions = fit_regions(distance, np.ones((500, 1), dtype=bool), np.arange(500))
    assert regions.radius(0.901) == regions.radius(0.91) > regions.radius(0.9)


def test_json_round_trip_and_damage() -> None:
    distance = np.random.default_rng(7).chisquare(2, (70, 2))
    regions = fit_regions(distance, np.ones((70, 2), dtype=bool), np.arange(70), area=np.arange(70.0), edges=(35.0,))
    content = regions.to_json()
    assert Regions.from_json(content, 2) == regions
    assert regions != 1
    for key, value in (("whole", [1.0]), ("edges", [3.0, 1.0]), ("images", [[1]]), ("keypoint", None)):
        with pytest.raises((ValueError, TypeError)):
            Regions.from_json({**content, key: value}, 2)
    falling = [2.0, *([1.0] * (len(PROBABILITIES) - 1))]
    with pytest.raises(ValueError, match="rising"):
        Regions.from_json({**content, "whole": falling}, 2)
