"""Every host against its unmodified framework, bit by bit, and the torchvision shim."""

from __future__ import annotations

import ast
import copy
import itertools
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner
from ultralytics.data.augment import LetterBox
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.nms import TorchNMS

import halopose
from halopose.cli.app import app
from halopose.data.loading import load_dataset
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.fitting.collecting import collect
from halopose.fitting.store import CollectSettings
from halopose.hosts import torchvision_shim
from halopose.hosts.base import Targets
from halopose.hosts.loading import load_host
from halopose.hosts.ultralytics import host as ultralytics
from halopose.hosts.ultralytics.host import UltralyticsHost, _letterbox
from halopose.hosts.yolonas import host as yolonas
from halopose.hosts.yolonas.host import YoloNASHost
from halopose.keypoints import Keypoints
from halopose.predictor import UncertainPose
from tests.helpers.models import (
    ASSETS,
    KINDS,
    PHOTOGRAPHS,
    ULTRALYTICS,
    artifact_for,
    framework_on,
    framework_predict,
    host_of,
    make_host,
    photograph,
    pose_model,
    run_script,
    scenes,
    wants_end2end,
    write_scenes,
)
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")
IMGSZ = 160


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested output, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def one_line(error: pytest.ExceptionInfo[HaloposeError]) -> str:
    text = str(error.value)
    assert text
    assert "\n" not in text
    return text


# The base is left alone ------------------------------------------------------------------------------------


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
    # Of weights by chance: single keypoints may go anywhere.
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
    assert all(torch.equal(value, host.model.state_dict()[name]) for name, value in frozen.items())
    assert not any(parameter.requires_grad for parameter in host.model.parameters())
    assert flags == ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()])
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    with torch.no_grad():
        after = tensors_in(model.eval()(batch))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


# Post-processing is the framework's own --------------------------------------------------------------------


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
    assert torch.equal(
        torch.cat([found.keypoints, present(found.visibility)[..., None]], 2), expected.keypoints.data
    )
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


# The letterbox ---------------------------------------------------------------------------------------------


@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from([64, 160, 320, 640]), st.booleans())
def test_letterbox_says_where_the_image_lies(height: int, width: int, size: int, auto: bool) -> None:
    image = np.zeros((height, width, 3), np.uint8)
    transform = LetterBox((size, size), auto=auto, stride=32)
    boxed, box = transform(image=image), _letterbox(transform.get_params({"img": image}))
    rows, columns = np.nonzero((boxed[..., 0] == 0).any(1))[0], np.nonzero((boxed[..., 0] == 0).any(0))[0]
    corners = box.to_input(np.array([[0.0, 0.0], [width, height]]))
    assert np.allclose(corners, [[columns[0], rows[0]], [columns[-1] + 1, rows[-1] + 1]], atol=1e-9)


@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from([64, 160, 320, 672]))
def test_letterbox_of_yolonas(height: int, width: int, size: int) -> None:
    host, image = host_of("nas"), np.zeros((height, width, 3), np.uint8)
    if min(height, width) * min(size, 640) / max(height, width) <= 0.5:
        with pytest.raises(HaloposeError, match="vanishes"):
            host.preprocess([image], size, True)
        return
    batch, [box] = host.preprocess([image], size, True)
    assert batch.shape == (1, 3, size, size)
    rows, columns = (np.nonzero((batch[0, 0] == 0).any(axis).numpy())[0] for axis in (1, 0))
    assert (rows[0], columns[0]) == (0, 0)
    corner = box.to_input(np.array([width, height]))
    assert np.abs(corner - [len(columns), len(rows)]).max() <= 0.5 + 1e-9  # whole pixels, but one ratio
    assert max(len(rows), len(columns)) == min(size, 640)  # larger inputs are padded, not filled


