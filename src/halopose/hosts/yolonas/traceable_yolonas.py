"""A YOLO-NAS-Pose model as LibreYOLO's exporter traces it, with the neck features as extra outputs."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from halopose.hosts.decoded_cells import decoded_cells
from halopose.hosts.traceable import Traceable, Traced


class TraceableNAS(Traceable):
    """Decoded boxes, scores, keypoints and visibilities, without the outputs for the loss."""

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
        # traced models return decoded outputs only
        boxes, scores, keypoints, visibility = output[0] if len(output) == 2 else output
        cell_boxes = decoded_cells(boxes, keypoints, visibility)
        return Traced((boxes, scores, keypoints, visibility), tuple(features), scores, cell_boxes)
