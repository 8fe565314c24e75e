"""Rivals: a constant covariance per keypoint, test-time augmentation, and a Laplace approximation of the heads.

Each method returns covariances (N, K, 2, 2) in original pixels for the same detections of the frozen base model, so
that all methods are scored on the same residuals.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch

from halopose.calibration.calibrate import fit_gaussian
from halopose.calibration.calibrators import GaussianCalibration
from halopose.data.dataset import Dataset
from halopose.fitting.feature_cache import MatchStore
from halopose.hosts.base import Host
from halopose.matching.matched_poses import MatchedPoses
from halopose.poses import PoseDistributions
from halopose.types import Array, Progress
from halopose.uncertainty.context_features import ContextFeatures
from halopose.uncertainty.heads import ProbabilisticHeads


@dataclass(frozen=True)
class AugmentedPass:
    """One augmented pass: mirrored or not, zoomed about the middle, shifted by a share of the image."""

    mirror: bool
    zoom: float
    shift: tuple[float, float]


VIEWS = [
    AugmentedPass(mirror, zoom, shift)
    for mirror in (False, True)
    for zoom, shift in ((0.8, (0.0, 0.0)), (0.9, (0.03, 0.0)), (1.0, (0.0, 0.03)), (0.95, (-0.03, -0.03)))
]


def constant_in_pixels(matched: MatchedPoses) -> Array:
    """Second moments (K, 2, 2) of the residuals of true positives."""
    return _moments(matched.residual, matched.labelled)


def constant_per_size(matched: MatchedPoses) -> Array:
    """Second moments (K, 2, 2) of the residuals over the square root of the predicted box's area."""
    return _moments(matched.residual / np.sqrt(matched.box_area)[:, None, None], matched.labelled)


def _moments(residual: Array, labelled: Array) -> Array:
    outer = residual[..., :, None] * residual[..., None, :] * labelled[..., None, None]
    return outer.sum(0) / labelled.sum(0)[:, None, None]


def augmented(
    host: Host,
    dataset: Dataset,
    detections: PoseDistributions,
    imgsz: int,
    path: Path,
    step: Progress,
    views: Sequence[AugmentedPass] = VIEWS,
) -> Array:
    """Keypoints (V, N, K, 2) of every detection in every view, NaN where a view misses it; kept in a file."""
    if path.is_file():
        return np.asarray(np.load(path)["keypoints"])
    found = np.full((len(views), len(detections), detections.keypoint_count, 2), np.nan)
    assert detections.image_ids is not None
    for number, record in enumerate(dataset.records):
        rows = np.flatnonzero(detections.image_ids == record.image_id)
        if len(rows):
            image = record.pixels()
            for place, view in enumerate(views):
                boxes, keypoints = seen(host, image, view, imgsz)
                for row, match in closest(detections.boxes[rows], boxes):
                    found[place, rows[row]] = keypoints[match]
        step("augmented passes", number + 1, len(dataset))
    np.savez_compressed(path, keypoints=found)
    return found


@torch.inference_mode()
def seen(host: Host, image: Array, view: AugmentedPass | None, imgsz: int) -> tuple[Array, Array]:
    """Boxes (M, 4) and keypoints (M, K, 2) that the base finds in a view, or in the image itself."""
    warped, flip, offset = image, np.eye(2), np.zeros(2)
    if view is not None:
        warped, flip, offset = warp(image, view)
    batch, boxes = host.preprocess([warped], imgsz, rectangular=True)
    chosen = host.select(host.forward(batch), conf=0.01, iou=0.7)[0]
    chosen = host.to_original(chosen, boxes[0], (int(batch.shape[2]), int(batch.shape[3])))
    inverse, mirror = np.linalg.inv(flip), host.layout.mirror
    assert mirror is not None  # persons and runways have one
    keypoints = (chosen.keypoints.cpu().numpy() - offset) @ inverse.T
    corners = (chosen.boxes.cpu().numpy().reshape(-1, 2, 2) - offset) @ inverse.T
    corners = np.concatenate([corners.min(1), corners.max(1)], axis=1)
    return corners, keypoints[:, list(mirror)] if flip[0, 0] < 0 else keypoints


def warp(image: Array, view: AugmentedPass) -> tuple[Array, Array, Array]:
    """The view's picture, and the matrix (2, 2) and offset (2,) that take the image's pixels to its."""
    height, width = image.shape[:2]
    middle = np.array([width - 1, height - 1]) / 2
    flip = np.diag([-1.0 if view.mirror else 1.0, 1.0]) * view.zoom
    offset = middle - flip @ middle + np.array(view.shift) * [width, height]
    grey = (114, 114, 114)
    warped = cv2.warpAffine(image, np.c_[flip, offset], (width, height), flags=cv2.INTER_LINEAR, borderValue=grey)
    half = np.array([0.5, 0.5])  # keypoints count from the image's edge, warping from the first pixel's centre
    return warped, flip, offset + half - flip @ half


