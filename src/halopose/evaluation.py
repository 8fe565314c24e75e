"""The evaluation protocol end to end: match, calibrate without leakage, prune, measure.

In: predictions and ground truth of a data set. Out: one plain dictionary, the content of metrics.json.
Matches of several shards join to exactly the result of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from halopose import metrics
from halopose.calibration import GaussianCalibration, StudentTCalibration
from halopose.distributions import Bivariate, Gaussian, StudentT, scale_tril_from_covariance
from halopose.errors import HaloposeError
from halopose.matching import MAX_DETECTIONS, candidate_pairs, greedy_match, keypoint_similarity
from halopose.poses import Array, GroundTruth, PoseDistributions
from halopose.pruning import (
    GAMMA_KS,
    Scalarisation,
    ThresholdRule,
    localization_confidence,
    reliability_curve,
    select_threshold,
)
from halopose.statistics import AXES, Statistics, curves_of, summaries

REGIMES = ("uncalibrated", "gaussian", "student_t")
SCALAR_METRICS = ("ace", "ace_x", "ace_y", "ence", "ence_x", "ence_y", "nll", "akp")


@dataclass(frozen=True)
class Protocol:
    """Settings of an evaluation; the defaults are the paper's.

    area: the s^2 of the localization confidence, ``annotation`` as in the paper, or ``box``, the predicted
    box's area times ``box_area_factor``, which is all there is at inference. The similarity of a keypoint
    always takes the annotated area. scale_edges: areas that part the object scales. folds: how many parts
    the images are cut into, so that each is scored with a calibration that never saw it.
    """

    oks_threshold: float = 0.5
    max_detections: int = MAX_DETECTIONS
    area: Literal["annotation", "box"] = "annotation"
    box_area_factor: float = 0.53
    scalarisation: Scalarisation = "trace"
    threshold_rule: ThresholdRule = "youden"
    gamma_ks: float = GAMMA_KS
    covariance: Literal["moment", "paper"] = "moment"
    scale_edges: tuple[float, ...] = (32.0**2, 96.0**2)
    folds: int = 5
    bootstrap: int = 0
    seed: int = 0


@dataclass(frozen=True)
class MatchedPoses:
    """M true positives of K keypoints: residuals (M, K, 2) and the predicted law of each, in image order."""

    image_ids: Array
    objects: Array
    residual: Array
    labelled: Array
    covariance: Array
    scale: Array
    visibility: Array
    area: Array
    box_area: Array
    dof: Array | None
    names: tuple[str, ...]
    sigmas: Array

    def __len__(self) -> int:
        return len(self.area)

    @classmethod
    def concatenate(cls, parts: Sequence[MatchedPoses]) -> MatchedPoses:
        """Join shards that hold different images; the order of the shards does not matter."""
        seen: set[int] = set()
        for part in parts:
            images = set(part.image_ids.tolist())
            if seen & images:
                raise HaloposeError("two shards hold the same image: split the data by image")
            seen |= images
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in cls._columns()}
        return replace(parts[0], **joined).select(np.lexsort((joined["objects"], joined["image_ids"])))

    def select(self, index: Array) -> MatchedPoses:
        """The true positives at the given indices."""
        return replace(self, **{name: getattr(self, name)[index] for name in self._columns()})

    @classmethod
    def _columns(cls) -> list[str]:
        """Fields with a row per true positive."""
        return [field.name for field in fields(cls) if field.name not in ("dof", "names", "sigmas")]

    def confidence_area(self, protocol: Protocol) -> Array:
        """s^2 (M,) that the localization confidence takes."""
        return self.area if protocol.area == "annotation" else self.box_area * protocol.box_area_factor


def match_poses(
    predictions: PoseDistributions, truth: GroundTruth, protocol: Protocol | None = None
) -> MatchedPoses:
    """Match detections to objects as COCO does and keep the true positives."""
    protocol = protocol or Protocol()
    if predictions.keypoint_count != truth.keypoint_count:
        raise HaloposeError(
            f"predictions have {predictions.keypoint_count} keypoints, ground truth {truth.keypoint_count}"
        )
    pairs = candidate_pairs(predictions, truth, protocol.max_detections)
    thresholds = np.array([protocol.oks_threshold])
    taken = greedy_match(pairs, len(predictions), truth.ignore, truth.crowd, thresholds)[0]
    detections = np.flatnonzero((taken >= 0) & ~truth.ignore[taken])
    objects = taken[detections]
    order = np.lexsort((objects, truth.image_ids[objects]))
    detections, objects = detections[order], objects[order]
    sides = predictions.boxes[detections, 2:] - predictions.boxes[detections, :2]
    visibility = predictions.visibility
    return MatchedPoses(
        image_ids=truth.image_ids[objects],
        objects=objects,
        residual=truth.keypoints[objects] - predictions.keypoints[detections],
        labelled=truth.labelled[objects],
        covariance=predictions.covariance[detections],
        scale=predictions.scale[detections],
        visibility=np.ones(truth.labelled[objects].shape) if visibility is None else visibility[detections],
        area=truth.area[objects],
        box_area=np.maximum(sides.prod(1), 1.0),
        dof=predictions.dof,
        names=truth.names,
        sigmas=truth.sigmas,
    )


@dataclass(frozen=True)
class Regimes:
    """The laws to compare, each over (M, K), the pruning mask (M, K), and where they came from."""

    laws: dict[str, Bivariate]
    covariance: Array  # the second-moment covariance that pruning looks at
    thresholds: Array  # (M,), one per instance as folds differ
    source: str


def given_law(matched: MatchedPoses, covariance: Literal["moment", "paper"] = "moment") -> Bivariate:
    """The predictions' own law over (M, K): Student-t if they have degrees of freedom, else Gaussian."""
    scale_tril = scale_tril_from_covariance(torch.from_numpy(matched.scale))
    if matched.dof is None:
        return Gaussian(scale_tril)
    moment = torch.from_numpy(matched.covariance) if covariance == "moment" else None
    return StudentT(scale_tril, torch.from_numpy(matched.dof), moment)


