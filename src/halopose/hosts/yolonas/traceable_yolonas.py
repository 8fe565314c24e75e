"""A YOLO-NAS-Pose model as LibreYOLO's exporter traces it, with the neck features as extra outputs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from halopose.hosts.traceable import Traceable, Traced
from halopose.uncertainty.context_features import CellBoxes, take_rows


class TraceableNAS(Traceable):
    """Decoded boxes, scores, keypoints and visibilities, without what only the loss needs."""

    layout = "yolonas"
    output_names = ("boxes", "scores", "keypoints_xy", "keypoints_conf")
    visibility = True
    fewest_cells = 1

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = copy.deepcopy(model).cpu()

    def forward(self, images: Tensor) -> Traced:
        features = self.model.neck(self.model.backbone(images))
        output = self.model.heads(features)
        boxes, scores, keypoints, visibility = output[0] if len(output) == 2 else output  # traced: decoded alone
        said = cells_of(boxes, keypoints, visibility)
        return Traced((boxes, scores, keypoints, visibility), tuple(features), scores, said)


def cells_of(boxes: Tensor, keypoints: Tensor, visibility: Tensor) -> CellBoxes:
    """Read boxes (B, A, 4), keypoints (B, A, K, 2) and visibility (B, A, K) at selected cells."""

    def points(cell: Tensor) -> Tensor:
        found = take_rows(keypoints, cell)
        return torch.cat([found[..., 0], found[..., 1], take_rows(visibility, cell)], 2)

    def corners(cell: Tensor) -> Tensor:
        return take_rows(boxes, cell)

    return CellBoxes(corners, points, lambda cell: torch.cat([corners(cell), points(cell)], 2))
