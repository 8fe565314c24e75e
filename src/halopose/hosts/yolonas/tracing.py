"""A YOLO-NAS-Pose model as LibreYOLO's own exporter traces it, with the neck's features beside.

In: a frozen model. Out: a ``Traceable`` copy; the model itself is left alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from halopose.hosts.tracing import Traceable, Traced
from halopose.uncertainty.signals import At, take


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
        at = cells_of(boxes, keypoints, visibility)
        return Traced((boxes, scores, keypoints, visibility), tuple(features), scores, at)


def cells_of(boxes: Tensor, keypoints: Tensor, visibility: Tensor) -> At:
    """Reads boxes (B, A, 4), keypoints (B, A, K, 2) and visibility (B, A, K) at some cells."""

    def at(cell: Tensor) -> Tensor:
        points = take(keypoints, cell)
        return torch.cat([take(boxes, cell), points[..., 0], points[..., 1], take(visibility, cell)], dim=2)

    return at
