"""Fitting of the out-of-distribution (OOD) model from clean images and corrupted copies.

The inputs are an artifact, a feature cache of training images with corrupted copies (``corruptions.with_copies``),
and a feature cache of calibration images. The result is the artifact with a ``Novelty``. The fit is deterministic:
whitening has a closed form, and the logistic regressions are convex.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halopose.boxes import box_area
from halopose.data.dataset import Dataset
from halopose.data.splits import check_unseen, hashed_order
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.fitting.card import NoveltyRecord
from halopose.fitting.collecting import collect
from halopose.fitting.corruptions import COPY, with_copies
from halopose.fitting.feature_cache import CachedCells, CollectSettings, MatchStore, NoDetectionError, stored_poses
from halopose.fitting.settings import NoveltySettings
from halopose.hosts.base import Host
from halopose.matching.greedy_matching import candidate_pairs, greedy_match
from halopose.poses import GroundTruth, PoseDistributions
from halopose.types import Array, Progress, named
from halopose.uncertainty.heads import ProbabilisticHeads
from halopose.uncertainty.novelty import Evidence, Novelty, Whitening, combined_distance, pool_windows

log = logging.getLogger(__name__)

OUTSIDE = -2 * np.log(0.01)  # squared Mahalanobis distance of the 99 % ellipse


class TooFewError(HaloposeError):
    """Too few detections to fit the out-of-distribution model."""


@dataclass(frozen=True)
class Rows:
    """Stored detections with the inputs and the targets of the OOD model.

    Detections of crowds and of objects without keypoints are left out.

    Attributes:
        evidence: Inputs of the OOD model for N detections.
        poses: Detections with the artifact's Gaussian.
        square: Squared Mahalanobis distances (N, K) of labelled keypoints; NaN for others and without an object.
        residual: Residuals (N, K, 2) in original pixels; NaN likewise.
        ids: Image ids (I,).
        vectors: Pooled feature vectors of the images (I, D).
    """

    evidence: Evidence
    poses: PoseDistributions
    square: Array
    residual: Array
    ids: Array
    vectors: Tensor

    def of_images(self, wanted: Callable[[Array], Array]) -> Rows:
        """Return the rows of the images for whose ids a function is true."""
        rows, images = np.flatnonzero(wanted(self.image)), np.flatnonzero(wanted(self.ids))
        return replace(self.select(rows), ids=self.ids[images], vectors=self.vectors[torch.from_numpy(images)])

    def select(self, rows: Array) -> Rows:
        """Return some of the detections, with all images."""
        return replace(
            self,
            evidence=self.evidence[torch.from_numpy(rows)],
            poses=self.poses[rows],
            square=self.square[rows],
            residual=self.residual[rows],
        )

    @property
    def image(self) -> Array:
        """Image id of each detection (N,)."""
        return np.asarray(self.poses.image_ids)

    @property
    def clean(self) -> Array:
        """Whether each detection is from an image without corruption (N,)."""
        return np.asarray(self.image < COPY)

    @property
    def labelled(self) -> Array:
        """Whether each keypoint has a label (N, K)."""
        return np.isfinite(self.square)

    @property
    def wrong(self) -> Array:
        """Share of labelled keypoints outside their 99 % ellipse (N,); 1 without an object."""
        known = self.labelled.sum(1)
        outside = (np.nan_to_num(self.square) > OUTSIDE).sum(1)
        return np.asarray(np.where(known > 0, outside / np.maximum(known, 1), 1.0))

    @property
    def excess(self) -> Array:
        """Mean squared Mahalanobis distance over 2 (N,); expected 1 under calibration, NaN without an object."""
        known = self.labelled.sum(1)
        total = np.minimum(np.nan_to_num(self.square) / 2, 50.0).sum(1)  # limits the influence of outliers
        return np.asarray(np.where(known > 0, total / np.maximum(known, 1), np.nan))


def collect_copies(
    host: Host,
    dataset: Dataset,
    folder: Path,
    imgsz: int,
    settings: NoveltySettings | None = None,
    progress: Progress | None = None,
    context_features: bool = False,
) -> MatchStore:
    """Collect a feature cache of some training images, chosen by a hash of their ids, and of their corrupted copies.

    Args:
        host: Host of the frozen model.
        dataset: Training images.
        folder: Folder of the feature cache.
        imgsz: Input size.
        settings: Settings of the out-of-distribution model.
        progress: Called with the progress.
        context_features: Store context features, for heads that use them.
    """
    settings = settings or NoveltySettings()
    some = dataset.subset(hashed_order(dataset.image_ids)[: settings.images])
    how = CollectSettings(
        imgsz=(imgsz,),
        assigned=False,
        conf=settings.conf,
        detections=settings.detections,
        context_features=context_features,
    )
    return collect(host, with_copies(some), folder, how, named(progress, "collecting corrupted copies"))


@torch.inference_mode()
def rows_of(artifact: Artifact, store: MatchStore, conf: float, images: Array | None = None) -> Rows:
    """Compute the inputs and targets of the OOD model for the detections of a feature cache.

    Args:
        artifact: Artifact with heads and calibration.
        store: Feature cache with retained detections.
        conf: Lowest score of the detections.
        images: Image ids; default: all.

    Raises:
        NoDetectionError: The images have no detection.
    """
    ids, vectors = store.image_vectors()
    order = np.argsort(ids)
    ids, vectors = ids[order], vectors[order]
    if images is not None:
        images = np.sort(images)
        chosen = np.isin(ids, images)
        ids, vectors = ids[chosen], vectors[chosen]
    parts: list[tuple[PoseDistributions, Evidence]] = []
    width = max(artifact.heads.widths)
    for cells in (part.of_images(images) for part in store.cells("detected")):
        if len(cells):
            factors = _factors(artifact.heads, cells)
            image = torch.from_numpy(vectors[np.searchsorted(ids, cells.columns["image_id"].numpy())])
            covariance = artifact.calibrations.gaussian(factors).covariance.numpy()
            parts.append((stored_poses(cells, covariance), _evidence(cells, image, width)))
    if not parts:
        raise NoDetectionError("no detection in these images: check that the base model detects objects there")
    poses = PoseDistributions.concatenate([found for found, _ in parts])
    evidence = Evidence.concatenate([one for _, one in parts])
    residual, ignored = residuals(poses, store.ground_truth(images))
    if artifact.calibrations.offset is not None:
        size = np.sqrt(box_area(poses.boxes))[:, None, None]
        residual = residual - artifact.calibrations.offset.numpy() * size
    whitened = np.linalg.solve(poses.covariance, np.nan_to_num(residual)[..., None])[..., 0]
    square = (residual * whitened).sum(-1)
    rows = Rows(evidence, poses, square, residual, ids, torch.from_numpy(vectors))
    return rows.select(np.flatnonzero((poses.scores >= conf) & ~ignored))


def _factors(heads: ProbabilisticHeads, cells: CachedCells) -> Tensor:
    """Return uncalibrated Cholesky factors (N, K, 2, 2) in original pixels."""
    return cells.factors(heads).cpu().double() / cells.columns["gain"].double()[:, None, :, None]


def _evidence(cells: CachedCells, image: Tensor, width: int) -> Evidence:
    """Return the OOD inputs of stored detections.

    Args:
        cells: Stored detections.
        image: Feature vectors (N, D) of their images.
        width: Width to which pooled windows are padded with zeros.
    """
    window = torch.zeros(len(cells), width)
    pooled = pool_windows(cells.windows.float(), cells.inside.float())
    window[:, : pooled.shape[1]] = pooled
    return Evidence(
        level=torch.full((len(cells),), cells.level),
        window=window,
        image=image.float(),
        score=cells.columns["score"].float(),
    )


def residuals(poses: PoseDistributions, truth: GroundTruth) -> tuple[Array, Array]:
    """Match detections with objects and compute residuals.

    Returns:
        Truth minus prediction (N, K, 2), NaN without a label or an object; and which detections (N,) match an ignored
        object.
    """
    residual, ignored = np.full(poses.keypoints.shape, np.nan), np.zeros(len(poses), dtype=bool)
    if not len(truth):
        return residual, ignored
    pairs = candidate_pairs(poses, truth)
    taken = greedy_match(pairs, len(poses), truth.ignore, truth.crowd, np.array([0.5]))[0]
    found = np.flatnonzero(taken >= 0)
    objects = taken[found]
    ignored[found] = truth.ignore[objects]
    away = truth.keypoints[objects] - poses.keypoints[found]
    residual[found] = np.where(truth.labelled[objects][..., None], away, np.nan)
    return residual, ignored


def fit_novelty(
    artifact: Artifact,
    copies: MatchStore,
    calibration: MatchStore,
    images: Array | None = None,
    settings: NoveltySettings | None = None,
) -> Artifact:
    """Fit the out-of-distribution model and calibrate its p-values.

    Args:
        artifact: Artifact without or with an out-of-distribution model.
        copies: Feature cache of training images and their corrupted copies.
        calibration: Feature cache of calibration images.
        images: Ids of the calibration images; default: all.
        settings: Settings of the fit.

    Returns:
        The artifact with the out-of-distribution model.

    Raises:
        TooFewError: The clean training images have too few detections.
    """
    settings = settings or NoveltySettings()
    heads = artifact.heads.eval()
    artifact = replace(artifact, heads=heads)
    rows = rows_of(artifact, copies, settings.conf)
    trusted = int((rows.clean & (rows.evidence.score.numpy() >= settings.trusted)).sum())
    if trusted < settings.fewest:
        raise TooFewError(
            f"{trusted} detections in clean training images are too few for the out-of-distribution model "
            f"(at least {settings.fewest}): give more images"
        )
    seen = copies.images[copies.images < COPY]
    card = replace(artifact.card, novelty=NoveltyRecord(settings, tuple(seen.tolist())))
    fitted = replace(artifact, novelty=_fit(rows, settings, heads.widths), card=card)
    return calibrate_novelty(fitted, calibration, images)


def calibrate_novelty(artifact: Artifact, calibration: MatchStore, images: Array | None = None) -> Artifact:
    """Calibrate the p-values of the out-of-distribution model on other images; the fitted model does not change.

    Args:
        artifact: Artifact with an out-of-distribution model.
        calibration: Feature cache of calibration images.
        images: Ids of the calibration images; default: all.

    Raises:
        HaloposeError: There is no out-of-distribution model, or it was fitted on some of the images.
    """
    record = artifact.card.novelty
    if artifact.novelty is None or record is None:
        raise HaloposeError(
            "the artifact has no out-of-distribution model to calibrate: add one with `halopose novelty`"
        )
    chosen = calibration.images if images is None else images
    originals = chosen[chosen < COPY]
    check_unseen(originals, np.array(record.images), "the out-of-distribution model was fitted on calibration images")
    lowest = max(calibration.settings.conf, record.settings.conf)
    held = rows_of(replace(artifact, heads=artifact.heads.eval()), calibration, lowest, images)
    record = replace(record, calibration=tuple(np.sort(chosen).tolist()), detections=len(held.poses))
    fitted = _calibrated(artifact.novelty, held)
    return replace(artifact, novelty=fitted, card=replace(artifact.card, novelty=record))


def _calibrated(fitted: Novelty, held: Rows) -> Novelty:
    """Return the model with the reference values of calibration detections and images."""
    fitted = Novelty.from_tensors({name: value.half().float() for name, value in fitted.to_tensors().items()})
    value = fitted.value(held.evidence)
    order = torch.argsort(value, stable=True)
    return replace(
        fitted,
        known=torch.stack([held.evidence.score, value], dim=1)[order],
        known_images=fitted.image_value(held.vectors).sort().values,
    )


def _fit(rows: Rows, settings: NoveltySettings, widths: tuple[int, ...]) -> Novelty:
    """Fit the components on all rows; standardise them by cross-validated components over folds of images."""
    originals = np.unique(rows.image % COPY)
    fold = np.searchsorted(originals, rows.image % COPY) % settings.folds
    image_fold = np.searchsorted(originals, rows.ids % COPY) % settings.folds
    components = torch.zeros(len(rows.poses), 4)
    image_components = torch.zeros(len(rows.ids), 2)
    for number in range(settings.folds):
        here, there = fold == number, image_fold == number
        others = partial(_copies_of, originals[np.arange(len(originals)) % settings.folds != number])
        part = _fit_components(rows.of_images(others), settings, widths)
        components[torch.from_numpy(here)] = part.components(rows.evidence[torch.from_numpy(here)])
        image_components[torch.from_numpy(there)] = part.image_components(rows.vectors[torch.from_numpy(there)])
    whole = _fit_components(rows, settings, widths)
    usual = rows.clean & (rows.evidence.score.numpy() >= settings.trusted)
    centre, scale = _standard(components, rows.evidence.level, torch.from_numpy(usual), len(widths))
    clean_images = image_components[torch.from_numpy(rows.ids < COPY)]
    whole = replace(
        whole,
        centre=centre,
        scale=scale,
        image_centre=clean_images.mean(0),
        image_scale=clean_images.std(0).clamp(min=1e-3),
    )
    unit = (components - centre[rows.evidence.level]) / scale[rows.evidence.level]
    knots, widening = widening_of(combined_distance(unit).numpy(), rows.excess, settings.bins)
    return replace(whole, knots=knots, widening=widening)


def _copies_of(originals: Array, ids: Array) -> Array:
    """Return which image ids (n,) are originals or copies of them."""
    return np.isin(ids % COPY, originals)


def _standard(components: Tensor, level: Tensor, usual: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (L, 4) of in-distribution detections by level.

    A level with fewer than 20 such detections uses those of all levels.
    """
    centre, scale = [], []
    for number in range(levels):
        chosen = usual & (level == number)
        chosen = chosen if int(chosen.sum()) >= 20 else usual
        centre.append(components[chosen].mean(0))
        scale.append(components[chosen].std(0).clamp(min=1e-3))
    return torch.stack(centre), torch.stack(scale)


