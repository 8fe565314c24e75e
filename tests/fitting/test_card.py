"""Card of an artifact: JSON round trip, older cards, unknown entries, damaged image ids."""

from dataclasses import replace
from typing import Any

import pytest

from halopose.data.tensors import read_content
from halopose.errors import HaloposeError
from halopose.fitting.card import Card, CardFigures, DistributionFigures, ImageRoles, NoveltyRecord
from halopose.fitting.head_training import TrainingHistory
from halopose.fitting.settings import FitSettings, NoveltySettings, TrainSettings
from halopose.landing.shipped_detectors import runway_artifact

FIGURES = DistributionFigures(0.01, 0.9, 0.05, 6.0)
CARD = Card(
    base="model.pt",
    images=ImageRoles(heads=(1, 2), calibration=(3,), evaluation=()),
    settings=FitSettings(TrainSettings(alpha=2.0, dof=12.0), train_sizes=(64, 32)),
    training=TrainingHistory((2.0, 1.0), (3.0, 1.5), 1),
    skipped=("a.jpg: damaged",),
    novelty=NoveltyRecord(NoveltySettings(images=5), (1, 2), (3,), 7),
    figures=CardFigures(FIGURES, FIGURES, FIGURES, 0.7, 0.6, 0.8, 0.75, 100, 10),
    other={"parts": ["a", "b"]},
)


@pytest.mark.parametrize("card", [Card(), CARD, replace(CARD, images=ImageRoles(), settings=None)])
def test_round_trip(card: Card) -> None:
    content = card.to_json()
    assert Card.from_json(content) == card
    assert list(content) == sorted(content)


def test_card_of_an_older_artifact_loses_nothing() -> None:
    """Settings that the older version did not have take their defaults; nothing else changes."""
    written = read_content(runway_artifact())["card"]
    card = Card.from_json(written)
    assert not card.other
    content = card.to_json()
    settings, before = content.pop("settings"), written.pop("settings")
    assert content == written
    for part in ("train", "head"):
        assert before[part].items() <= settings[part].items()
    assert {**before, "train": 0, "head": 0}.items() <= {**settings, "train": 0, "head": 0}.items()
    assert settings["match"] == "oks"


def test_images_by_role() -> None:
    images = CARD.images
    assert images.of("heads", "calibration", "choosing").tolist() == [1, 2, 3]
    assert images.counts() == {"heads": 2, "calibration": 1, "evaluation": 0}


def test_unknown_settings_are_kept_but_not_used() -> None:
    content = CARD.to_json()
    content["settings"]["train"]["momentum"] = 0.9
    card = Card.from_json(content)
    assert card.to_json() == content
    with pytest.raises(HaloposeError, match="train"):
        _ = card.fit_settings


@pytest.mark.parametrize("content", [[], {"images": []}, {"images": {"heads": ["a"]}}, {"images": {"new": [1]}}])
def test_damaged_card_is_refused(content: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Card.from_json(content)
