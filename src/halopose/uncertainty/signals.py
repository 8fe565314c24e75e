"""What one pass gives away about a detection beside the window around its cell.

Before overlaps are suppressed several cells claim the same object: how far apart they place a keypoint, and how
far from the cell that was kept, is the disagreement of an ensemble that cost nothing. And the maps hold features
where the keypoints were predicted, not only around the cell. Pixels of the input throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

CANDIDATES = 512  # best cells of an image among which claims are sought
CLAIMS = 16  # best cells that count for one object; assigners train about ten
OVERLAP = 0.6  # IoU from which a box claims the same object


@dataclass(frozen=True)
class Claims:
    """All cells as a host sees them before suppression: boxes (B, A, 4) xyxy, visibility (B, A, K) or None."""

    boxes: Tensor
    visibility: Tensor | None


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


def signals_at(
    maps: Sequence[Tensor],
    strides: Sequence[int],
    scores: Tensor,
    keypoints: Tensor,
    claims: Claims,
    image: Tensor,
    cell: Tensor,
) -> Signals:
    """Signals at cells (N,) of images (N,).

    maps (B, C, H, W) by level; scores (B, A), keypoints (B, A, K, 2): of every cell.
    """
    own = keypoints[image, cell]
    box = claims.boxes[image, cell]
    # Padded, so that it can be traced for any number of cells: -1 ranks behind every one.
    best, candidate = F.pad(scores, (0, CANDIDATES), value=-1.0).topk(CANDIDATES, dim=1, sorted=False)
    candidate, best = torch.where(best >= 0, candidate, 0), best.clamp_min(0.0)
    rivals = claims.boxes.gather(1, candidate[..., None].expand(-1, -1, 4))
    weight = torch.where(overlap(box, rivals[image]) >= OVERLAP, best[image], 0.0)
    weight, place = weight.topk(CLAIMS, dim=1, sorted=False)
    claimed = candidate[image].gather(1, place)
    mass = weight.sum(1)
    share = (weight / mass.clamp_min(1e-9)[:, None])[..., None]
    apart = keypoints[image[:, None], claimed] - own[:, None]  # (N, claims, K, 2)
    offset = (share[..., None] * apart).sum(1)
    about = apart - offset[:, None]
    x, y = about[..., 0], about[..., 1]
    moment = torch.stack([(share * part).sum(1) for part in (x * x, x * y, y * y)], dim=2)
    visibility = seen = own.new_zeros(own.shape[:2])
    if claims.visibility is not None:
        visibility = claims.visibility[image, cell]
        seen = (share * claims.visibility[image[:, None], claimed]).sum(1)
    height, width = (torch.as_tensor(side) for side in maps[0].shape[2:])
    extent = (torch.stack([width, height]) * strides[0]).to(own)
    return Signals(
        keypoints=own,
        box=box,
        score=scores[image, cell],
        visibility=visibility,
        offset=offset,
        moment=moment,
        seen=seen,
        mass=mass,
        features=features_at(maps, strides, image, own),
        extent=extent.expand(own.shape[0], 2),
    )


def overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """IoU (N, C) of boxes (N, 4) with others (N, C, 4)."""
    low = torch.maximum(boxes[:, None, :2], others[..., :2])
    high = torch.minimum(boxes[:, None, 2:], others[..., 2:])
    shared = (high - low).clamp_min(0).prod(2)
    area, areas = ((each[..., 2:] - each[..., :2]).prod(-1) for each in (boxes, others))
    return shared / (area[:, None] + areas - shared).clamp_min(1e-9)


def features_at(maps: Sequence[Tensor], strides: Sequence[int], image: Tensor, points: Tensor) -> Tensor:
    """Maps (B, C, H, W) of all levels at points (N, K, 2), bilinear, zero off the map: (N, K, sum of C)."""
    device = points.device
    sizes = torch.stack([torch.stack([torch.as_tensor(side) for side in level.shape[2:]]) for level in maps]).to(
        device
    )
    place = points[:, :, None] / torch.tensor(strides, device=device)[:, None] - 0.5  # (N, K, levels, 2) in cells
    corner = place.floor()
    beside = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]], device=device)
    share = ((place - corner)[..., None, :] * (2 * beside - 1) + (1 - beside)).prod(4)  # (N, K, levels, 4)
    corner = corner[..., None, :].long() + beside
    on = (corner >= 0) & (corner < sizes.flip(1)[:, None])
    inside = on[..., 0] & on[..., 1]
    start = image[:, None, None, None] * sizes[:, :1]  # rows of maps before an image's own
    cell = torch.where(inside, (start + corner[..., 1]) * sizes[:, 1:] + corner[..., 0], 0)
    share = share * inside
    parts = []
    for level, values in enumerate(maps):
        rows = values.permute(0, 2, 3, 1).reshape(-1, values.shape[1])
        found = rows[cell[:, :, level].flatten()].reshape(*cell.shape[:2], 4, values.shape[1])
        parts.append((share[:, :, level, None] @ found)[:, :, 0])
    return torch.cat(parts, dim=2)


__all__ = ["CANDIDATES", "CLAIMS", "OVERLAP", "Claims", "Signals", "features_at", "overlap", "signals_at"]