def _fit_components(rows: Rows, settings: NoveltySettings, widths: tuple[int, ...]) -> Novelty:
    """Fit the whitenings of clean features and the logistic regressions, without standardisation or calibration."""
    evidence = rows.evidence
    clean = torch.from_numpy(rows.clean)
    usual = clean & (evidence.score >= settings.trusted)
    windows = []
    for level, width in enumerate(widths):
        chosen = usual & (evidence.level == level)
        windows.append(whitening_of(evidence.window[chosen, :width]))
    clean_vectors = rows.vectors[torch.from_numpy(rows.ids < COPY)]
    images = tuple(whitening_of(part) for part in clean_vectors.split(widths, dim=1))
    odds = evidence.odds[usual]
    none = torch.zeros(0)
    start = Novelty(
        tuple(windows), images, odds.mean(0), odds.std(0).clamp(min=1e-3), none, none, none, none, none,
        none, none, none, none, none,
    )  # fmt: skip
    inputs = start.inputs(evidence)[0].double()
    changed = (~clean).double()
    wrong = torch.from_numpy(rows.wrong)
    fair = torch.where(clean, (changed.sum() / (1 - changed).sum().clamp(min=1)), 1.0).double()
    weights = [
        logistic(inputs, wrong, torch.ones_like(wrong), settings.ridge),
        logistic(inputs, changed, fair, settings.ridge),
    ]
    white = start.whitened(rows.vectors)
    pictures = torch.cat([white * (8 / white.shape[1]) ** 0.5, torch.ones(len(white), 1)], dim=1).double()
    copied = torch.from_numpy((rows.ids >= COPY).astype(float))
    even = torch.where(copied > 0, 1.0, copied.sum() / (1 - copied).sum().clamp(min=1))
    image_weights = logistic(pictures, copied, even, settings.ridge)
    return replace(start, weights=torch.stack(weights).float(), image_weights=image_weights.float())


