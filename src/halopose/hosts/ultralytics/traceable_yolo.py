"""A YOLO-Pose model as Ultralytics' exporter traces it, with neck features and chosen cells as extra outputs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from ultralytics.nn.modules import C2f
from ultralytics.nn.tasks import PoseModel

from halopose.hosts.decoded_cells import column_cells
from halopose.hosts.traceable import Traceable, Traced


class TraceablePose(Traceable):
    """The framework's exported model. A hook captures the features, and for an end-to-end model the cells that the head
    chooses.
    """

    output_names = ("output0",)

    def __init__(self, model: PoseModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu()
        self.head = head = self.model.model[-1]
        head.export, head.dynamic, head.format = True, True, "onnx"
        for module in self.model.modules():
            if isinstance(module, C2f):
                module.forward = module.forward_split  # as in the framework's exporter
        self.end2end = bool(head.end2end)
        self.layout = "ultralytics-end2end" if self.end2end else "ultralytics"
        self.visibility = head.kpt_shape[1] == 3
        self.fewest_cells = int(head.max_det) if self.end2end else 1
        self._features: list[Tensor] = []
        self._chosen: tuple[Tensor, Tensor] | None = None
        head.register_forward_pre_hook(self._note_features)
        if self.end2end:
            self._choose, head.get_topk_index = head.get_topk_index, self._note_chosen
            head._gather = _gather_rows

    def _note_features(self, head: Any, inputs: tuple[list[Tensor]]) -> None:
        self._features = list(inputs[0])

    def _note_chosen(self, scores: Tensor, max_det: int) -> tuple[Tensor, Tensor, Tensor]:
        best, labels, cells = self._choose(scores, max_det)
        self._chosen = scores, cells
        return best, labels, cells

    def forward(self, images: Tensor) -> Traced:
        output = self.model(images)
        if self._chosen is not None:
            scores, cells = self._chosen
            return Traced((output,), tuple(self._features), scores, None, cells)
        scores = output[:, 4 : 4 + self.head.nc].transpose(1, 2)
        cell_boxes = column_cells(output, self.head.nc, tuple(self.head.kpt_shape))
        return Traced((output,), tuple(self._features), scores, cell_boxes)


def _gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return rows (B, k, C) of values (B, N, C), or entries (B, k) of (B, N), at index (B, k).

    The framework uses GatherElements here, on which OpenVINO fails.
    """
    if values.ndim == 2:
        return values.gather(1, index)
    batch, count, channels = values.shape
    place = index + torch.arange(batch)[:, None] * count
    return values.reshape(-1, channels)[place.reshape(-1)].reshape(batch, -1, channels)