def fit_gaussian(matched: MatchedPoses, min_samples: float = 50.0) -> GaussianCalibration:
    """Calibrate the predicted covariances on true positives."""
    calibration = GaussianCalibration(matched.labelled.shape[1], min_samples=min_samples)
    calibration.fit(*_residuals(matched, matched.covariance), torch.from_numpy(matched.labelled))
    return calibration


def fit_student(
    matched: MatchedPoses, covariance: Literal["moment", "paper"] = "moment", min_samples: float = 50.0
) -> StudentTCalibration:
    """Calibrate scale and tails of the predicted scale matrices on true positives."""
    calibration = StudentTCalibration(
        matched.labelled.shape[1], min_samples=min_samples, covariance=covariance
    )
    calibration.fit(*_residuals(matched, matched.scale), torch.from_numpy(matched.labelled))
    return calibration


def _residuals(matched: MatchedPoses, dispersion: Array) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(matched.residual), scale_tril_from_covariance(torch.from_numpy(dispersion))


def pruning_threshold(matched: MatchedPoses, covariance: Array, protocol: Protocol) -> float:
    """Threshold on the localization confidence, chosen on these true positives."""
    confidence = localization_confidence(
        covariance, matched.confidence_area(protocol), matched.sigmas, protocol.scalarisation
    )
    similarity = keypoint_similarity(matched.residual, matched.area, matched.sigmas)
    labelled = matched.labelled
    return select_threshold(
        confidence[labelled], similarity[labelled] >= protocol.gamma_ks, protocol.threshold_rule
    )


