"""A YOLO-NAS-Pose model as LibreYOLO's exporter traces it, with the neck features as extra outputs."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from halopose.arrays import Values, alike, joined, take
from halopose.hosts.traceable import Traceable, Traced
from halopose.uncertainty.context_features import CellBoxes


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
    """Reads boxes (B, A, 4), keypoints (B, A, K, 2) and visibility (B, A, K) at some cells."""

    def points(cell: Values) -> Values:
        found = take(alike(keypoints, cell), cell)
        return joined([found[..., 0], found[..., 1], take(alike(visibility, cell), cell)], 2)

    def corners(cell: Values) -> Values:
        return take(alike(boxes, cell), cell)

    return CellBoxes(corners, points, lambda cell: joined([corners(cell), points(cell)], 2))
