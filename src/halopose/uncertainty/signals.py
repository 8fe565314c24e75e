"""More that one pass of the base tells about a detection, from outside the window around its cell.

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
        features = features_at(maps, strides, points.reshape(-1, count, keypoints, 2))
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


def take(rows: Tensor, cell: Tensor) -> Tensor:
    """Rows (B, n, ...) at cells (B, n) among (B, A, ...)."""
    shape = [int(side) for side in rows.shape[2:]]
    start = torch.arange(rows.shape[0], device=cell.device)[:, None] * rows.shape[1]
    return rows.reshape(-1, *shape)[(start + cell).reshape(-1)].reshape(-1, int(cell.shape[1]), *shape)


def overlapping(boxes: Tensor, others: Tensor, least: float = OVERLAP) -> Tensor:
    """Which of boxes (B, m, 4) and others (B, n, 4) have an IoU of ``least`` or more: (B, m, n).

    Products of two numbers instead of reductions: a runtime multiplies faster.
    """
    boxes, others = boxes.transpose(1, 2)[..., None], others.transpose(1, 2)[:, :, None]
    sides = torch.minimum(boxes[:, 2:], others[:, 2:]) - torch.maximum(boxes[:, :2], others[:, :2])
    shared, area, areas = (
        each[:, 0] * each[:, 1]
        for each in (sides.clamp_min(0), boxes[:, 2:] - boxes[:, :2], others[:, 2:] - others[:, :2])
    )
    return shared * (1 + least) >= (area + areas) * least


def features_at(maps: Sequence[Tensor], strides: Sequence[int], points: Tensor) -> Tensor:
    """Maps (B, C, H, W) of all levels at points (B, M, K, 2), bilinear, zero off the map: (B * M, K, sum of C)."""
    found = []
    for level, stride in zip(maps, strides, strict=True):
        half = points.new_tensor([level.shape[3] * stride / 2, level.shape[2] * stride / 2])
        found.append(F.grid_sample(level, points / half - 1, padding_mode="zeros", align_corners=False))
    return torch.cat(found, dim=1).permute(0, 2, 3, 1).flatten(0, 1)


__all__ = [
    "CANDIDATES",
    "CLAIMS",
    "OVERLAP",
    "At",
    "Signals",
    "best_cells",
    "features_at",
    "overlapping",
    "side_by_side",
    "signals_at",
    "take",
]
