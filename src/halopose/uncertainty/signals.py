"""What one pass gives away about a detection beside the window around its cell.

Before overlaps are suppressed several cells claim the same object: how far apart they place a keypoint, and how
far from the cell that was kept, is the disagreement of an ensemble that cost nothing. And the maps hold features
where the keypoints were predicted, not only around the cell. Pixels of the input throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

CANDIDATES = 512  # best cells of an image among which claims are sought
CLAIMS = 16  # best cells that count for one object; assigners train about ten
OVERLAP = 0.6  # IoU from which a box claims the same object


# What cells (B, n) say before overlaps are suppressed, as rows (B, n, 4 + 2K or 3K): the box x1 y1 x2 y2, then the
# x of all keypoints, then their y, then their visibility, if the model has any.
At = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Signals:
    """Of N cells with K keypoints.

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

    def select(self, index: Tensor) -> Signals:
        """Those of some cells."""
        return Signals(*(getattr(self, field.name)[index] for field in fields(self)))

    def columns(self) -> dict[str, Tensor]:
        """As a store keeps them."""
        return {
            f"signal.{field.name}": value.half() if field.name == "features" else value
            for field in fields(self)
            for value in [getattr(self, field.name)]
        }

    @classmethod
    def of_columns(cls, columns: dict[str, Tensor], device: torch.device | str = "cpu") -> Signals:
        """As a store gave them."""
        return cls(**{field.name: columns[f"signal.{field.name}"].to(device).float() for field in fields(cls)})


def best_cells(scores: Tensor, count: int = CANDIDATES) -> tuple[Tensor, Tensor]:
    """The best scores (B, count) among scores (B, A), best first, and their cells; -1 and cell 0 for none."""
    # Padded, so that it can be traced for any number of cells: -1 ranks behind every one.
    best, cell = F.pad(scores, (0, count), value=-1.0).topk(count, dim=1)
    return best, torch.where(best >= 0, cell, 0)


def side_by_side(image: Tensor, cell: Tensor, images: int) -> tuple[Tensor, Tensor | None]:
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


def signals_at(
    maps: Sequence[Tensor],
    strides: Sequence[int],
    best: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    keypoints: int,
    features: Tensor | None = None,
) -> Signals:
    """Signals of M cells an image, image by image: N = B * M.

    maps (B, C, H, W) by level; best: scores (B, n) of the cells among which claims are sought, and their rows as
    ``At`` gives them; own: the same of the M cells. features (N, K, C): in place of those found in the maps.
    """
    (scores, theirs), (score, mine) = best, own
    count, width, end = int(mine.shape[1]), int(mine.shape[2]), 4 + 2 * keypoints
    weight = torch.where(overlapping(mine[..., :4], theirs[..., :4]), scores.clamp_min(0.0)[:, None], 0.0)
    weight, place = weight.topk(CLAIMS, dim=2, sorted=False)  # (B, M, claims)
    mass = weight.sum(2, keepdim=True)
    share = (weight / mass.clamp_min(1e-9)).reshape(-1, 1, CLAIMS)
    claimed = take(theirs, place.reshape(-1, count * CLAIMS)).reshape(-1, CLAIMS, width)
    apart = claimed - F.pad(mine[..., :end], (0, width - end)).reshape(-1, 1, width)
    mean = share @ apart  # (N, 1, width)
    about = apart - mean
    x, y = about[..., 4 : 4 + keypoints], about[..., 4 + keypoints : end]
    moment = share @ torch.cat([x * x, x * y, y * y], dim=2)
    points = mine[..., 4:end].reshape(-1, 2, keypoints).transpose(1, 2)
    visibility = seen = torch.zeros_like(points[..., 0])
    if width > end:
        visibility, seen = mine[..., end:].reshape(-1, keypoints), mean[:, 0, end:]
    if features is None:
        features = features_at(maps, strides, images_of(score), points)
    height, across = (torch.as_tensor(side) for side in maps[0].shape[2:])
    box = mine[..., :4].reshape(-1, 4)
    extent = (torch.stack([across, height]) * strides[0]).to(box)
    return Signals(
        keypoints=points,
        box=box,
        score=score.reshape(-1),
        visibility=visibility,
        offset=mean[:, 0, 4:end].reshape(-1, 2, keypoints).transpose(1, 2),
        moment=moment.reshape(-1, 3, keypoints).transpose(1, 2),
        seen=seen,
        mass=mass.reshape(-1),
        features=features,
        extent=extent + torch.zeros_like(box[:, :2]),
    )


