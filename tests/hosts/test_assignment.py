"""Label assignment of every host against the criterion of its framework."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from halopose.hosts.base import Targets
from halopose.hosts.yolonas.yolonas_host import YoloNASHost
from tests.helpers.checkpoints import views
from tests.helpers.models import (
    KINDS,
    host_of,
    make_host,
    pose_model,
    wants_end2end,
)

pytestmark = pytest.mark.usefixtures("one_thread")
IMGSZ = 160


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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nas"])
def test_assignment_of_several_classes_with_random_scores(kind: str) -> None:
    model = pose_model(kind, (4, 3), 2)
    host: Any = make_host(kind, model)
    output = host.forward(host.preprocess(views(), IMGSZ, True)[0])
    scores = torch.randn(output.raw[1]["scores"].shape, generator=torch.Generator().manual_seed(1)) * 6 - 8
    output = replace(output, raw=(output.raw[0], {**output.raw[1], "scores": scores}))
    targets = separated_targets(4)
    targets[1] = replace(targets[1], class_ids=torch.tensor([1, 0]))
    expected = framework_assignment(kind, model, output, targets)
    found = host.assign(output, targets, host.layout.sigmas)
    for one, other in zip((found.image, found.cell, found.object), expected, strict=True):
        assert torch.equal(one, other.long())


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
