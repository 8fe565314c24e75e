"""More that one pass of the base tells about a detection, from outside the window around its cell.

Before overlaps are suppressed several cells claim the same object: how far apart they place a keypoint, and how
far from the cell that was kept, is the disagreement of an ensemble that cost nothing. And the maps hold features
where the keypoints were predicted, not only around the cell. Pixels of the input throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from halopose.arrays import Values, alike, at_least, joined, largest, library_of, turned, zeros_like

CANDIDATES = 512  # best cells of an image among which claims are sought
MAX_OVERLAPS = 16  # best cells that count for one object; assigners train about ten
OVERLAP = 0.6  # IoU from which a box claims the same object
FEW = 64  # cells up to which numpy beats torch (``make bench`` needs both)


@dataclass(frozen=True)
class CellBoxes:
    """What cells (B, n) of a model say before overlaps are suppressed; of an array of one image's cells an array.

    boxes: (B, n, 4), x1 y1 x2 y2. points: (B, n, 2K or 3K), the x of all keypoints, then their y, then their
    visibility, if the model has any. rows: both, one after the other.
    """

    boxes: Callable[[Values], Values]
    points: Callable[[Values], Values]
    rows: Callable[[Values], Values]


@dataclass(frozen=True)
class Candidates:
    """Cells among which claims are sought: scores (B, n), none below zero, and boxes (B, n, 4).

    points: those of the cells at places (B, m) among them, as ``CellBoxes`` gives them.
    """

    scores: Values
    boxes: Values
    points: Callable[[Values], Values]


@dataclass(frozen=True)
class ContextFeatures:
    """Of N cells with K keypoints: tensors, or arrays where a host found few; features always as a tensor.

    keypoints (N, K, 2), box (N, 4), score (N,) and visibility (N, K) of the cell itself, zero where a model has
    none; over the cells that claim its object, weighted by score: offset (N, K, 2), their mean minus its own
    keypoint, moment (N, K, 3), xx xy yy about that mean, seen (N, K), their mean visibility, mass (N,), the sum of
    weights; features (N, K, C): the maps of all levels at the keypoints; extent (N, 2): width and height.
    """

    keypoints: Tensor
    box: Tensor
    score: Tensor
    visibility: Tensor
    offset: Tensor
    moment: Tensor
    seen: Tensor
    mass: Tensor
    features: Tensor
    extent: Tensor

    def select(self, index: Tensor) -> ContextFeatures:
        """Those of some cells."""
        values = [getattr(self, field.name) for field in fields(self)]
        return ContextFeatures(*(value[alike(index, value)] for value in values))

    def columns(self) -> dict[str, Tensor]:
        """As a store keeps them."""
        return {
            f"signal.{field.name}": value.half() if field.name == "features" else value
            for field in fields(self)
            for value in [torch.as_tensor(getattr(self, field.name))]
        }

    @classmethod
    def of_columns(cls, columns: dict[str, Tensor], device: torch.device | str = "cpu") -> ContextFeatures:
        """As a store gave them."""
        return cls(**{field.name: columns[f"signal.{field.name}"].to(device).float() for field in fields(cls)})


def pad_by_image(image: Tensor, cell: Tensor, images: int) -> tuple[Tensor, Tensor | None]:
    """Cells (N,) of images (N,) as (B, M), filled up with cell 0, and the place (N,) of each among B * M.

    None where that is the order they have.
    """
    if images == 1 and len(cell):
        return cell[None], None
    counts = torch.bincount(image, minlength=images)
    order = image.argsort(stable=True)
    rank = torch.empty_like(image)
    rank[order] = torch.arange(len(image), device=image.device) - (counts.cumsum(0) - counts)[image[order]]
    most = max(1, int(counts.max()))
    place = image * most + rank
    return cell.new_zeros(images * most).index_put((place,), cell).reshape(images, most), place


def context_features_at(
    maps: Sequence[Tensor],
    strides: Sequence[int],
    best: Candidates,
    own: tuple[Values, Values, Values],
    keypoints: int,
    features: Tensor | None = None,
) -> ContextFeatures:
    """Signals of M cells an image, image by image: N = B * M.

    maps (B, C, H, W) by level; own: scores (B, M), boxes (B, M, 4) and points of the M cells, as ``CellBoxes`` gives
    them. features (N, K, C): in place of those found in the maps.
    """
    score, boxes, mine = own
    count, width, end = int(mine.shape[1]), int(mine.shape[2]), 2 * keypoints
    box, mine = boxes.reshape(-1, 4), mine.reshape(-1, width)
    overlaps = min(MAX_OVERLAPS, int(best.boxes.shape[1]))
    weight, place = largest(overlapping_boxes(boxes, best.boxes) * best.scores[:, None], overlaps)
    mass = weight.sum(2)
    share = (weight / at_least(mass, 1e-9)[..., None]).reshape(-1, 1, overlaps)
    overlapping = best.points(place.reshape(-1, count * overlaps)).reshape(-1, overlaps, width)
    apart = overlapping[..., :end] - mine[:, None, :end]
    mean = share @ apart  # (N, 1, 2K)
    about = apart - mean
    x, y = about[..., :keypoints], about[..., keypoints:]
    moment = share @ joined([x * x, x * y, y * y], 2)
    points = turned(mine[:, :end].reshape(-1, 2, keypoints))
    if width > end:
        visibility, seen = mine[:, end:], (share @ overlapping[..., end:])[:, 0]
    else:
        visibility = seen = zeros_like(points[..., 0])
    if features is None:
        features = features_at(maps, strides, points.reshape(-1, count, keypoints, 2))
    return ContextFeatures(
        keypoints=points,
        box=box,
        score=score.reshape(-1),
        visibility=visibility,
        offset=turned(mean.reshape(-1, 2, keypoints)),
        moment=turned(moment.reshape(-1, 3, keypoints)),
        seen=seen,
        mass=mass.reshape(-1),
        features=features,
        extent=_extent(maps[0], strides[0], box) + 0 * box[:, :2],
    )


def _extent(maps: Tensor, stride: int, like: Values) -> Values:
    """Width and height (2,) of the input that maps (B, C, H, W) are of."""
    height, width = maps.shape[2:]
    if isinstance(like, np.ndarray):
        return _like((width * stride, height * stride), like)
    # Sizes may be traced, and are then no plain numbers.
    return (torch.stack([torch.as_tensor(width), torch.as_tensor(height)]) * stride).to(like)


def _like(numbers: tuple[float, float], values: Values) -> Values:
    """Two numbers as an array or tensor (2,) of the values' kind."""
    return np.array(numbers, values.dtype) if isinstance(values, np.ndarray) else values.new_tensor(numbers)


