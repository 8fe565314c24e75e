"""Read decoded boxes, keypoints and visibilities at some cells, for context features and for export."""

from __future__ import annotations

import torch
from torch import Tensor

from halopose.uncertainty.context_features import CellBoxes, take_rows


def decoded_cells(boxes: Tensor, keypoints: Tensor, visibility: Tensor | None) -> CellBoxes:
    """Read boxes (B, A, 4), keypoints (B, A, K, 2) and visibility (B, A, K), if there is one, at selected cells."""

    def points(cell: Tensor) -> Tensor:
        found = take_rows(keypoints, cell)
        seen = [] if visibility is None else [take_rows(visibility, cell)]
        return torch.cat([found[..., 0], found[..., 1], *seen], 2)

    def corners(cell: Tensor) -> Tensor:
        return take_rows(boxes, cell)

    return CellBoxes(corners, points, lambda cell: torch.cat([corners(cell), points(cell)], 2))


def column_cells(decoded: Tensor, classes: int, keypoints: tuple[int, int], corners: bool = False) -> CellBoxes:
    """Read a decoded output (B, 4 + classes + K * dimensions, A) at selected cells.

    Args:
        decoded: Output of Ultralytics' models.
        classes: Number of classes.
        keypoints: Number of keypoints and of values per keypoint.
        corners: Whether boxes are x1, y1, x2, y2 rather than centre and size.
    """
    _, dimensions = keypoints

    def boxes_of(found: Tensor) -> list[Tensor]:
        if corners:
            return [found[:, :4]]
        centre, half = found[:, :2], found[:, 2:4] / 2
        return [centre - half, centre + half]

    def points_of(found: Tensor) -> list[Tensor]:
        return [found[:, part::dimensions] for part in range(dimensions)]

    def rows(cell: Tensor) -> Tensor:
        found = _columns(decoded, slice(None), cell)
        return torch.cat([*boxes_of(found), *points_of(found[:, 4 + classes :])], 1).transpose(1, 2)

    return CellBoxes(
        boxes=lambda cell: torch.cat(boxes_of(_columns(decoded, slice(4), cell)), 1).transpose(1, 2),
        points=lambda cell: torch.cat(points_of(_columns(decoded, slice(4 + classes, None), cell)), 1).transpose(1, 2),
        rows=rows,  # read at once: a runtime takes it for a mistake if less is read than there is
    )


def _columns(values: Tensor, part: slice, cell: Tensor) -> Tensor:
    """Select channels (B, c, n) of values (B, C, A) at cells (B, n)."""
    values = values[:, part]
    return values.gather(2, cell[:, None].expand(-1, int(values.shape[1]), -1))
