"""Gaussian residual fine-tuning of a base (paper, appendix B), and what it changes.

In: a base, training and validation images. Out: the fine-tuned base, and AP, AR and Gaussian calibration before
and after. The framework's own loss, tuned with alike, is the control.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from halopose.analysis import constant_predictions
from halopose.datasets import Dataset
from halopose.errors import HaloposeError
from halopose.evaluation import evaluate
from halopose.hosts.base import Host
from halopose.matches import MatchStore
from halopose.pipeline import FitSettings, collect_validation, fit, split_validation
from halopose.poses import GroundTruth, PoseDistributions
from halopose.predictor import load_host
from halopose.regimes import Fitted, Given, cross_fitted
from halopose.training import TrainSettings
from halopose.truepositives import Protocol, match_poses

Progress = Callable[[str, int, int], None]
_COCO_SCORES = ("ap", "ap50", "ap75", "ap_medium", "ap_large", "ar", "ar50", "ar75", "ar_medium", "ar_large")
_CALIBRATION = ("ace", "ence", "nll")
_CONFIDENCE = 0.001  # from which detections count, as is usual for AP


@dataclass(frozen=True)
class FinetuneSettings:
    """How to fine-tune: ``loss`` is pOKS or the framework's own. freeze: so many first layers stay as they are.

    heads: judge calibration with heads trained for each base, else with one constant spread per keypoint in
    units of object scale.
    """

    loss: Literal["poks", "oks"] = "poks"
    epochs: int = 10
    learning_rate: float = 1e-4
    warmup_epochs: float = 1.0
    imgsz: int = 640
    batch: int = 16
    freeze: int = 0
    seed: int = 0
    workers: int = 4
    amp: bool = False
    heads: bool = True
    head_epochs: int = 12


def finetune(
    base: Path,
    training: Dataset,
    validation: Dataset,
    output: Path,
    work: Path,
    settings: FinetuneSettings | None = None,
    *,
    device: str | None = None,
    unsafe: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fine-tune the base into ``output`` and compare the two on the validation images."""
    from halopose.hosts.ultralytics_training import tune

    settings = settings or FinetuneSettings()
    _require_pycocotools()
    if len(np.intersect1d(training.image_ids, validation.image_ids)):
        raise HaloposeError("some images are in both the training and the validation split: they must differ")
    if output.resolve() == base.resolve():
        raise HaloposeError("the output would overwrite the base: choose another name")
    scores: dict[str, Any] = {}
    for name in ("before", "after"):
        if name == "after":
            tune(base, training, output, work, settings, device=device, unsafe=unsafe, progress=progress)
        path = base if name == "before" else output
        host = load_host(path, device=_first(device), unsafe=unsafe, sigmas=training.sigmas)
        host.keypoint_names = training.names
        scores[name] = measure(host, training, validation, work / name, settings, _prefixed(progress, name))
    return {
        "base": base.name,
        "settings": asdict(settings),
        "images": {"training": len(training), "validation": len(validation)},
        **scores,
        "change": difference(scores["before"], scores["after"]),
    }


