"""Other out-of-distribution methods on the same detections, in fog and in usual weather.

Every method is a row of a table, with its threshold at 95 % of the calibration detections and its cost. The inputs are
detections in fog, in the weathers of training, in calibration scenes, and in training scenes with corrupted copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from halopose.boxes import box_area
from halopose.data.dataset import Dataset
from halopose.fitting.artifact import Artifact
from halopose.fitting.novelty_fitting import Rows, ledoit_wolf
from halopose.hosts.base import Host
from halopose.landing.world.scenes import TRAINING_WEATHERS
from halopose.studies.shift_study import auroc
from halopose.types import Array, Progress
from halopose.uncertainty.novelty import COMPONENTS, Novelty, combined_distance
from research.rivals import VIEWS, augmented, seen, spread
from research.tables import markdown

CONFIDENCES = (0.25, 0.7)
SETS = ("fog", *TRAINING_WEATHERS, "val")
TIMED = 10  # images
SOME = VIEWS[::2]  # zoomed and shifted, each unchanged and mirrored
KNOWN = 400  # calibration images, alternating weathers, for the thresholds of methods that need further predictions

Rule = Callable[[Rows], Array]  # a score (N,) for each detection, larger if farther from the training data


def wrong(rows: Rows) -> Array:
    """Which detections (N,) have a corner outside its 99 % ellipse or show no runway."""
    return rows.wrong > 0


def rival_table(artifact: Artifact, found: Mapping[str, Rows], views: Mapping[str, Array], passes: str) -> str:
    """Table of all methods, given the views (V, N, K, 2) of each set and their cost."""
    rows = []
    for name, rule in rules(artifact, found["train"]).items():
        began = time.process_time()
        rule(found["fog"])
        cost = 1e6 * (time.process_time() - began) / len(found["fog"].poses)
        rows.append([name, *cells({one: rule(found[one]) for one in SETS}, found), f"{cost:.0f}"])
    shown = seen_twice(found)
    for name, unit in {"box": box_size, "stated covariance": stated_size}.items():
        values = {one: relative_spread(shown[one], views[one], unit(shown[one])) for one in SETS}
        rows.append([f"spread over {len(SOME)} views, over the {name}", *cells(values, shown), passes])
    head = ["rule", *(f"{what} at {conf}" for conf in CONFIDENCES for what in ("AUROC", "kept, wrong"))]
    return markdown([*head, "microseconds of processor time a detection"], rows)


def cells(value: Mapping[str, Array], found: Mapping[str, Rows]) -> list[str]:
    """AUROC, kept share and wrong share at every confidence, at 5 % false alarms in calibration."""
    fog, score = found["fog"], {name: found[name].poses.scores for name in SETS}
    result = []
    for conf in CONFIDENCES:
        at = score["fog"] >= conf
        limit = np.quantile(value["val"][score["val"] >= conf], 0.95)
        kept = at & (value["fog"] <= limit)
        usual = np.concatenate([value[name][score[name] >= conf] for name in TRAINING_WEATHERS])
        area = auroc(np.r_[value["fog"][at], usual], np.r_[np.ones(at.sum()), np.zeros(len(usual))] > 0)
        result += [f"{area:.3f}", f"{kept.sum()}, {(wrong(fog) & kept).sum()}"]
    return result


def rules(artifact: Artifact, train: Rows) -> dict[str, Rule]:
    """Published methods on the same features, fitted on the same training images."""
    novelty = artifact.novelty
    assert novelty is not None
    usual = train.select(np.flatnonzero(train.clean & (train.poses.scores >= 0.25)))

    def of_components(*names: str) -> Rule:
        index = [COMPONENTS.index(name) for name in names]
        return lambda rows: combined_distance(unit(novelty, rows)[:, index]).numpy()

    return {
        "score alone": lambda rows: -rows.poses.scores,
        "stated covariance": lambda rows: np.linalg.det(rows.poses.covariance).max(1) / box_area(rows.poses.boxes) ** 2,
        "nearest neighbours of the window": neighbours(usual),
        "relative Mahalanobis of the window": relative(train, usual),
        "Mahalanobis of the window": of_components("window"),
        "Mahalanobis of the image": of_components("image"),
        "both distances": of_components("window", "image"),
        "reliability": of_components("unreliable"),
        "clean or corrupted": of_components("changed"),
        "all four: the gate": of_components(*COMPONENTS),
    }


def unit(novelty: Novelty, rows: Rows) -> torch.Tensor:
    """Standardised components (N, 4)."""
    level = rows.evidence.level
    return (novelty.components(rows.evidence) - novelty.centre[level]) / novelty.scale[level]


def _windows(rows: Rows) -> torch.Tensor:
    window = rows.evidence.window
    return window / window.norm(dim=1, keepdim=True).clamp(min=1e-12)


def neighbours(usual: Rows, count: int = 10) -> Rule:
    """Distance to the tenth nearest clean window of the level."""

    def signal(rows: Rows) -> Array:
        result = np.full(len(rows.poses), np.inf)
        for level in range(3):
            known = _windows(usual)[usual.evidence.level == level]
            at = (rows.evidence.level == level).numpy()
            if at.any() and len(known) >= count:
                distance = torch.cdist(_windows(rows)[torch.from_numpy(at)], known)
                result[at] = distance.kthvalue(count, dim=1).values.numpy()
        return result

    return signal


def relative(train: Rows, usual: Rows) -> Rule:
    """Mahalanobis distance to clean windows less that to all windows, corrupted ones included."""

    def fitted(rows: Rows, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        known = _windows(rows)[rows.evidence.level == level].double()
        return known.mean(0), torch.linalg.inv(ledoit_wolf(known))

    def square(vectors: torch.Tensor, distribution: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        away = vectors.double() - distribution[0]
        return ((away @ distribution[1]) * away).sum(1)

    distributions = {
        level: (fitted(usual, level), fitted(train, level))
        for level in range(3)
        if (usual.evidence.level == level).sum() > 20
    }

    def signal(rows: Rows) -> Array:
        result = np.full(len(rows.poses), np.inf)
        for level, (near, far) in distributions.items():
            at = rows.evidence.level == level
            vectors = _windows(rows)[at]
            result[at.numpy()] = (square(vectors, near) - square(vectors, far)).numpy()
        return result

    return signal


# --- test-time augmentation -------------------------------------------------------------------------------


def seen_twice(found: Mapping[str, Rows]) -> dict[str, Rows]:
    """Detections of every set above the lowest confidence of the table; a part of the calibration images."""
    some = found["val"].ids[:KNOWN]
    sets = {**found, "val": found["val"].of_images(lambda ids: np.isin(ids, some))}
    return {name: sets[name].select(np.flatnonzero(sets[name].poses.scores >= min(CONFIDENCES))) for name in SETS}


def seen_again(
    host: Host, data: Mapping[str, Dataset], found: Mapping[str, Rows], imgsz: int, work: Path, step: Progress
) -> dict[str, Array]:
    """Corners (V, N, K, 2) of these detections of every set in every view, NaN where a view has none."""
    shown = seen_twice(found)
    paths = {name: work / f"views-{name}-{len(SOME)}.npz" for name in SETS}
    return {
        name: augmented(host, data[name], shown[name].poses, imgsz, path, step, SOME) for name, path in paths.items()
    }


def relative_spread(rows: Rows, views: Array, size: Array) -> Array:
    """Largest root mean square distance (N,) of a corner in the views (V, N, K, 2) from the image's own, over a
    size (N, K).

    A view without a counterpart of the detection counts as an error of one box side (square root of the area).
    """
    own = rows.poses.keypoints
    lost = own + np.sqrt(box_area(rows.poses.boxes))[:, None, None] * [1.0, 0.0]
    moments = spread(own, np.where(np.isfinite(views), views, lost))
    return np.asarray((np.sqrt(np.trace(moments, axis1=2, axis2=3)) / size).max(1))


def box_size(rows: Rows) -> Array:
    """Box side (N, K), equal for all corners."""
    return np.broadcast_to(np.sqrt(box_area(rows.poses.boxes))[:, None], rows.labelled.shape)


def stated_size(rows: Rows) -> Array:
    """Stated root mean square distances (N, K)."""
    return np.sqrt(np.trace(rows.poses.covariance, axis1=2, axis2=3))


def passes_cost(host: Host, data: Dataset, imgsz: int) -> str:
    """Processor time of all views of an image, in words; the first image warms up."""
    images, spent = [record.pixels() for record in data.records[: TIMED + 1]], 0.0
    for number, image in enumerate(images):
        began = time.process_time()
        for view in SOME:
            seen(host, image, view, imgsz)
        spent += (time.process_time() - began) * (number > 0)
    return f"{1e6 * spent / (len(images) - 1):.0f} an image: {len(SOME)} predictions"
