"""MoveNet from files of TensorFlow.js: conversion, decoding and the contract of a host, on a small random network."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts.base import Selection, Targets
from halopose.hosts.loading import load_host
from halopose.hosts.movenet.movenet_host import BRANCHES, LEAST, REACH, SEEN, MoveNetHost
from halopose.prediction.uncertain_pose import UncertainPose
from tests.helpers.models import artifact_for, photograph
from tests.helpers.movenet_files import Network

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = 128


@cache
def network() -> Network:
    return Network()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return network().write(tmp_path_factory.mktemp("movenet"))


@pytest.fixture(scope="module")
def host(path: Path) -> MoveNetHost:
    found = load_host(path)
    assert isinstance(found, MoveNetHost)
    return found


def test_the_converted_network_equals_its_layers_in_pytorch(host: MoveNetHost) -> None:
    images = torch.randint(0, 256, (2, 3, 64, 96)).float()
    found = host._session.run(list(BRANCHES), {"input": images.numpy()})
    for branch, values in network().maps(images).items():
        assert np.abs(found[BRANCHES.index(branch)] - values.numpy()).max() < 1e-3 * values.abs().max()


def test_decoding_equals_that_of_the_published_graph(host: MoveNetHost) -> None:
    batch, _ = host.preprocess([photograph("bus.jpg")], SIZE, True)
    found = host.forward(batch).raw.people[0]
    maps = {name: values[0].double() for name, values in network().maps(batch).items()}
    expected = published(maps, len(found.cell))
    assert len(expected) == len(found.cell) > 2
    for number, (cell, score, box, points, seen) in enumerate(expected):
        assert found.cell[number] == cell
        assert float(found.scores[number]) == pytest.approx(score, abs=1e-4)
        assert np.allclose(found.boxes[number], box, atol=1e-3)
        clear = np.isfinite(points).all(1)
        assert np.allclose(found.visibility[number][clear], seen[clear], atol=1e-4)
        assert np.allclose(found.keypoints[number][clear], points[clear], atol=1e-3)


def published(maps: dict[str, torch.Tensor], most: int) -> list[tuple[int, float, np.ndarray, np.ndarray, np.ndarray]]:
    """Persons, one after the other, as the nodes after the maps compute them."""
    center, heat = maps["center"].sigmoid().numpy()[0], maps["kpt_heatmap"].sigmoid().numpy()
    height, width = center.shape
    cells: list[int] = []
    boxes: list[np.ndarray] = []
    weighted: list[np.ndarray] = []
    for flat in np.argsort(-center, axis=None, kind="stable"):
        y, x = divmod(int(flat), width)
        near = center[max(y - 2, 0) : y + 3, max(x - 2, 0) : x + 3]
        if near.max() - center[y, x] >= 1e-6 or center[y, x] <= LEAST or len(cells) == most:
            continue
        tall, wide = np.maximum(maps["box_scale"][:, y, x].numpy(), 0)
        down, across = maps["box_offset"][:, y, x].numpy()
        top, bottom = np.clip([y + down - tall / 2, y + down + tall / 2], 0, height)
        left, right = np.clip([x + across - wide / 2, x + across + wide / 2], 0, width)
        own = np.zeros_like(heat)
        for k, row, column in np.ndindex(*heat.shape):
            dy, dx = maps["kpt_regress"][2 * k : 2 * k + 2, y, x].numpy()
            apart = (row - y - dy) ** 2 + (column - x - dx) ** 2
            inside = top <= row < bottom and left <= column < right
            own[k, row, column] = heat[k, row, column] * np.exp(-apart / (REACH * min(height, width))) * inside
        cells.append(int(flat))
        boxes.append(np.array([left, top, right, bottom]))
        weighted.append(own)
    largest = np.max(weighted, axis=0)  # over the persons
    persons: list[tuple[int, float, np.ndarray, np.ndarray, np.ndarray]] = []
    for cell, box, own in zip(cells, boxes, weighted, strict=True):
        points, seen = [], []
        for k in range(17):
            row, column = divmod(int(own[k].argmax()), width)
            oy, ox = maps["kpt_offset"][2 * k : 2 * k + 2, row, column].numpy()
            clear = own[k].max() > 1e-6  # elsewhere single precision has no maximum
            points.append([column + ox, row + oy] if clear else [np.nan, np.nan])
            seen.append(largest[k, row, column])
        counted = [value for value in seen if value > SEEN]
        score = center.flat[cell] * sum(counted) / max(len(counted), 1)
        persons.append((cell, score, box, np.array(points), np.array(seen)))
    return persons


def detections(host: MoveNetHost, name: str = "bus.jpg", conf: float = 0.05) -> Selection:
    batch, _ = host.preprocess([photograph(name)], SIZE, True)
    return host.select(host.forward(batch), conf=conf, iou=0.7)[0]


def test_detections_are_cells_of_the_output(host: MoveNetHost) -> None:
    batch, boxes = host.preprocess([photograph("bus.jpg")], SIZE, True)
    output = host.forward(batch)
    found = host.select(output, conf=0.05, iou=0.7)[0]
    assert len(found.cell.unique()) == len(found.cell) > 2
    assert torch.equal(output.keypoints[0, found.cell], found.keypoints)
    assert torch.equal(output.scores[0, found.cell], found.scores)
    assert torch.equal(host.cells(output).boxes(found.cell[None])[0], found.boxes)
    moved = host.to_original(found, boxes[0], (SIZE, SIZE))
    height, width = photograph("bus.jpg").shape[:2]
    assert bool((moved.boxes <= torch.tensor([width, height, width, height])).all())
    assert moved.keypoints == pytest.approx(found.keypoints / torch.tensor(boxes[0].gain))


def test_training_cells_are_detections_on_objects(host: MoveNetHost) -> None:
    batch, _ = host.preprocess([photograph("bus.jpg")], SIZE, True)
    output = host.forward(batch)
    best = host.select(output, conf=0.05, iou=1.0)[0]
    seen = torch.ones(1, 17, dtype=torch.bool)
    target = Targets(best.boxes[1:2], torch.zeros(1, dtype=torch.long), torch.zeros(1, 17, 2), seen)
    found = host.assign(output, [target], (0.1,) * 17)
    overlapping = best.cell.tolist()
    assert found.object.tolist() == [0]
    assert int(found.cell[0]) in overlapping
    none = Targets(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), torch.zeros(0, 17, 2), seen[:0])
    assert len(host.assign(output, [none], (0.1,) * 17).cell) == 0


def test_it_predicts_with_heads_and_keeps_its_own_keypoints(host: MoveNetHost) -> None:
    artifact: Artifact = artifact_for(host)
    model = UncertainPose(host, artifact)
    poses = model.predict(photograph("bus.jpg"), conf=0.05, imgsz=SIZE)[0]
    _, boxes = host.preprocess([photograph("bus.jpg")], SIZE, True)
    expected = host.to_original(detections(host), boxes[0], (SIZE, SIZE))
    assert len(poses) == len(expected.scores)
    assert np.array_equal(poses.keypoints, expected.keypoints.numpy())
    assert np.isfinite(poses.covariance).all()
    assert (np.linalg.eigvalsh(poses.covariance) > 0).all()


@pytest.mark.parametrize(("change", "word"), [
    (lambda content: content.pop("weightsManifest"), "graph model"),
    (lambda content: content["modelTopology"].update(node=content["modelTopology"]["node"][:-1]), "kpt_offset"),
    (lambda content: content["weightsManifest"][0].update(paths=["other.bin"]), "other.bin"),
    (lambda content: content["modelTopology"]["node"][1].update(op="Abs"), "Abs"),
])  # fmt: skip
def test_other_files_are_refused_in_one_line(change, word, path: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    content = json.loads(path.read_text())
    change(content)
    (tmp_path / "tiny.json").write_text(json.dumps(content))
    (tmp_path / "tiny.bin").write_bytes((path.parent / "tiny.bin").read_bytes())
    with pytest.raises(HaloposeError, match=word) as caught:
        load_host(tmp_path / "tiny.json")
    assert "\n" not in str(caught.value)