@pytest.mark.parametrize("kind", ["11", "nas"])
@pytest.mark.parametrize("shape", [(480, 641), (641, 1280), (31, 500)])
def test_factors_go_back_to_original_pixels(kind: str, shape: tuple[int, int]) -> None:
    host = host_of(kind)
    _, [box] = host.preprocess([np.zeros((*shape, 3), np.uint8)], 160, True)
    factor = torch.tensor([[2.0, 0.0], [0.7, 3.0]], dtype=torch.float64)
    undo = torch.diag(1 / torch.tensor(box.gain, dtype=torch.float64))
    covariance = undo @ factor @ factor.T @ undo
    back = box.factors_to_original(factor)
    assert back[0, 1] == 0
    torch.testing.assert_close(back @ back.T, covariance)


# Label assignment is the framework's own -------------------------------------------------------------------


def separated_targets(count: int, images: int = 2) -> list[Targets]:
    """Two boxes an image far apart in a 128 x 160 input, with keypoints inside, some of them unlabelled."""
    generator = torch.Generator().manual_seed(4)
    boxes = torch.tensor([[6.0, 10.0, 70.0, 90.0], [80.0, 20.0, 150.0, 120.0]])
    return [
        Targets(
            boxes=boxes + number,
            class_ids=torch.zeros(2, dtype=torch.long),
            keypoints=boxes[:, None, :2]
            + torch.rand((2, count, 2), generator=generator) * (boxes[:, None, 2:] - boxes[:, None, :2]),
            labelled=torch.rand((2, count), generator=generator) < 0.7,
        )
        for number in range(images)
    ]


def no_targets(count: int) -> Targets:
    return Targets(
        torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), torch.zeros(0, count, 2), torch.zeros(0, count) > 0
    )


def cell_centres(features: Any, strides: Any) -> torch.Tensor:
    centres = []
    for maps, stride in zip(features, strides, strict=True):
        rows, columns = torch.meshgrid(torch.arange(maps.shape[2]), torch.arange(maps.shape[3]), indexing="ij")
        centres.append((torch.stack([columns, rows], -1).reshape(-1, 2) + 0.5) * stride)
    return torch.cat(centres)


def framework_assignment(kind: str, model: Any, output: Any, targets: Any) -> tuple[torch.Tensor, ...]:
    """Image, cell and object that the framework's criterion uses, taken from its assigner as it runs."""
    criterion = copy.deepcopy(model).init_criterion()
    if hasattr(criterion, "one2one"):
        criterion = criterion.one2one if wants_end2end(kind) else criterion.one2many
    scale = torch.tensor([160.0, 128.0])
    boxes = torch.cat([t.boxes for t in targets])
    batch = {
        "batch_idx": torch.cat([torch.full((len(t.boxes),), float(n)) for n, t in enumerate(targets)]),
        "cls": torch.cat([t.class_ids for t in targets]).float()[:, None],
        "bboxes": torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2 / scale, (boxes[:, 2:] - boxes[:, :2]) / scale], 1),
        "keypoints": torch.cat(
            [torch.cat([t.keypoints / scale, 2.0 * t.labelled[..., None].float()], 2) for t in targets]
        ),
    }
    seen = []
    criterion.assigner.register_forward_hook(lambda module, inputs, output: seen.append(output))
    preds = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in output.raw[1].items()}
    preds["feats"] = [value.clone() for value in preds["feats"]]
    criterion.loss(preds, batch)
    foreground, chosen = seen[0][3], seen[0][4]
    image, cell = torch.nonzero(foreground, as_tuple=True)
    return image, cell, chosen[image, cell]