def measure(
    host: Host,
    training: Dataset,
    validation: Dataset,
    work: Path,
    settings: FinetuneSettings,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """AP and AR of a base, and the calibration of what is said about its residuals, by regime."""
    plan = FitSettings(
        train=TrainSettings(epochs=settings.head_epochs, seed=settings.seed),
        train_sizes=(settings.imgsz,),
        imgsz=settings.imgsz,
        conf=_CONFIDENCE,
        area_factor=validation.box_area_factor,
    )
    store = collect_validation(host, validation, work / "val", plan, progress)
    scores = coco_scores(store, host)
    if settings.heads:
        _, metrics = fit(host, training, validation, work, plan, progress)
    else:
        metrics = constant_metrics(store, host, plan)
    return {
        **scores,
        "matched_instances": metrics["matched_instances"],
        **{regime: {key: metrics[regime][key] for key in _CALIBRATION} for regime in ("gaussian", "student_t")},
        "nu": float(np.median(metrics["calibration"]["nu"])),
    }


def constant_metrics(store: MatchStore, host: Host, plan: FitSettings) -> dict[str, Any]:
    """The evaluation of one constant spread per keypoint, in units of object scale, calibrated as heads are."""
    protocol = Protocol(area="box", box_area_factor=plan.area_factor)
    images = np.asarray(store.manifest["images"], dtype=np.int64)
    calibration, evaluation = split_validation(images, plan.calibration_share)
    predictions = constant_predictions(store, host.sigmas, plan.area_factor)
    assert predictions.image_ids is not None
    matched = [
        match_poses(
            predictions[np.isin(predictions.image_ids, part)],
            store.ground_truth(host.keypoint_names, host.sigmas, part),
            protocol,
        )
        for part in (calibration, evaluation)
    ]
    if not all(len(part) for part in matched):
        raise HaloposeError("too few detections match an object to judge calibration: give more images")
    fitted = Fitted.on(matched[0], protocol)
    given = Given(fitted.gaussian, fitted.student, fitted.threshold)
    return evaluate(matched[1], cross_fitted(matched[1], protocol, given), protocol)


def coco_scores(store: MatchStore, host: Host) -> dict[str, float]:
    """AP and AR of the stored detections, by pycocotools; -1 where there are no objects of a size."""
    _require_pycocotools()
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = store.ground_truth(host.keypoint_names, host.sigmas)
    predictions = constant_predictions(store, host.sigmas, 1.0)
    with contextlib.redirect_stdout(io.StringIO()):
        annotated = COCO()
        annotated.dataset = _coco_truth(truth)
        annotated.createIndex()
        evaluator = COCOeval(annotated, annotated.loadRes(_coco_results(predictions)), "keypoints")
        evaluator.params.kpt_oks_sigmas = np.asarray(host.sigmas)
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    return dict(zip(_COCO_SCORES, map(float, evaluator.stats), strict=True))


def _coco_truth(truth: GroundTruth) -> dict[str, Any]:
    keypoints = np.concatenate([truth.keypoints, 2.0 * truth.labelled[..., None]], axis=2)
    columns = (truth.image_ids, truth.class_ids, truth.boxes, truth.area, truth.crowd, truth.ignore)
    annotations = [
        {
            "id": number + 1,
            "image_id": int(image),
            "category_id": int(category),
            "bbox": box.tolist(),
            "area": float(area),
            "iscrowd": int(crowd),
            "ignore": int(ignored),
            "keypoints": points.ravel().tolist(),
            "num_keypoints": int((points[:, 2] > 0).sum()),
        }
        for number, (image, category, box, area, crowd, ignored, points) in enumerate(
            zip(*columns, keypoints, strict=True)
        )
    ]
    return {
        "images": [{"id": int(image)} for image in truth.images],
        "categories": [{"id": int(category)} for category in np.unique(truth.class_ids)],
        "annotations": annotations,
    }


def _coco_results(predictions: PoseDistributions) -> list[dict[str, Any]]:
    assert predictions.image_ids is not None
    assert predictions.class_ids is not None
    visible = np.ones((*predictions.keypoints.shape[:2], 1))
    points = np.concatenate([predictions.keypoints, visible], axis=2).reshape(len(predictions), -1)
    columns = (predictions.image_ids, predictions.class_ids, predictions.scores, points)
    return [
        {
            "image_id": int(image),
            "category_id": int(category),
            "score": float(score),
            "keypoints": row.tolist(),
        }
        for image, category, score, row in zip(*columns, strict=True)
    ]


def _require_pycocotools() -> None:
    try:
        import pycocotools  # noqa: F401
    except ImportError:
        raise HaloposeError("AP and AR need pycocotools: pip install pycocotools") from None


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """After less before, key by key; of nested scores too."""
    return {
        key: difference(before[key], value) if isinstance(value, dict) else value - before[key]
        for key, value in after.items()
    }


def to_text(result: dict[str, Any]) -> str:
    """The comparison as a table for the terminal."""
    rows = [("AP", "ap"), ("AR", "ar")]
    lines = [f"{'':18}{'before':>10}{'after':>10}{'change':>10}"]
    for label, key in rows:
        lines.append(_row(label, *(result[part][key] for part in ("before", "after", "change"))))
    for regime, title in (("gaussian", "Gaussian"), ("student_t", "Student-t")):
        for key in _CALIBRATION:
            values = (result[part][regime][key] for part in ("before", "after", "change"))
            lines.append(_row(f"{title} {key.upper()}", *values))
    lines.append(_row("Student-t nu", *(result[part]["nu"] for part in ("before", "after", "change"))))
    return "\n".join(lines)


def _row(label: str, before: float, after: float, change: float) -> str:
    return f"{label:18}{before:10.4f}{after:10.4f}{change:+10.4f}"


def _first(device: str | None) -> str | None:
    """The device to evaluate on: the first of those to train on, which the framework calls by number."""
    if device is None:
        return None
    first = device.split(",")[0]
    return f"cuda:{first}" if first.isdigit() else first


def _prefixed(progress: Progress | None, name: str) -> Progress | None:
    if progress is None:
        return None
    return lambda what, done, total: progress(f"{name}: {what}", done, total)


__all__ = ["FinetuneSettings", "coco_scores", "constant_metrics", "difference", "finetune", "measure", "to_text"]
