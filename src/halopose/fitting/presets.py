"""Named settings of a fit and of an evaluation, and how settings differ from the paper's."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

from halopose.calibration.calibrators import Calibrations
from halopose.fitting.settings import FitSettings, TrainSettings
from halopose.protocol import Protocol
from halopose.uncertainty.heads import head_settings

Preset = Literal["paper", "best"]
ALL_CELLS = 13  # largest number of assigned cells per object of any host (YOLO-NAS-Pose)

PRESETS: dict[Preset, FitSettings] = {
    "paper": FitSettings(
        calibration="assigned",
        match="oks",
        cells_per_object=ALL_CELLS,
        split_student=False,
        covariance="paper",
        min_samples=0.0,
        novelty_images=0,
        preset="paper",
    ),
    "best": FitSettings(
        train=TrainSettings(epochs=5, learning_rate=1e-3, scale_weight=False, dof=12.0, last=True),
        head=head_settings(context=True),
        gamma_ks=0.3,
        visibility=False,
        preset="best",
    ),
}


_TRAIN_OPTIONS = ("epochs", "alpha", "scale_weight", "dof", "seed")
_HEAD_OPTIONS = {"dispersion", "trunk", "warm_start", "context"}
_OPTIONS = ("calibration", "calibration_share", "match", "rule", "region_scales", "novelty_images")


def with_options(preset: FitSettings, settings: FitSettings, given: set[str]) -> FitSettings:
    """Return a preset with the options that the user gave.

    Args:
        preset: Settings of the preset.
        settings: Settings from all options of ``halopose fit``, given or not.
        given: Names of the options that were given.
    """
    train: dict[str, Any] = {name: getattr(settings.train, name) for name in _TRAIN_OPTIONS if name in given}
    rest: dict[str, Any] = {name: getattr(settings, name) for name in _OPTIONS if name in given}
    return replace(
        preset,
        train=replace(preset.train, **train),
        head=settings.head if given & _HEAD_OPTIONS else preset.head,
        imgsz=settings.imgsz,
        train_sizes=settings.train_sizes,
        **rest,
    )


def evaluation_protocol(preset: Preset | None, **given: Any) -> Protocol:
    """Return the protocol of an evaluation under a preset.

    Args:
        preset: Name of the preset; None for the defaults of ``Protocol``. The paper's preset takes the annotated area.
        **given: Fields of ``Protocol`` that the user gave; a value of None counts as not given.
    """
    protocol = Protocol() if preset is None else replace(PRESETS[preset].protocol, visibility=False)
    if preset == "paper":
        protocol = replace(protocol, area="annotation")
    return replace(protocol, **{name: value for name, value in given.items() if value is not None})


def evaluated_as(calibrations: Calibrations, preset: Preset | None) -> Calibrations:
    """Return the calibrations as a preset evaluates them: the paper has one Student-t per keypoint."""
    if preset != "paper":
        return calibrations
    student = deepcopy(calibrations.student)
    student.covariance = "paper"
    return replace(calibrations, student=student, split_student=None)


def evaluation_departures(settings: FitSettings | None, protocol: Protocol, preset: Preset | None) -> tuple[str, ...]:
    """Describe how an evaluated artifact and its protocol differ from the paper's.

    Args:
        settings: Settings of the fit; None if they are unknown.
        protocol: Settings of the evaluation.
        preset: Preset of the evaluation, as for ``evaluated_as``.
    """
    found: tuple[str, ...] = ("settings of the fit are unknown",)
    if settings is not None:
        single = replace(settings, split_student=False, covariance="paper")
        found = departures(single if preset == "paper" else settings)
    if protocol.area == "box":
        found += ("object area of the confidence: the predicted box",)
    return found if protocol.match == "oks" else (*found, "true positives of the evaluation: matched by box")


def departures(settings: FitSettings) -> tuple[str, ...]:
    """Describe how settings differ from the paper's, one short text each; docs/explanation/departures.md explains why.

    Example:
        >>> departures(PRESETS["paper"])
        ()
    """
    return tuple(_departures(settings))


def _departures(settings: FitSettings) -> Iterator[str]:
    paper, train, head = PRESETS["paper"], settings.train, settings.head
    if settings.calibration != paper.calibration:
        yield "calibrated on matched detections, not on assigned cells"
        if settings.match != paper.match:
            yield f"true positives of calibration: {settings.match}"
    if settings.split_student:
        yield "a Student-t for kept and one for pruned keypoints"
    if settings.covariance != paper.covariance:
        kind = {"auto": "eq. 17, but the second moment where nu is near 2", "moment": "second moment, not eq. 17"}
        yield f"covariance of the Student-t: {kind[settings.covariance]}"
    if settings.min_samples:
        yield f"temperatures are blended under {settings.min_samples:g} samples"
    if settings.cells_per_object < paper.cells_per_object:
        yield f"at most {settings.cells_per_object} assigned cells per object"
    if train.dof is not None:
        yield f"training loss: Student-t with {train.dof:g} degrees of freedom"
    if not train.scale_weight:
        yield "no weights by object scale in training (eq. 9)"
    if train.alpha != paper.train.alpha:
        yield f"exponent alpha of the confidence weight: {train.alpha:g}"
    if head.context_features:
        yield "heads see context features beside their window"
    if head.bounded:
        yield "dispersions have a bound"
    if head.conditional:
        yield "dispersions have a feature-conditional scale"
    if (head.parameterisation, head.trunk) != (paper.head.parameterisation, paper.head.trunk):
        yield f"heads: {head.parameterisation} dispersion, {head.trunk} trunk"
    if settings.gamma_ks != paper.gamma_ks:
        yield f"gamma_KS {settings.gamma_ks:g}, not {paper.gamma_ks:g}"
    if settings.rule != paper.rule:
        yield f"threshold rule {settings.rule}"
    if settings.region_scales:
        yield "regions and correlation by object scale"