def nas_rows(targets: list[Targets]) -> torch.Tensor:
    """Padded rows of class, centre, size and keypoints with visibility, as LibreYOLO's collate makes them."""
    rows = []
    for t in targets:
        centre, size = (t.boxes[:, :2] + t.boxes[:, 2:]) / 2, t.boxes[:, 2:] - t.boxes[:, :2]
        poses = torch.cat([t.keypoints, 2.0 * t.labelled[..., None].float()], 2).flatten(1)
        rows.append(torch.cat([t.class_ids[:, None].float(), centre, size, poses], 1))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def nas_assignment(model: Any, output: Any, targets: Any, oks_factor: bool = True) -> tuple[torch.Tensor, ...]:
    """The same of the trainer's own loss, made by the trainer's own settings."""
    from libreyolo.data import default_oks_sigmas
    from libreyolo.training.config import YOLONASPoseConfig

    config = YOLONASPoseConfig()
    assert config.assigner_multiply_by_pose_oks
    from libreyolo.models.yolonas.loss import YoloNASPoseLoss

    criterion = YoloNASPoseLoss(
        default_oks_sigmas(model.num_keypoints),
        num_classes=model.num_classes,
        bbox_assigner_topk=config.bbox_assigner_topk,
        bbox_assigned_alpha=config.bbox_assigned_alpha,
        bbox_assigned_beta=config.bbox_assigned_beta,
        assigner_multiply_by_pose_oks=oks_factor,
    )
    seen = []
    criterion.assigner.register_forward_hook(lambda module, inputs, output: seen.append(output))
    rows = nas_rows(targets)
    criterion(output.raw, rows)
    image, cell = torch.nonzero(seen[0].assigned_labels < model.num_classes, as_tuple=True)
    return image, cell, seen[0].assigned_gt_index[image, cell] % rows.shape[1]


def views() -> list[np.ndarray]:
    return [photograph(name)[:512, :640] for name in PHOTOGRAPHS]


