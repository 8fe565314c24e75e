"""Calibrate and evaluate a deployed folder in its own runtime.

Quantisation changes residuals and dispersions, so that a quantised model needs its own calibration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halopose.boxes import xyxy_to_xywh
from halopose.calibration.calibrate import apply_calibrations, fit_calibrations, fit_offset, limit_narrowing
from halopose.calibration.calibrators import Calibrations, GaussianCalibration, StudentTCalibration
from halopose.calibration.correlation import Correlation
from halopose.calibration.split_student_t import SplitStudentT
from halopose.data.dataset import Dataset, Objects
from halopose.data.files import read_json, write_json
from halopose.deploy.deployed_model import CARD, Deployed, Detecting
from halopose.deploy.onnx_file import calibrated_facts, read_model, set_temperature, write_facts, write_model
from halopose.errors import HaloposeError
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.scores import Scores
from halopose.fitting.card import Card
from halopose.fitting.settings import FitSettings
from halopose.keypoints import Keypoints
from halopose.matching.matched_poses import match_poses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.runtime.predict import Facts
from halopose.types import Array, Counter
from halopose.uncertainty.regions import Regions

SCORING = Detecting(conf=0.01, detections=20)  # as the evaluation of an artifact collects them


@dataclass(frozen=True)
class LabelledDetections:
    """Uncalibrated detections of annotated images.

    Attributes:
        detections: Detections with the dispersions of the heads.
        truth: Annotations of the images.
        skipped: One line per image that could not be read.
    """

    detections: PoseDistributions
    truth: GroundTruth
    skipped: tuple[str, ...]


def collect(
    deployed: Deployed, dataset: Dataset, settings: Detecting = SCORING, step: Counter | None = None
) -> LabelledDetections:
    """Run the deployed model on a data set.

    Args:
        deployed: Model.
        dataset: Annotated images.
        settings: Detection settings.
        step: Called with the number of finished images and the number of all images.

    Raises:
        HaloposeError: The keypoints of model and data differ, or nothing is detected.
    """
    count, given = len(deployed.layout), len(dataset.layout)
    if given != count:
        raise HaloposeError(
            f"the data have {given} keypoints, the model has {count}: use data with the keypoints of the model"
        )
    parts, objects, skipped = [], {}, []
    for number, record in enumerate(dataset.records):
        try:
            image, found = record.read()
        except HaloposeError as error:
            skipped.append(str(error))
            continue
        poses = deployed.uncalibrated(image, settings)
        parts.append(replace(poses, image_ids=np.full(len(poses), record.image_id)))
        objects[record.image_id] = found
        if step is not None:
            step(number + 1, len(dataset))
    if not sum(map(len, parts)):
        raise HaloposeError("the model detects nothing in these images: check the images and the model")
    truth = _truth(objects, deployed.layout)
    return LabelledDetections(PoseDistributions.concatenate(parts), truth, tuple(skipped))


def _truth(objects: dict[int, Objects], layout: Keypoints) -> GroundTruth:
    """Concatenate the objects of all images, given by image id."""
    images = np.array(list(objects), dtype=np.int64)
    parts = list(objects.values())
    boxes, crowd, labelled = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("boxes", "crowd", "labelled")
    )
    crowd, labelled = crowd.astype(bool), labelled.astype(bool)
    return GroundTruth(
        images=np.sort(images),
        image_ids=np.repeat(images, [len(part) for part in parts]),
        class_ids=np.concatenate([part.class_ids for part in parts]) + 1,
        keypoints=np.concatenate([part.keypoints for part in parts]),
        labelled=labelled,
        boxes=xyxy_to_xywh(boxes),
        area=np.concatenate([part.area for part in parts]),
        crowd=crowd,
        ignore=crowd | ~labelled.any(1),
        layout=layout,
    )


def calibrate(
    folder: Path | str,
    seen: LabelledDetections,
    *,
    offset: bool = False,
    rule: str | None = None,
    region_scales: bool | None = None,
) -> int:
    """Fit calibrations and pruning threshold, and write them into the folder.

    Nothing is written before the card of the folder has been read and everything has been fitted.

    Args:
        folder: Deployed folder.
        seen: Detections of the calibration images.
        offset: Whether to fit an offset of the mean where residuals are biased.
        rule: As in ``Protocol``; default that of the folder.
        region_scales: As in ``Protocol``; default that of the folder.

    Returns:
        Number of matched objects.

    Raises:
        HaloposeError: The card is missing or damaged, or no detection matches an object.
    """
    deployed = Deployed(folder)
    card = read_card(deployed)
    made = card.settings or FitSettings()
    rule = made.rule if rule is None else rule
    region_scales = made.region_scales if region_scales is None else region_scales
    if not isinstance(rule, str) or not isinstance(region_scales, bool):
        raise _damaged(deployed.path.with_name(CARD))
    protocol = Protocol(
        area="box",
        visibility=True,
        split_student=True,
        covariance=_covariance(deployed.facts),
        threshold_rule=rule,
        region_scales=region_scales,
    )
    matched = match_poses(seen.detections, seen.truth, protocol)
    if not len(matched):
        raise HaloposeError("no detection of the calibration images matches an object: give more images")
    moved = fit_offset(matched) if offset else None
    centred = matched if moved is None else matched.moved(moved.numpy())
    fitted = limit_narrowing(fit_calibrations(centred, protocol), calibrations_of(deployed.facts), centred, protocol)
    facts = calibrated_facts(deployed.facts, replace(fitted, offset=moved))
    model = read_model(deployed.path)
    set_temperature(model, facts.temperature)
    write_facts(model, facts)
    write_model(model, deployed.path)
    card = replace(
        card,
        images=replace(card.images, calibration=tuple(seen.truth.images.tolist())),
        settings=replace(made, rule=rule, region_scales=region_scales),
        calibrated="in the deployed runtime",
    )
    write_json(deployed.path.with_name(CARD), card.to_json())
    return len(matched)


def _covariance(facts: Facts) -> Any:
    return "paper" if facts.student_moment is None else "moment"


def score(deployed: Deployed, seen: LabelledDetections, protocol: Protocol, step: Counter | None = None) -> Scores:
    """Evaluate the full protocol with the calibrations and thresholds of the model file."""
    fitted, source = calibrations_of(deployed.facts), "from the model file, fitted on other images"
    matched = match_poses(seen.detections, seen.truth, protocol)
    matched = matched.moved(None if fitted.offset is None else fitted.offset.numpy())
    distributions = apply_calibrations(matched, fitted, protocol, source) if len(matched) else None
    return evaluate(matched, distributions, protocol, step)


def calibrations_of(facts: Facts) -> Calibrations:
    """Calibrations of a model file, as modules that act on uncalibrated factors."""
    tau = torch.tensor(facts.temperature, dtype=torch.float64)
    gaussian = GaussianCalibration(len(tau))
    gaussian.tau_ = tau
    student = _student(facts, facts.student_dof, facts.student_scale)
    split_student = None
    if facts.pruned_dof is not None and facts.pruned_scale is not None:
        split_student = SplitStudentT(student, _student(facts, facts.pruned_dof, facts.pruned_scale))
    threshold = float("-inf") if facts.threshold is None else facts.threshold
    regions = None if facts.regions is None else Regions.from_json(facts.regions, len(tau))
    correlation = None if facts.correlation is None else Correlation.from_json(facts.correlation, len(tau))
    offset = None if facts.offset is None else torch.tensor(facts.offset, dtype=torch.float64)
    visible = facts.visibility_threshold
    return Calibrations(gaussian, student, threshold, visible, regions, correlation, split_student, offset)


def _student(facts: Facts, dof: list[float], scale: list[float]) -> StudentTCalibration:
    tau = torch.tensor(facts.temperature, dtype=torch.float64)
    distribution = StudentTCalibration(len(tau), covariance=_covariance(facts))
    distribution.nu_, distribution.tau_ = (
        torch.tensor(dof, dtype=torch.float64),
        torch.tensor(scale, dtype=torch.float64) * tau,
    )
    if facts.student_moment is not None:
        distribution.moment_tau_ = torch.tensor(facts.student_moment, dtype=torch.float64) * tau
    return distribution


def read_card(deployed: Deployed) -> Card:
    """Read the card next to a model file.

    Raises:
        HaloposeError: The card is missing or damaged. It lists the images that the model was made with, and without
            it the model could be evaluated on them.
    """
    path = deployed.path.with_name(CARD)
    if not path.is_file():
        raise HaloposeError(f"no file {path}, which lists the images the model was made with: export the model again")
    try:
        card = Card.from_json(read_json(path))
        card.images.of("heads", "calibration", "evaluation", "choosing")  # ids too large for an integer array
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
        raise _damaged(path) from None
    return card


def _damaged(path: Path) -> HaloposeError:
    return HaloposeError(f"{path} is damaged: export the model again")


def images_seen(deployed: Deployed, parts: tuple[str, ...] = ("heads", "calibration")) -> Array:
    """Ids (I,) of the images that the heads were trained on or the calibrations were fitted on.

    Args:
        deployed: Model.
        parts: Roles of the images; the card is not read if there are none.
    """
    return read_card(deployed).images.of(*parts) if parts else np.zeros(0, dtype=np.int64)
