"""Every host: the base model does not change, batches equal single images, sparse heads equal dense heads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings
from halopose.hosts.loading import load_host
from halopose.hosts.weight_sketch import same_model
from halopose.prediction.uncertain_pose import UncertainPose
from tests.helpers.checkpoints import tensors_in, views
from tests.helpers.models import (
    KINDS,
    PHOTOGRAPHS,
    artifact_for,
    host_of,
    make_host,
    photograph,
    pose_model,
    scenes,
    write_scenes,
)
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["11", "nas"])
def test_half_precision_is_near_and_can_be_left_again(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host: Any = make_host(kind, pose_model(kind))
    batch = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    whole = host.forward(batch)
    dataset = load_dataset(write_scenes(tmp_path, host, {"val": 1}), "val")
    settings = CollectSettings(imgsz=(64,), detections=5)
    assert "half" not in collect(host, dataset, tmp_path / "whole", settings).manifest["settings"]
    host.use_half()
    assert "half precision on cpu" in caplog.text
    half = host.forward(batch)
    for mine, theirs in zip(half.features, whole.features, strict=True):
        assert mine.dtype == torch.float32
        assert 0 < float((mine - theirs).norm() / theirs.norm()) < 0.2
    assert half.keypoints.dtype == half.scores.dtype == torch.float32
    # With random weights single keypoints may differ.
    assert float((half.keypoints - whole.keypoints).abs().median()) < 5
    assert collect(host, dataset, tmp_path / "half", settings).manifest["settings"]["half"] is True
    with pytest.raises(HaloposeError, match="other data or settings"):
        collect(host, dataset, tmp_path / "whole", settings)
    host.half = False
    assert all(torch.equal(a, b) for a, b in zip(host.forward(batch).features, whole.features, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_touches_the_base(kind: str, tmp_path: Path) -> None:
    model = pose_model(kind).train()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 > 0)
    flags = [module.training for module in model.modules()], [p.requires_grad for p in model.parameters()]
    state = copy.deepcopy(model.state_dict())
    batch = torch.rand(2, 3, 64, 96)
    with torch.no_grad():
        before = [value.clone() for value in tensors_in(copy.deepcopy(model).eval()(batch))]

    host: Any = make_host(kind, model)
    frozen = copy.deepcopy(host.model.state_dict())
    first = host.forward(batch)
    dataset = load_dataset(write_scenes(tmp_path, host, {"val": 2}), "val")
    collect(host, dataset, tmp_path / "store", CollectSettings(imgsz=(64,), detections=5))
    UncertainPose(host, artifact_for(host)).predict(scenes(2))
    last = host.forward(batch)

    for one, other in zip(tensors_in(first.raw), tensors_in(last.raw), strict=True):
        assert torch.equal(one, other)
    now = host.model.state_dict()
    assert all(torch.equal(value, now[name]) for name, value in frozen.items())
    assert not any(parameter.requires_grad for parameter in host.model.parameters())
    assert flags == ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()])
    now = model.state_dict()
    assert state.keys() == now.keys()
    assert all(torch.equal(value, now[name]) for name, value in state.items())
    with torch.no_grad():
        after = tensors_in(model.eval()(batch))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", ["11", "26-one-to-one", "nas"])
def test_batches_select_per_image(kind: str) -> None:
    host = host_of(kind)
    images = [photograph(name)[:700, :700] for name in PHOTOGRAPHS]
    batch, boxes = host.preprocess(images, 96, True)
    output = host.forward(batch)
    found = host.select(output, conf=0.25, iou=0.7, max_detections=7, letterboxes=boxes)
    for number, selection in enumerate(found):
        assert 0 < len(selection.scores) <= 7
        assert torch.equal(output.keypoints[number, selection.cell], selection.keypoints)
    for selection in host.select(output, conf=1.0, iou=0.7):
        assert (selection.cell.shape, selection.boxes.shape) == ((0,), (0, 4))
        assert (selection.keypoints.shape, present(selection.visibility).shape) == ((0, 17, 2), (0, 17))


@pytest.mark.parametrize("kind", ["11", "nas"])
@pytest.mark.parametrize("shape", [(480, 641), (641, 1280), (31, 500)])
def test_factors_go_back_to_original_pixels(kind: str, shape: tuple[int, int]) -> None:
    host = host_of(kind)
    _, [box] = host.preprocess([np.zeros((*shape, 3), np.uint8)], 160, True)
    factor = np.array([[2.0, 0.0], [0.7, 3.0]])
    undo = np.diag(1 / np.array(box.gain))
    covariance = undo @ factor @ factor.T @ undo
    back = box.factors_to_original(factor)
    assert back[0, 1] == 0
    np.testing.assert_allclose(back @ back.T, covariance, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_heads_are_dense_heads_at_every_cell(kind: str) -> None:
    """Windows 7 wide on a map 3 wide: every border there is."""
    host = host_of(kind)
    output = host.forward(host.preprocess(views(), 96, False)[0])
    heads = artifact_for(host).heads.double()
    assert heads.reaches == ((2, 2, 3) if kind == "nas" else (2, 2, 2))
    features = [maps.double() for maps in output.features]
    with torch.inference_mode():
        dense = heads.dense(features)
        image, cell = torch.ones(dense.shape[:2]).nonzero(as_tuple=True)
        sparse = heads.sparse(features, image, cell)
    dense = dense[image, cell]
    assert len(dense) == 2 * 189
    assert ((sparse - dense).abs().amax((-1, -2)) / dense.abs().amax((-1, -2))).max() < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprints_know_the_weights(kind: str) -> None:
    model = pose_model(kind)
    host: Any = host_of(kind)
    assert set(host.fingerprints) == set(make_host(kind, model).fingerprints)
    prepared = copy.deepcopy(host.model)
    assert same_model(host.fingerprints, load_host(prepared).fingerprints)
    with torch.no_grad():
        next(model.parameters()).flatten()[0].add_(1e-3)
    assert not same_model(host.fingerprints, make_host(kind, model).fingerprints)