@pytest.mark.parametrize("shape", [(17, 3), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_assignment_is_the_criterions(kind: str, shape: tuple[int, int]) -> None:
    model = pose_model(kind, shape)
    host = make_host(kind, model)
    output = host.forward(host.preprocess(views(), IMGSZ, True)[0])
    targets = separated_targets(shape[0])
    found = host.assign(output, targets, host.layout.sigmas)
    oracle = nas_assignment(model, output, targets) if kind == "nas" else None
    expected = oracle or framework_assignment(kind, model, output, targets)
    assert len(found.cell) > 0
    for one, other in zip((found.image, found.cell, found.object), expected, strict=True):
        assert torch.equal(one, other.long())
    centres = cell_centres(output.features, host.strides)[found.cell]
    corners = torch.stack(
        [targets[i].boxes[o] for i, o in zip(found.image.tolist(), found.object.tolist(), strict=True)]
    )
    assert ((centres > corners[:, :2]) & (centres < corners[:, 2:])).all()
    _, counts = torch.unique(found.image * 2 + found.object, return_counts=True)
    assert len(counts) == 4
    assert counts.max() <= {"26-one-to-one": 1, "nas": 13}.get(kind, 10)


@pytest.mark.parametrize("classes", [1, 3])
def test_assignment_of_yolonas_with_and_without_oks(classes: int) -> None:
    """Images with different numbers of objects, of several classes: numbers are counted over the padded batch."""
    model = pose_model("nas", (4, 3), classes)
    first, second = separated_targets(4)
    one = Targets(*(getattr(second, name)[1:] for name in ("boxes", "class_ids", "keypoints", "labelled")))
    one = replace(one, class_ids=one.class_ids + classes - 1, labelled=one.labelled & False)
    results = []
    for oks_factor in (True, False):
        host = YoloNASHost(model, oks_factor=oks_factor)
        output = host.forward(host.preprocess([*views(), views()[0]], IMGSZ, True)[0])
        for targets in ([one, no_targets(4), first], [first, one, second]):
            found = host.assign(output, targets, host.layout.sigmas)
            expected = nas_assignment(model, output, targets, oks_factor)
            for mine, other in zip((found.image, found.cell, found.object), expected, strict=True):
                assert torch.equal(mine, other)
            results.append(found.cell.tolist())
    assert results[:2] != results[2:]


@pytest.mark.parametrize("kind", KINDS)
def test_unlabelled_keypoints_may_hold_anything(kind: str) -> None:
    host = host_of(kind)
    output = host.forward(host.preprocess(views(), IMGSZ, True)[0])
    targets = separated_targets(17)
    expected = host.assign(output, targets, host.layout.sigmas)
    for value in (float("nan"), float("inf"), 1e6):
        odd = [replace(t, keypoints=t.keypoints.where(t.labelled[..., None], value)) for t in targets]
        found = host.assign(output, odd, host.layout.sigmas)
        for name in ("image", "cell", "object"):
            assert torch.equal(getattr(found, name), getattr(expected, name))


def test_boxes_without_area_take_nothing_from_others() -> None:
    """LibreYOLO's loss counts sound boxes but takes the first rows: a flat one in front would cost the last."""
    host, [sound] = host_of("nas"), separated_targets(17, 1)
    output = host.forward(host.preprocess(views()[:1], IMGSZ, True)[0])
    expected = host.assign(output, [sound], host.layout.sigmas)
    for bad in (torch.tensor([9.0, 9.0, 9.0, 40.0]), torch.full((4,), torch.nan)):
        odd = Targets(
            boxes=torch.cat([bad[None], sound.boxes]),
            class_ids=torch.zeros(3, dtype=torch.long),
            keypoints=torch.cat([sound.keypoints[:1], sound.keypoints]),
            labelled=torch.cat([sound.labelled[:1], sound.labelled]),
        )
        found = host.assign(output, [odd], host.layout.sigmas)
        assert torch.equal(found.cell, expected.cell)
        assert torch.equal(found.object, expected.object + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_images_without_objects(kind: str) -> None:
    host = host_of(kind)
    images = [*views(), views()[0]]
    output = host.forward(host.preprocess(images, IMGSZ, True)[0])
    nothing = host.assign(output, [no_targets(17)] * 3, host.layout.sigmas)
    assert (nothing.image.shape, nothing.cell.shape, nothing.object.shape) == ((0,), (0,), (0,))
    assert nothing.cell.dtype == torch.long
    [target] = separated_targets(17, 1)
    for place in range(3):
        targets = [no_targets(17)] * 3
        targets[place] = target
        found = host.assign(output, targets, host.layout.sigmas)
        assert set(found.image.tolist()) == {place}
        one = host.forward(host.preprocess([images[place]], IMGSZ, True)[0])
        alone = host.assign(one, [target], host.layout.sigmas)
        assert torch.equal(found.cell, alone.cell)
        assert torch.equal(found.object, alone.object)


# What the host says about the model ------------------------------------------------------------------------


def test_strides_names_and_sigmas() -> None:
    host = host_of("11")
    assert host.strides == (8, 16, 32)
    assert host.layout == Keypoints.of(17)
    assert host.device == torch.device("cpu")


def test_sigmas_of_the_checkpoint_and_of_an_assignment() -> None:
    model = pose_model("26", (4, 3))
    model.kpt_oks_sigmas = [0.1, 0.2, 0.3, 0.4]
    host = UltralyticsHost(model)
    assert host.layout.sigmas == (0.1, 0.2, 0.3, 0.4)
    others = (0.4, 0.3, 0.2, 0.1)
    torch.testing.assert_close(host._criterion(others).keypoint_loss.sigmas, torch.tensor(others))
    assert host.layout.sigmas == (0.1, 0.2, 0.3, 0.4)  # what the data say stays with the data
    for wrong in ([0.1, 0.2], [0.1, 0.2, 0.3, 0.0]):
        model.kpt_oks_sigmas = wrong
        with pytest.raises(HaloposeError, match="sigmas"):
            UltralyticsHost(model)


@pytest.mark.parametrize("kind", ULTRALYTICS)
def test_templates_are_the_pose_heads_trunk(kind: str) -> None:
    """The trunk of the templates, then the base's own last layer, is the base's keypoint map."""
    host: Any = host_of(kind)
    output = host.forward(host.preprocess([photograph("bus.jpg")], 64, True)[0])
    lasts = host.head.cv4
    if kind.startswith("26"):
        lasts = host.head.one2one_cv4_kpts if host.end2end else host.head.cv4_kpts
    raw = []
    for maps, template, branch in zip(output.features, host.pose_templates(), lasts, strict=True):
        for conv in template:
            maps = torch.nn.functional.conv2d(maps, conv.weight, conv.bias, padding=conv.reach)
            assert conv.activation == "silu"
            maps = torch.nn.functional.silu(maps)
        last = branch if isinstance(branch, nn.Conv2d) else branch[-1]
        raw.append(last(maps).flatten(2))
    torch.testing.assert_close(torch.cat(raw, 2), output.raw[1]["kpts"], rtol=1e-4, atol=1e-4)


def test_templates_of_yolonas_decode_to_its_keypoints() -> None:
    """Trunk and last layer give offsets; keypoints are (offset + anchor - 0.5) * stride. ReLU, windows 5, 5, 7."""
    host: Any = host_of("nas")
    output = host.forward(host.preprocess([photograph("bus.jpg")], 96, True)[0])
    found = []
    for level, (maps, template) in enumerate(zip(output.features, host.pose_templates(), strict=True)):
        for conv in template:
            assert conv.activation == "relu"
            maps = torch.nn.functional.conv2d(maps, conv.weight, conv.bias, padding=conv.reach).relu()
        offsets = getattr(host.model.heads, f"head{level + 1}").pose_pred(maps)[0].unflatten(0, (17, 2))
        rows, columns = torch.meshgrid(*(torch.arange(side) for side in maps.shape[2:]), indexing="ij")
        found.append(((offsets + torch.stack([columns, rows])) * host.strides[level]).flatten(2).permute(2, 0, 1))
    torch.testing.assert_close(torch.cat(found), output.keypoints[0], rtol=1e-4, atol=1e-2)
    assert [[conv.weight.shape[-1] for conv in template] for template in host.pose_templates()] == [
        [1, 3, 3], [1, 3, 3], [1, 3, 3, 3],
    ]  # fmt: skip


def test_forward_of_yolonas_is_the_models_own() -> None:
    model = pose_model("nas")
    batch, _ = host_of("nas").preprocess(views(), 96, True)
    with torch.no_grad():
        expected = tensors_in(model(batch))
    found = host_of("nas").forward(batch)
    assert len(expected) == 11
    assert all(torch.equal(one, other) for one, other in zip(tensors_in(found.raw), expected, strict=True))


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
    assert set(host.fingerprints) & set(load_host(prepared).fingerprints)
    with torch.no_grad():
        next(model.parameters()).flatten()[0].add_(1e-3)
    assert not set(host.fingerprints) & set(make_host(kind, model).fingerprints)


def test_fingerprints_know_buffers_and_heads() -> None:
    model = pose_model("26")
    two = [set(UltralyticsHost(model, end2end=choice).fingerprints) for choice in (False, True)]
    assert not two[0] & two[1]
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    present(norm.running_mean)[0] += 0.1
    assert not two[0] & set(UltralyticsHost(model, end2end=False).fingerprints)


def test_end2end_that_a_model_lacks_is_refused() -> None:
    with pytest.raises(HaloposeError, match="one-to-one"):
        UltralyticsHost(pose_model("11"), end2end=True)
    for kind in ("26", "26-one-to-one"):
        with pytest.raises(HaloposeError, match="one-to-one"):
            UltralyticsHost(vars(host_of(kind))["model"], end2end=not wants_end2end(kind))


def test_other_models_are_refused(tmp_path: Path) -> None:
    detector = DetectionModel("yolov8n.yaml", nc=1, verbose=False)
    with pytest.raises(HaloposeError, match="not a pose model"):
        load_host(detector)
    torch.save({"model": detector}, tmp_path / "detector.pt")
    with pytest.raises(HaloposeError, match=r"detector\.pt is not a pose model"):
        load_host(tmp_path / "detector.pt")


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Sequential(nn.Conv2d(3, 3, 1))])
def test_modules_that_are_no_yolo_are_refused(module: nn.Module, tmp_path: Path) -> None:
    torch.save({"model": module}, tmp_path / "module.pt")
    for base in (module, tmp_path / "module.pt"):
        with pytest.raises(HaloposeError) as error:
            load_host(base)
        one_line(error)


# Loading ---------------------------------------------------------------------------------------------------


class Payload:
    """Unpickling it touches a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


class Foreign:
    """A class that no checkpoint should hold."""


def test_a_checkpoint_loads(tmp_path: Path) -> None:
    model = pose_model("11")
    torch.save({"model": copy.deepcopy(model).half(), "ema": None}, tmp_path / "base.pt")
    torch.save({"model": None, "ema": model}, tmp_path / "ema.pt")
    assert UltralyticsHost.load(tmp_path / "base.pt").description == "base.pt"
    assert set(UltralyticsHost.load(tmp_path / "ema.pt").fingerprints) & set(host_of("11").fingerprints)


def test_only_hosts_import_a_framework() -> None:
    package = Path(halopose.__file__).parent
    for path in package.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        if {"ultralytics", "libreyolo"} & {module.split(".")[0] for module in modules}:
            assert path.is_relative_to(package / "hosts"), f"{path} imports a framework"


@pytest.mark.parametrize(
    ("fetched", "expected"),
    [
        (lambda path: path.write_bytes(b"weights"), b"weights"),
        (lambda path: None, None),
        (lambda path: path.read_bytes(), None),  # fails with an OSError
    ],
)
def test_a_download_or_nothing(
    monkeypatch: pytest.MonkeyPatch, fetched: Callable[..., Any], expected: bytes | None
) -> None:
    monkeypatch.setattr(ultralytics, "attempt_download_asset", fetched)
    assert ultralytics.download("yolo11n-pose.pt") == expected


def test_no_host_is_looked_up_when_the_framework_is_imported() -> None:
    script = (
        "import socket\n"
        "def refuse(*given, **more): raise SystemExit('looked up a host')\n"
        "socket.getaddrinfo = refuse\n"
        "import halopose.hosts.ultralytics.host\n"
    )
    run_script(script)


def test_foreign_pickles_are_refused_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    contents = {
        "payload.pt": Payload(marker),
        "hidden.pt": {"model": pose_model("11"), "extra": Payload(marker)},
        "foreign.pt": {"model": Foreign()},
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(HaloposeError, match=name) as error:
            UltralyticsHost.load(tmp_path / name)
        assert "--unsafe" in one_line(error)
        assert not marker.exists()
    UltralyticsHost.load(tmp_path / "hidden.pt", unsafe=True)
    assert marker.exists()  # the payload does work


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut.pt": lambda content: content[: len(content) // 2],
    "start.pt": lambda content: content[:100],
    "empty.pt": lambda content: b"",
    "text.pt": lambda content: b"hello",
    "picture.pt": lambda content: (ASSETS / "bus.jpg").read_bytes(),
    "whole.bin": lambda content: content,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_one_line(tmp_path: Path, name: str) -> None:
    torch.save({"model": pose_model("11")}, tmp_path / "whole.pt")
    (tmp_path / name).write_bytes(DAMAGE[name]((tmp_path / "whole.pt").read_bytes()))
    with pytest.raises(HaloposeError, match=name) as error:
        UltralyticsHost.load(tmp_path / name)
    assert "unsafe" not in one_line(error)  # which would not help


def test_checkpoints_without_a_model_are_one_line(tmp_path: Path) -> None:
    torch.save({"weights": 1}, tmp_path / "none.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"model": pose_model("11").state_dict()}, tmp_path / "state.pt")
    for name in ("none.pt", "list.pt", "state.pt", "missing.pt"):
        with pytest.raises(HaloposeError, match=name) as error:
            UltralyticsHost.load(tmp_path / name)
        one_line(error)


# Loading YOLO-NAS -------------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("something wanted the network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


def supergradients(net: nn.Module, **more: Any) -> dict[str, Any]:
    """A checkpoint as SuperGradients writes one: weights among metrics, versions and processing parameters."""
    return {
        "net": net.state_dict(),
        "acc": np.float32(0.59),
        "epoch": 3,
        "metrics": {"valid": {"AP": np.float64(0.59), "loss": 1.5}},
        "packages": {"torch": "1.13.1"},
        "processing_params": {"conf": 0.05, "edge_links": [[0, 1]], "edge_colors": np.zeros((1, 3), np.int64)},
        **more,
    }


def test_supergradients_checkpoints_load(tmp_path: Path, offline: None) -> None:
    net, averaged = pose_model("nas", (4, 3), seed=1), pose_model("nas", (4, 3))
    for name, more, model in (("both.pth", {"ema_net": averaged.state_dict()}, averaged), ("net.pth", {}, net)):
        torch.save(supergradients(net, **more), tmp_path / name)
        host = load_host(tmp_path / name)
        assert isinstance(host, YoloNASHost)
        assert host.fingerprints == YoloNASHost(model).fingerprints
        assert (host.description, host.keypoint_count, host.class_names) == (name, 4, ("object",))


def test_weights_are_found_under_any_name() -> None:
    net, averaged = ({"heads.head1.pose_pred.weight": torch.full((8, 3), value)} for value in (1.0, 2.0))
    parallel = {f"module.{name}": value for name, value in averaged.items()}
    for checkpoint in (
        {"net": net, "ema_net": averaged},
        {"net": averaged, "ema_net": None},
        {"net": net, "ema_net": parallel},
        {"model": averaged, "train_model": net},
        averaged,
    ):
        assert yolonas._weights(checkpoint, "here").keys() == averaged.keys()
        assert next(iter(yolonas._weights(checkpoint, "here").values()))[0, 0] == 2


def nas_model(size: str, **options: Any) -> Any:
    from libreyolo.models.yolonas.nn import LibreYOLONASPoseModel

    return LibreYOLONASPoseModel(size, **options)


def test_constants_that_some_versions_saved_are_no_obstacle() -> None:
    with torch.device("meta"):
        model = nas_model("n")
        state = model.state_dict()
        assert yolonas._build(state | dict(model.named_buffers()), "here").config == "n"
        for name in ("heads.head1.extra.weight", "heads.head1.reg_pred.weight"):
            with pytest.raises(HaloposeError, match="here does not fit") as error:
                yolonas._build(state | {name: torch.zeros(4, 4)}, "here")
            one_line(error)


def test_libreyolo_checkpoints_load_with_what_they_say(tmp_path: Path, offline: None) -> None:
    from libreyolo.utils.serialization import wrap_libreyolo_checkpoint

    model = pose_model("nas", (5, 3), 3)
    content = wrap_libreyolo_checkpoint(
        model.state_dict(), model_family="yolonas", size="n", task="pose", nc=3, names={0: "a", 1: "b", 2: "c"},
        imgsz=320, config={"assigner_multiply_by_pose_oks": False}, oks_sigmas=[0.1, 0.2, 0.3, 0.4, 0.5],
    )  # fmt: skip
    torch.save(content, tmp_path / "best.pt")
    host: Any = load_host(tmp_path / "best.pt")
    assert host.fingerprints == YoloNASHost(model).fingerprints
    assert host.class_names == ("a", "b", "c")
    sigmas = host.layout.sigmas
    assert sigmas == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert not host._criterion(sigmas).assigner.multiply_by_pose_oks
    assert YoloNASHost.load(tmp_path / "best.pt", oks_factor=True)._criterion(sigmas).assigner.multiply_by_pose_oks


@pytest.mark.parametrize(("size", "millions"), [("n", 9.9), ("s", 22.2), ("m", 58.2), ("l", 79.4)])
def test_sizes_are_told_by_the_weights(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = yolonas._build(nas_model(size, num_keypoints=4).state_dict(), "here")
    assert model.config == size
    assert sum(value.numel() for value in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


def test_a_checkpoint_whose_parts_are_not_what_they_are_named_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a few changed bytes of a pickle can do, and safe loading lets pass."""
    model = pose_model("11")
    model.model[0]._state_dict_pre_hooks = dict
    (tmp_path / "mine.pt").write_bytes(b"PK")
    monkeypatch.setattr("halopose.hosts.ultralytics.host.load_model", lambda *_: model)
    with pytest.raises(HaloposeError, match=r"mine.pt is damaged \(TypeError\)"):
        UltralyticsHost.load(tmp_path / "mine.pt")


def test_foreign_pickles_of_yolonas_are_refused_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    contents = {
        "hidden.pth": supergradients(pose_model("nas"), extra=Payload(marker)),
        "foreign.pth": supergradients(pose_model("nas"), ema_net=Foreign()),
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(HaloposeError, match=name) as error:
            load_host(tmp_path / name)
        assert "it holds " in one_line(error)
        assert "unsafe" in one_line(error)
        assert not marker.exists()
    load_host(tmp_path / "hidden.pth", unsafe=True)
    assert marker.exists()  # the payload does work


def test_wrong_yolonas_checkpoints_are_one_line(tmp_path: Path, offline: None) -> None:
    state = pose_model("nas").state_dict()
    contents = {
        "detector.pth": {name: value for name, value in state.items() if "pose_pred" not in name},
        "lacking.pth": {name: value for name, value in state.items() if not name.startswith("neck.neck1")},
        "width.pth": state | {"heads.head1.cls_pred.weight": torch.zeros(18, 50, 1, 1)},
        "list.pth": [state],
        "whole.pth": state,
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / name)
    whole = (tmp_path / "whole.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[: len(whole) // 2])
    for name in ("detector.pth", "lacking.pth", "width.pth", "list.pth", "cut.pth", "missing.pth"):
        with pytest.raises(HaloposeError, match=name) as error:
            YoloNASHost.load(tmp_path / name)
        one_line(error)
    with pytest.raises(HaloposeError, match="one-to-one"):
        load_host(tmp_path / "whole.pth", end2end=True)


def test_yolonas_takes_pose_models_only() -> None:
    from libreyolo.models.yolonas.nn import LibreYOLONASModel

    with torch.device("meta"):
        detector = LibreYOLONASModel("s")
    with pytest.raises(HaloposeError, match="not a YOLO-NAS pose model"):
        load_host(detector)


def test_yolonas_all_the_way(tmp_path: Path) -> None:
    """The command line from a checkpoint to an artifact, and predictions with it."""
    model = pose_model("nas")
    torch.save(supergradients(model), tmp_path / "nas.pth")
    data = write_scenes(tmp_path / "data", host_of("nas"), {"train": 6, "val": 6})
    artifact = tmp_path / "heads.safetensors"
    arguments = ["fit", data, "--base", tmp_path / "nas.pth", "-o", artifact, "--imgsz", 64, "--epochs", 2]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert Artifact.load(artifact).fits(host_of("nas"))
    [poses] = UncertainPose.load(tmp_path / "nas.pth", artifact).predict(photograph("bus.jpg"), imgsz=IMGSZ)
    expected = framework_on("nas", "bus.jpg", IMGSZ)
    assert np.array_equal(poses.keypoints, expected.keypoints.data[..., :2].numpy())
    assert (np.linalg.eigvalsh(poses.covariance) > 0).all()


# The torchvision shim --------------------------------------------------------------------------------------


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
