"""MoveNet MultiPose (Apache-2.0) from the files published for TensorFlow.js, run by ONNX Runtime.

A CenterNet: one map of person centres at stride 4. The keypoints that a centre predicts are coarse. Each is replaced by
the maximum of the heatmap of that keypoint, weighted by the distance to the coarse one and inside the person's box.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halopose.errors import HaloposeError
from halopose.hosts.base import (
    Assignment,
    Host,
    HostOutput,
    Letterbox,
    Placer,
    Selection,
    Targets,
    fingerprint,
    laid_in,
    sketch_of_head,
)
from halopose.hosts.decoded_cells import decoded_cells
from halopose.hosts.movenet.tfjs_graph import GraphModel, kernel_of
from halopose.hosts.onnx.onnx_host import open_session
from halopose.hosts.task_aligned import assign_matched
from halopose.keypoints import Keypoints
from halopose.types import Array
from halopose.uncertainty.context_features import CellBoxes
from halopose.uncertainty.heads import ConvTemplate

STRIDE = 4  # of the maps
COARSEST = 32  # the sides of the input are multiples of it
KEYPOINTS = 17
BRANCHES = ("center", "box_scale", "box_offset", "kpt_heatmap", "kpt_regress", "kpt_offset")
REACH = 0.3  # the weight of a keypoint's heatmap is exp(-d^2 / (REACH * shorter side)), in cells
SEEN = 0.127  # keypoints with smaller scores do not count for the score of a person
PEAK = 5  # cells around a centre in which it is the largest
LEAST = 0.02  # fainter centres are not decoded
MOST = 30  # persons of an image; the published graph returns six
MATCHED_CONF = 0.05  # score of detections that training uses


@dataclass(frozen=True)
class People:
    """Persons of one image, best centre first, in cells of the maps.

    Attributes:
        cell: Cells (N,) of the centres.
        scores: Scores (N,).
        boxes: Boxes (N, 4) xyxy, clipped to the input.
        keypoints: Keypoints (N, K, 2).
        visibility: Scores (N, K) of the keypoints.
    """

    cell: Tensor
    scores: Tensor
    boxes: Tensor
    keypoints: Tensor
    visibility: Tensor


@dataclass(frozen=True)
class _Raw:
    """Predictions of all cells in input pixels, and the persons of every image."""

    people: list[People]
    boxes: Tensor
    visibility: Tensor


class MoveNetHost(Host):
    """MoveNet MultiPose from its json and bin file."""

    def __init__(self, path: Path | str, *, device: torch.device | str | None = None) -> None:
        path = Path(path)
        graph = GraphModel(path)
        last = {branch: _last(graph, branch) for branch in BRANCHES}
        trunk = graph.inputs(last["kpt_regress"])[0]
        depthwise = graph.inputs(trunk)[0]
        onnx_model = graph.to_onnx({**last, "features": graph.inputs(depthwise)[0]})
        self._content, self._path, self._onnx_device = onnx_model.SerializeToString(), path, device
        self._session, self._process = open_session(self._content, path, device), os.getpid()
        self.description = path.name
        self.strides = (STRIDE,)
        self.layout = Keypoints.of(KEYPOINTS)
        self.class_names = ("person",)
        self._templates = [[_merged(graph, depthwise, trunk)]]
        weights = {name: torch.from_numpy(values.copy()) for name, values in graph.weights.items()}
        sketch = sketch_of_head(self._templates, [_module(graph, last["kpt_regress"])], half=True)
        self.fingerprints = (fingerprint(weights), sketch)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def use_half(self) -> None:
        raise HaloposeError(f"{self.description} runs in the precision of the file: leave half precision off")

    def placer(self) -> Placer:
        return MoveNetPlacer()

    def to_batch(self, placed: Sequence[Array]) -> Tensor:
        batch = np.stack([pixels[..., ::-1] for pixels in placed]).transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(batch, dtype=np.float32))

    @torch.inference_mode()
    def forward(self, batch: Tensor) -> HostOutput:
        if self._process != os.getpid():  # the threads of a session do not survive a fork
            self._session, self._process = open_session(self._content, self._path, self._onnx_device), os.getpid()
        names = [*BRANCHES, "features"]
        found = dict(zip(names, map(torch.from_numpy, self._session.run(names, {"input": batch.numpy()})), strict=True))
        features = found.pop("features")
        maps = {name: found[name] for name in BRANCHES}
        for name in ("center", "kpt_heatmap"):
            maps[name] = maps[name].sigmoid()
        people = [people_in({name: values[image] for name, values in maps.items()}) for image in range(len(batch))]
        boxes, keypoints = _every_box(maps), _every_pose(maps)
        scores = maps["center"].flatten(1).clone()
        visibility = torch.zeros(*scores.shape, KEYPOINTS)
        for image, person in enumerate(people):
            scores[image, person.cell] = person.scores
            keypoints[image, person.cell] = person.keypoints
            visibility[image, person.cell] = person.visibility
        return HostOutput((features,), scores, keypoints * STRIDE, _Raw(people, boxes * STRIDE, visibility))

    @torch.inference_mode()
    def assign(self, output: HostOutput, targets: Sequence[Targets], sigmas: tuple[float, ...]) -> Assignment:
        found = self.select(output, conf=MATCHED_CONF, iou=1.0)
        return assign_matched([(each.cell, each.boxes, each.class_ids) for each in found], targets)

    @torch.inference_mode()
    def select(
        self,
        output: HostOutput,
        *,
        conf: float,
        iou: float,
        max_detections: int = 300,
        letterboxes: Sequence[Letterbox] | None = None,
    ) -> list[Selection]:
        selections = []
        raw: _Raw = output.raw
        for person in raw.people:
            order = person.scores.argsort(descending=True, stable=True)
            kept = order[person.scores[order] > conf][:max_detections]
            selections.append(
                Selection(
                    cell=person.cell[kept],
                    boxes=person.boxes[kept] * STRIDE,
                    scores=person.scores[kept],
                    class_ids=torch.zeros(len(kept), dtype=torch.long),
                    keypoints=person.keypoints[kept] * STRIDE,
                    visibility=person.visibility[kept],
                )
            )
        return selections

    def cells(self, output: HostOutput) -> CellBoxes:
        raw: _Raw = output.raw
        return decoded_cells(raw.boxes, output.keypoints, raw.visibility)

    def to_original(self, selection: Selection, letterbox: Letterbox, size: tuple[int, int]) -> Selection:
        height, width = letterbox.shape
        gain = torch.tensor(letterbox.gain)
        corners = torch.minimum(selection.boxes.reshape(-1, 2, 2) / gain, torch.tensor([width, height]))
        return Selection(
            cell=selection.cell,
            boxes=corners.reshape(-1, 4),
            scores=selection.scores,
            class_ids=selection.class_ids,
            keypoints=selection.keypoints / gain,
            visibility=selection.visibility,
        )

    def pose_templates(self) -> list[list[ConvTemplate]]:
        return self._templates


@dataclass(frozen=True)
class MoveNetPlacer:
    """The longer side becomes the input size; the rest is black, below and to the right."""

    def __call__(
        self, image: Array, imgsz: int, rectangular: bool, room: Array | None = None
    ) -> tuple[Array, Letterbox]:
        size = -(-imgsz // COARSEST) * COARSEST
        height, width = image.shape[:2]
        gain = size / max(height, width)
        rows, columns = max(round(height * gain), 1), max(round(width * gain), 1)
        shape = (-(-rows // COARSEST) * COARSEST, -(-columns // COARSEST) * COARSEST) if rectangular else (size, size)
        pixels = laid_in(room, (*shape, 3))
        pixels[:] = 0
        how = cv2.INTER_AREA if gain < 1 else cv2.INTER_LINEAR
        pixels[:rows, :columns] = cv2.resize(image, (columns, rows), interpolation=how)
        return pixels, Letterbox((height, width), (columns / width, rows / height), (0.0, 0.0))


def people_in(maps: dict[str, Tensor]) -> People:
    """Decode the maps (c, h, w) of one image as the published graph does, for up to ``MOST`` persons.

    Args:
        maps: Output of each branch; ``center`` and ``kpt_heatmap`` after the sigmoid.
    """
    heat = maps["center"][0]
    height, width = heat.shape
    peaks = F.max_pool2d(heat[None], PEAK, 1, PEAK // 2)[0]
    best = torch.where((heat - peaks).abs() < 1e-6, heat, 0.0).flatten().topk(min(MOST, heat.numel()))
    centre = best.values[best.values > LEAST]
    cell = best.indices[: len(centre)]
    boxes = _every_box({name: values[None] for name, values in maps.items()})[0, cell]
    coarse = _every_pose({name: values[None] for name, values in maps.items()})[0, cell]
    rows, columns = torch.arange(height)[:, None], torch.arange(width)
    left, top, right, bottom = boxes[:, :, None, None].unbind(1)
    inside = (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)
    across = (columns - coarse[..., 0, None]) ** 2  # the weight is a product of one factor for each axis
    down = (rows[:, 0] - coarse[..., 1, None]) ** 2
    spread = REACH * min(height, width)
    weight = (-down / spread).exp()[..., :, None] * (-across / spread).exp()[..., None, :]
    weighted = (maps["kpt_heatmap"] * weight * inside[:, None]).flatten(2)
    place = weighted.argmax(2)
    visibility = weighted.amax(0).gather(1, place.T).T  # a keypoint of two persons has the larger weight
    x, y = place % width, place // width
    offset = maps["kpt_offset"].unflatten(0, (KEYPOINTS, 2)).flatten(2)  # (K, 2, cells), y before x
    moved = offset[torch.arange(KEYPOINTS), :, place]
    keypoints = torch.stack([x + moved[..., 1], y + moved[..., 0]], dim=2)
    counted = visibility > SEEN
    scores = centre * (visibility * counted).sum(1) / counted.sum(1).clamp_min(1)
    return People(cell, scores, boxes, keypoints, visibility)


def _every_box(maps: dict[str, Tensor]) -> Tensor:
    """Boxes (B, A, 4) that all cells predict, in cells, clipped to the input."""
    height, width = maps["box_scale"].shape[2:]
    size = maps["box_scale"].clamp_min(0).flip(1).flatten(2).transpose(1, 2)  # the file has y before x
    centre = _places(maps["box_scale"]) + maps["box_offset"].flip(1).flatten(2).transpose(1, 2)
    boxes = torch.cat([centre - size / 2, centre + size / 2], dim=2)
    return torch.minimum(boxes.clamp_min(0), torch.tensor([width, height, width, height]))


def _every_pose(maps: dict[str, Tensor]) -> Tensor:
    """Coarse keypoints (B, A, K, 2) that all cells predict, in cells."""
    shift = maps["kpt_regress"].unflatten(1, (KEYPOINTS, 2)).flip(2).flatten(3).permute(0, 3, 1, 2)
    return _places(maps["kpt_regress"])[:, None] + shift


def _places(maps: Tensor) -> Tensor:
    """Column and row (A, 2) of every cell."""
    row, column = torch.meshgrid(*(torch.arange(int(side)) for side in maps.shape[2:]), indexing="ij")
    return torch.stack([column, row], dim=-1).reshape(-1, 2).float()


def _last(graph: GraphModel, branch: str) -> str:
    """The last convolution of a branch: the only one of kernel 1 that is fused with a bias alone."""
    found = [
        name
        for name, node in graph.nodes.items()
        if f"/{branch}_0/" in f"/{name}" and node["op"] == "_FusedConv2D" and name.endswith("/BiasAdd")
    ]
    if len(found) != 1:
        raise HaloposeError(f"{graph.path} has no branch {branch}: give movenet-multipose.json")
    return found[0]


def _merged(graph: GraphModel, depthwise: str, pointwise: str) -> ConvTemplate:
    """A depthwise and a pointwise convolution as one that heads can mirror."""
    each = kernel_of(graph.weights[graph.inputs(depthwise)[1]], True)[:, 0]
    mixed = kernel_of(graph.weights[graph.inputs(pointwise)[1]], False)[:, :, 0, 0]
    bias = graph.weights[graph.inputs(pointwise)[2]]
    weight = torch.from_numpy(mixed[:, :, None, None] * each)
    return ConvTemplate(weight, torch.from_numpy(bias.copy()), "relu")


def _module(graph: GraphModel, name: str) -> nn.Conv2d:
    weight, bias = (graph.weights[source] for source in graph.inputs(name)[1:3])
    module = nn.Conv2d(weight.shape[2], weight.shape[3], 1)
    module.weight.data = torch.from_numpy(kernel_of(weight, False).copy())
    module.bias.data = torch.from_numpy(bias.copy())  # type: ignore[union-attr]
    return module