def whitening_of(vectors: Tensor) -> Whitening:
    """Fit the whitening of vectors (N, C) after scaling to unit length, with the Ledoit-Wolf covariance.

    With fewer than three vectors, the whitening gives every input a large distance.
    """
    width = vectors.shape[1]
    if len(vectors) < 3:
        return Whitening(torch.zeros(width), torch.eye(width) * width**0.5 * 10)
    unit = (vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)).double()
    factor = torch.linalg.cholesky(torch.linalg.inv(ledoit_wolf(unit)))
    return Whitening(unit.mean(0).float(), factor.float())


def ledoit_wolf(samples: Tensor) -> Tensor:
    """Return the covariance (C, C) of samples (N, C), shrunk towards a multiple of the identity.

    Reference:
        Ledoit and Wolf, A well-conditioned estimator for large-dimensional covariance matrices, 2004.
    """
    centred = samples - samples.mean(0)
    count, width = centred.shape
    covariance = centred.T @ centred / count
    mean = covariance.diagonal().mean()
    target = mean * torch.eye(width, dtype=samples.dtype)
    distance = (covariance - target).square().sum()
    noise = (centred.square().sum(1).square().sum() / count - covariance.square().sum()) / count
    share = float((torch.minimum(noise, distance) / distance).clamp(0, 1)) if float(distance) > 0 else 1.0
    floor = 1e-9 * torch.eye(width, dtype=samples.dtype)
    return (1 - share) * covariance + share * target + floor


