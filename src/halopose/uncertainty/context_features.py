"""Context features: what one pass of the base model says about a detection outside the window around its cell.

Before overlapping boxes are suppressed, several cells predict the same object. How much they disagree about a keypoint
is the disagreement of an ensemble at no extra cost. The feature maps are also sampled at the predicted keypoints.
All lengths are in pixels of the model's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

CANDIDATES = 512  # best cells of an image that are compared with a detection
MAX_OVERLAPS = 16  # best overlapping boxes that count for one object; assigners train about ten cells
OVERLAP = 0.6  # IoU from which a box counts as the same object


@dataclass(frozen=True)
class CellBoxes:
    """Readers of a model's output at cells (B, n), before overlapping boxes are suppressed.

    Attributes:
        boxes: Boxes (B, n, 4) as x1, y1, x2, y2.
        points: Keypoints (B, n, 2K or 3K): all x, then all y, then all visibilities if the model has them.
        rows: Boxes and points, concatenated along the last axis.
    """

    boxes: Callable[[Tensor], Tensor]
    points: Callable[[Tensor], Tensor]
    rows: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Candidates:
    """Cells whose boxes may overlap a detection.

    Attributes:
        scores: Scores (B, n), not negative.
        boxes: Boxes (B, n, 4).
        points: Reader of the points at positions (B, m) among the candidates, as in ``CellBoxes``.
    """

    scores: Tensor
    boxes: Tensor
    points: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ContextFeatures:
    """Context features of N cells with K keypoints.

    Attributes:
        keypoints: Keypoints (N, K, 2) of the cell itself.
        box: Box (N, 4) of the cell itself.
        score: Score (N,) of the cell itself.
        visibility: Visibility (N, K) of the cell itself, zero where a model has none.
        offset: Score-weighted mean of the keypoints of the overlapping boxes, minus ``keypoints`` (N, K, 2).
        moment: Second moments xx, xy, yy of these keypoints about their mean (N, K, 3).
        seen: Mean visibility (N, K) of the overlapping boxes.
        mass: Sum of the weights (N,) of the overlapping boxes.
        features: Feature maps of all levels, sampled at the keypoints (N, K, C).
        extent: Width and height of the input (N, 2).
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
        """Return the context features of the cells at ``index``."""
        return ContextFeatures(*(getattr(self, field.name)[index] for field in fields(self)))

    def columns(self) -> dict[str, Tensor]:
        """Return the columns that a feature cache stores."""
        return {
            f"signal.{field.name}": value.half() if field.name == "features" else value
            for field in fields(self)
            for value in [getattr(self, field.name)]
        }

    @classmethod
    def of_columns(cls, columns: dict[str, Tensor], device: torch.device | str = "cpu") -> ContextFeatures:
        """Restore context features from the columns of a feature cache."""
        return cls(**{field.name: columns[f"signal.{field.name}"].to(device).float() for field in fields(cls)})


def take_rows(rows: Tensor, place: Tensor) -> Tensor:
    """Select rows (B, n, ...) at positions (B, n) from rows (B, A, ...) of the same image."""
    shape = [int(side) for side in rows.shape[2:]]
    start = torch.arange(rows.shape[0], device=place.device)[:, None] * rows.shape[1]
    flat = rows.reshape(-1, *shape).index_select(0, (start + place).reshape(-1))
    return flat.reshape(-1, int(place.shape[1]), *shape)


def pad_by_image(image: Tensor, cell: Tensor, images: int) -> tuple[Tensor, Tensor | None]:
    """Arrange cells by image, padded to the same number for each image.

    Args:
        image: Image index (N,) of each cell, on the host or the device of the cells.
        cell: Cells (N,).
        images: Number of images B.

    Returns:
        Cells (B, M), padded with cell 0, and the position (N,) of each input cell among the B * M; None if these are
        the positions 0 to N - 1.
    """
    if images == 1 and len(cell):
        return cell[None], None
    image = image.cpu()
    counts = torch.bincount(image, minlength=images)
    order = image.argsort(stable=True)
    rank = torch.empty_like(image)
    rank[order] = torch.arange(len(image)) - (counts.cumsum(0) - counts)[image[order]]
    most = max(1, int(counts.max()))
    place = (image * most + rank).to(cell.device)
    return cell.new_zeros(images * most).index_put((place,), cell).reshape(images, most), place


