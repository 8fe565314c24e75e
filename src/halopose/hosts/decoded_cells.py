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