def overlapping_boxes(boxes: Values, others: Values, least: float = OVERLAP) -> Values:
    """Which of boxes (B, m, 4) and others (B, n, 4) have an IoU of ``least`` or more: (B, m, n).

    Products of two numbers instead of reductions: a runtime multiplies faster.
    """
    library = library_of(boxes)
    boxes, others = turned(boxes)[..., None], turned(others)[:, :, None]
    sides = library.minimum(boxes[:, 2:], others[:, 2:]) - library.maximum(boxes[:, :2], others[:, :2])
    shared, area, areas = (
        each[:, 0] * each[:, 1]
        for each in (at_least(sides, 0.0), boxes[:, 2:] - boxes[:, :2], others[:, 2:] - others[:, :2])
    )
    return shared * (1 + least) >= (area + areas) * least


def features_at(maps: Sequence[Tensor], strides: Sequence[int], points: Values) -> Tensor:
    """Maps (B, C, H, W) of all levels at points (B, M, K, 2), bilinear, zero off the map: (B * M, K, sum of C)."""
    found, extent, grid = [], (0.0, 0.0), points
    for level, stride in zip(maps, strides, strict=True):
        covers = level.shape[3] * stride / 2, level.shape[2] * stride / 2
        if covers != extent:  # once, as a rule: levels cover the same
            extent, grid = covers, torch.as_tensor(points / _like(covers, points) - 1)
        found.append(F.grid_sample(level, grid, padding_mode="zeros", align_corners=False))
    return torch.cat(found, dim=1).permute(0, 2, 3, 1).flatten(0, 1)