def context_features_at(
    maps: Sequence[Tensor],
    strides: Sequence[int],
    best: Candidates,
    own: tuple[Tensor, Tensor, Tensor],
    keypoints: int,
    features: Tensor | None = None,
) -> ContextFeatures:
    """Compute the context features of M cells in each of B images: N = B * M.

    Args:
        maps: Feature maps (B, C, H, W), one for each level.
        strides: Pixels per cell of each level.
        best: Candidates for overlapping boxes.
        own: Scores (B, M), boxes (B, M, 4) and points of the M cells, as in ``CellBoxes``.
        keypoints: Number of keypoints K.
        features: Features (N, K, C) to use instead of sampling the maps.
    """
    score, boxes, mine = own
    count, width, end = int(mine.shape[1]), int(mine.shape[2]), 2 * keypoints
    box, mine = boxes.reshape(-1, 4), mine.reshape(-1, width)
    overlaps = min(MAX_OVERLAPS, int(best.boxes.shape[1]))
    overlap_scores = overlapping_boxes(boxes, best.boxes) * best.scores[:, None]
    weight, place = overlap_scores.topk(overlaps, dim=-1, sorted=False)
    mass = weight.sum(2)
    share = (weight / mass.clamp_min(1e-9)[..., None]).reshape(-1, 1, overlaps)
    overlapping = best.points(place.reshape(-1, count * overlaps)).reshape(-1, overlaps, width)
    apart = overlapping[..., :end] - mine[:, None, :end]
    mean = share @ apart  # (N, 1, 2K)
    about = apart - mean
    x, y = about[..., :keypoints], about[..., keypoints:]
    moment = share @ torch.cat([x * x, x * y, y * y], 2)
    points = mine[:, :end].reshape(-1, 2, keypoints).transpose(1, 2)
    if width > end:
        visibility, seen = mine[:, end:], (share @ overlapping[..., end:])[:, 0]
    else:
        visibility = seen = torch.zeros_like(points[..., 0])
    if features is None:
        features = features_at(maps, strides, points.reshape(-1, count, keypoints, 2))
    return ContextFeatures(
        keypoints=points,
        box=box,
        score=score.reshape(-1),
        visibility=visibility,
        offset=mean.reshape(-1, 2, keypoints).transpose(1, 2),
        moment=moment.reshape(-1, 3, keypoints).transpose(1, 2),
        seen=seen,
        mass=mass.reshape(-1),
        features=features,
        extent=_extent(maps[0], strides[0], box) + 0 * box[:, :2],
    )


def _extent(maps: Tensor, stride: int, like: Tensor) -> Tensor:
    """Width and height (2,) of the input of feature maps (B, C, H, W), with the type and device of ``like``."""
    height, width = maps.shape[2:]
    # Sizes may be traced, and are then tensors instead of numbers.
    return (torch.stack([torch.as_tensor(width), torch.as_tensor(height)]) * stride).to(like)


def overlapping_boxes(boxes: Tensor, others: Tensor, least: float = OVERLAP) -> Tensor:
    """Mark (B, m, n) which boxes (B, m, 4) and others (B, n, 4) have an IoU of at least ``least``.

    Written with products of two numbers instead of reductions, which run faster in ONNX runtimes.
    """
    boxes, others = boxes.transpose(1, 2)[..., None], others.transpose(1, 2)[:, :, None]
    sides = torch.minimum(boxes[:, 2:], others[:, 2:]) - torch.maximum(boxes[:, :2], others[:, :2])
    shared, area, areas = (
        each[:, 0] * each[:, 1]
        for each in (sides.clamp_min(0.0), boxes[:, 2:] - boxes[:, :2], others[:, 2:] - others[:, :2])
    )
    return shared * (1 + least) >= (area + areas) * least


def features_at(maps: Sequence[Tensor], strides: Sequence[int], points: Tensor) -> Tensor:
    """Sample the maps (B, C, H, W) of all levels at points (B, M, K, 2), bilinear and zero outside the map.

    Returns:
        Features (B * M, K, sum of C).
    """
    found, extent, grid = [], (0.0, 0.0), points
    for level, stride in zip(maps, strides, strict=True):
        covers = level.shape[3] * stride / 2, level.shape[2] * stride / 2
        if covers != extent:  # usually once: all levels cover the same input
            extent, grid = covers, points / points.new_tensor(covers) - 1
        found.append(F.grid_sample(level, grid, padding_mode="zeros", align_corners=False))
    return torch.cat(found, dim=1).permute(0, 2, 3, 1).flatten(0, 1)
