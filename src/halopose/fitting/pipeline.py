"""From a frozen base and annotated images to a calibrated artifact, in steps that resume.

collect -> train -> calibrate (with the pruning threshold) -> evaluate. Each step reads what the one before
wrote; ``fit`` runs them all in one work folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from halopose.data.dataset import Dataset
from halopose.errors import HaloposeError
from halopose.evaluation.calibrations import (
    Given,
    cross_fitted,
    fit_gaussian,
    fit_student,
    hashed_order,
    pruning_threshold,
)
from halopose.evaluation.protocol import evaluate
from halopose.evaluation.true_positives import Protocol, match_poses
from halopose.fitting.artifact import Artifact, round_to_stored
from halopose.fitting.store import Cells, CollectSettings, MatchStore, collect
from halopose.fitting.training import Trained, TrainSettings, importance_weights, train
from halopose.hosts.base import Host
from halopose.poses import Array, PoseDistributions
from halopose.uncertainty.calibration import GaussianCalibration, StudentTCalibration
from halopose.uncertainty.distributions import Gaussian
from halopose.uncertainty.heads import HeadSettings, ProbabilisticHeads
from halopose.uncertainty.pruning import GAMMA_KS

Progress = Callable[[str, int, int], None]
CalibrationSource = Literal["assigned", "matched"]


@dataclass(frozen=True)
class FitSettings:
    """Everything a fit depends on.

    calibration_share: part of the validation images kept for calibration. gamma_ks: similarity from which a
    keypoint counts as reliable when the pruning threshold is chosen.

    >>> FitSettings(train=TrainSettings(epochs=4), imgsz=320).calibration
    'matched'
    """

    train: TrainSettings = field(default_factory=TrainSettings)
    head: HeadSettings = field(default_factory=HeadSettings)
    train_sizes: tuple[int, ...] = (640,)
    imgsz: int = 640
    conf: float = 0.01
    iou: float = 0.7
    calibration: CalibrationSource = "matched"
    calibration_share: float = 0.2
    cells_per_object: int = 10
    area_factor: float = 0.53
    gamma_ks: float = GAMMA_KS
    batch: int = 1


def collect_training(
    host: Host, dataset: Dataset, folder: Path, settings: FitSettings, progress: Progress | None = None
) -> MatchStore:
    """The store that heads are trained on: assigned cells only."""
    return collect(
        host,
        dataset,
        folder,
        CollectSettings(
            imgsz=settings.train_sizes, cells_per_object=settings.cells_per_object, batch=settings.batch
        ),
        _named(progress, "collecting training images"),
    )


def collect_validation(
    host: Host, dataset: Dataset, folder: Path, settings: FitSettings, progress: Progress | None = None
) -> MatchStore:
    """The store for calibration and evaluation: retained detections, and assigned cells beside."""
    return collect(
        host,
        dataset,
        folder,
        CollectSettings(
            imgsz=(settings.imgsz,),
            cells_per_object=settings.cells_per_object,
            conf=settings.conf,
            iou=settings.iou,
            detections=20,
            batch=settings.batch,
        ),
        _named(progress, "collecting validation images"),
    )


def train_heads(
    host: Host,
    stores: Sequence[MatchStore],
    settings: FitSettings,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
    images: Array | None = None,
) -> tuple[ProbabilisticHeads, Trained]:
    """New heads for the base, trained on the stores, or only the given images of them."""
    for store in stores:
        _check_base(host, store)
    torch.manual_seed(settings.train.seed)
    heads = ProbabilisticHeads(host.pose_templates(), host.strides, host.keypoint_count, settings.head)
    report = None
    if progress is not None:
        report = lambda done, total, note: progress(f"training heads ({note})", done, total)  # noqa: E731
    trained = train(
        heads, stores, settings.train, images=images, device=host.device, checkpoint=checkpoint, progress=report
    )
    return round_to_stored(heads), trained


@torch.inference_mode()
def predictions_of(heads: ProbabilisticHeads, store: MatchStore, images: Array | None = None) -> PoseDistributions:
    """Uncalibrated distributions of the stored detections, in original pixels."""
    parts = []
    device = next(heads.parameters()).device
    for cells in store.cells("detected"):
        rows = torch.arange(len(cells))
        if images is not None:
            rows = torch.nonzero(torch.isin(cells.columns["image_id"], torch.from_numpy(images))).flatten()
        if len(rows):
            parts.append(_predictions(heads, cells, rows, device))
    if not parts:
        raise HaloposeError("no detection in these images: check that the base detects anything there")
    joined = PoseDistributions.concatenate(parts)
    assert joined.image_ids is not None
    return joined[np.lexsort((-joined.scores, joined.image_ids))]


def _predictions(heads: ProbabilisticHeads, cells: Cells, rows: Tensor, device: torch.device) -> PoseDistributions:
    columns = {name: value[rows] for name, value in cells.columns.items()}
    windows, inside = cells.windows[rows].to(device).float(), cells.inside[rows].to(device)
    factors = heads.at_windows(cells.level, windows, inside).cpu().double()
    covariance = Gaussian(factors / columns["gain"].double()[:, None, :, None]).covariance.numpy()
    return PoseDistributions(
        boxes=columns["box"].double().numpy(),
        scores=columns["score"].double().numpy(),
        keypoints=columns["keypoints"].double().numpy(),
        covariance=covariance,
        scale=covariance,
        visibility=columns["visibility"].double().numpy() if "visibility" in columns else None,
        class_ids=columns["class_id"].numpy() + 1,
        image_ids=columns["image_id"].numpy(),
    )


@dataclass(frozen=True)
class Calibrated:
    """Both calibrations and the pruning threshold."""

    gaussian: GaussianCalibration
    student: StudentTCalibration
    threshold: float


def calibrate_heads(
    host: Host, heads: ProbabilisticHeads, store: MatchStore, images: Array, settings: FitSettings
) -> Calibrated:
    """Calibrate on the given images of a validation store, and choose the pruning threshold there."""
    _check_base(host, store)
    protocol = Protocol(area="box", box_area_factor=settings.area_factor, gamma_ks=settings.gamma_ks)
    truth = store.ground_truth(host.keypoint_names, host.sigmas, images)
    matched = match_poses(predictions_of(heads, store, images), truth, protocol)
    if not len(matched):
        raise HaloposeError("no detection of the calibration images matches an object: give more images")
    if settings.calibration == "matched":
        gaussian, student = fit_gaussian(matched), fit_student(matched)
    else:
        gaussian, student = _calibrate_assigned(heads, store, images, settings)
    law = gaussian(torch.linalg.cholesky(torch.from_numpy(matched.covariance)))
    return Calibrated(gaussian, student, pruning_threshold(matched, law.covariance.numpy(), protocol))


@torch.no_grad()
def _calibrate_assigned(
    heads: ProbabilisticHeads, store: MatchStore, images: Array, settings: FitSettings
) -> tuple[GaussianCalibration, StudentTCalibration]:
    """The paper's source: label-assigned cells with their importance weights (eqs. 12, 18)."""
    device = next(heads.parameters()).device
    residual, factors, labelled, weight = [], [], [], []
    for cells in store.cells("assigned"):
        rows = torch.nonzero(torch.isin(cells.columns["image_id"], torch.from_numpy(images))).flatten()
        if len(rows):
            columns = {name: value[rows] for name, value in cells.columns.items()}
            windows, inside = cells.windows[rows].to(device).float(), cells.inside[rows].to(device)
            factors.append(heads.at_windows(cells.level, windows, inside).cpu().double())
            residual.append(columns["residual"])
            labelled.append(columns["labelled"].bool())
            weight.append(
                importance_weights(
                    columns["confidence"],
                    columns["area"],
                    settings.train.alpha,
                    settings.train.scale_weight,
                )
            )
    if not residual:
        raise HaloposeError("the calibration images have no assigned cells: give more images")
    data = torch.cat(residual), torch.cat(factors), torch.cat(labelled), torch.cat(weight)
    gaussian, student = GaussianCalibration(heads.keypoints), StudentTCalibration(heads.keypoints)
    gaussian.fit(*data)
    student.fit(*data)
    return gaussian, student


