"""Bootstrap over images: margins by definition, and paired differences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.evaluation.bootstrap import (
    Difference,
    PairedMetrics,
    clustered_share,
    confidence_interval,
    half_width,
    resample_images,
)
from halopose.evaluation.scores import METRICS, RANKINGS
from halopose.types import Array


@dataclass(frozen=True)
class Model(PairedMetrics):
    estimate: dict[str, float]
    draws: dict[str, Array]


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_resamplings_draw_as_many_images_and_are_the_same_again(images: int, count: int, seed: int) -> None:
    drawn = resample_images(images, count, seed)
    assert drawn.shape == (count, images)
    assert ((drawn >= 0) & (drawn < images)).all()
    np.testing.assert_array_equal(drawn, resample_images(images, count, seed))


def test_every_image_is_drawn_once_on_average() -> None:
    counts = np.bincount(resample_images(50, 4000).ravel(), minlength=50) / 4000
    np.testing.assert_allclose(counts, 1, atol=0.08)
    assert not np.array_equal(resample_images(50, 2, 0), resample_images(50, 2, 1))


def test_the_error_of_a_share_is_that_of_resampled_images() -> None:
    """Images of one to five samples, equal within an image: a binomial error would be too small."""
    rng = np.random.default_rng(0)
    image = np.repeat(np.arange(300), rng.integers(1, 6, 300))
    hits = (rng.random(300) < 0.2)[image]
    share, error = clustered_share(hits, image)
    sums, counts = np.bincount(image, hits), np.bincount(image)
    draws = [sums[pick].sum() / counts[pick].sum() for pick in resample_images(300, 4000)]
    assert share == hits.mean()
    assert error == pytest.approx(np.std(draws), rel=0.05)
    assert error > 1.5 * np.sqrt(share * (1 - share) / len(hits))


def test_the_error_of_a_share_is_binomial_where_every_image_has_one_sample() -> None:
    hits = np.arange(50) < 10
    share, error = clustered_share(hits, np.arange(50))
    assert share == 0.2
    assert error == pytest.approx(np.sqrt(0.2 * 0.8 / 49))
    assert np.isnan(clustered_share(hits, np.zeros(50))[1])  # of one image nothing is known
    assert np.isnan(clustered_share(hits[:0], np.zeros(0))).all()


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30), st.floats(-1e3, 1e3))
def test_intervals_are_standard_errors_around_the_estimate(draws: list[float], estimate: float) -> None:
    mean = sum(draws) / len(draws)
    error = (sum((value - mean) ** 2 for value in draws) / (len(draws) - 1)) ** 0.5
    assert half_width(draws) == pytest.approx(1.96 * error, abs=1e-9)
    for metric in ("nll", "akp_skill"):  # which may be negative
        assert confidence_interval(metric, estimate, draws) == (
            estimate - half_width(draws),
            estimate + half_width(draws),
        )


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.floats(0, 1))
def test_intervals_of_what_cannot_be_negative_end_at_0(draws: list[float], estimate: float) -> None:
    for metric in {*METRICS, *RANKINGS} - {"nll", "akp_skill"}:
        low, high = confidence_interval(metric, estimate, draws)
        assert low == max(0.0, estimate - half_width(draws))
        assert high == estimate + half_width(draws)


def test_one_draw_has_no_margin() -> None:
    assert np.isnan(half_width([1.0]))
    assert np.isnan(half_width(np.zeros(0)))


def test_difference_is_decided_by_its_interval() -> None:
    assert Difference(0.3, 0.2).significant
    assert Difference(-0.3, 0.2).significant
    assert not Difference(0.1, 0.2).significant
    assert not Difference(0.1, half_width(np.array([1.0]))).significant


def test_differences_are_of_the_same_draws() -> None:
    """Effects that both models share, such as hard images, cancel."""
    rng = np.random.default_rng(0)
    shared, own = rng.normal(size=500), 0.1 * rng.normal(size=500)
    one = Model({"nll": 3.0, "nll2": 2.0}, {"nll": 3 + shared, "nll2": 2 + shared})
    other = Model({"nll": 2.5}, {"nll": 2.5 + shared + own})
    difference = one.minus(other, "nll")
    assert difference.value == 0.5
    assert difference.margin == pytest.approx(1.96 * own.std(ddof=1))
    assert difference.margin < 0.2 * one.margin("nll") == pytest.approx(0.2 * half_width(shared))
    assert one.minus(one, "nll") == Difference(0.0, 0.0)
    assert one.minus(one, "nll", "nll2").value == 1.0
