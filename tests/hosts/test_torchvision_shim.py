"""The torchvision shim: its NMS is NMS, and torchvision imports."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ultralytics.utils.nms import TorchNMS

from halopose.hosts import torchvision_shim
from tests.helpers.models import (
    run_script,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def naive_nms(boxes: Any, scores: Any, threshold: float) -> list[int]:
    kept: list[int] = []
    for index in sorted(range(len(boxes)), key=lambda i: -scores[i]):
        x1, y1, x2, y2 = boxes[index]
        for other in kept:
            a1, b1, a2, b2 = boxes[other]
            overlap = max(0.0, min(x2, a2) - max(x1, a1)) * max(0.0, min(y2, b2) - max(y1, b1))
            if overlap > threshold * ((x2 - x1) * (y2 - y1) + (a2 - a1) * (b2 - b1) - overlap):
                break
        else:
            kept.append(index)
    return kept


@pytest.mark.parametrize(("count", "threshold"), [*itertools.product((0, 1, 7, 150), (0.1, 0.5, 0.7))])
def test_shim_nms_is_nms(count: int, threshold: float) -> None:
    generator = torch.Generator().manual_seed(count)
    corner = torch.rand((count, 2), generator=generator, dtype=torch.float64) * 60
    boxes = torch.cat([corner, corner + 5 + torch.rand((count, 2), generator=generator) * 40], 1)
    scores = torch.rand(count, generator=generator, dtype=torch.float64)
    found = torchvision_shim.nms(boxes, scores, threshold)
    assert found.dtype == torch.long
    assert found.tolist() == naive_nms(boxes.tolist(), scores.tolist(), threshold)
    assert torch.equal(found, TorchNMS.nms(boxes, scores, threshold))


def test_shim_nms_keeps_empty_boxes_as_torchvision_does() -> None:
    """torchvision suppresses where the overlap exceeds the threshold; 0 / 0 does not."""
    boxes = torch.tensor([[5.0, 5.0, 5.0, 5.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 1.0, 1.0]])
    scores = torch.tensor([0.9, 0.8, 0.7])
    assert torchvision_shim.nms(boxes, scores, 0.5).tolist() == [0, 1, 2]


def test_shim_acts_once() -> None:
    first = torchvision_shim.ensure_torchvision()
    library = torchvision_shim._library
    assert torchvision_shim.ensure_torchvision() is first
    assert torchvision_shim._library is library


def test_shim_makes_torchvision_import() -> None:
    text = """
from halopose.hosts.torchvision_shim import ensure_torchvision
ensure_torchvision(); ensure_torchvision()
import torch, torchvision
boxes = torch.tensor([[0.0, 0.0, 9.0, 9.0], [1.0, 1.0, 9.0, 9.0], [20.0, 20.0, 30.0, 30.0]])
print(torchvision.ops.nms(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.5).tolist())
"""
    assert run_script(text).split() == ["[1,", "2]"]
