"""Detections of every host against those of its unmodified framework, bit by bit."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.models import (
    KINDS,
    PHOTOGRAPHS,
    framework_on,
    framework_predict,
    host_of,
    make_host,
    photograph,
    pose_model,
)
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")
IMGSZ = 160


@pytest.mark.parametrize("name", PHOTOGRAPHS)
@pytest.mark.parametrize("kind", KINDS)
def test_detections_are_the_frameworks(kind: str, name: str) -> None:
    host, image = host_of(kind), photograph(name)
    batch, boxes = host.preprocess([image], IMGSZ, True)
    assert (batch.shape[2] == batch.shape[3]) is (kind == "nas")
    output = host.forward(batch)
    selection = host.select(output, conf=0.25, iou=0.7, letterboxes=boxes)[0]
    found = host.to_original(selection, boxes[0], (batch.shape[2], batch.shape[3]))
    expected = framework_on(kind, name, IMGSZ)
    assert len(found.scores) > 5
    assert torch.equal(found.boxes, expected.boxes.xyxy)
    assert torch.equal(found.scores, expected.boxes.conf)
    assert torch.equal(found.class_ids, expected.boxes.cls.long())
    assert torch.equal(torch.cat([found.keypoints, present(found.visibility)[..., None]], 2), expected.keypoints.data)
    # and the cells are where they came from
    assert torch.equal(output.keypoints[0, selection.cell], selection.keypoints)
    assert torch.equal(output.scores[0, selection.cell], selection.scores)
    assert len(selection.cell.unique()) == len(selection.cell)


@pytest.mark.parametrize(("kind", "shape", "classes"), [
    ("v8", (4, 2), 1), ("11", (5, 3), 3), ("26", (4, 2), 2), ("26-one-to-one", (6, 3), 3), ("12", (1, 3), 1),
    ("nas", (4, 3), 1), ("nas", (5, 3), 3),
])  # fmt: skip
def test_other_keypoints_and_classes(kind: str, shape: tuple[int, int], classes: int) -> None:
    model = pose_model(kind, shape, classes)
    host = make_host(kind, model)
    assert (host.keypoint_count, len(host.class_names)) == (shape[0], classes)
    assert host.layout.names == tuple(f"keypoint_{k}" for k in range(shape[0]))
    assert host.layout.sigmas == (1 / shape[0],) * shape[0]
    image = photograph("bus.jpg")
    batch, boxes = host.preprocess([image], 96, True)
    output = host.forward(batch)
    selection = host.select(output, conf=0.3, iou=0.6, letterboxes=boxes)[0]
    found = host.to_original(selection, boxes[0], (batch.shape[2], batch.shape[3]))
    expected = framework_predict(kind, model, image, imgsz=96, conf=0.3, iou=0.6)[0]
    assert len(found.scores) > 3
    assert torch.equal(found.boxes, expected.boxes.xyxy)
    assert torch.equal(found.class_ids, expected.boxes.cls.long())
    assert torch.equal(found.keypoints, expected.keypoints.data[..., :2])
    assert (found.visibility is None) is (shape[1] == 2)
    assert torch.equal(output.keypoints[0, selection.cell], selection.keypoints)
    assert not classes > 1 or len(found.class_ids.unique()) > 1
