"""From a frozen base and annotated images to a calibrated artifact, in steps that resume.

collect -> train -> calibrate (with the pruning threshold) -> evaluate. Each step reads what the one before
wrote; ``fit`` runs them all in one work folder.
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

DETECTIONS = 20  # of an image in a validation store, as many as COCO scores


def collect_training(
    host: Host,
    dataset: Dataset,
    folder: Path,
    settings: FitSettings,
    progress: Progress | None = None,
    workers: WorkerPool | None = None,
) -> MatchStore:
    """The store that heads are trained on: assigned cells only."""
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
    """The store for calibration and evaluation: retained detections, and assigned cells beside."""
    return collect(
        host, dataset, folder, validation_settings(settings), named(progress, "collecting validation images"), workers
    )


def settings_for(artifact: Artifact, **changes: Any) -> FitSettings:
    """Settings to collect images for an artifact: its input size and head architecture, else the defaults.

    The head architecture decides what a feature cache must hold, so it is never taken from elsewhere.

    Args:
        artifact: Trained heads, calibrated or not.
        **changes: Fields of ``FitSettings`` with other values, such as ``conf``; ``imgsz=None`` is the artifact's.
    """
    if changes.get("imgsz") is None:
        changes["imgsz"] = artifact.imgsz
    return replace(FitSettings(), **{**changes, "head": artifact.heads.settings})


def validation_settings(settings: FitSettings) -> CollectSettings:
    """How the store for calibration and evaluation is collected."""
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
    """Train new heads on feature caches, or on the given images of them; in several processes if there is a group."""
    for store in stores:
        store.check(host)
    torch.manual_seed(settings.train.seed)
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
    """Uncalibrated distributions of the stored detections, in original pixels."""

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
    """Stored detections matched to the objects of their images; layout: keypoints, where not the store's own.

    Goes through the store part by part and keeps only what matches, so that memory grows with the objects.
    """
    found, before = [], 0
    nothing = HaloposeError(f"{store.folder} holds no images: collect some")
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
    """Uncalibrated Cholesky factors (N, K, 2, 2) in input pixels."""
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
    """Calibrate on the given images of a validation store, and choose the pruning thresholds there.

    offset: where residuals are biased the distributions get a mean. before: what a few images that resemble
    each other may widen, and hardly narrow.
    """
    matched = true_positives(heads, store, images, settings.protocol)
    if not len(matched):
        raise HaloposeError("no detection of the calibration images matches an object: give more images")
    warn_of_few(matched, len(images))
    gaussian = student = moved = None
    if offset:
        if settings.calibration == "assigned":
            raise HaloposeError("an offset is measured on detections: leave out --source assigned, or --offset")
        moved = fit_offset(matched)
        matched = matched.moved(moved.numpy())
    if settings.calibration == "assigned":
        gaussian, student = _calibrate_assigned(heads, store, images, settings)
    fitted = fit_calibrations(matched, settings.protocol, gaussian=gaussian, student=student)
    if before is not None and settings.calibration == "matched":
        fitted = limit_narrowing(fitted, before, matched, settings.protocol)
    return fitted if moved is None else replace(fitted, offset=moved)


def _for_both(heads: ProbabilisticHeads, store: MatchStore, images: Array, settings: FitSettings, offset: bool) -> bool:
    """Whether to calibrate for matches by OKS and by box, for which the images must show enough objects."""
    if settings.match != "both" or settings.calibration != "matched" or offset:
        return False
    objects = len(true_positives(heads, store, images, settings.protocol))
    if objects < FEWEST_OBJECTS:
        log.info("calibrated on matches by OKS: matches by box take %d objects, here are %d", FEWEST_OBJECTS, objects)
    return objects >= FEWEST_OBJECTS


def bound_heads(
    heads: ProbabilisticHeads, store: MatchStore, images: Array, protocol: Protocol | None = None
) -> ProbabilisticHeads:
    """Return a copy of heads with context features, with the most likely bound for the given images.

    It is sought in units of (kappa s)^2: detections that match an object are not further off than some of them.
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
    """The paper's source: label-assigned cells with their importance weights (eqs. 12, 18)."""
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
    """Heads trained on the stores as an artifact that calibrates nothing and prunes nothing yet."""
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
    """Calibrate trained heads on a share of a store's images, none of which they may have been trained on.

    offset: with a mean per keypoint where residuals are biased. changes: of the settings that the artifact was
    made with.
    """
    artifact.check(host)
    store.check(host)
    if store.layout != artifact.layout:
        raise HaloposeError(
            f"{store.folder} was collected with other keypoints or sigmas than the heads: use one data set"
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
) -> Scores:
    """The whole protocol on images that neither the heads nor the calibration have seen.

    By default confidences take the predicted box's area, as the predictor does: the artifact's thresholds
    were chosen so. Where the artifact has novelty, what it flags is counted as well.
    """
    artifact.check(host)
    store.check(host)
    protocol = protocol or Protocol(bootstrap=200, area="box")
    heads = artifact.heads.to(host.device).eval()
    matched = true_positives(heads, store, images, protocol, artifact.layout)
    if artifact.calibrations.offset is not None:
        matched = matched.moved(artifact.calibrations.offset.numpy())
    source = "the artifact's, fitted on other images"
    distributions = apply_calibrations(matched, artifact.calibrations, protocol, source) if len(matched) else None
    other = replace(protocol, match="box" if protocol.match == "oks" else "oks")
    also = true_positives(heads, store, images, other, artifact.layout)
    if artifact.calibrations.offset is not None:
        also = also.moved(artifact.calibrations.offset.numpy())
    others = []
    if also.labelled.any():
        others.append((also, apply_calibrations(also, artifact.calibrations, other, source), other))
    scores = evaluate(matched, distributions, protocol, named(progress, "resampling images"), others)
    return replace(scores, novelty=score_novelty(artifact, store, images))


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
    """Collect, train, calibrate, choose the thresholds and evaluate; a rerun goes on where it stopped.

    Args:
        host: The frozen base model.
        training: Images for the heads.
        validation: Images for calibration and evaluation, which share none with ``training``.
        work: Folder of feature caches and checkpoints.
        settings: Settings of the fit.
        progress: Called with what is being done, how much of it is done, and of how much.
        workers: Worker processes that collect.
        callbacks: Called with the settings, the losses of every epoch, and the scores.

    Returns:
        The artifact, and its scores on validation images that calibration did not use.

    >>> from halopose.data.dataset_loading import load_dataset
    >>> from halopose.fitting.settings import TrainSettings
    >>> from halopose.hosts.loading import load_host
    >>> from halopose.landing.shipped_detectors import runway_detector
    >>> from halopose.landing.world.dataset_writer import write_dataset
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
    if training.layout != validation.layout:
        raise HaloposeError("the training and the validation data have different keypoints or sigmas")
    train_store = collect_training(host, training, work / "train", settings, progress, workers)
    val_store = collect_validation(host, validation, work / "val", settings, progress, workers)
    checkpoint = work / "training.safetensors"
    with _told(callbacks, settings):
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
def _told(callbacks: Sequence[Callback], settings: FitSettings) -> Iterator[None]:
    """Tell callbacks of the start and the end."""
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
    """Everything of a fit that comes after training."""
    artifact = calibrate_artifact(
        uncalibrated(host, heads, [train_store], settings, trained),
        host,
        val_store,
        settings.calibration,
        settings.calibration_share,
    )
    artifact = _with_novelty(artifact, host, training, val_store, work / "copies", settings, progress)
    images = artifact.card.images.of("evaluation")
    scores = evaluate_artifact(artifact, host, val_store, images, progress=progress)
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
        log.info("%d training images are too few to learn what is unlike them: no novelty", len(training))
        return artifact
    copies = collect_copies(host, training, folder, settings.imgsz, how, progress, settings.head.context_features)
    calibration = artifact.card.images.of("calibration")
    try:
        return fit_novelty(artifact, copies, val_store, calibration, how)
    except TooFewError as error:
        log.warning("no novelty: %s", error)
        return artifact