def logistic(inputs: Tensor, label: Tensor, weight: Tensor, ridge: float, steps: int = 50) -> Tensor:
    """Fit a logistic regression by Newton's method.

    Args:
        inputs: Inputs (N, D).
        label: Labels between 0 and 1 (N,).
        weight: Sample weights (N,).
        ridge: Ridge penalty.
        steps: Largest number of Newton steps.

    Returns:
        Coefficients (D,).
    """
    coefficients = inputs.new_zeros(inputs.shape[1])
    penalty = torch.full_like(coefficients, ridge)

    def loss(at: Tensor) -> Tensor:
        odds = inputs @ at
        return (weight * (torch.nn.functional.softplus(odds) - label * odds)).sum() + (penalty * at * at).sum() / 2

    now = loss(coefficients)
    for _ in range(steps):
        chance = torch.sigmoid(inputs @ coefficients)
        slope = inputs.T @ (weight * (chance - label)) + penalty * coefficients
        curvature = (inputs * (weight * chance * (1 - chance))[:, None]).T @ inputs + penalty.diag()
        step = torch.linalg.solve(curvature, slope)
        size = 1.0
        while loss(coefficients - size * step) > now and size > 1e-6:
            size /= 2
        coefficients = coefficients - size * step
        before, now = now, loss(coefficients)
        if float(before - now) < 1e-9 * len(inputs):
            break
    return coefficients


