"""Gaussian residual fine-tuning of a base (paper, appendix B), and what it changes.

In: a base, training and validation images. Out: the fine-tuned base, another tuned alike with the framework's own
loss as control, and AP, AR and calibration of all three with paired differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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
from halopose.finetuning.settings import FinetuneSettings, Loss, data_key
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

_AP_CONFIDENCE = 0.001  # from which detections count, as is usual for AP
SHOWN = {
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
    """How to judge. control: beside a base tuned with the framework's own loss.

    heads: by the calibration of heads trained for each base, in so many epochs, else of one constant spread per
    keypoint in units of object scale. conf: confidence from which detections are calibrated and scored.
    """

    control: bool = True
    heads: bool = True
    head_epochs: int = 12
    conf: float = 0.01
    bootstrap: int = 200


@dataclass(frozen=True)
class BaseModelScores(PairedMetrics):
    """What a base is worth: AP, AR and calibration by name, with bootstrap draws.

    coverage: empirical (99,) at ``metrics.LEVELS`` by regime and axis; nu: the median over keypoints.
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
    judging: ComparisonSettings | None = None,
    *,
    device: str | None = None,
    unsafe: bool = False,
    progress: Progress | None = None,
) -> dict[str, BaseModelScores]:
    """Fine-tune the base into ``output`` and compare on the validation images; a rerun goes on.

    The comparison has the base as ``before``, the control and the tuned one under the names of their losses.
    """
    settings, judging = settings or FinetuneSettings(), judging or ComparisonSettings()
    require_pycocotools()
    if len(np.intersect1d(training.image_ids, validation.image_ids)):
        raise HaloposeError("some images are in both the training and the validation split: they must differ")
    losses: list[Loss] = ["oks"] if judging.control and settings.loss != "oks" else []
    losses.append(settings.loss)
    files: dict[str, Path] = {"before": base, **{loss: _file_of(loss, settings, output) for loss in losses}}
    if len({path.resolve() for path in files.values()}) < len(files):
        raise HaloposeError("the output would overwrite the base: choose another name")
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
        scores[name] = measure(host, training, validation, work, settings, judging, step)
    return scores


def _file_of(loss: Loss, settings: FinetuneSettings, output: Path) -> Path:
    return output if loss == settings.loss else output.with_name(f"{output.stem}-{loss}{output.suffix}")


def tuner(base: Path) -> Callable[..., None]:
    """The function that fine-tunes a base in its framework's trainer."""
    if is_yolonas(base):
        from halopose.finetuning import yolonas_trainer as yolonas_training

        return yolonas_training.tune
    from halopose.finetuning import ultralytics_trainer as ultralytics_training

    return ultralytics_training.tune


def measure(
    host: Host,
    training: Dataset,
    validation: Dataset,
    work: Path,
    settings: FinetuneSettings,
    judging: ComparisonSettings,
    progress: Progress | None = None,
) -> BaseModelScores:
    """AP and AR of a base, and the calibration of what is said about its residuals."""
    plan = FitSettings(
        train=TrainSettings(epochs=judging.head_epochs, seed=settings.seed),
        train_sizes=(settings.imgsz,),
        imgsz=settings.imgsz,
        conf=_AP_CONFIDENCE,
    )
    work = work / f"judged-{data_key(host, (training, validation), settings.imgsz)}"
    store = collect_validation(host, validation, work / "val", plan, progress)
    if judging.heads:
        train_store = collect_training(host, training, work / "train", plan, progress)
        checkpoint = work / f"training-{judging.head_epochs}-{settings.seed}.safetensors"
        heads, _ = train_heads(host, [train_store], plan, checkpoint, progress)
        predictions = predictions_of(heads, store)
    else:
        predictions = constant_predictions(store)
    predictions = predictions[predictions.scores >= judging.conf]
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
        raise HaloposeError("no detection of the calibration images matches an object: give more images")
    fitted = fit_calibrations(held_out, protocol)
    distributions = apply_calibrations(scored, fitted, protocol)
    measured = ResampledMetrics.of(scored, distributions, protocol, np.zeros(0), images[1])
    accuracy = CocoScores.of(store)
    draws = [*measured.draws(judging.bootstrap)], [*accuracy.draws(judging.bootstrap)]
    estimate = accuracy.scores() | measured.scores()
    return BaseModelScores(
        estimate=estimate,
        draws={name: np.array([draw[name] for draw in part]) for part in draws for name in estimate if name in part[0]},
        coverage=measured.coverage,
        nu=float(np.median(fitted.student.nu_)),
        matched_instances=len(scored),
    )


def differences(scores: dict[str, BaseModelScores]) -> dict[str, dict[str, Difference]]:
    """Of every two bases, later less earlier, metric by metric."""
    return {
        f"{name} - {other}": {metric: scores[name].minus(scores[other], metric) for metric in scores[name].draws}
        for other, name in combinations(scores, 2)
    }


def to_json(scores: dict[str, BaseModelScores]) -> dict[str, Any]:
    """Everything measured; margins are half of 95 % intervals over images."""
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
            pair: {metric: asdict(difference) for metric, difference in metrics.items()}
            for pair, metrics in differences(scores).items()
        },
    }


def _first(device: str | None) -> str | None:
    """The device to evaluate on: the first of those to train on, which the framework calls by number."""
    if device is None:
        return None
    first = device.split(",")[0]
    return f"cuda:{first}" if first.isdigit() else first