def uncalibrated(host: Host, heads: ProbabilisticHeads, settings: FitSettings, card: dict[str, Any]) -> Artifact:
    """Trained heads as an artifact that calibrates nothing and prunes nothing yet."""
    return Artifact(
        heads=heads,
        gaussian=GaussianCalibration(host.keypoint_count),
        student=StudentTCalibration(host.keypoint_count),
        threshold=float("-inf"),
        base=host.fingerprints,
        keypoint_names=host.keypoint_names,
        sigmas=tuple(float(sigma) for sigma in host.sigmas),
        imgsz=settings.imgsz,
        area_factor=settings.area_factor,
        card={"base": host.description, "settings": asdict(settings), **card},
    )


def calibrate_artifact(artifact: Artifact, host: Host, store: MatchStore, source: CalibrationSource) -> Artifact:
    """Calibrate trained heads on all images of a store, none of which they may have been trained on."""
    artifact.check(host)
    images = np.asarray(store.manifest["images"], dtype=np.int64)
    trained_on = artifact.card.get("images", {}).get("heads", [])
    if len(np.intersect1d(images, trained_on)):
        raise HaloposeError("some calibration images are among those the heads were trained on: give others")
    settings = FitSettings(calibration=source, area_factor=artifact.area_factor)
    calibrated = calibrate_heads(host, artifact.heads.to(host.device).eval(), store, images, settings)
    card = {**artifact.card, "images": {**artifact.card.get("images", {}), "calibration": images.tolist()}}
    return replace(
        artifact,
        gaussian=calibrated.gaussian,
        student=calibrated.student,
        threshold=calibrated.threshold,
        card=card,
    )