def widening_of(value: Array, excess: Array, bins: int) -> tuple[Tensor, Tensor]:
    """Fit covariance factors that increase with the OOD distance, by isotonic regression.

    Args:
        value: OOD distances (N,).
        excess: Mean squared Mahalanobis distances over 2 (N,); NaN without an object.
        bins: Number of bins.

    Returns:
        Knots (j,) and factors (j,), at least 1.
    """
    known = np.flatnonzero(np.isfinite(excess))
    known = known[np.argsort(value[known], kind="stable")]
    parts = [part for part in np.array_split(known, bins) if len(part)]
    means = isotonic(np.array([excess[part].mean() for part in parts]), np.array([float(len(part)) for part in parts]))
    knots = np.array([value[part[0]] for part in parts])
    return torch.from_numpy(knots).float(), torch.from_numpy(np.maximum(means, 1.0)).float()


def isotonic(values: Array, weight: Array) -> Array:
    """Weighted isotonic regression of values (n,) with weights (n,), by pooling adjacent violators."""
    level: list[float] = []
    mass: list[float] = []
    count: list[int] = []
    for value, each in zip(values.tolist(), weight.tolist(), strict=True):
        level.append(value)
        mass.append(each)
        count.append(1)
        while len(level) > 1 and level[-2] > level[-1]:
            total = mass[-2] + mass[-1]
            level[-2:] = [(level[-2] * mass[-2] + level[-1] * mass[-1]) / total]
            mass[-2:], count[-2:] = [total], [count[-2] + count[-1]]
    return np.repeat(level, count)
