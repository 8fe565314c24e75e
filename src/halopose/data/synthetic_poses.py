"""Synthetic poses with a known true distribution, for tests, benchmarks and trying out the protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halopose.keypoints import COCO_NAMES, COCO_SIGMAS
from halopose.poses import PoseDistributions
from halopose.types import Array
from halopose.uncertainty.distributions import Gaussian, StudentT, scale_tril_from_raw

# A standing person in a unit box, x to the right and y down.
TEMPLATE = np.array(
    [
        [0.50, 0.10], [0.55, 0.08], [0.45, 0.08], [0.61, 0.10], [0.39, 0.10], [0.70, 0.24],
        [0.30, 0.24], [0.80, 0.39], [0.20, 0.39], [0.84, 0.52], [0.16, 0.52], [0.62, 0.54],
        [0.38, 0.54], [0.64, 0.74], [0.36, 0.74], [0.65, 0.95], [0.35, 0.95],
    ]
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """Settings of a synthetic dataset.

    Attributes:
        dof: Degrees of freedom of the residuals, None for Gaussian.
        overconfidence: True standard deviation divided by the reported one.
        ankle_overconfidence: Further factor for ankles of small persons.
    """

    images: int = 600
    persons: int = 1500
    detections_per_image: int = 8
    dof: float | None = 4.0
    overconfidence: float = 1.25
    ankle_overconfidence: float = 1.5
    seed: int = 0


def synthesize(world: World | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """COCO ground truth and COCO results with covariances."""
    world = world or World()
    rng = np.random.default_rng(world.seed)
    image_ids = np.sort(rng.integers(world.images, size=world.persons)) + 1
    keypoints, labelled, area, boxes = _persons(rng, world.persons)
    true_tril = _dispersions(rng, area)
    predictions = _detections(rng, world, image_ids, keypoints, true_tril, area)
    truth = {
        "images": [{"id": i + 1, "width": 1280, "height": 960} for i in range(world.images)],
        "categories": [{"id": 1, "name": "person", "keypoints": list(COCO_NAMES)}],
        "annotations": _annotations(image_ids, keypoints, labelled, area, boxes),
    }
    return truth, predictions.to_json()


def _persons(rng: np.random.Generator, count: int) -> tuple[Array, Array, Array, Array]:
    height = np.exp(rng.uniform(np.log(40), np.log(700), count))
    size = np.stack([height * rng.uniform(0.35, 0.6, count), height], axis=1)
    corner = rng.uniform(0, 1, (count, 2)) * np.maximum([1280, 960] - size, 1)
    pose = TEMPLATE + rng.normal(0, 0.03, (count, 17, 2))
    keypoints = corner[:, None] + pose * size[:, None]
    labelled = rng.random((count, 17)) < rng.uniform(0.35, 1.0, (count, 1))
    labelled[rng.random(count) < 0.05] = False
    return keypoints, labelled, 0.53 * size.prod(1), np.concatenate([corner, size], axis=1)


def _dispersions(rng: np.random.Generator, area: Array) -> Array:
    """Strongly heteroscedastic factors (M, 17, 2, 2): sizes, aspects and directions all vary."""
    raw = rng.normal(0, 1, (len(area), 17, 3)) * [0.5, 0.6, 0.5] + rng.normal(0, 0.4, (len(area), 1, 3))
    factors = scale_tril_from_raw(torch.from_numpy(raw)).numpy()
    return np.asarray(factors * (0.35 * np.sqrt(area)[:, None] * COCO_SIGMAS)[..., None, None])


def _detections(
    rng: np.random.Generator, world: World, image_ids: Array, keypoints: Array, true_tril: Array, area: Array
) -> PoseDistributions:
    generator = torch.Generator().manual_seed(world.seed)
    factors = torch.from_numpy(true_tril)
    distribution: Gaussian | StudentT = Gaussian(factors)
    if world.dof is not None:
        distribution = StudentT(factors, torch.full((17,), world.dof, dtype=torch.float64))
    found = keypoints - distribution.sample(1, generator)[0].numpy()
    spread = np.sqrt(np.square(true_tril).sum((-1, -2)))
    covariance = factors @ factors.mT
    if isinstance(distribution, StudentT):
        covariance = distribution.covariance if distribution.dof[0] > 2 else covariance
    flaw = np.full(keypoints.shape[:2], world.overconfidence)
    flaw[(area < 96**2)[:, None] & (np.arange(17) >= 15)] *= world.ankle_overconfidence
    covariance = covariance / torch.from_numpy(flaw**2)[..., None, None]
    clutter = _clutter(rng, world, image_ids)
    every = np.r_[np.arange(len(found)), clutter]
    shift = np.zeros((len(every), 1, 2))
    shift[len(found) :] = rng.normal(0, 1, (len(clutter), 1, 2)) * np.sqrt(area[clutter])[:, None, None]
    points = found[every] + shift
    relative = spread / (np.sqrt(area)[:, None] * COCO_SIGMAS)
    visibility = 1 / (1 + relative[every] * np.exp(rng.normal(0, 0.7, (len(every), 17))))
    scores = np.r_[rng.beta(6, 2, len(found)), rng.beta(1, 6, len(clutter))]
    return PoseDistributions(
        boxes=np.concatenate([points.min(1), points.max(1)], axis=1),
        scores=scores,
        keypoints=points,
        covariance=covariance.numpy()[every],
        scale=covariance.numpy()[every],
        visibility=visibility,
        class_ids=np.ones(len(every), dtype=np.int64),
        image_ids=image_ids[every],
    )


def _clutter(rng: np.random.Generator, world: World, image_ids: Array) -> Array:
    """Choose persons to copy as displaced false detections, up to the number of detections per image."""
    images, counts = np.unique(image_ids, return_counts=True)
    missing = np.maximum(world.detections_per_image - counts, 0)
    first = np.searchsorted(image_ids, images)
    chosen = np.repeat(first, missing) + rng.integers(0, np.repeat(counts, missing))
    return np.asarray(chosen)


def _annotations(
    image_ids: Array, keypoints: Array, labelled: Array, area: Array, boxes: Array
) -> list[dict[str, Any]]:
    flags = np.where(labelled, 2, 0)[..., None]
    triples = np.concatenate([np.where(labelled[..., None], keypoints, 0), flags], axis=2)
    return [
        {
            "id": i + 1,
            "image_id": int(image_ids[i]),
            "category_id": 1,
            "keypoints": triples[i].reshape(-1).tolist(),
            "num_keypoints": int(labelled[i].sum()),
            "area": float(area[i]),
            "bbox": boxes[i].tolist(),
            "iscrowd": 0,
        }
        for i in range(len(area))
    ]
