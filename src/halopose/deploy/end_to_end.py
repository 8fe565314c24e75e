"""One graph from the image to calibrated detections in original pixels, with non-maximum suppression in the graph.

Inputs:
    images: Batch (B, 3, H, W).
    letterbox: Gain x, gain y, pad x, pad y, and width and height of the image, (B, 6).

Outputs, N detections over all images of the batch, best first within an image:
    image, classes: Number of the image in the batch, and class from 1, (N,).
    boxes, scores, keypoints, visibility: (N, 4) xyxy, (N,), (N, K, 2), (N, K).
    covariance, scale: Entries xx, xy, yy (N, K, 3) in squared pixels of the image.
    dof: Degrees of freedom (N, K); infinite for the Gaussian.
    keep: Whether each keypoint is kept (N, K).
    novelty, image_novelty: p-values (N,) and (B,), if the artifact has an out-of-distribution model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from halopose.deploy.added_heads import TracedTensors, example_tensors, file_facts, joined, opset_of, tensors_of
from halopose.deploy.graph import TopkHeads, best_cells
from halopose.deploy.onnx_file import (
    TRACED_SIZE,
    ExportSettings,
    checked,
    facts_of,
    trace_module,
    write_facts,
)
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts.base import Host
from halopose.hosts.onnx.onnx_host import OnnxHost, open_session
from halopose.hosts.traceable import Traceable, Traced
from halopose.runtime import predict

if TYPE_CHECKING:
    from onnx import ModelProto

CANDIDATES = 1000  # best cells that non-maximum suppression compares
MOST = 300  # detections of a class and image


class _NonMaxSuppression(torch.autograd.Function):
    """The ONNX operator of this name: rows of image, class and box index (n, 3)."""

    @staticmethod
    def forward(ctx: Any, boxes: Tensor, scores: Tensor, iou: float, conf: float) -> Tensor:
        found = []
        for image in range(scores.shape[0]):
            for label in range(scores.shape[1]):
                own = scores[image, label].numpy()
                index = np.flatnonzero(own > conf)
                kept = index[predict.suppress(boxes[image].numpy()[index], own[index], np.zeros(len(index)), iou)]
                found += [(image, label, place) for place in kept[:MOST].tolist()]
        return torch.tensor(found, dtype=torch.long).reshape(-1, 3)

    @staticmethod
    def symbolic(g: Any, boxes: Any, scores: Any, iou: float, conf: float) -> Any:
        most = g.op("Constant", value_t=torch.tensor([MOST]))
        limits = [g.op("Constant", value_t=torch.tensor([value], dtype=torch.float32)) for value in (iou, conf)]
        return g.op("NonMaxSuppression", boxes, scores, most, *limits)


class EndToEnd(nn.Module):
    """A traceable model, its heads, and everything that follows them."""

    temperature: Tensor
    sigmas: Tensor
    dof: Tensor
    factor: Tensor
    pruned_dof: Tensor
    pruned_factor: Tensor
    moment: Tensor
    known: Tensor
    known_images: Tensor

    def __init__(self, model: Traceable, host: Host, artifact: Artifact, settings: ExportSettings) -> None:
        super().__init__()
        self.model, self.heads = model, TopkHeads(artifact, settings.topk)
        self.chosen = settings.detection
        self.one_class, self.yolonas = len(host.class_names) == 1, model.layout == "yolonas"
        self.keypoints, self.visible = host.keypoint_count, model.visibility
        facts = facts_of(host, model, artifact, settings)
        self.facts = facts
        tables = {
            "temperature": facts.temperature,
            "sigmas": facts.sigmas,
            "dof": facts.student_dof,
            "factor": facts.student_scale,
            "pruned_dof": facts.pruned_dof or facts.student_dof,
            "pruned_factor": facts.pruned_scale or facts.student_scale,
            "moment": facts.student_moment or [],
        }
        for name, table in tables.items():
            self.register_buffer(name, torch.tensor(table, dtype=torch.float32))
        known = facts.novelty
        if known is not None:
            scores, values = np.asarray(known["known"], dtype=np.float64).reshape(-1, 2).T
            self.register_buffer("known", torch.tensor(values[scores >= settings.detection.conf], dtype=torch.float32))
            self.register_buffer("known_images", torch.tensor(known["known_images"], dtype=torch.float32))

    @property
    def has_novelty(self) -> bool:
        """Whether there are p-values."""
        return self.heads.novelty is not None

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, in order."""
        seen = ["visibility"] if self.visible else []
        novelty = ["novelty", "image_novelty"] if self.has_novelty else []
        return [
            "image",
            "classes",
            "boxes",
            "scores",
            "keypoints",
            *seen,
            "covariance",
            "scale",
            "dof",
            "keep",
            *novelty,
        ]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        *tensors, letterbox = given
        traced = self.model(*tensors)
        gain, pad, size = letterbox[:, :2], letterbox[:, 2:4], letterbox[:, 4:]
        area = torch.cat([pad, pad + gain * size], dim=1) if self.has_novelty else None
        factors, cells, *novelty = self.heads(traced, area)
        image, label, cell, score, values = self._detections(traced, letterbox)
        match = cells[image] == cell[:, None]  # (N, M)
        known = torch.nonzero(match.any(dim=1))[:, 0]  # detections without covariances are left out
        image, label, score, values, match = (each[known] for each in (image, label, score, values, match))
        place = match.to(torch.float32).argmax(dim=1)
        gain, pad, size = gain[image], pad[image], size[image]
        boxes = self._original(values[:, :4].reshape(-1, 2, 2), gain, pad, size, clip=True).reshape(-1, 4)
        count = self.keypoints
        points = torch.stack([values[:, 4 : 4 + count], values[:, 4 + count : 4 + 2 * count]], dim=2)
        points = self._original(points, gain, pad, size, clip=not self.yolonas)
        seen = values[:, 4 + 2 * count :]
        scaled = factors[image, place] * self.temperature[:, None] / torch.cat([gain, gain[:, 1:]], dim=1)[:, None]
        l11, l21, l22 = scaled.unbind(dim=2)
        gaussian = torch.stack([l11 * l11, l11 * l21, l21 * l21 + l22 * l22], dim=2)
        keep = self._kept(boxes, gaussian, seen)
        covariance, scale, dof = self._distribution(gaussian, keep)
        visibility = (seen,) if self.visible else ()
        p_values: tuple[Tensor, ...] = ()
        if self.has_novelty:
            values_of, image_value = novelty
            p_values = p_value(self.known, values_of[image, place]), p_value(self.known_images, image_value)
        return (image, label + 1, boxes, score, points, *visibility, covariance, scale, dof, keep, *p_values)

    def _detections(self, traced: Traced, letterbox: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Image, class, cell and score (N,) of the detections, and box, x, y and visibility (N, 4 + K * dimensions)."""
        conf = float(np.float32(self.chosen.conf))
        if traced.rows is not None:  # the model has chosen its rows itself
            rows = traced.native[0]
            image, place = torch.nonzero(rows[:, :, 4] > conf).unbind(dim=1)
            found = rows[image, place]
            points = found[:, 6:].reshape(-1, self.keypoints, 3 if self.visible else 2).transpose(1, 2).flatten(1)
            values = torch.cat([found[:, :4], points], dim=1)
            return image, found[:, 5].long(), traced.rows[image, place], found[:, 4], values
        assert traced.cell_boxes is not None  # only models that choose rows have no boxes to compare
        every = traced.scores.amax(dim=2) if not self.one_class else traced.scores[:, :, 0]
        score, cell = best_cells(every, CANDIDATES)
        values = traced.cell_boxes.rows(cell)
        boxes = values[:, :, :4]
        ranked = score
        if self.yolonas:  # clipped to the image before suppression, as LibreYOLO does
            corners = boxes.reshape(boxes.shape[0], -1, 2, 2)
            sides = [each[:, None, None] for each in (letterbox[:, :2], letterbox[:, 4:])]
            boxes = torch.minimum((corners / sides[0]).clamp_min(0), sides[1]).flatten(2)
            sound = (boxes[:, :, 2:] > boxes[:, :, :2]).all(dim=2)
            ranked = torch.where(sound, score, -1.0)
            conf = float(np.nextafter(np.float32(conf), np.float32(-1)))
        if self.one_class:
            label, ranked = torch.zeros_like(cell), ranked[:, None]
        else:
            label = traced.scores.argmax(dim=2).gather(1, cell)
            classes = torch.arange(traced.scores.shape[2])[None, :, None]
            ranked = torch.where(label[:, None] == classes, ranked[:, None], -1.0)
        suppress: Any = _NonMaxSuppression.apply
        image, _, place = suppress(boxes, ranked, self.chosen.iou, conf).unbind(dim=1)
        order = torch.sort(score[image, place] - 2.0 * image, descending=True).indices
        image, place = image[order], place[order]
        return image, label[image, place], cell[image, place], score[image, place], values[image, place]

    @staticmethod
    def _original(points: Tensor, gain: Tensor, pad: Tensor, size: Tensor, clip: bool) -> Tensor:
        """Points (N, n, 2) in pixels of the image."""
        places = (points - pad[:, None]) / gain[:, None]
        return torch.minimum(places.clamp_min(0), size[:, None]) if clip else places

    def _kept(self, boxes: Tensor, gaussian: Tensor, seen: Tensor) -> Tensor:
        """Whether each keypoint (N, K) is kept by the pruning thresholds."""
        extent = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).clamp_min(1.0) * self.facts.area_factor
        trace = gaussian[:, :, 0] + gaussian[:, :, 2]
        least = -math.inf if self.facts.threshold is None else self.facts.threshold
        keep = -trace / (extent[:, None] * (2 * self.sigmas) ** 2) >= max(least, -3e38)
        if self.facts.visibility_threshold is not None and self.visible:
            keep = keep & (seen >= self.facts.visibility_threshold)
        return keep

    def _distribution(self, gaussian: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Covariance and scale (N, K, 3), and degrees of freedom (N, K)."""
        if self.chosen.family == "gaussian":
            return gaussian, gaussian * 1.0, torch.full_like(gaussian[:, :, 0], math.inf)
        dof = torch.where(keep, self.dof, self.pruned_dof)
        factor = torch.where(keep, self.factor, self.pruned_factor)
        scale = gaussian * (factor**2)[:, :, None]
        if self.facts.student_moment is None:
            return scale * (dof / (dof - 2))[:, :, None], scale, dof
        return gaussian * (self.moment**2)[:, None], scale, dof


def p_value(known: Tensor, value: Tensor) -> Tensor:
    """Conformal p-values (N,) of values among known ones."""
    larger = (known[None] >= value[:, None]).to(torch.float32).sum(dim=1)
    return (1 + larger) / (1 + known.shape[0])


def build_end_to_end(host: Host, artifact: Artifact, settings: ExportSettings) -> ModelProto:
    """Trace a model with everything that follows it, or add that to an ONNX file.

    Args:
        host: Base model.
        artifact: Artifact of the base model.
        settings: Settings of the export.
    """
    artifact.check(host)
    if artifact.calibrations.offset is not None:
        raise HaloposeError("this artifact has an offset of the mean, which the end2end form lacks: export it as topk")
    chosen = settings.detection
    fixed = {"conf": chosen.conf, "iou": chosen.iou, "family": chosen.family}
    height, width = TRACED_SIZE
    letterbox = torch.tensor([[1.0, 1.0, 0.0, 0.0, width, height]]).repeat(2, 1)
    if isinstance(host, OnnxHost):
        tensors = TracedTensors(host)
        module = EndToEnd(tensors, host, artifact, settings).eval()
        given, axes = example_tensors(host)
        given["letterbox"] = letterbox
        axes |= _axes(module)
        added = trace_module(module, given, module.output_names, axes, opset_of(host))
        model = joined(host, added, tensors_of(host))
        write_facts(model, replace(module.facts, fixed=fixed, file=file_facts(host)))
        open_session(model.SerializeToString(), host.path, None)
        return model
    module = EndToEnd(host.traceable(), host, artifact, settings).eval()
    given = {"images": torch.rand(2, 3, height, width), "letterbox": letterbox}
    axes = {"images": {0: "batch", 2: "height", 3: "width"}, **_axes(module)}
    model = trace_module(module, given, module.output_names, axes)
    write_facts(model, replace(module.facts, fixed=fixed))
    return checked(model)


def _axes(module: EndToEnd) -> dict[str, dict[int, str]]:
    """Free axes of the letterbox and of the outputs."""
    axes: dict[str, dict[int, str]] = {name: {0: "detections"} for name in module.output_names}
    return {**axes, "letterbox": {0: "batch"}, **({"image_novelty": {0: "batch"}} if module.has_novelty else {})}
