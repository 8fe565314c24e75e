"""The card of an artifact: the base model, the images and settings it was made with, and the figures measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.evaluation.scores import Scores
from halopose.fitting.head_training import TrainingHistory
from halopose.fitting.presets import departures
from halopose.fitting.settings import FitSettings, NoveltySettings
from halopose.types import Array


@dataclass(frozen=True)
class ImageRoles:
    """Ids of the images by what they were used for; None: nothing yet.

    Attributes:
        calibration: Images that the calibration was fitted on.
        choosing: Images that model variants were compared on.
        evaluation: Images kept for evaluation.
        heads: Images that the heads were trained on.
    """

    calibration: tuple[int, ...] | None = None
    choosing: tuple[int, ...] | None = None
    evaluation: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def of(self, *roles: str) -> Array:
        """Ids (I,) of the images in any of the named roles."""
        return np.array([image for role in roles for image in getattr(self, role) or ()], dtype=np.int64)

    def counts(self) -> dict[str, int]:
        """Number of images by role, for the roles that have images assigned."""
        return {role: len(images) for role, images in _set_fields(self).items()}


@dataclass(frozen=True)
class NoveltyRecord:
    """How the out-of-distribution model was fitted.

    Attributes:
        settings: Settings of the fit.
        images: Ids of the images it was fitted on.
        calibration: Ids of the images that its p-values are relative to.
        detections: Number of detections in those images.
    """

    settings: NoveltySettings
    images: tuple[int, ...]
    calibration: tuple[int, ...] = ()
    detections: int = 0


@dataclass(frozen=True)
class DistributionFigures:
    """Calibration error (ACE), AKP, ENCE and NLL of one output distribution."""

    ace: float
    akp: float
    ence: float
    nll: float


@dataclass(frozen=True)
class CardFigures:
    """Figures measured on the evaluation images; the names are those of ``Scores``."""

    uncalibrated: DistributionFigures
    gaussian: DistributionFigures
    student_t: DistributionFigures
    akp_random: float
    akp_skill: float
    akp_visibility: float
    kept_fraction: float
    keypoints: int
    matched_instances: int

    @classmethod
    def of(cls, scores: Scores) -> CardFigures:
        """The figures of an evaluation."""
        metrics = [each.name for each in fields(DistributionFigures)]
        regimes = {
            name: DistributionFigures(*(scores.distribution(name).metric(metric) for metric in metrics))
            for name in ("uncalibrated", "gaussian", "student_t")
        }
        return cls(
            **regimes,
            akp_random=scores.akp_random,
            akp_skill=scores.akp_skill,
            akp_visibility=scores.akp_visibility,
            kept_fraction=scores.pruned.kept_fraction,
            keypoints=scores.keypoints,
            matched_instances=scores.matched_instances,
        )


@dataclass(frozen=True)
class Card:
    """Record of how an artifact was made.

    Attributes:
        base: Name of the base model.
        data: Description of the data.
        images: Image ids by role.
        settings: Settings of the fit.
        training: Losses of the training.
        skipped: One line per image that could not be read.
        novelty: How the out-of-distribution model was fitted.
        figures: Figures measured on the evaluation images.
        calibrated: Runtime in which a deployed folder was calibrated again.
        other: Entries unknown to this version; they are kept when the card is written.
    """

    base: str | None = None
    data: str | None = None
    images: ImageRoles = field(default_factory=ImageRoles)
    settings: FitSettings | None = None
    training: TrainingHistory | None = None
    skipped: tuple[str, ...] | None = None
    novelty: NoveltyRecord | None = None
    figures: CardFigures | None = None
    calibrated: str | None = None
    other: Mapping[str, Any] = field(default_factory=dict)

    @property
    def departures(self) -> tuple[str, ...]:
        """Differences of the fit from the paper; empty if the settings are unknown."""
        return () if self.settings is None else departures(self.settings)

    @property
    def fit_settings(self) -> FitSettings:
        """Settings of the fit.

        Raises:
            HaloposeError: The card has no settings.
        """
        if self.settings is None:
            raise HaloposeError(
                "the artifact's card has no training settings: train the heads again with `halopose train`"
            )
        return self.settings

    def to_json(self) -> dict[str, Any]:
        """Card as JSON values, with sorted keys; entries without a value are left out."""
        content = dict(self.other)
        for name, value in _set_fields(self).items():
            if name != "other":
                content[name] = _WRITERS[name](value) if name in _WRITERS else value
        if not content["images"]:
            del content["images"]
        ordered: dict[str, Any] = json.loads(json.dumps(content, sort_keys=True))
        return ordered

    @classmethod
    def from_json(cls, content: Any) -> Card:
        """Card from JSON values; entries of another form than this version writes go to ``other``.

        Raises:
            TypeError, ValueError, LookupError: The content is no card, or its image ids are damaged.
        """
        if not isinstance(content, dict):
            raise TypeError("a card is a JSON object")
        known: dict[str, Any] = {"images": _images(content.get("images", {}))}
        other: dict[str, Any] = {}
        for name, value in content.items():
            try:
                known[name] = _READERS[name](value)
            except (LookupError, TypeError, ValueError, AttributeError):
                other[name] = value
        return cls(**known, other=other)


def _set_fields(value: Any) -> dict[str, Any]:
    """Fields of a dataclass that are not None, by name."""
    values = {each.name: getattr(value, each.name) for each in fields(value)}
    return {name: value for name, value in values.items() if value is not None}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _lines(value: Any) -> tuple[str, ...]:
    return tuple(_text(line) for line in value)


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(image) is int for image in value):
        raise TypeError("not a list of image ids")
    return tuple(value)


def _images(content: Any) -> ImageRoles:
    if not isinstance(content, dict):
        raise TypeError("not image ids by role")
    return ImageRoles(**{role: _ids(images) for role, images in content.items()})


def _training(content: Any) -> TrainingHistory:
    return TrainingHistory(tuple(content["train_loss"]), tuple(content["holdout_loss"]), content["best_epoch"])


def _novelty(content: Any) -> NoveltyRecord:
    read: dict[str, Callable[[Any], Any]] = {
        "settings": lambda settings: NoveltySettings(**settings),
        "images": _ids,
        "calibration": _ids,
        "detections": int,
    }
    return NoveltyRecord(**{name: read[name](value) for name, value in content.items()})


def _figures(content: Any) -> CardFigures:
    regimes = {name: DistributionFigures(**value) for name, value in content.items() if isinstance(value, dict)}
    return CardFigures(**{**content, **regimes})


_READERS: dict[str, Callable[[Any], Any]] = {
    "base": _text,
    "data": _text,
    "images": _images,
    "settings": FitSettings.from_json,
    "training": _training,
    "skipped": _lines,
    "novelty": _novelty,
    "figures": _figures,
    "calibrated": _text,
}
_WRITERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "images": _set_fields,
    "settings": FitSettings.to_json,
    "training": asdict,
    "novelty": lambda record: {**_set_fields(record), "settings": asdict(record.settings)},
    "figures": asdict,
}
