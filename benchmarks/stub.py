"""A host whose model takes almost no time, which leaves reading, cutting windows and writing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import cv2
import numpy as np
import torch
from torch import Tensor

from halopose.hosts.base import Assignment, Host, HostOutput, Letterbox, Placer, Selection, Targets, laid_in
from halopose.keypoints import Keypoints
from halopose.types import Array
from halopose.uncertainty.heads import ConvTemplate

CHANNELS = 3


def place(image: Array, imgsz: int, rectangular: bool, room: Array | None = None) -> tuple[Array, Letterbox]:
    """Resize to a square."""
    height, width = image.shape[:2]
    box = Letterbox((height, width), (imgsz / width, imgsz / height), (0.0, 0.0))
    return cv2.resize(image, (imgsz, imgsz), dst=laid_in(room, (imgsz, imgsz, 3))), box


class StubHost(Host):
    """Features are pixels, a cell predicts keypoints at its centre, and an object gets the cells nearest its centre.

    Args:
        keypoints: number of keypoints.
        seconds: time that a batch of any size takes, as on a GPU.
    """

    strides = (8, 16, 32)
    class_names = ("object",)
    fingerprints = ("stub",)
    description = "a stub"

    def __init__(self, keypoints: int = 3, seconds: float = 0.0) -> None:
        self.layout = Keypoints.of(keypoints)
        self.seconds = seconds

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def placer(self) -> Placer:
        return place

    def to_batch(self, placed: Sequence[Array]) -> Tensor:
        return torch.from_numpy(np.stack(placed)).permute(0, 3, 1, 2)

    def forward(self, batch: Tensor) -> HostOutput:
        time.sleep(self.seconds)
        maps = tuple(batch[:, :, ::stride, ::stride].float() / 255 for stride in self.strides)
        scores = torch.cat([values.mean(1).flatten(1) for values in maps], dim=1)
        places = torch.cat([self._centres(values, stride) for values, stride in zip(maps, self.strides, strict=True)])
        keypoints = places[None, :, None].expand(len(batch), -1, self.keypoint_count, 2)
        return HostOutput(maps, scores, keypoints, places)

    @staticmethod
    def _centres(maps: Tensor, stride: int) -> Tensor:
        rows, columns = torch.meshgrid(*(torch.arange(side) for side in maps.shape[2:]), indexing="ij")
        return (torch.stack([columns, rows], dim=-1).flatten(0, 1) + 0.5) * stride

    def assign(self, output: HostOutput, targets: Sequence[Targets], sigmas: tuple[float, ...]) -> Assignment:
        found = [
            (number, cell, object)
            for number, target in enumerate(targets)
            for object, box in enumerate(target.boxes)
            for cell in (output.raw - (box[:2] + box[2:]) / 2).norm(dim=1).topk(4, largest=False).indices.tolist()
        ]
        return Assignment(*torch.tensor(found, dtype=torch.long).reshape(-1, 3).T)

    def select(
        self,
        output: HostOutput,
        *,
        conf: float,
        iou: float,
        max_detections: int = 300,
        letterboxes: Sequence[Letterbox] | None = None,
    ) -> list[Selection]:
        return [
            self._selection(output, number, scores.topk(min(max_detections, 5)).indices)
            for number, scores in enumerate(output.scores)
        ]

    def _selection(self, output: HostOutput, number: int, cell: Tensor) -> Selection:
        keypoints = output.keypoints[number, cell]
        boxes = torch.cat([keypoints[:, 0] - 16, keypoints[:, 0] + 16], dim=1)
        return Selection(cell, boxes, output.scores[number, cell], torch.zeros_like(cell), keypoints, None)

    def to_original(self, selection: Selection, letterbox: Letterbox, size: tuple[int, int]) -> Selection:
        gain = torch.tensor(letterbox.gain)
        boxes, keypoints = selection.boxes / gain.repeat(2), selection.keypoints / gain
        return Selection(selection.cell, boxes, selection.scores, selection.class_ids, keypoints, None)

    def pose_templates(self) -> list[list[ConvTemplate]]:
        convolution = ConvTemplate(torch.zeros(CHANNELS, CHANNELS, 3, 3), torch.zeros(CHANNELS), "relu")
        return [[convolution, convolution] for _ in self.strides]
