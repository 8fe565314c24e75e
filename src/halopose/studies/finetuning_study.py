"""Gaussian residual fine-tuning of a base model (paper, appendix B), compared with the original and a control.

The control is fine-tuned in the same way with the framework's own loss. The comparison has AP, AR and calibration of
all three models, with paired differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from halopose.calibration.calibrate import apply_calibrations, fit_calibrations
from halopose.data.dataset import Dataset
from halopose.data.splits import split_validation
from halopose.errors import HaloposeError
from halopose.evaluation.bootstrap import Difference, PairedMetrics
from halopose.evaluation.resampling import ResampledMetrics
from halopose.finetuning.finetuning_settings import FinetuneSettings, Loss, data_key
from halopose.fitting.pipeline import (
    collect_training,
    collect_validation,
    predictions_of,
    train_heads,
)
from halopose.fitting.settings import FitSettings, TrainSettings
from halopose.hosts.base import Host
from halopose.hosts.loading import is_yolonas, load_host
from halopose.matching.matched_poses import match_poses
from halopose.protocol import Protocol
from halopose.studies.coco_ap import CocoScores, require_pycocotools
from halopose.studies.residual_analysis import constant_predictions
from halopose.types import Array, Progress, prefixed

_AP_CONFIDENCE = 0.001  # lowest confidence of detections for AP, the usual value
REPORT_METRICS = {
    "ap": "AP",
    "ar": "AR",
    "gaussian.ace": "Gaussian ACE",
    "gaussian.ence": "Gaussian ENCE",
    "gaussian.nll": "Gaussian NLL",
    "student_t.ace": "Student-t ACE",
    "student_t.nll": "Student-t NLL",
    "gaussian.akp": "AKP",
}


@dataclass(frozen=True)
class ComparisonSettings:
    """Settings of the comparison.

    Attributes:
        control: Also fine-tune a control with the framework's own loss.
        heads: Compare the calibration of heads trained for each model, instead of one constant standard deviation
            per keypoint in units of object scale.
        head_epochs: Epochs of head training.
        conf: Lowest confidence of detections that are calibrated and scored.
        bootstrap: Number of resamplings of images.
    """

    control: bool = True
    heads: bool = True
    head_epochs: int = 12
    conf: float = 0.01
    bootstrap: int = 200


@dataclass(frozen=True)
class BaseModelScores(PairedMetrics):
    """Scores of a base model on the validation images.

    Attributes:
        estimate: AP, AR and calibration metrics by name.
        draws: Each metric under the same resamplings of images (B,).
        coverage: Empirical coverage (99,) at ``metrics.LEVELS`` by regime and axis.
        nu: Degrees of freedom of the Student-t, median over keypoints.
        matched_instances: Number of matched detections.
    """

    estimate: dict[str, float]
    draws: dict[str, Array]
    coverage: dict[str, dict[str, Array]]
    nu: float
    matched_instances: int


def finetune(
    base: Path,
    training: Dataset,
    validation: Dataset,
    output: Path,
    work: Path,
    settings: FinetuneSettings | None = None,
    comparison: ComparisonSettings | None = None,
    *,
    device: str | None = None,
    unsafe: bool = False,
    progress: Progress | None = None,
) -> dict[str, BaseModelScores]:
    """Fine-tune a base model and compare the result on the validation images. Resumable.

    Args:
        base: Checkpoint of the base model.
        training: Images to fine-tune on.
        validation: Images to compare on.
        output: File for the fine-tuned checkpoint.
        work: Folder for features and intermediate results.
        settings: Settings of the fine-tuning.
        comparison: Settings of the comparison.
        device: Device, as the framework names it.
        unsafe: Allow checkpoints that contain code.
        progress: Called with every step.

    Returns:
        Scores by model: ``before`` for the base model, ``oks`` for the control, and the loss of the result.

    Raises:
        HaloposeError: The images overlap, or the output would overwrite the base model.
    """
    settings, comparison = settings or FinetuneSettings(), comparison or ComparisonSettings()
    require_pycocotools()
    if len(np.intersect1d(training.image_ids, validation.image_ids)):
        raise HaloposeError(
            "some images are in both the training and the validation split: remove them from one of the two"
        )
    losses: list[Loss] = ["oks"] if comparison.control and settings.loss != "oks" else []
    losses.append(settings.loss)
    files: dict[str, Path] = {"before": base, **{loss: _file_of(loss, settings, output) for loss in losses}}
    if len({path.resolve() for path in files.values()}) < len(files):
        raise HaloposeError("the output would overwrite the base model: choose another file name")
    dataset = training
    if settings.sigma is not None:
        sigmas = (settings.sigma,) * len(training.layout)
        dataset = replace(training, layout=replace(training.layout, sigmas=sigmas))
    tune = tuner(base)
    for loss in losses:
        step = prefixed(progress, loss)
        chosen = replace(settings, loss=loss)
        tune(base, dataset, files[loss], work, chosen, device=device, unsafe=unsafe, progress=step)
    scores = {}
    for name, path in files.items():
        host = load_host(path, device=_first(device), unsafe=unsafe)
        step = prefixed(progress, name)
        scores[name] = measure(host, training, validation, work, settings, comparison, step)
    return scores


def _file_of(loss: Loss, settings: FinetuneSettings, output: Path) -> Path:
    return output if loss == settings.loss else output.with_name(f"{output.stem}-{loss}{output.suffix}")


def tuner(base: Path) -> Callable[..., None]:
    """The function that fine-tunes a base model with the trainer of its framework."""
    if is_yolonas(base):
        from halopose.finetuning import yolonas_trainer

        return yolonas_trainer.tune
    from halopose.finetuning import ultralytics_trainer

    return ultralytics_trainer.tune


def measure(
    host: Host,
    training: Dataset,
    validation: Dataset,
    work: Path,
    settings: FinetuneSettings,
    comparison: ComparisonSettings,
    progress: Progress | None = None,
) -> BaseModelScores:
    """Measure AP and AR of a base model, and the calibration of its residuals.

    Args:
        host: The base model.
        training: Images to train heads on.
        validation: Images to calibrate and to score on.
        work: Folder for intermediate results.
        settings: Settings of the fine-tuning.
        comparison: Settings of the comparison.
        progress: Called with every step.
    """
    plan = FitSettings(
        train=TrainSettings(epochs=comparison.head_epochs, seed=settings.seed),
        train_sizes=(settings.imgsz,),
        imgsz=settings.imgsz,
        conf=_AP_CONFIDENCE,
    )
    work = work / f"judged-{data_key(host, (training, validation), settings.imgsz)}"
    store = collect_validation(host, validation, work / "val", plan, progress)
    if comparison.heads:
        train_store = collect_training(host, training, work / "train", plan, progress)
        checkpoint = work / f"training-{comparison.head_epochs}-{settings.seed}.safetensors"
        heads, _ = train_heads(host, [train_store], plan, checkpoint, progress)
        predictions = predictions_of(heads, store)
    else:
        predictions = constant_predictions(store)
    predictions = predictions[predictions.scores >= comparison.conf]
    protocol = Protocol(area="box")
    images = split_validation(validation.image_ids, plan.calibration_share)
    assert predictions.image_ids is not None
    held_out, scored = (
        match_poses(
            predictions[np.isin(predictions.image_ids, part)],
            store.ground_truth(part),
            protocol,
        )
        for part in images
    )
    if not len(held_out):
        raise HaloposeError("no detection of the calibration images matches an annotated object: give more images")
    fitted = fit_calibrations(held_out, protocol)
    distributions = apply_calibrations(scored, fitted, protocol)
    measured = ResampledMetrics.of(scored, distributions, protocol, np.zeros(0), images[1])
    accuracy = CocoScores.of(store)
    draws = [*measured.draws(comparison.bootstrap)], [*accuracy.draws(comparison.bootstrap)]
    estimate = accuracy.scores() | measured.scores()
    return BaseModelScores(
        estimate=estimate,
        draws={name: np.array([draw[name] for draw in part]) for part in draws for name in estimate if name in part[0]},
        coverage=measured.coverage,
        nu=float(np.median(fitted.student.nu_)),
        matched_instances=len(scored),
    )


def differences(scores: dict[str, BaseModelScores]) -> dict[str, dict[str, Difference]]:
    """Paired differences of every two models, later minus earlier, by metric."""
    return {
        f"{name} - {other}": {metric: scores[name].minus(scores[other], metric) for metric in scores[name].draws}
        for other, name in combinations(scores, 2)
    }


def to_json(scores: dict[str, BaseModelScores]) -> dict[str, Any]:
    """All results as json. Margins are half the width of 95 % intervals over images."""
    return {
        "scores": {
            name: {
                "nu": one.nu,
                "matched_instances": one.matched_instances,
                "coverage": one.coverage,
                **{metric: {"value": value, "margin": one.margin(metric)} for metric, value in one.estimate.items()},
            }
            for name, one in scores.items()
        },
        "differences": {
            pair: {metric: {"value": one.value, "margin": one.margin} for metric, one in metrics.items()}
            for pair, metrics in differences(scores).items()
        },
    }


def _first(device: str | None) -> str | None:
    """The device to evaluate on: the first training device, which the framework names by number."""
    if device is None:
        return None
    first = device.split(",")[0]
    return f"cuda:{first}" if first.isdigit() else first
