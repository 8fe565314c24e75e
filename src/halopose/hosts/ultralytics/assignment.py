"""The decision of Ultralytics' training criterion which cells are whose, without the losses it computes beside.

In: a criterion, the raw output of a branch of the head, and targets as the criterion takes them. Out: the cells
that its own assigner gives to objects. Losses are never computed, and cells that cannot win are not decoded.
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

LIKELY = 3e-4  # score of a cell that is looked at first: some hundred of eight thousand are
MARGIN = 1.01  # an overlap is at most one but for rounding


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


@dataclass(frozen=True)
class _Contest:
    """What the assigner is asked about: scores (B, A, classes) and boxes of cells, and the objects of images.

    labels (B, M, 1) and wanted boxes (B, M, 4), all zero where an image has fewer objects than others.
    """

    assigner: Any
    scores: Tensor
    boxes: _Boxes
    labels: Tensor
    wanted: Tensor
    extra: dict[str, Tensor]

    def won(self, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the assigner's ``get_pos_mask`` says of all cells, from a few of them; centres (A, 2) of cells.

        Each object takes its ``topk`` cells of the best metric, score ** alpha * overlap ** beta, no overlap being
        more than one: where that many likely cells beat what an unlikely one could reach, no other is looked at.
        """
        sound = self.wanted.sum(2, keepdim=True).gt_(0.0)
        inside = self.assigner.select_candidates_in_gts(centres, self.wanted, sound) & sound.bool()
        likely = ~(self.scores.amax(2) < LIKELY)[:, None]
        metric, overlaps = self._metrics(inside & likely)
        best = metric.topk(self.assigner.topk + 1).values
        settled = best[..., -2:-1] > best[..., -1:].clamp(min=MARGIN * LIKELY**self.assigner.alpha)
        # All of the other objects' cells; and other objects there, as those may overlap more.
        rest = inside & ~likely & (inside & ~settled).any(1, keepdim=True)
        if rest.any():
            for whole, part in zip((metric, overlaps), self._metrics(rest), strict=True):
                whole += part
        among = sound.expand(-1, -1, self.assigner.topk).bool()
        return self.assigner.select_topk_candidates(metric, topk_mask=among).mul_(inside), metric, overlaps

    def _metrics(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Metric and overlap (B, M, A) of pairs (B, M, A) of objects and cells, zero elsewhere."""
        found: tuple[Tensor, Tensor] = self.assigner.get_box_metrics(
            self.scores, self.boxes, self.labels, self.wanted, pairs, **self.extra
        )
        return found


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
    contest = _Contest(
        assigner,
        branch["scores"].sigmoid().transpose(1, 2),
        _Boxes(criterion, branch["boxes"], grid),
        labels,
        boxes,
        extra,
    )
    wanted, metric, overlaps = contest.won(grid.centres * grid.strides)
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
