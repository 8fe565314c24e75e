"""Analysis of the residuals of a base model before heads are fitted, with recommended settings.

The result is the content of analysis.json: tails, anisotropy, correlations, dependence of the residuals on object
scale, confidence and visibility, training against inference, and recommendations.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from halopose.boxes import box_area
from halopose.calibration.estimation import Sample, gaussian_temperature, student_parameters
from halopose.errors import HaloposeError
from halopose.fitting.feature_cache import CachedCells, MatchStore
from halopose.keypoints import Keypoints
from halopose.matching.greedy_matching import true_pairs
from halopose.poses import PoseDistributions
from halopose.studies.recommendations import recommend
from halopose.types import Array

_SCATTER_NU = 4.0  # of the robust scatter: bounds the influence of outliers and loses little for Gaussian residuals
_FEW = 50  # keypoints with fewer residuals are not tested


@dataclass(frozen=True)
class AnalysisSettings:
    """Settings of the analysis.

    Attributes:
        oks_threshold: Smallest OKS of a matched detection.
        bins: Number of groups of equal count over which residuals are compared.
        alphas: Retention exponents to compare.
        bootstrap: Number of resamplings of images.
        seed: Seed of the bootstrap.
    """

    oks_threshold: float = 0.5
    bins: int = 5
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0)
    bootstrap: int = 200
    seed: int = 0


@dataclass(frozen=True)
class ResidualSample:
    """Residuals of N instances, with covariates.

    Attributes:
        normalized: (N, K, 2) residuals r / (s kappa).
        labelled: (N, K) whether the keypoint is labelled.
        area: (N,) object area s^2.
        confidence: (N,) confidence.
        level: (N,) pyramid level.
        image_ids: (N,) image ids.
        visibility: (N, K) visibility scores, for detections only.
        limb: (N, K, 2) vector from each keypoint to the keypoint nearest to it, for detections only.
    """

    normalized: Array
    labelled: Array
    area: Array
    confidence: Array
    level: Array
    image_ids: Array
    visibility: Array | None = None
    limb: Array | None = None

    def __len__(self) -> int:
        return len(self.area)

    @property
    def radius(self) -> Array:
        """u (N, K) = |r| / (s kappa)."""
        return np.asarray(np.hypot(self.normalized[..., 0], self.normalized[..., 1]))


def constant_predictions(store: MatchStore, images: Array | None = None) -> PoseDistributions:
    """Cached detections with the covariance s^2 kappa^2 I of their box and keypoint, highest scores first."""
    return _detections(store, images)[0]


def _detections(store: MatchStore, images: Array | None = None) -> tuple[PoseDistributions, Array]:
    """Detections (N), and their pyramid level (N,)."""

    def covariance_of(cells: CachedCells) -> Array:
        area = box_area(cells.columns["box"].double().numpy()) * store.layout.area_factor
        return np.asarray((area[:, None] * store.layout.kappa**2)[..., None, None] * np.eye(2))

    return store.detections(covariance_of, images)


def matched_residuals(store: MatchStore, oks_threshold: float = 0.5) -> ResidualSample:
    """Residuals of detections matched to annotated objects as in COCO: the distribution at inference."""
    truth = store.ground_truth()
    predictions, level = _detections(store)
    rows, objects = true_pairs(predictions, truth, oks_threshold)
    if not len(rows):
        raise HaloposeError("no detection matches an annotated object: check that the base model fits the data")
    keypoints = predictions.keypoints[rows]
    scale = np.sqrt(truth.area[objects])[:, None] * store.layout.kappa
    return ResidualSample(
        normalized=(truth.keypoints[objects] - keypoints) / scale[..., None],
        labelled=truth.labelled[objects],
        area=truth.area[objects],
        confidence=predictions.scores[rows],
        level=level[rows],
        image_ids=truth.image_ids[objects],
        visibility=None if predictions.visibility is None else predictions.visibility[rows],
        limb=_to_nearest(keypoints / np.sqrt(truth.area[objects])[:, None, None]),
    )


def _to_nearest(keypoints: Array) -> Array | None:
    """Vector (N, K, 2) to the keypoint with the smallest median distance; None for a single keypoint."""
    count = keypoints.shape[1]
    if count < 2:
        return None
    nearest = np.zeros(count, dtype=np.int64)
    for k in range(count):
        distance = np.median(np.linalg.norm(keypoints - keypoints[:, [k]], axis=2), axis=0)
        distance[k] = np.inf
        nearest[k] = distance.argmin()
    return np.asarray(keypoints[:, nearest] - keypoints)


def assigned_residuals(store: MatchStore) -> ResidualSample:
    """Residuals of label-assigned cells in input pixels: the distribution in training."""
    parts = [(cells.level, cells.columns) for cells in store.cells("assigned")]
    if not parts:
        raise HaloposeError(f"{store.folder} has no assigned cells: collect it with them")
    names = ("residual", "labelled", "area", "confidence", "image_id")
    columns = {name: np.concatenate([part[name].numpy() for _, part in parts]) for name in names}
    area = np.maximum(columns["area"].astype(float), 1.0)
    scale = np.sqrt(area)[:, None] * store.layout.kappa
    return ResidualSample(
        normalized=columns["residual"].astype(float) / scale[..., None],
        labelled=columns["labelled"].astype(bool),
        area=area,
        confidence=columns["confidence"].astype(float),
        level=np.concatenate([np.full(len(part["area"]), number) for number, part in parts]),
        image_ids=columns["image_id"],
    )


def analyse(
    store: MatchStore, settings: AnalysisSettings | None = None, training: MatchStore | None = None
) -> dict[str, Any]:
    """Analyse the residuals of a feature cache.

    Args:
        store: Cache with retained detections.
        settings: Settings of the analysis.
        training: Cache with the cells assigned in training; default: ``store``.

    Returns:
        The content of analysis.json.
    """
    settings = settings or AnalysisSettings()
    matched = matched_residuals(store, settings.oks_threshold)
    return analyse_residuals(matched, assigned_residuals(training or store), store.layout, settings)


def analyse_residuals(
    matched: ResidualSample, assigned: ResidualSample, layout: Keypoints, settings: AnalysisSettings
) -> dict[str, Any]:
    """Analyse the residuals of matched detections and of assigned training cells.

    Args:
        matched: Residuals of matched detections.
        assigned: Residuals of assigned cells.
        layout: Keypoint layout.
        settings: Settings of the analysis.

    Returns:
        The content of analysis.json.
    """
    if not matched.labelled.any() or not assigned.labelled.any():
        raise HaloposeError("no labelled keypoint: check the annotations")
    scatter, weight = robust_scatter(matched.normalized, matched.labelled)
    result: dict[str, Any] = {
        "settings": asdict(settings),
        "keypoint_names": list(layout.names),
        "images": len(np.unique(matched.image_ids)),
        "matched_instances": len(matched),
        "keypoints": int(matched.labelled.sum()),
        "assigned_cells": len(assigned),
        "tails": tails(matched, scatter, settings),
        "shape": shape(matched, weight, settings),
        "keypoint_correlation": keypoint_correlation(matched, scatter, weight),
        "dependence": dependence(matched, scatter, np.asarray(layout.sigmas), settings),
        "shift": shift(matched, assigned, settings),
        "downweighting": downweighting(matched),
        "similarity": similarity_levels(matched),
    }
    return result | {"recommendations": recommend(result)}


def robust_scatter(residual: Array, labelled: Array) -> tuple[Array, Array]:
    """Student-t scatter matrices (K, 2, 2) around zero by fixed-point iteration, and the weights (N, K)."""
    values = np.where(labelled[..., None], residual, 0.0)
    count = np.maximum(labelled.sum(0), 1)
    products = values[..., :, None] * values[..., None, :]
    floor = 1e-12 * np.eye(2)
    scatter = products.sum(0) / count[:, None, None] + floor
    weight = labelled.astype(float)
    for _ in range(100):
        distance = np.einsum("nki,kij,nkj->nk", values, np.linalg.inv(scatter), values)
        weight = labelled * (_SCATTER_NU + 2) / (_SCATTER_NU + distance)
        updated = np.einsum("nk,nkij->kij", weight, products) / count[:, None, None] + floor
        done = np.abs(updated - scatter).max() <= 1e-9 * np.abs(scatter).max()
        scatter = updated
        if done:
            break
    return scatter, weight


def _distances(residuals: ResidualSample, scatter: Array) -> Array:
    """Squared Mahalanobis distances (N, K) under one scatter matrix (K, 2, 2) per keypoint; 0 if unlabelled."""
    values = np.where(residuals.labelled[..., None], residuals.normalized, 0.0)
    return np.asarray(np.einsum("nki,kij,nkj->nk", values, np.linalg.inv(scatter), values))


@dataclass(frozen=True)
class _Distributions:
    """Constant distributions fitted to squared distances (N, K): Gaussian tau, Student-t nu and tau, (K,) each."""

    tau: Array
    nu: Array
    tau_t: Array

    @classmethod
    def of(cls, distance: Array, labelled: Array) -> _Distributions:
        sample = Sample(torch.from_numpy(distance), torch.from_numpy(labelled.astype(float)))
        nu, tau_t = student_parameters(sample)
        return cls(gaussian_temperature(sample).numpy(), nu.numpy(), tau_t.numpy())

    def gain(self, distance: Array) -> Array:
        """Log-likelihood of the Student-t minus that of the Gaussian (N, K)."""
        student = -2 * np.log(self.tau_t) - (self.nu + 2) / 2 * np.log1p(distance / (self.nu * self.tau_t**2))
        return np.asarray(student + 2 * np.log(self.tau) + distance / (2 * self.tau**2))


def tails(residuals: ResidualSample, scatter: Array, settings: AnalysisSettings) -> dict[str, Any]:
    """Survival function of the radius against both distributions, nu by keypoint, and the gain in likelihood.

    A standard deviation that varies between instances looks like heavy tails. Heads explain this part. The results
    are therefore given twice: ``constant`` for one scale per keypoint, ``binned`` for a scale that also depends on
    visibility (or confidence) and object scale in bins.

    Args:
        residuals: Residuals of matched detections.
        scatter: Scatter matrices (K, 2, 2).
        settings: Settings of the analysis.
    """
    constant = _distances(residuals, scatter)
    binned = constant / _binned_variance(residuals, constant)
    return {
        "constant": _tail(residuals, constant, settings),
        "binned": _tail(residuals, binned, settings),
    }


def _tail(residuals: ResidualSample, distance: Array, settings: AnalysisSettings) -> dict[str, Any]:
    labelled = residuals.labelled
    distributions = _Distributions.of(distance, labelled)
    gain = np.where(labelled, distributions.gain(distance), 0.0)
    count = labelled.sum(0)
    totals = resampled_sums(residuals.image_ids, np.stack([gain.sum(1), labelled.sum(1)], axis=1), settings)
    counts = np.maximum(count, 1)
    estimate = gain.sum() / labelled.sum()
    radius = np.sqrt(distance) / distributions.tau  # in standard deviations of the Gaussian
    grid = np.geomspace(0.1, 30, 61)
    ratio = (distributions.tau / distributions.tau_t) ** 2
    student = (1 + np.square(grid)[:, None] * ratio / distributions.nu) ** (-distributions.nu / 2)
    pooled = np.sort(radius[labelled])
    judged = count >= _FEW
    return {
        "nu": np.where(count > 0, distributions.nu, np.nan),
        "nu_median": float(np.median(distributions.nu[judged if judged.any() else count > 0])),
        "gain": np.where(count > 0, gain.sum(0) / counts, np.nan),
        "gain_mean": float(estimate),
        "gain_interval": _interval(float(estimate), totals[:, 0] / np.maximum(totals[:, 1], 1)),
        "count": count,
        "survival": {
            "radius": grid,
            "empirical": 1 - np.searchsorted(pooled, grid, side="right") / len(pooled),
            "gaussian": np.exp(-np.square(grid) / 2),
            "student_t": student @ count / count.sum(),
        },
        "beyond_3": {
            "empirical": float((pooled > 3).mean()),
            "gaussian": float(np.exp(-4.5)),
        },
    }


def _binned_variance(residuals: ResidualSample, distance: Array) -> Array:
    """Half the mean squared distance (N, K), by bins of visibility (or confidence) and of object scale."""
    labelled = residuals.labelled
    visibility = residuals.visibility
    if visibility is None:
        visibility = np.broadcast_to(residuals.confidence[:, None], labelled.shape)
    size = np.broadcast_to(residuals.area[:, None], labelled.shape)
    own = np.maximum((distance * labelled).sum(0) / np.maximum(labelled.sum(0), 1) / 2, 1e-12)
    bins = 10 if labelled.sum() >= 50 * _FEW else 2
    cell = equal_bins(visibility[labelled], bins)[0] * 5 + equal_bins(size[labelled], 5)[0]
    relative = (distance / own)[labelled] / 2
    total = np.bincount(cell, relative, minlength=5 * bins)
    mean = total / np.maximum(np.bincount(cell, minlength=5 * bins), 1)
    result = np.ones(labelled.shape)
    result[labelled] = np.maximum(mean[cell], 1e-12)
    return result * own


def shape(residuals: ResidualSample, weight: Array, settings: AnalysisSettings) -> dict[str, Any]:
    """Anisotropy and correlation of x and y by keypoint with intervals, from robust second moments.

    ``image`` is in image axes. ``limb`` is the correlation after mirroring each instance so that the limb points into
    one quadrant: it detects residuals along or across the limb.

    Args:
        residuals: Residuals of matched detections.
        weight: Robust weights (N, K).
        settings: Settings of the analysis.
    """
    values = np.where(residuals.labelled[..., None], residuals.normalized, 0.0)
    result = {"image": _shape_in(residuals, values, weight, settings)}
    if residuals.limb is not None:
        side = np.sign(residuals.limb.prod(-1))
        mirrored = np.stack([values[..., 0], side * values[..., 1]], axis=-1)
        turning = _shape_in(residuals, mirrored, weight, settings)
        result["limb"] = {name: value for name, value in turning.items() if not name.startswith("ratio")}
    return result


def _shape_in(residuals: ResidualSample, values: Array, weight: Array, settings: AnalysisSettings) -> dict[str, Any]:
    first, second = values[..., 0], values[..., 1]
    moments = weight[..., None] * np.stack([first**2, first * second, second**2], axis=-1)  # (N, K, 3)
    draws = resampled_sums(residuals.image_ids, moments.reshape(len(moments), -1), settings)
    estimates = _ratio_and_correlation(moments.sum(0))
    spreads = _ratio_and_correlation(draws.reshape(-1, *moments.shape[1:]))
    enough = residuals.labelled.sum(0) >= _FEW
    result: dict[str, Any] = {"judged": enough}
    for name, value, drawn, neutral in zip(("ratio", "correlation"), estimates, spreads, (1.0, 0.0), strict=True):
        margin = 1.96 * drawn.std(0, ddof=1) if len(drawn) > 1 else np.full(len(value), np.inf)
        result[name] = value
        result[f"{name}_interval"] = np.stack([value - margin, value + margin], axis=1)
        result[f"{name}_significant"] = enough & (np.abs(value - neutral) > margin)
    return result


def _ratio_and_correlation(moments: Array) -> tuple[Array, Array]:
    """Ratio of the standard deviations in x and y, and correlation, from moments xx, xy, yy (..., 3)."""
    xx, xy, yy = np.moveaxis(np.maximum(moments, [1e-12, -np.inf, 1e-12]), -1, 0)
    return np.sqrt(xx / yy), xy / np.sqrt(xx * yy)


def keypoint_correlation(residuals: ResidualSample, scatter: Array, weight: Array) -> dict[str, Any]:
    """Robust correlation (K, K) of the residuals of two keypoints of an instance, over both axes.

    Args:
        residuals: Residuals of matched detections.
        scatter: Scatter matrices (K, 2, 2).
        weight: Robust weights (N, K).
    """
    factor = np.linalg.inv(np.linalg.cholesky(scatter))
    values = np.where(residuals.labelled[..., None], residuals.normalized, 0.0)
    white = np.einsum("kij,nkj->nki", factor, values) * np.sqrt(weight)[..., None]
    product = np.einsum("nki,nli->kl", white, white)
    # Sum of squares of each keypoint over the instances that have both keypoints.
    energy = np.einsum("nk,nl->kl", (white**2).sum(-1), residuals.labelled.astype(float))
    both = residuals.labelled.T.astype(float) @ residuals.labelled
    with np.errstate(invalid="ignore", divide="ignore"):
        matrix = np.where(both >= _FEW, product / np.sqrt(energy * energy.T), np.nan)
    upper = np.triu_indices(len(matrix), 1)
    pairs = [(float(matrix[k, j]), int(k), int(j)) for k, j in zip(*upper, strict=True) if both[k, j] >= _FEW]
    pairs.sort(key=lambda pair: -abs(pair[0]))
    known = [pair[0] for pair in pairs]
    partners = np.abs(np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix))
    best = [float(np.nanmax(row)) for row in partners if np.isfinite(row).any()]
    return {
        "matrix": matrix,
        "mean": float(np.mean(known)) if known else float("nan"),
        "best_partner": float(np.mean(best)) if best else float("nan"),
        "strongest": [{"pair": [k, j], "correlation": value} for value, k, j in pairs[:5]],
    }


def dependence(residuals: ResidualSample, scatter: Array, sigmas: Array, settings: AnalysisSettings) -> dict[str, Any]:
    """Scale of the residuals by bins of object scale, confidence, visibility and pyramid level.

    The scale is the median radius, divided by that of a unit Gaussian. It is given twice: ``normalized`` is relative to
    the scatter of each keypoint, in units of object scale, and ``pixels`` is in pixels.

    Args:
        residuals: Residuals of matched detections.
        scatter: Scatter matrices (K, 2, 2).
        sigmas: Keypoint sigmas (K,).
        settings: Settings of the analysis.
    """
    labelled = residuals.labelled
    radius = np.sqrt(_distances(residuals, scatter))
    pixels = residuals.radius * np.sqrt(residuals.area)[:, None] * 2 * sigmas
    wide = {"scale": np.sqrt(residuals.area), "confidence": residuals.confidence}
    columns = {name: np.broadcast_to(value[:, None], labelled.shape) for name, value in wide.items()}
    if residuals.visibility is not None:
        columns["visibility"] = residuals.visibility
    result = {}
    for name, values in columns.items():
        index, edges = equal_bins(values[labelled], settings.bins)
        result[name] = _spread_table(index, radius[labelled], pixels[labelled]) | {"edges": edges}
    levels, index = np.unique(residuals.level, return_inverse=True)
    index = np.broadcast_to(index[:, None], labelled.shape)[labelled]
    result["level"] = _spread_table(index, radius[labelled], pixels[labelled]) | {"edges": levels}
    return result


def _spread_table(index: Array, radius: Array, pixels: Array) -> dict[str, Any]:
    unit = np.sqrt(2 * np.log(2))  # median radius of a unit Gaussian in the plane
    groups = [np.flatnonzero(index == number) for number in range(int(index.max()) + 1)]
    table = {
        name: np.array([np.median(values[rows]) / unit if len(rows) else np.nan for rows in groups])
        for name, values in (("normalized", radius), ("pixels", pixels))
    }
    count = np.array([len(rows) for rows in groups])
    enough = count >= _FEW if (count >= _FEW).any() else count > 0
    ratios = {
        f"{name}_ratio": float(values[enough].max() / max(values[enough].min(), 1e-12))
        for name, values in table.items()
    }
    return {"count": count, **table, **ratios}


def shift(matched: ResidualSample, assigned: ResidualSample, settings: AnalysisSettings) -> dict[str, Any]:
    """Compare training with inference: effect of importance weights on the distribution and the effective samples.

    ``distance`` is the Kolmogorov distance between the radii |r| / (s kappa) of weighted assigned cells and of
    matched detections. ``effective`` is Kish's effective sample size over the number of cells.

    Args:
        matched: Residuals of matched detections.
        assigned: Residuals of assigned cells.
        settings: Settings of the analysis.
    """
    rows = []
    inference = np.sort(matched.radius[matched.labelled])
    own = assigned.radius[assigned.labelled]
    order = np.argsort(own)
    for alpha in settings.alphas:
        row: dict[str, float] = {"alpha": alpha}
        for name, scaled in (("", False), ("_scaled", True)):
            weight = np.maximum(assigned.confidence, 1e-6) ** alpha / (assigned.area if scaled else 1.0)
            row[f"effective{name}"] = float(weight.sum() ** 2 / np.square(weight).sum() / len(weight))
            spread = np.broadcast_to(weight[:, None], assigned.labelled.shape)[assigned.labelled][order]
            row[f"distance{name}"] = _distribution_gap(own[order], spread, inference)
        rows.append(row)
    grid = np.geomspace(0.02, 10, 61)
    return {
        "weights": rows,
        "radius": grid,
        "matched": np.searchsorted(inference, grid, side="right") / len(inference),
        "assigned": np.searchsorted(own[order], grid, side="right") / len(own),
        "confidence": {
            "matched": np.quantile(matched.confidence, [0.1, 0.5, 0.9]),
            "assigned": np.quantile(assigned.confidence, [0.1, 0.5, 0.9]),
        },
    }


def _distribution_gap(values: Array, weight: Array, other: Array) -> float:
    """Kolmogorov distance between sorted weighted values (n,) and another sorted sample (m,)."""
    cumulative = np.cumsum(weight) / weight.sum()
    at = np.concatenate([values, other])
    share = np.r_[0.0, cumulative][np.searchsorted(values, at, side="right")]
    return float(np.abs(share - np.searchsorted(other, at, side="right") / len(other)).max())


def downweighting(residuals: ResidualSample) -> dict[str, Any]:
    """Weight w(u) of a residual of radius u under each objective (appendix C), 1 at u = 0.

    Gaussian 1, OKS exp(-u^2 / 2), Student-t nu / (nu + u^2 / tau^2) with nu and tau fitted to the radii.
    """
    radius = residuals.radius[residuals.labelled]
    distributions = _Distributions.of(np.square(radius)[:, None], np.ones((len(radius), 1), dtype=bool))
    nu, tau = float(distributions.nu[0]), float(distributions.tau_t[0])
    grid = np.linspace(0, 5, 101)
    ignored = np.exp(-np.square(radius) / 2) < 0.1
    share, edges = np.histogram(np.minimum(radius, 5.0), bins=50, range=(0, 5))
    return {
        "radius": grid,
        "gaussian": np.ones_like(grid),
        "oks": np.exp(-np.square(grid) / 2),
        "student_t": nu / (nu + np.square(grid / tau)),
        "nu": nu,
        "tau": tau,
        "ignored_share": float(ignored.mean()),
        "ignored_energy": float(np.square(radius[ignored]).sum() / max(np.square(radius).sum(), 1e-12)),
        "histogram": {"edges": edges, "share": share / len(radius)},
    }


def similarity_levels(residuals: ResidualSample) -> dict[str, Any]:
    """Share of keypoints whose similarity exp(-u^2 / 2) is below each threshold."""
    similarity = np.exp(-np.square(residuals.radius[residuals.labelled]) / 2)
    thresholds = np.arange(0.1, 0.96, 0.05).round(2)
    return {"threshold": thresholds, "below": (similarity[:, None] < thresholds).mean(0)}


def equal_bins(values: Array, bins: int) -> tuple[Array, Array]:
    """Index (n,) of the bin of equal count of each value, and the edges (bins + 1,). Ties may leave a bin empty."""
    edges = np.quantile(values, np.linspace(0, 1, bins + 1))
    return np.searchsorted(edges[1:-1], values, side="right"), edges


def resampled_sums(image_ids: Array, values: Array, settings: AnalysisSettings) -> Array:
    """Sums (B, F) of values (N, F) under B bootstrap resamplings of images.

    Args:
        image_ids: Image ids (N,).
        values: Values (N, F) to sum.
        settings: Settings with the number of resamplings and their seed.
    """
    images, index = np.unique(image_ids, return_inverse=True)
    sums = np.zeros((len(images), values.shape[1]))
    np.add.at(sums, index, values)
    generator = np.random.default_rng(settings.seed)
    counts = generator.multinomial(len(images), np.full(len(images), 1 / len(images)), size=settings.bootstrap)
    return np.asarray(counts @ sums)


def _interval(estimate: float, draws: Array) -> list[float]:
    margin = 1.96 * float(draws.std(ddof=1)) if len(draws) > 1 else float("nan")
    return [estimate - margin, estimate + margin]
