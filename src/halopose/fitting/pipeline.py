"""Pipeline from a frozen base model and annotated images to a calibrated artifact.

The steps are collect -> train -> calibrate (with the pruning threshold) -> evaluate. Each step reads the output of
the step before and can resume. ``fit`` runs all steps in one work folder.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halopose.calibration.calibrate import (
    DISTRIBUTIONS,
    apply_calibrations,
    fit_calibrations,
    fit_offset,
    limit_narrowing,
    scale_sample,
    warn_of_few,
)
from halopose.calibration.calibrators import Calibrations, GaussianCalibration, StudentTCalibration
from halopose.calibration.conditional_fit import FEWEST_OBJECTS
from halopose.calibration.estimation import likeliest_bound
from halopose.data.dataset import Dataset
from halopose.data.lock import locked
from halopose.data.splits import check_unseen, split_validation
from halopose.errors import HaloposeError
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.scores import METRICS, Scores
from halopose.fitting.artifact import Artifact, round_to_stored
from halopose.fitting.callbacks import Callback, flat
from halopose.fitting.card import Card, CardFigures, ImageRoles
from halopose.fitting.collecting import collect
from halopose.fitting.conditional_calibration import calibrate_for_both
from halopose.fitting.feature_cache import (
    SHARDS_AT_ONCE,
    CachedCells,
    CollectSettings,
    MatchStore,
    NoDetectionError,
)
from halopose.fitting.head_training import TrainingHistory, importance_weights, train
from halopose.fitting.novelty_evaluation import score_novelty
from halopose.fitting.novelty_fitting import TooFewError, collect_copies, fit_novelty
from halopose.fitting.presets import Preset, evaluated_as, evaluation_departures, evaluation_protocol
from halopose.fitting.settings import CalibrationSource, FitSettings, NoveltySettings
from halopose.fitting.workers import ProcessGroup, WorkerPool
from halopose.hosts.base import Host
from halopose.keypoints import Keypoints
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.poses import PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array, Progress, named
from halopose.uncertainty.distributions import Gaussian
from halopose.uncertainty.heads import ProbabilisticHeads, with_bound

log = logging.getLogger(__name__)

DETECTIONS = 20  # detections per image in a validation cache: the number that COCO evaluates


def collect_training(
    host: Host,
    dataset: Dataset,
    folder: Path,
    settings: FitSettings,
    progress: Progress | None = None,
    workers: WorkerPool | None = None,
) -> MatchStore:
    """Collect the feature cache for training, which contains only label-assigned cells.

    Args:
        host: Host of the frozen model.
        dataset: Training images.
        folder: Folder of the feature cache.
        settings: Settings of the fit.
        progress: Called with the progress.
        workers: Distribution over processes and machines.
    """
    return collect(
        host,
        dataset,
        folder,
        CollectSettings(
            imgsz=settings.train_sizes,
            cells_per_object=settings.cells_per_object,
            batch=settings.batch,
            context_features=settings.head.context_features,
        ),
        named(progress, "collecting training images"),
        workers,
    )


def collect_validation(
    host: Host,
    dataset: Dataset,
    folder: Path,
    settings: FitSettings,
    progress: Progress | None = None,
    workers: WorkerPool | None = None,
) -> MatchStore:
    """Collect the feature cache for calibration and evaluation: retained detections and label-assigned cells.

    Args:
        host: Host of the frozen model.
        dataset: Validation images.
        folder: Folder of the feature cache.
        settings: Settings of the fit.
        progress: Called with the progress.
        workers: Distribution over processes and machines.
    """
    return collect(
        host, dataset, folder, validation_settings(settings), named(progress, "collecting validation images"), workers
    )


def settings_for(artifact: Artifact, **changes: Any) -> FitSettings:
    """Return settings to collect images for an artifact: its input size and head architecture, else the defaults.

    The head architecture determines the content of a feature cache, so it always comes from the artifact.

    Args:
        artifact: Trained heads, calibrated or not.
        **changes: Fields of ``FitSettings`` with other values, such as ``conf``; ``imgsz=None`` is the artifact's.
    """
    if changes.get("imgsz") is None:
        changes["imgsz"] = artifact.imgsz
    return replace(FitSettings(), **{**changes, "head": artifact.heads.settings})


def validation_settings(settings: FitSettings) -> CollectSettings:
    """Return the collection settings for calibration and evaluation."""
    return CollectSettings(
        imgsz=(settings.imgsz,),
        cells_per_object=settings.cells_per_object,
        conf=settings.conf,
        iou=settings.iou,
        detections=DETECTIONS,
        batch=settings.batch,
        context_features=settings.head.context_features,
    )


def train_heads(
    host: Host,
    stores: Sequence[MatchStore],
    settings: FitSettings,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
    images: Array | None = None,
    group: ProcessGroup | None = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[ProbabilisticHeads, TrainingHistory]:
    """Train new heads on feature caches.

    Args:
        host: Host of the frozen model.
        stores: Feature caches of training images.
        settings: Settings of the fit.
        checkpoint: File to write after every epoch and to resume from.
        progress: Called with the progress.
        images: Image ids to train on; default: all.
        group: Ranks of a distributed training.
        callbacks: Called after every epoch.

    Returns:
        The heads, rounded to half precision, and the losses.
    """
    for store in stores:
        store.check(host)
    with torch.random.fork_rng(devices=[]):  # restores the caller's generator
        torch.default_generator.manual_seed(settings.train.seed)
        heads = ProbabilisticHeads(host.pose_templates(), host.strides, host.keypoint_count, settings.head)
    report = None
    if progress is not None:
        report = lambda done, total, note: progress(f"training heads ({note})", done, total)  # noqa: E731
    trained = train(
        heads,
        stores,
        settings.train,
        images=images,
        device=host.device,
        checkpoint=checkpoint,
        progress=report,
        group=group,
        callbacks=callbacks,
    )
    return round_to_stored(heads), trained


def predictions_of(heads: ProbabilisticHeads, store: MatchStore, images: Array | None = None) -> PoseDistributions:
    """Return uncalibrated distributions of the stored detections, in original pixels."""

    def covariance_of(cells: CachedCells) -> Array:
        factors = _factors(heads, cells) / cells.columns["gain"].double()[:, None, :, None]
        return Gaussian(factors).covariance.numpy()

    return store.detections(covariance_of, images)[0]


def true_positives(
    heads: ProbabilisticHeads,
    store: MatchStore,
    images: Array | None = None,
    protocol: Protocol | None = None,
    layout: Keypoints | None = None,
) -> MatchedPoses:
    """Match stored detections with the objects of their images.

    The cache is read part by part and only true positives are kept, so memory grows with the number of objects.

    Args:
        heads: Heads.
        store: Feature cache with retained detections.
        images: Image ids; default: all.
        protocol: Rules of the matching.
        layout: Keypoints; default: those of the cache.

    Raises:
        HaloposeError: There are no images, or no detections.
    """
    found, before = [], 0
    nothing = HaloposeError(f"{store.folder} holds no images: run `halopose collect` on a data set with images")
    for part in store.parts(SHARDS_AT_ONCE):
        try:
            poses = predictions_of(heads, part, images)
        except NoDetectionError as error:
            nothing = error
            continue
        truth = part.ground_truth(images)
        matched = match_poses(poses, truth if layout is None else replace(truth, layout=layout), protocol)
        found.append(replace(matched, objects=matched.objects + before))
        before += len(truth)
    if not found:
        raise nothing
    return MatchedPoses.concatenate(found)


@torch.inference_mode()
def _factors(heads: ProbabilisticHeads, cells: CachedCells) -> Tensor:
    """Return uncalibrated Cholesky factors (N, K, 2, 2) in input pixels."""
    return cells.factors(heads).cpu().double()


def calibrate_heads(
    heads: ProbabilisticHeads,
    store: MatchStore,
    images: Array,
    settings: FitSettings,
    *,
    offset: bool = False,
    before: Calibrations | None = None,
) -> Calibrations:
    """Fit calibrations and pruning thresholds on images of a validation cache.

    Args:
        heads: Trained heads.
        store: Feature cache of validation images.
        images: Ids of the calibration images.
        settings: Settings of the fit.
        offset: Fit a mean residual per keypoint.
        before: Previous calibration. With few images the new one may widen it, but narrow it only slightly.

    Raises:
        HaloposeError: No detection matches an object, or the options do not fit together.
    """
    matched = true_positives(heads, store, images, settings.protocol)
    if not len(matched):
        raise HaloposeError("no detection of the calibration images matches an object: give more images")
    warn_of_few(matched, len(images))
    gaussian = student = moved = None
    if offset:
        if settings.calibration == "assigned":
            raise HaloposeError("--offset needs matched detections: leave out --source assigned or --offset")
        moved = fit_offset(matched)
        matched = matched.moved(moved.numpy())
    if settings.calibration == "assigned":
        gaussian, student = _calibrate_assigned(heads, store, images, settings)
    fitted = fit_calibrations(matched, settings.protocol, gaussian=gaussian, student=student)
    if before is not None and settings.calibration == "matched":
        fitted = limit_narrowing(fitted, before, matched, settings.protocol)
    return fitted if moved is None else replace(fitted, offset=moved)


def _for_both(heads: ProbabilisticHeads, store: MatchStore, images: Array, settings: FitSettings, offset: bool) -> bool:
    """Return whether to calibrate for matches by OKS and by box, which needs enough objects."""
    if settings.match != "both" or settings.calibration != "matched" or offset:
        return False
    objects = len(true_positives(heads, store, images, settings.protocol))
    if objects < FEWEST_OBJECTS:
        log.info(
            "calibration on matches by OKS only: matches by box need %d objects, the images have %d",
            FEWEST_OBJECTS,
            objects,
        )
    return objects >= FEWEST_OBJECTS


def bound_heads(
    heads: ProbabilisticHeads, store: MatchStore, images: Array, protocol: Protocol | None = None
) -> ProbabilisticHeads:
    """Return a copy of heads with context features, with the maximum-likelihood bound for the given images.

    The bound is in units of (kappa s)^2, because matching limits the residuals of true positives in these units.
    """
    free = with_bound(heads, np.zeros(heads.keypoints))
    matched = true_positives(free, store, images, protocol)
    layout = store.layout
    unit = 2 * layout.kappa**2 * layout.area_factor  # traces are two variances
    trace = np.trace(matched.covariance, axis1=2, axis2=3)
    variance = torch.from_numpy(trace / (unit * matched.box_area[:, None]))
    return with_bound(heads, 1 / (unit * likeliest_bound(scale_sample(matched), variance)))


def _calibrate_assigned(
    heads: ProbabilisticHeads, store: MatchStore, images: Array, settings: FitSettings
) -> tuple[GaussianCalibration, StudentTCalibration]:
    """Calibrate on label-assigned cells with their importance weights, as in the paper (eqs. 12, 18)."""
    residual, factors, labelled, weight = [], [], [], []
    images = np.sort(images)
    for cells in (part.of_images(images) for part in store.cells("assigned")):
        if len(cells):
            columns = cells.columns
            factors.append(_factors(heads, cells))
            residual.append(columns["residual"])
            labelled.append(columns["labelled"].bool())
            weight.append(
                importance_weights(
                    columns["confidence"], columns["area"], settings.train.alpha, settings.train.scale_weight
                )
            )
    if not residual:
        raise HaloposeError("the calibration images have no assigned cells: give more images")
    data = torch.cat(residual), torch.cat(factors), torch.cat(labelled), torch.cat(weight)
    gaussian = GaussianCalibration(heads.keypoints, min_samples=settings.min_samples)
    student = StudentTCalibration(heads.keypoints, min_samples=settings.min_samples, covariance=settings.covariance)
    gaussian.fit(*data)
    student.fit(*data)
    return gaussian, student


def uncalibrated(
    host: Host,
    heads: ProbabilisticHeads,
    stores: Sequence[MatchStore],
    settings: FitSettings,
    trained: TrainingHistory,
) -> Artifact:
    """Return an artifact of trained heads without calibration and pruning.

    Args:
        host: Host of the frozen model.
        heads: Trained heads.
        stores: Feature caches that they were trained on.
        settings: Settings of the fit.
        trained: Losses of the training.
    """
    layout = stores[0].layout
    return Artifact(
        heads=heads,
        calibrations=Calibrations.none(len(layout)),
        base=host.fingerprints,
        layout=layout,
        imgsz=settings.imgsz,
        card=Card(
            base=host.description,
            images=ImageRoles(heads=tuple(np.concatenate([store.images for store in stores]).tolist())),
            settings=settings,
            training=trained,
            skipped=tuple(line for store in stores for line in store.skipped()),
        ),
    )


def calibrate_artifact(
    artifact: Artifact,
    host: Host,
    store: MatchStore,
    source: CalibrationSource,
    share: float = 1.0,
    *,
    offset: bool = False,
    **changes: Any,
) -> Artifact:
    """Calibrate trained heads on images that they were not trained on.

    Args:
        artifact: Artifact with trained heads.
        host: Host of the base model.
        store: Feature cache of validation images.
        source: Calibrate on matched detections or on label-assigned cells.
        share: Fraction of the images to calibrate on; the others are recorded for evaluation.
        offset: Fit a mean residual per keypoint.
        **changes: Fields of ``FitSettings`` with other values than in the artifact.

    Raises:
        HaloposeError: The artifact, host and cache do not fit together, or images were used for training.
    """
    artifact.check(host)
    store.check(host)
    if store.layout != artifact.layout:
        raise HaloposeError(
            f"{store.folder} was collected with other keypoints or sigmas than the heads: use the same data set"
        )
    images, rest = (store.images, store.images[:0]) if share == 1 else split_validation(store.images, share)
    used = artifact.card.images
    check_unseen(images, used.of("heads"), "calibration images are among those the heads were trained on")
    if not store.settings.detections:
        raise HaloposeError(f"{store.folder} holds no detections: collect it with --detections {DETECTIONS}")
    settings = replace(
        artifact.card.fit_settings,
        imgsz=max(store.settings.imgsz),
        conf=store.settings.conf,
        iou=store.settings.iou,
        calibration=source,
        calibration_share=share,
        **changes,
    )
    heads = artifact.heads.to(host.device).eval()
    if heads.settings.bounded and not heads.settings.conditional:
        heads = bound_heads(heads, store, images, settings.protocol)
    before = None if used.calibration is None else artifact.calibrations
    if _for_both(heads, store, images, settings, offset):
        heads, fitted = calibrate_for_both(heads, store, images, settings.protocol)
    else:
        fitted = calibrate_heads(heads, store, images, settings, offset=offset, before=before)
    card = replace(
        artifact.card,
        settings=settings,
        images=ImageRoles(
            heads=used.heads,
            calibration=tuple(images.tolist()),
            evaluation=tuple(rest.tolist()) if len(rest) else None,
        ),
        skipped=(*(artifact.card.skipped or ()), *store.skipped()),
    )
    return replace(artifact, heads=heads, calibrations=fitted, imgsz=settings.imgsz, card=card)


def evaluate_artifact(
    artifact: Artifact,
    host: Host,
    store: MatchStore,
    images: Array | None = None,
    protocol: Protocol | None = None,
    progress: Progress | None = None,
    preset: Preset | None = None,
) -> Scores:
    """Evaluate an artifact with the complete protocol on images of a feature cache.

    By default, confidences use the area of the predicted box, as at inference and in the choice of the thresholds.
    An out-of-distribution model is evaluated as well.

    Args:
        artifact: Calibrated artifact.
        host: Host of the base model.
        store: Feature cache of validation images.
        images: Ids of images that neither heads nor calibration have used; default: all.
        protocol: Rules of matching and scores.
        progress: Called with the progress.
        preset: "paper" evaluates one Student-t per keypoint with the paper's covariance.
    """
    artifact.check(host)
    store.check(host)
    protocol = protocol or evaluation_protocol(preset, bootstrap=200)
    calibrations = evaluated_as(artifact.calibrations, preset)
    heads = artifact.heads.to(host.device).eval()
    matched = true_positives(heads, store, images, protocol, artifact.layout)
    if artifact.calibrations.offset is not None:
        matched = matched.moved(artifact.calibrations.offset.numpy())
    source = "the artifact's, fitted on other images"
    distributions = apply_calibrations(matched, calibrations, protocol, source) if len(matched) else None
    other = replace(protocol, match="box" if protocol.match == "oks" else "oks")
    also = true_positives(heads, store, images, other, artifact.layout)
    if artifact.calibrations.offset is not None:
        also = also.moved(artifact.calibrations.offset.numpy())
    others = []
    if also.labelled.any():
        others.append((also, apply_calibrations(also, calibrations, other, source), other))
    scores = evaluate(matched, distributions, protocol, named(progress, "resampling images"), others)
    made = artifact.card.settings
    return replace(
        scores,
        novelty=score_novelty(artifact, store, images),
        preset=preset or (None if made is None else made.preset),
        departures=evaluation_departures(made, protocol, preset),
    )


def fit(
    host: Host,
    training: Dataset,
    validation: Dataset,
    work: Path | str,
    settings: FitSettings | None = None,
    progress: Progress | None = None,
    workers: WorkerPool | None = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[Artifact, Scores]:
    """Collect, train, calibrate, choose the thresholds and evaluate; a second call resumes an interrupted fit.

    Args:
        host: The frozen base model.
        training: Images for the heads.
        validation: Images for calibration and evaluation; none may be in ``training``.
        work: Folder of feature caches and checkpoints.
        settings: Settings of the fit.
        progress: Called with the name of the step, the finished amount and the total amount.
        workers: Distribution of the collection.
        callbacks: Called with the settings, the losses of every epoch, and the scores.

    Returns:
        The artifact, and its scores on validation images that calibration did not use.

    Example:
        >>> from halopose.data.dataset_loading import load_dataset
        >>> from halopose.fitting.settings import TrainSettings
        >>> from halopose.hosts.loading import load_host
        >>> train, val = load_dataset("data.yaml", "train"), load_dataset("data.yaml", "val")
        >>> settings = FitSettings(TrainSettings(epochs=1), imgsz=320, train_sizes=(320,), calibration_share=0.5)
        >>> artifact, scores = fit(load_host("model.safetensors"), train, val, "work", settings)
        >>> artifact.save("heads.safetensors")
    """
    settings = settings or FitSettings()
    work = Path(work)
    shared = np.intersect1d(training.image_ids, validation.image_ids)
    if len(shared):
        raise HaloposeError(f"{len(shared)} images are in both the training and the validation split")
    if training.layout != validation.layout:
        raise HaloposeError("the training and the validation data have different keypoints or sigmas")
    train_store = collect_training(host, training, work / "train", settings, progress, workers)
    val_store = collect_validation(host, validation, work / "val", settings, progress, workers)
    checkpoint = work / "training.safetensors"
    with _notified(callbacks, settings):
        heads, trained = train_heads(host, [train_store], settings, checkpoint, progress, callbacks=callbacks)
        artifact, scores = _calibrated_and_scored(
            host, training, train_store, val_store, heads, trained, work, settings, progress
        )
        for callback in callbacks:
            callback.on_scores(score_values(scores))
    return artifact, scores


def add_novelty(
    artifact: Artifact,
    host: Host,
    training: Dataset,
    validation: Dataset,
    work: Path | str,
    settings: NoveltySettings | None = None,
    progress: Progress | None = None,
) -> Artifact:
    """Add an out-of-distribution model to a calibrated artifact. Heads and calibration do not change. Resumable.

    Args:
        artifact: The calibrated artifact.
        host: The frozen base model.
        training: Images, of which the model is fitted on some and on corrupted copies of them.
        validation: Images that the p-values come from. Images that the heads were trained on, or that the artifact
            reserves for evaluation, are left out.
        work: Folder of feature caches.
        settings: Settings of the out-of-distribution model.
        progress: Called with the name of the step, the number of images done and their total.

    Raises:
        HaloposeError: No validation image is left, or another process works in the folder.
    """
    settings, work = settings or NoveltySettings(), Path(work)
    reserved = artifact.card.images.of("evaluation", "heads")
    validation = validation.subset(np.setdiff1d(validation.image_ids, reserved))
    if not len(validation):
        raise HaloposeError("the heads have seen every validation image: give other images")
    collecting = settings_for(artifact)
    with locked(work):
        features = artifact.heads.settings.context_features
        copies = collect_copies(host, training, work / "copies", artifact.imgsz, settings, progress, features)
        store = collect_validation(host, validation, work / "val", collecting, progress)
        return fit_novelty(artifact, copies, store)


@contextmanager
def _notified(callbacks: Sequence[Callback], settings: FitSettings) -> Iterator[None]:
    """Notify callbacks of the start and the end."""
    try:
        for callback in callbacks:
            callback.on_start(flat(asdict(settings)))
        yield
    finally:
        for callback in callbacks:
            callback.on_end()


def score_values(scores: Scores) -> dict[str, float]:
    """Return the finite metrics by name, such as ``student_t/ace``."""
    found = {
        f"{name}/{metric}": float(scores.distribution(name).metric(metric))
        for name in DISTRIBUTIONS
        for metric in METRICS
    }
    found |= {"akp": float(scores.gaussian.akp), "akp_skill": float(scores.akp_skill or math.nan)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _calibrated_and_scored(
    host: Host,
    training: Dataset,
    train_store: MatchStore,
    val_store: MatchStore,
    heads: ProbabilisticHeads,
    trained: TrainingHistory,
    work: Path,
    settings: FitSettings,
    progress: Progress | None,
) -> tuple[Artifact, Scores]:
    """Calibrate, fit the out-of-distribution model and evaluate."""
    artifact = calibrate_artifact(
        uncalibrated(host, heads, [train_store], settings, trained),
        host,
        val_store,
        settings.calibration,
        settings.calibration_share,
    )
    artifact = _with_novelty(artifact, host, training, val_store, work / "copies", settings, progress)
    images = artifact.card.images.of("evaluation")
    scores = evaluate_artifact(artifact, host, val_store, images, progress=progress, preset=settings.preset)
    return replace(artifact, card=replace(artifact.card, figures=CardFigures.of(scores))), scores


def _with_novelty(
    artifact: Artifact,
    host: Host,
    training: Dataset,
    val_store: MatchStore,
    folder: Path,
    settings: FitSettings,
    progress: Progress | None,
) -> Artifact:
    """Return the artifact with an out-of-distribution model; unchanged if there are too few data."""
    how = NoveltySettings(images=settings.novelty_images)
    if not settings.novelty_images:
        return artifact
    if min(len(training), how.images) < how.fewest:
        log.info("no out-of-distribution model: %d training images are too few", len(training))
        return artifact
    copies = collect_copies(host, training, folder, settings.imgsz, how, progress, settings.head.context_features)
    calibration = artifact.card.images.of("calibration")
    try:
        return fit_novelty(artifact, copies, val_store, calibration, how)
    except TooFewError as error:
        log.warning("no out-of-distribution model: %s", error)
        return artifact
