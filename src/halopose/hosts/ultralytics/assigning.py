"""The decision of Ultralytics' training criterion which cells are whose, without the losses it computes beside.

In: a criterion, the raw output of a branch of the head, and targets as the criterion takes them. Out: the cells
that its own assigner gives to objects. Losses are never computed, and boxes are decoded only inside of objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from ultralytics.utils.loss import PoseLoss26
from ultralytics.utils.tal import make_anchors

from halopose.hosts.base import Assignment


@dataclass(frozen=True)
class _Grid:
    """Cells of all levels: centres (A, 2) in cells of their own level, strides (A, 1)."""

    centres: Tensor
    strides: Tensor


@dataclass(frozen=True)
class _Boxes:
    """Predicted boxes (B, A, 4) in input pixels, decoded where they are asked for: most cells lie in no object.

    It stands for the tensor that the criterion would hand to its assigner. offsets (B, 4 * bins, A): as the branch
    gives them.
    """

    criterion: Any
    offsets: Tensor
    grid: _Grid

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.offsets.shape[0], self.offsets.shape[2], 4

    @property
    def dtype(self) -> torch.dtype:
        return self.offsets.dtype

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    def __getitem__(self, where: tuple[Tensor, Tensor]) -> Tensor:
        """Boxes (N, 4) of cells (N,) of images (N,)."""
        image, cell = where
        offsets = self.offsets[image, :, cell]
        boxes: Tensor = self.criterion.bbox_decode(self.grid.centres[cell], offsets[None])[0]
        return boxes * self.grid.strides[cell]


def assigned(criterion: Any, branch: dict[str, Any], batch: dict[str, Tensor], keypoints: Tensor) -> Assignment:
    """What the criterion's assigner decides.

    branch: the head's boxes (B, 4 * bins, A), scores (B, classes, A) and feats; batch: at least one target;
    keypoints (B, A, K, 2) in input pixels, which the criterion of YOLO26 compares.
    """
    sizes = tuple(tuple(maps.shape[2:]) for maps in branch["feats"])
    grid = _grid(sizes, tuple(criterion.stride.tolist()), criterion.device)
    height, width = (side * int(criterion.stride[0]) for side in sizes[0])
    images = len(branch["scores"])
    labels, boxes = _padded(criterion, batch, images, (height, width))
    extra: dict[str, Tensor] = {}
    assigner = criterion.assigner
    assigner.bs, assigner.n_max_boxes = images, boxes.shape[1]  # as its ``forward`` sets them
    if isinstance(criterion, PoseLoss26):
        size = torch.tensor([height, width], dtype=torch.float32, device=criterion.device)
        extra = {"pd_kpts": keypoints, "gt_kpts": criterion._batch_keypoints(batch, images, size)}
        assigner.anc_strides = grid.strides.flatten()
    wanted, metric, overlaps = assigner.get_pos_mask(
        branch["scores"].sigmoid().transpose(1, 2),
        _Boxes(criterion, branch["boxes"], grid),
        labels,
        boxes,
        grid.centres * grid.strides,
        boxes.sum(2, keepdim=True).gt_(0.0),
        **extra,
    )
    chosen, foreground, _ = assigner.select_highest_overlaps(wanted, overlaps, assigner.n_max_boxes, metric)
    image, cell = torch.nonzero(foreground, as_tuple=True)
    return Assignment(image, cell, chosen[image, cell].long())


@lru_cache(maxsize=64)  # rectangular inputs have few sizes
def _grid(sizes: tuple[tuple[int, ...], ...], strides: tuple[float, ...], device: torch.device) -> _Grid:
    return _Grid(*make_anchors([torch.empty(1, 0, *size, device=device) for size in sizes], strides, 0.5))


def _padded(criterion: Any, batch: dict[str, Tensor], images: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Classes (B, M, 1) and boxes (B, M, 4) of objects in input pixels, as many an image as the most have."""
    targets = torch.cat([batch["batch_idx"][:, None], batch["cls"][:, None], batch["bboxes"]], dim=1)
    height, width = size
    scale = torch.tensor([width, height, width, height], dtype=torch.float32, device=criterion.device)
    labels, boxes = criterion.preprocess(targets, images, scale_tensor=scale).split((1, 4), 2)
    return labels, boxes


__all__ = ["assigned"]
