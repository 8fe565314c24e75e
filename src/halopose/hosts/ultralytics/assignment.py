"""Label assignment by the assigner of Ultralytics' training criterion, without computing losses."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from ultralytics.utils.loss import PoseLoss26
from ultralytics.utils.tal import make_anchors

from halopose.hosts.base import Assignment


def assign_cells(
    criterion: Any, branch: dict[str, Any], batch: dict[str, Tensor], keypoints: Tensor, strides: tuple[int, ...]
) -> Assignment:
    """Assign cells to objects as the criterion does.

    Args:
        criterion: The framework's training criterion.
        branch: Raw output of a branch of the head: boxes (B, 4 * bins, A), scores (B, classes, A) and feats.
        batch: Targets as the criterion takes them, at least one.
        keypoints: Predicted keypoints (B, A, K, 2) in input pixels, which the criterion of YOLO26 compares.
        strides: Pixels per cell of each level.
    """
    sizes = tuple(tuple(maps.shape[2:]) for maps in branch["feats"])
    centres, stride = _grid(sizes, tuple(map(float, strides)), criterion.device)
    height, width = (side * strides[0] for side in sizes[0])
    images = len(branch["scores"])
    targets = torch.cat([batch["batch_idx"][:, None], batch["cls"][:, None], batch["bboxes"]], dim=1)
    scale = torch.tensor([width, height, width, height], dtype=torch.float32, device=criterion.device)
    labels, boxes = criterion.preprocess(targets, images, scale_tensor=scale).split((1, 4), 2)
    extra: dict[str, Tensor] = {}
    if isinstance(criterion, PoseLoss26):
        size = torch.tensor([height, width], dtype=torch.float32, device=criterion.device)
        targets_of_image = criterion._batch_keypoints(batch, images, size)
        extra = {"pd_kpts": keypoints, "gt_kpts": targets_of_image, "anc_strides": stride.flatten()}
    *_, foreground, chosen = criterion.assigner(
        branch["scores"].sigmoid().transpose(1, 2),
        criterion.bbox_decode(centres, branch["boxes"].transpose(1, 2).contiguous()) * stride,
        centres * stride,
        labels,
        boxes,
        boxes.sum(2, keepdim=True).gt_(0.0),
        **extra,
    )
    image, cell = torch.nonzero(foreground, as_tuple=True)
    return Assignment(image, cell, chosen[image, cell].long())


@lru_cache(maxsize=64)  # rectangular inputs have few sizes
def _grid(
    sizes: tuple[tuple[int, ...], ...], strides: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the centres (A, 2) of all cells, in cells of their level, and their strides (A, 1)."""
    centres, stride = make_anchors([torch.empty(1, 0, *size, device=device) for size in sizes], strides, 0.5)
    return centres, stride
