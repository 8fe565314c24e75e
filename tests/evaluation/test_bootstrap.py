"""Shared resamplings: draws equal copies of the drawn images, also where some images have no match."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from halopose.evaluation.bootstrap import Difference, Measured, Paired, margin_of, resamplings
from halopose.evaluation.calibrations import Fitted
from halopose.evaluation.true_positives import MatchedPoses, Protocol
from halopose.types import Array

PROTOCOL = Protocol()
DRAWS = 6


def true_positives(images: Array, seed: int) -> MatchedPoses:
    """Three instances of four keypoints in each image, correctly described but for a factor."""
    generator = np.random.default_rng(seed)
    count = 3 * len(images)
    spread = generator.uniform(1, 6, (count, 4, 1))
    covariance = np.square(spread)[..., None] * np.eye(2) * 0.7
    area = generator.uniform(1e3, 2e4, count)
    return MatchedPoses(
        image_ids=np.repeat(images, 3),
        objects=np.arange(count),
        residual=spread * generator.normal(size=(count, 4, 2)),
        labelled=generator.random((count, 4)) < 0.8,
        covariance=covariance,
        scale=covariance,
        visibility=np.ones((count, 4)),
        area=area,
        box_area=area,
        dof=None,
        names=("a", "b", "c", "d"),
        sigmas=np.full(4, 0.1),
    )


@dataclass(frozen=True)
class Model(Paired):
    estimate: dict[str, float]
    draws: dict[str, Array]

    @classmethod
    def of(cls, measured: Measured) -> Model:
        draws = list(measured.draws(DRAWS))
        return cls(measured.scores(), {name: np.array([draw[name] for draw in draws]) for name in draws[0]})


def test_draws_are_copies_of_the_drawn_images() -> None:
    """Images 10, 11 and 40 have no match: a draw that holds them holds fewer keypoints."""
    images = np.arange(10, 41)
    matched = true_positives(images[2:-1], seed=0)
    fitted = Fitted.on(true_positives(np.arange(30), seed=1), PROTOCOL)
    model = Model.of(Measured.of(matched, fitted, PROTOCOL, images))
    for number, pick in enumerate(resamplings(len(images), DRAWS)):
        rows = np.concatenate([np.flatnonzero(matched.image_ids == images[drawn]) for drawn in pick])
        copies = Measured.of(matched.select(rows), fitted, PROTOCOL).scores()
        for metric in ("gaussian.ace", "gaussian.nll", "student_t.nll", "pruned.gaussian.ace", "kept_fraction"):
            assert model.draws[metric][number] == pytest.approx(copies[metric], rel=1e-9), metric


def test_models_that_match_in_different_images_are_paired() -> None:
    """The same residuals but for two images: differences are far surer than the metrics themselves."""
    images = np.arange(60)
    fitted = Fitted.on(true_positives(np.arange(30), seed=1), PROTOCOL)
    matched = true_positives(images, seed=0)
    fewer = matched.select(np.flatnonzero(~np.isin(matched.image_ids, [3, 50])))
    one, other = (Model.of(Measured.of(part, fitted, PROTOCOL, images)) for part in (matched, fewer))
    assert one.minus(other, "gaussian.nll").margin < 0.3 * one.margin("gaussian.nll")
    assert one.minus(one, "gaussian.nll") == Difference(0.0, 0.0)
    unpaired = Model.of(Measured.of(fewer, fitted, PROTOCOL))
    assert one.minus(other, "gaussian.nll").margin < one.minus(unpaired, "gaussian.nll").margin


def test_difference_is_decided_by_its_interval() -> None:
    assert Difference(0.3, 0.2).decided
    assert Difference(-0.3, 0.2).decided
    assert not Difference(0.1, 0.2).decided
    assert not Difference(0.1, margin_of(np.array([1.0]))).decided