def images_of(cells: Tensor) -> Tensor:
    """The image (B * n,) of each of the cells (B, n)."""
    image = torch.arange(cells.shape[0], device=cells.device)[:, None]
    return (image + torch.zeros_like(cells, dtype=torch.long)).reshape(-1)


def take(rows: Tensor, cell: Tensor) -> Tensor:
    """Rows (B, n, ...) at cells (B, n) among (B, A, ...)."""
    shape = [int(side) for side in rows.shape[2:]]
    start = torch.arange(rows.shape[0], device=cell.device)[:, None] * rows.shape[1]
    return rows.reshape(-1, *shape)[(start + cell).reshape(-1)].reshape(-1, int(cell.shape[1]), *shape)


def overlapping(boxes: Tensor, others: Tensor) -> Tensor:
    """Which of boxes (B, m, 4) and others (B, n, 4) have an IoU of ``OVERLAP`` or more: (B, m, n)."""
    boxes, others = boxes.transpose(1, 2)[..., None], others.transpose(1, 2)[:, :, None]
    sides = torch.minimum(boxes[:, 2:], others[:, 2:]) - torch.maximum(boxes[:, :2], others[:, :2])
    shared, area, areas = (
        each[:, 0] * each[:, 1]
        for each in (sides.clamp_min(0), boxes[:, 2:] - boxes[:, :2], others[:, 2:] - others[:, :2])
    )
    return shared * (1 + OVERLAP) >= (area + areas) * OVERLAP


def features_at(maps: Sequence[Tensor], strides: Sequence[int], image: Tensor, points: Tensor) -> Tensor:
    """Maps (B, C, H, W) of all levels at points (N, K, 2), bilinear, zero off the map: (N, K, sum of C)."""
    cell, share = cells_around(maps, strides, image, points)
    found = [sampled(rows_of(level), cell[n], share[n], points.shape[1]) for n, level in enumerate(maps)]
    return torch.cat(found, dim=2)


def rows_of(maps: Tensor) -> Tensor:
    """Features (B * H * W, C) cell by cell of maps (B, C, H, W)."""
    return maps.permute(0, 2, 3, 1).reshape(-1, int(maps.shape[1]))


def sampled(rows: Tensor, cell: Tensor, share: Tensor, keypoints: int) -> Tensor:
    """Weighted sums (N, K, C) of rows (R, C) at cells (N * K, n) with shares (N * K, n)."""
    count, channels = int(cell.shape[1]), int(rows.shape[1])
    found = rows[cell.reshape(-1)].reshape(-1, count, channels)
    return (share[:, None] @ found).reshape(-1, keypoints, channels)


def cells_around(
    maps: Sequence[Tensor], strides: Sequence[int], image: Tensor, points: Tensor
) -> tuple[Tensor, Tensor]:
    """The four cells (levels, N * K, 4) around points (N, K, 2), counted over all images, and their shares.

    A cell off the map has no share.
    """
    sides = [torch.stack([torch.as_tensor(side) for side in level.shape[3:1:-1]]) for level in maps]
    sizes = torch.stack(sides).to(points)[..., None]  # (levels, 2, 1): width, height
    x_y = points.permute(2, 0, 1).reshape(2, -1)
    place = x_y / torch.tensor(strides, dtype=points.dtype, device=points.device)[:, None, None] - 0.5
    low = place.floor()
    part = place - low
    beside = torch.stack([low, low + 1])  # (2, levels, 2, N * K): points last, which a runtime goes through faster
    share = torch.stack([1 - part, part]) * ((beside >= 0) & (beside < sizes))
    beside = beside.clamp_min(0).minimum(sizes - 1)
    # Whole numbers up to 2^24 are exact in single precision: more cells than any batch has.
    start = image.to(points)[:, None].repeat(1, int(points.shape[1])).reshape(-1) * sizes[:, 1]
    row = (start + beside[:, :, 1]) * sizes[:, 0]  # (2, levels, N * K)
    cell, both = row[:, None] + beside[:, :, 0], share[:, None, :, 1] * share[:, :, 0]  # (2, 2, levels, N * K)
    levels = len(maps)
    return (
        cell.reshape(4, levels, -1).permute(1, 2, 0).long(),
        both.reshape(4, levels, -1).permute(1, 2, 0).contiguous(),
    )


__all__ = [
    "CANDIDATES",
    "CLAIMS",
    "OVERLAP",
    "At",
    "Signals",
    "best_cells",
    "cells_around",
    "features_at",
    "images_of",
    "overlapping",
    "rows_of",
    "sampled",
    "side_by_side",
    "signals_at",
    "take",
]
