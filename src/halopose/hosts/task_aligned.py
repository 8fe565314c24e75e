"""Task-aligned label assignment on decoded predictions, for hosts whose framework is not installed.

The definition is that of TOOD (Feng et al., 2021) with the overlaps and limits of each family of models. Nothing here
imports a framework; tests compare the decisions with the frameworks' own assigners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halopose.hosts.base import Assignment, Targets

AssignerName = Literal["yolo", "yolo26", "yolo26-one-to-one", "yolonas", "matched"]
ASSIGNERS: tuple[AssignerName, ...] = ("yolo", "yolo26", "yolo26-one-to-one", "yolonas", "matched")
BOX_AREA = 0.53  # object area over box area in the OKS of the assigners
MATCH_IOU = 0.5  # smallest IoU of a detection and its object in the matched mode
_LEVELS = 2.0, 12.0  # smallest and largest object side of a level, in strides


@dataclass(frozen=True)
class Cells:
    """Decoded predictions of A cells of one image.

    Attributes:
        boxes: Boxes (A, 4) xyxy in input pixels.
        scores: Class scores (A, classes).
        keypoints: Keypoints (A, K, 2) in input pixels.
        centres: Centres (A, 2) of the cells in input pixels.
        strides: Stride (A,) of each cell.
    """

    boxes: Tensor
    scores: Tensor
    keypoints: Tensor
    centres: Tensor
    strides: Tensor


@dataclass(frozen=True)
class TaskAlignedSettings:
    """Settings of the assignment.

    Attributes:
        topk: Cells per object before conflicts are resolved.
        topk_after: Cells per object afterwards; None for all.
        score_power: Exponent of the class score in the alignment metric.
        overlap_power: Exponent of the overlap.
        overlap: Overlap of a prediction and an object: ``ciou``, ``oks``, or ``iou-oks`` for their product.
        level_gate: Whether an object takes cells only of levels that fit its size.
        floor: Whether boxes smaller than the second stride are enlarged to it before cells inside are looked for.
    """

    topk: int = 10
    topk_after: int | None = None
    score_power: float = 0.5
    overlap_power: float = 6.0
    overlap: Literal["ciou", "oks", "iou-oks"] = "ciou"
    level_gate: bool = False
    floor: bool = True


SETTINGS: dict[str, TaskAlignedSettings] = {
    "yolo": TaskAlignedSettings(),
    "yolo26": TaskAlignedSettings(overlap="oks", level_gate=True),
    "yolo26-one-to-one": TaskAlignedSettings(topk=7, topk_after=1, overlap="oks", level_gate=True),
    "yolonas": TaskAlignedSettings(topk=13, score_power=1.0, overlap="iou-oks", floor=False),
}


def assign_task_aligned(
    images: Sequence[Cells], targets: Sequence[Targets], sigmas: tuple[float, ...], settings: TaskAlignedSettings
) -> Assignment:
    """Assign cells to objects, image by image.

    Args:
        images: Predictions of every image.
        targets: Objects of every image, in input pixels.
        sigmas: OKS sigmas (K,).
        settings: Which assignment.
    """
    found = [
        _assign_image(cells, target, torch.tensor(sigmas), settings)
        for cells, target in zip(images, targets, strict=True)
    ]
    counts = torch.tensor([len(cell) for cell, _ in found])
    image = torch.repeat_interleave(torch.arange(len(found)), counts)
    return Assignment(image, torch.cat([cell for cell, _ in found]), torch.cat([own for _, own in found]))


def _assign_image(
    cells: Cells, target: Targets, sigmas: Tensor, settings: TaskAlignedSettings
) -> tuple[Tensor, Tensor]:
    """Assigned cells (n,) and their objects (n,), by cell."""
    sizes = target.boxes[:, 2:] - target.boxes[:, :2]
    sound = torch.nonzero((sizes > 0).all(1) & torch.isfinite(target.boxes).all(1)).flatten()
    empty = torch.zeros(0, dtype=torch.long)
    if not len(sound):
        return empty, empty
    boxes = target.boxes[sound].float()
    inside = cells_inside(cells, boxes, settings)
    overlap = _overlaps(cells, target, sound, sigmas, settings)
    if settings.floor:  # overlaps count only inside the box there
        overlap = torch.where(inside, overlap, 0.0)
    score = cells.scores[:, target.class_ids[sound].long()].T
    metric = score.pow(settings.score_power) * overlap.pow(settings.overlap_power) * inside
    topk = min(settings.topk, metric.shape[1])
    positive = torch.zeros_like(inside).scatter_(1, metric.topk(topk, dim=1).indices, True) & inside
    several = positive.sum(0) > 1
    best = torch.zeros_like(inside).scatter_(0, overlap.argmax(0)[None], True)
    positive = torch.where(several, best, positive)
    if settings.topk_after is not None:
        kept = (metric * positive).topk(settings.topk_after, dim=1).indices
        positive &= torch.zeros_like(inside).scatter_(1, kept, True)
    cell = torch.nonzero(positive.any(0)).flatten()
    return cell, sound[positive[:, cell].to(torch.uint8).argmax(0)]


def cells_inside(cells: Cells, boxes: Tensor, settings: TaskAlignedSettings) -> Tensor:
    """Which cells (M, A) have their centre strictly inside a box (M, 4) and, if gated, fit its size."""
    centre, size = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    levels = cells.strides.unique()
    wide = size
    if settings.floor:
        wide = size.clamp_min(float(levels[min(1, len(levels) - 1)]))
    low, high = centre - wide / 2, centre + wide / 2
    inside: Tensor = ((cells.centres > low[:, None]) & (cells.centres < high[:, None])).all(2)
    if not settings.level_gate:
        return inside
    side, stride = size.prod(1).sqrt()[:, None], cells.strides
    large_enough = (side >= _LEVELS[0] * stride) | (stride == levels[0])
    small_enough = (side <= _LEVELS[1] * stride) | (stride == levels[-1])
    gated = inside & large_enough & small_enough
    return torch.where(gated.any(1, keepdim=True), gated, inside)


def _overlaps(cells: Cells, target: Targets, sound: Tensor, sigmas: Tensor, settings: TaskAlignedSettings) -> Tensor:
    """Overlaps (M, A) of the objects ``sound`` and all cells."""
    boxes, labelled = target.boxes[sound].float(), target.labelled[sound]
    if settings.overlap == "ciou":
        return complete_iou(boxes, cells.boxes)
    oks = keypoint_similarity(cells.keypoints, target.keypoints[sound].float(), labelled, boxes, sigmas)
    unlabelled = ~labelled.any(1, keepdim=True)
    if settings.overlap == "oks":
        return torch.where(unlabelled, complete_iou(boxes, cells.boxes), oks)
    return box_iou(boxes, cells.boxes) * torch.where(unlabelled, 1.0, oks)


def keypoint_similarity(predicted: Tensor, wanted: Tensor, labelled: Tensor, boxes: Tensor, sigmas: Tensor) -> Tensor:
    """OKS (M, A) of keypoints wanted (M, K, 2) and predicted (A, K, 2) over labelled ones (M, K)."""
    result = []
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1) * BOX_AREA
    for points, seen, area in zip(wanted, labelled, areas, strict=True):  # an object at a time saves memory
        squared = (predicted[:, seen] - points[seen]).square().sum(2)
        exponent = squared / ((2 * sigmas[seen]) ** 2 * area * 2)
        result.append(torch.exp(-exponent).sum(1) / max(int(seen.sum()), 1))
    return torch.stack(result)


def box_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """IoU (M, A) of boxes (M, 4) and (A, 4), xyxy."""
    boxes, others = boxes[:, None], others[None]
    sides = torch.minimum(boxes[..., 2:], others[..., 2:]) - torch.maximum(boxes[..., :2], others[..., :2])
    shared = sides.clamp_min(0).prod(2)
    area, areas = ((each[..., 2:] - each[..., :2]).clamp_min(0).prod(2) for each in (boxes, others))
    return shared / (area + areas - shared + 1e-9)


def complete_iou(boxes: Tensor, others: Tensor) -> Tensor:
    """Complete IoU (M, A) of boxes (M, 4) and (A, 4), negative values as 0.

    Reference: Zheng et al., Distance-IoU Loss, AAAI 2020.
    """
    iou = box_iou(boxes, others)
    boxes, others = boxes[:, None], others[None]
    around = torch.maximum(boxes[..., 2:], others[..., 2:]) - torch.minimum(boxes[..., :2], others[..., :2])
    apart = (boxes[..., :2] + boxes[..., 2:] - others[..., :2] - others[..., 2:]) / 2
    distance = apart.square().sum(2) / (around.square().sum(2) + 1e-9)
    angle, angles = (torch.atan((each[..., 2] - each[..., 0]) / _height(each)) for each in (boxes, others))
    shape = 4 / math.pi**2 * (angles - angle).square()
    return (iou - distance - shape.square() / (1 - iou + shape + 1e-9)).clamp_min(0)


def _height(boxes: Tensor) -> Tensor:
    return boxes[..., 3] - boxes[..., 1] + 1e-9


def assign_matched(found: Sequence[tuple[Tensor, Tensor, Tensor]], targets: Sequence[Targets]) -> Assignment:
    """Give every object the retained detection of its class that overlaps it most.

    Args:
        found: Cells (N,), boxes (N, 4) and class ids (N,) of the detections of every image, best first.
        targets: Objects of every image, in input pixels.
    """
    image, cells, objects = [], [], []
    for number, ((cell, boxes, class_ids), target) in enumerate(zip(found, targets, strict=True)):
        overlap = box_iou(target.boxes.float(), boxes)
        overlap = torch.where(target.class_ids[:, None] == class_ids, overlap, 0.0)
        for row in range(len(cell)):  # best first, one object each
            if len(overlap) and float(overlap[:, row].max()) >= MATCH_IOU:
                own = int(overlap[:, row].argmax())
                overlap[own] = 0.0
                image.append(number)
                cells.append(int(cell[row]))
                objects.append(own)
    return Assignment(*(torch.tensor(values, dtype=torch.long) for values in (image, cells, objects)))