def evaluate_artifact(
    artifact: Artifact,
    host: Host,
    store: MatchStore,
    images: Array | None = None,
    protocol: Protocol | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The whole protocol on images that neither the heads nor the calibration have seen.

    By default confidences take the predicted box's area, as the predictor does: the artifact's threshold
    was chosen so.
    """
    artifact.check(host)
    _check_base(host, store)
    protocol = protocol or Protocol(bootstrap=200, area="box", box_area_factor=artifact.area_factor)
    truth = store.ground_truth(artifact.keypoint_names, np.asarray(artifact.sigmas), images)
    heads = artifact.heads.to(host.device).eval()
    matched = match_poses(predictions_of(heads, store, images), truth, protocol)
    given = Given(artifact.gaussian, artifact.student, artifact.threshold)
    return evaluate(
        matched,
        cross_fitted(matched, protocol, given) if len(matched) else None,
        protocol,
        _named(progress, "resampling images"),
    )


def split_validation(images: Array, share: float) -> tuple[Array, Array]:
    """Calibration and evaluation images (I,), by a hash of their ids."""
    order = hashed_order(images)
    if len(order) < 2:
        raise HaloposeError("give at least two validation images: some to calibrate on, some to score")
    cut = min(max(1, round(share * len(order))), len(order) - 1)
    return np.sort(order[:cut]), np.sort(order[cut:])


def fit(
    host: Host,
    training: Dataset,
    validation: Dataset,
    work: Path | str,
    settings: FitSettings | None = None,
    progress: Progress | None = None,
) -> tuple[Artifact, dict[str, Any]]:
    """Collect, train, calibrate, choose the threshold and evaluate; a rerun goes on where it stopped.

    >>> from halopose.data.dataset import load_dataset
    >>> from halopose.hosts.shipped import runway_detector
    >>> from halopose.landing.world.dataset import write_dataset
    >>> from halopose.predictor import load_host
    >>> data = write_dataset("world", {"train": 6, "val": 6})
    >>> train, val = load_dataset(data, "train"), load_dataset(data, "val")
    >>> settings = FitSettings(TrainSettings(epochs=1), imgsz=320, train_sizes=(320,), calibration_share=0.5)
    >>> artifact, scores = fit(load_host(runway_detector()), train, val, "work", settings)
    >>> artifact.save("heads.safetensors")
    """
    settings = settings or FitSettings()
    work = Path(work)
    shared = np.intersect1d(training.image_ids, validation.image_ids)
    if len(shared):
        raise HaloposeError(f"{len(shared)} images are in both the training and the validation split")
    train_store = collect_training(host, training, work / "train", settings, progress)
    val_store = collect_validation(host, validation, work / "val", settings, progress)
    heads, trained = train_heads(host, [train_store], settings, work / "training.safetensors", progress)
    calibration_images, evaluation_images = split_validation(validation.image_ids, settings.calibration_share)
    calibrated = calibrate_heads(host, heads, val_store, calibration_images, settings)
    artifact = replace(
        uncalibrated(host, heads, settings, {}),
        gaussian=calibrated.gaussian,
        student=calibrated.student,
        threshold=calibrated.threshold,
    )
    metrics = evaluate_artifact(artifact, host, val_store, evaluation_images, progress=progress)
    card = {
        "base": host.description,
        "settings": asdict(settings),
        "images": {
            "heads": training.image_ids.tolist(),
            "calibration": calibration_images.tolist(),
            "evaluation": evaluation_images.tolist(),
        },
        "skipped": train_store.skipped() + val_store.skipped(),
        "training": asdict(trained),
        "figures": figures(metrics),
    }
    return replace(artifact, card=card), metrics


def figures(metrics: dict[str, Any]) -> dict[str, Any]:
    """The scalars worth carrying along."""
    names = ("ace", "ence", "nll", "akp")
    figures: dict[str, Any] = {
        regime: {name: metrics[regime][name] for name in names}
        for regime in ("uncalibrated", "gaussian", "student_t")
    }
    for name in ("akp_random", "akp_visibility", "akp_skill", "matched_instances", "keypoints"):
        figures[name] = metrics[name]
    return figures | {"kept_fraction": metrics["pruned"]["kept_fraction"]}


def _check_base(host: Host, store: MatchStore) -> None:
    if not set(store.manifest["base"]) & set(host.fingerprints):
        raise HaloposeError(f"{store.folder} was collected with another base: collect it again")


def _named(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(name, done, total)
