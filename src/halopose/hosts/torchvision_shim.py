"""Make ``import torchvision`` work beside a CPU build of torch.

The registry's torchvision is linked against CUDA. Beside a CPU torch its operators are missing and the import fails.
Pose frameworks need only two schemas and a CPU non-maximum suppression. If torchvision imports normally, nothing is
changed.
"""

from __future__ import annotations

import importlib
import sys

import torch
from torch import Tensor

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # operators are removed with the object that defines them


def ensure_torchvision() -> bool:
    """Import torchvision, and define its operators if they are missing; returns True if they were."""
    global _library
    try:
        importlib.import_module("torchvision")
        return _library is not None
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # left half-imported by the failure
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)
    _library.impl("nms", nms, "CPU")
    importlib.import_module("torchvision")
    # torchvision.ops refuses to run without its binary, although the operator exists now.
    vars(importlib.import_module("torchvision.extension"))["_has_ops"] = lambda: True
    return True


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return indices of boxes (N, 4) xyxy to keep, by falling score, as torchvision does."""
    order = scores.argsort(descending=True, stable=True)
    boxes = dets[order]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    alive = torch.ones(len(boxes), dtype=torch.bool)
    for index in range(len(boxes)):
        if not alive[index]:
            continue
        corner = torch.maximum(boxes[index, :2], boxes[index + 1 :, :2])
        opposite = torch.minimum(boxes[index, 2:], boxes[index + 1 :, 2:])
        overlap = (opposite - corner).clamp(min=0).prod(1)
        union = area[index] + area[index + 1 :] - overlap
        alive[index + 1 :] &= ~(overlap / union > iou_threshold)  # empty boxes (0 / 0) overlap no other box
    return order[alive]