@dataclass(frozen=True)
class Given:
    """What was fitted on other data already, and need not be fitted again."""

    gaussian: GaussianCalibration | None = None
    student: StudentTCalibration | None = None
    threshold: float | None = None

    @property
    def names(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


@dataclass(frozen=True)
class Fitted:
    """What held-out data yield: both calibrations and the pruning threshold."""

    gaussian: GaussianCalibration
    student: StudentTCalibration
    threshold: float

    @classmethod
    def on(cls, matched: MatchedPoses, protocol: Protocol, given: Given | None = None) -> Fitted:
        """Calibrate on true positives, then choose the threshold on the calibrated covariances."""
        given = given or Given()
        gaussian = given.gaussian or fit_gaussian(matched)
        student = given.student or fit_student(matched, protocol.covariance)
        threshold = given.threshold
        if threshold is None:
            law = gaussian(scale_tril_from_covariance(torch.from_numpy(matched.covariance)))
            threshold = pruning_threshold(matched, law.covariance.numpy(), protocol)
        return cls(gaussian, student, threshold)

    def regimes(self, matched: MatchedPoses) -> Regimes:
        """The three regimes of other true positives."""
        law = self.gaussian(scale_tril_from_covariance(torch.from_numpy(matched.covariance)))
        student = self.student(scale_tril_from_covariance(torch.from_numpy(matched.scale)))
        return Regimes(
            laws={
                "uncalibrated": given_law(matched, self.student.covariance),
                "gaussian": law,
                "student_t": student,
            },
            covariance=law.covariance.numpy(),
            thresholds=np.full(len(matched), self.threshold),
            source="",
        )


def cross_fitted(matched: MatchedPoses, protocol: Protocol, given: Given | None = None) -> Regimes:
    """The three regimes, each image under what was fitted on the other folds of images.

    What is given was fitted on other data and takes the place of what would be fitted.
    """
    names = given.names if given else []
    everything = len(names) == len(fields(Given))
    fold = np.zeros(len(matched)) if everything else image_folds(matched.image_ids, protocol.folds)
    parts: list[Regimes] = []
    indices: list[Array] = []
    for number in np.unique(fold):
        fitted = Fitted.on(matched.select(np.flatnonzero(fold != number)), protocol, given)
        indices.append(np.flatnonzero(fold == number))
        parts.append(fitted.regimes(matched.select(indices[-1])))
    back = np.argsort(np.concatenate(indices))
    folds = f"{len(parts)} folds of images, each scored with what was fitted on the others"
    return Regimes(
        laws={name: _join([part.laws[name] for part in parts], back) for name in REGIMES},
        covariance=np.concatenate([part.covariance for part in parts])[back],
        thresholds=np.concatenate([part.thresholds for part in parts])[back],
        source="; ".join([f"given: {', '.join(names)}"] * bool(names) + [folds] * (not everything)),
    )


def hashed_order(images: Array) -> Array:
    """Distinct image ids (I,) in an order that has nothing to do with their values."""
    images = np.unique(images)
    with np.errstate(over="ignore"):
        mixed = images.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(images[np.argsort(mixed ^ (mixed >> np.uint64(32)), kind="stable")])


def image_folds(image_ids: Array, folds: int) -> Array:
    """Fold (N,) of each image id: the distinct ids in hashed order, dealt out in turn."""
    order = hashed_order(image_ids)
    if len(order) < 2:
        raise HaloposeError("calibration and scoring need different images: give at least two with matches")
    by_id = np.argsort(order)
    return np.asarray(by_id[np.searchsorted(order, image_ids, sorter=by_id)] % folds)


def _join(laws: list[Bivariate], back: Array) -> Bivariate:
    index = torch.from_numpy(back)
    scale_tril = torch.cat([law.scale_tril for law in laws])[index]
    if not isinstance(laws[0], StudentT):
        return Gaussian(scale_tril)
    students = [law for law in laws if isinstance(law, StudentT)]
    dof = torch.cat([law.dof.expand(law.scale_tril.shape[:-2]) for law in students])[index]
    moments = [law.moment for law in students if law.moment is not None]
    return StudentT(scale_tril, dof, torch.cat(moments)[index] if moments else None)


def evaluate(
    matched: MatchedPoses,
    regimes: Regimes | None = None,
    protocol: Protocol | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """All metrics of all regimes, overall, per keypoint and per scale, before and after pruning."""
    protocol = protocol or Protocol()
    if not len(matched) or not matched.labelled.any():
        raise HaloposeError(
            f"no detection matches an annotated object at OKS {protocol.oks_threshold}: check that "
            "predictions and ground truth use the same images, pixels and keypoints"
        )
    regimes = regimes or cross_fitted(matched, protocol)
    frame = _Frame.of(matched, regimes, protocol)
    kept = frame.kept
    everything = {name: frame.statistics(matched, law, protocol) for name, law in regimes.laws.items()}
    pruned = {name: statistics.take(kept) for name, statistics in everything.items()}
    similarity = next(iter(everything.values())).similarity
    akp_random = metrics.random_keypoint_precision(similarity, seed=protocol.seed)
    visibility = matched.visibility[matched.labelled]
    result: dict[str, Any] = {
        "settings": asdict(protocol),
        "given_family": "gaussian" if matched.dof is None else "student-t",
        "calibration": {"source": regimes.source, **_parameters(regimes)},
        "images": int(frame.image_count),
        "matched_instances": len(matched),
        "keypoints": len(similarity),
        "keypoint_names": list(matched.names),
        "scales": frame.scale_table,
        "akp_random": akp_random,
        "akp_visibility": metrics.average_keypoint_precision(visibility, similarity),
    }
    for name, statistics in everything.items():
        result[name] = _blocks(statistics, frame.keypoint, frame.scale, matched.names, frame.scale_names)
    result["akp_skill"] = metrics.skill(result["gaussian"]["akp"], akp_random)
    threshold = float(np.mean(regimes.thresholds))
    result["pruned"] = {
        "kept_fraction": float(kept.mean()),
        "threshold": threshold,
        **{
            name: _blocks(
                statistics, frame.keypoint[kept], frame.scale[kept], matched.names, frame.scale_names
            )
            for name, statistics in pruned.items()
        },
    }
    result["pruning_curve"] = _pruning_curve(everything["gaussian"], protocol)
    result["cells"] = _cells(everything, frame, matched)
    result["curves"] = {
        name: curves_of(statistics, frame.keypoint, matched.names) for name, statistics in everything.items()
    }
    result["curves_pruned"] = {
        name: curves_of(statistics, frame.keypoint[kept], ()) for name, statistics in pruned.items()
    }
    if protocol.bootstrap:
        _add_intervals(result, everything, pruned, frame, protocol, visibility, progress)
    return result


@dataclass(frozen=True)
class _Frame:
    """Where each evaluated keypoint belongs (n,): keypoint, scale, image, kept or pruned."""

    labelled: Array
    keypoint: Array
    scale: Array
    image: Array
    image_count: int
    kept: Array
    scale_table: list[dict[str, Any]]

    @property
    def scale_names(self) -> list[str]:
        return [entry["name"] for entry in self.scale_table]

    @classmethod
    def of(cls, matched: MatchedPoses, regimes: Regimes, protocol: Protocol) -> _Frame:
        instance, keypoint = np.nonzero(matched.labelled)
        images, image = np.unique(matched.image_ids, return_inverse=True)
        edges = np.asarray(protocol.scale_edges, dtype=float)
        scale = np.searchsorted(edges, matched.area, side="left")
        confidence = localization_confidence(
            regimes.covariance, matched.confidence_area(protocol), matched.sigmas, protocol.scalarisation
        )
        bounds = [0.0, *edges.tolist(), float("inf")]
        table = [
            {"name": name, "low": bounds[i], "high": bounds[i + 1], "instances": int((scale == i).sum())}
            for i, name in enumerate(_scale_names(len(bounds) - 1))
        ]
        return cls(
            labelled=matched.labelled,
            keypoint=keypoint,
            scale=scale[instance],
            image=image[instance],
            image_count=len(images),
            kept=(confidence >= regimes.thresholds[:, None])[matched.labelled],
            scale_table=table,
        )

    def statistics(self, matched: MatchedPoses, law: Bivariate, protocol: Protocol) -> Statistics:
        confidence = localization_confidence(
            law.covariance.numpy(), matched.confidence_area(protocol), matched.sigmas, protocol.scalarisation
        )
        similarity = keypoint_similarity(matched.residual, matched.area, matched.sigmas)
        return Statistics.of(law, matched.residual, self.labelled, confidence, similarity)


def _scale_names(count: int) -> list[str]:
    known = {2: ["small", "large"], 3: ["small", "medium", "large"]}
    return known.get(count, [f"scale {i + 1}" for i in range(count)])


def _blocks(
    statistics: Statistics, keypoint: Array, scale: Array, names: Sequence[str], scales: Sequence[str]
) -> dict[str, Any]:
    """Scalar metrics overall, per keypoint and per scale."""
    whole = summaries(statistics, np.zeros(len(keypoint), dtype=np.int64), 1)[0]
    return {
        **whole,
        "per_keypoint": dict(zip(names, summaries(statistics, keypoint, len(names)), strict=True)),
        "per_scale": dict(zip(scales, summaries(statistics, scale, len(scales)), strict=True)),
    }


def _parameters(regimes: Regimes) -> dict[str, Any]:
    """Median calibration parameters by keypoint, for the reader of the report."""
    given, gaussian, student = (regimes.laws[name] for name in REGIMES)
    tau = gaussian.scale_tril[..., 0, 0] / torch.diagonal(given.covariance, dim1=-2, dim2=-1)[..., 0].sqrt()
    result: dict[str, Any] = {"tau": tau.median(0).values.tolist()}
    if isinstance(student, StudentT):
        result["nu"] = student.dof.expand(student.scale_tril.shape[:-2]).median(0).values.tolist()
        result["tau_t"] = (
            (student.scale_tril[..., 0, 0] / given.scale_tril[..., 0, 0]).median(0).values.tolist()
        )
    return result


def _pruning_curve(statistics: Statistics, protocol: Protocol) -> dict[str, Any]:
    """Reliability and NLL of the keypoints kept, by the share kept."""
    correct = statistics.similarity >= protocol.gamma_ks
    curve = reliability_curve(statistics.confidence, correct)
    running = np.cumsum(statistics.nll[statistics.by_confidence]) / np.arange(1, len(correct) + 1)
    ranks = np.round(curve.kept * len(correct)).astype(np.int64) - 1
    return {
        "kept": curve.kept,
        "reliability": curve.reliability,
        "threshold": curve.threshold,
        "nll": running[ranks],
    }


def _cells(everything: dict[str, Statistics], frame: _Frame, matched: MatchedPoses) -> dict[str, Any]:
    """Coverage at 50, 90 and 95 % of every keypoint at every scale, (K, S) each."""
    scales = len(frame.scale_table)
    shape = (len(matched.names), scales)
    cell = frame.keypoint * scales + frame.scale
    result: dict[str, Any] = {"count": np.bincount(cell, minlength=shape[0] * scales).reshape(shape)}
    for name, statistics in everything.items():
        curves = metrics.coverage_of_levels(statistics.level["joint"], None, cell, shape[0] * scales)
        result[name] = {str(level): curves[:, level - 1].reshape(shape) for level in (50, 90, 95)}
    return result


def _add_intervals(
    result: dict[str, Any],
    everything: dict[str, Statistics],
    pruned: dict[str, Statistics],
    frame: _Frame,
    protocol: Protocol,
    visibility: Array,
    progress: Callable[[int, int], None] | None,
) -> None:
    """95 % bootstrap intervals over images, at ``interval`` of every block."""
    generator = np.random.default_rng(protocol.seed)
    similarity = next(iter(everything.values())).similarity
    draws: dict[tuple[str, str], list[dict[str, float]]] = {}
    extra: dict[str, list[float]] = {"akp_visibility": [], "akp_random": [], "akp_skill": []}
    order = np.argsort(-visibility, kind="stable")
    for round_number in range(protocol.bootstrap):
        picks = generator.integers(frame.image_count, size=frame.image_count)
        weight = np.bincount(picks, minlength=frame.image_count)[frame.image]
        for name in everything:
            draws.setdefault(("", name), []).append(everything[name].resampled(weight))
            draws.setdefault(("pruned", name), []).append(pruned[name].resampled(weight[frame.kept]))
        chance = metrics.random_keypoint_precision(similarity, weight, rounds=1, seed=round_number)
        extra["akp_random"].append(chance)
        extra["akp_skill"].append(metrics.skill(draws["", "gaussian"][-1]["akp"], chance))
        extra["akp_visibility"].append(
            metrics.average_keypoint_precision(order, similarity[order], weight[order], presorted=True)
        )
        if progress:
            progress(round_number + 1, protocol.bootstrap)
    for (part, name), values in draws.items():
        block = result[part][name] if part else result[name]
        block["interval"] = {
            key: np.percentile([value[key] for value in values], [2.5, 97.5]).tolist()
            for key in SCALAR_METRICS
        }
    result["interval"] = {key: np.percentile(value, [2.5, 97.5]).tolist() for key, value in extra.items()}


__all__ = [
    "AXES",
    "REGIMES",
    "Fitted",
    "Given",
    "MatchedPoses",
    "Protocol",
    "Regimes",
    "cross_fitted",
    "evaluate",
    "fit_gaussian",
    "fit_student",
    "given_law",
    "hashed_order",
    "image_folds",
    "match_poses",
    "pruning_threshold",
]