def closest(boxes: Array, others: Array) -> Iterator[tuple[int, int]]:
    """Pairs of boxes (N, 4), (M, 4) that overlap most, from an IoU of 0.5, each used once."""
    if not len(others):
        return
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    common = np.clip(high - low, 0, None).prod(-1)
    area, other = ((each[:, 2:] - each[:, :2]).prod(1) for each in (boxes, others))
    overlap = common / np.maximum(area[:, None] + other - common, 1e-9)
    while overlap.max() >= 0.5:
        row, match = np.unravel_index(overlap.argmax(), overlap.shape)
        yield int(row), int(match)
        overlap[row], overlap[:, match] = -1, -1


def spread(keypoints: Array, views: Array) -> Array:
    """Second moments (N, K, 2, 2) of the views (V, N, K, 2) about the base's own keypoints (N, K, 2).

    A detection that fewer than two views see again has none: NaN here, and the whole floor in ``with_floor``.
    """
    difference = views - keypoints
    seen_by = np.isfinite(difference[..., 0, 0]).sum(0)
    outer = np.nansum(difference[..., :, None] * difference[..., None, :], axis=0)
    moments = outer / np.maximum(seen_by, 1)[:, None, None, None]
    moments[seen_by < 2] = np.nan
    return np.asarray(moments)


def with_floor(moments: Array, floor: Array, share: float) -> Array:
    """Moments plus a share of a floor (N, K, 2, 2); where there are none, the whole floor."""
    return np.where(np.isfinite(moments), moments + share * floor, floor)


def best_share(build: Callable[[float], MatchedPoses]) -> float:
    """The share of the floor whose calibrated Gaussian has the lowest NLL on calibration images."""
    shares = np.geomspace(1e-3, 1.0, 13)
    return float(shares[int(np.argmin([_nll(build(float(share))) for share in shares]))])


def _nll(matched: MatchedPoses) -> float:
    calibration: GaussianCalibration = fit_gaussian(matched)
    distribution = calibration(torch.linalg.cholesky(torch.from_numpy(matched.covariance)))
    nll = -distribution.log_prob(torch.from_numpy(matched.residual)).numpy()
    return float(nll[matched.labelled].mean())


@torch.inference_mode()
def laplace(heads: ProbabilisticHeads, store: MatchStore, samples: int = 10, seed: int = 0) -> list[ProbabilisticHeads]:
    """Draw heads from the last-layer Laplace approximation of the posterior of their context head.

    The Hessian is the Gauss-Newton matrix of the Gaussian NLL. Each training cell adds the outer product of its last
    activations times the Fisher information of its raw parameters. Cells of one object count as one sample. The prior
    is a standard normal.

    Args:
        heads: Trained heads with context features.
        store: Feature cache of training images.
        samples: Number of draws.
        seed: Seed of the draws.
    """
    network = heads.context_head
    assert network is not None
    count, width, outputs = network.last.shape
    hessian = torch.eye(width * outputs, dtype=torch.float64).repeat(count, 1, 1)
    for cells in store.cells("assigned"):
        hidden = heads.by_level[cells.level].hidden_at(cells.windows.float(), cells.inside)
        strides = torch.full((len(cells),), float(heads.strides[cells.level]))
        context = ContextFeatures.of_columns(cells.columns)
        values = network.activations(network.enter(cells.level, hidden), context, strides)
        last = heads.by_level[cells.level].last
        raw = torch.nn.functional.linear(hidden, last.weight.flatten(1), last.bias).reshape(-1, count, outputs)
        information = fisher_information(raw + (values.transpose(0, 1) @ network.last).transpose(0, 1))
        _, place, size = torch.unique(
            torch.stack([cells.columns["image_id"], cells.columns["object"]]), dim=1, return_inverse=True,
            return_counts=True,
        )  # fmt: skip
        weight = cells.columns["labelled"].double() / size[place, None]
        for k in range(count):
            product = torch.einsum(
                "n,ni,nj,nab->iajb", weight[:, k], values[:, k].double(), values[:, k].double(), information[:, k]
            )
            hessian[k] += product.reshape(width * outputs, -1)
    factor = torch.linalg.inv(torch.linalg.cholesky(hessian))  # its transpose times noise has covariance H^-1
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(samples):
        noise = torch.randn((count, width * outputs, 1), generator=generator, dtype=torch.float64)
        drawn = copy.deepcopy(heads)
        assert drawn.context_head is not None
        drawn.context_head.last.data.add_((factor.mT @ noise).reshape(count, width, outputs).float())
        found.append(drawn)
    return found


def fisher_information(raw: torch.Tensor) -> torch.Tensor:
    """Fisher information (..., 3, 3) of a Gaussian in the raw parameters a, b, c (..., 3) of its Cholesky factor."""
    _, b, c = raw.double().unbind(-1)
    precision, zero, two = torch.exp(-2 * c), torch.zeros_like(b), torch.full_like(b, 2.0)
    rows = [[two + b * b * precision, -b * precision, zero], [-b * precision, precision, zero], [zero, zero, two]]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)
