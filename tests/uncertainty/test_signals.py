"""Signals against plain loops: who claims an object, how far apart the claims are, features between cells."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from halopose.uncertainty.signals import CLAIMS, OVERLAP, Claims, Signals, features_at, overlap, signals_at

STRIDES = (8, 16)


def scene(seed: int, batch: int = 2) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, Claims]:
    """Maps, scores, keypoints and boxes of 20 cells, many of which overlap."""
    generator = torch.Generator().manual_seed(seed)
    maps = [torch.randn((batch, 3 + n, 4 >> n, 4 >> n), generator=generator) for n in range(2)]
    corner = torch.rand((batch, 20, 2), generator=generator) * 4
    boxes = torch.cat([corner, corner + 20 + 4 * torch.rand((batch, 20, 2), generator=generator)], dim=2)
    keypoints = torch.rand((batch, 20, 5, 2), generator=generator) * 44 - 6
    visibility = torch.rand((batch, 20, 5), generator=generator)
    return maps, torch.rand((batch, 20), generator=generator), keypoints, Claims(boxes, visibility)


def iou(one: list[float], other: list[float]) -> float:
    sides = [max(0.0, min(one[2 + d], other[2 + d]) - max(one[d], other[d])) for d in (0, 1)]
    area = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return sides[0] * sides[1] / (sum(area) - sides[0] * sides[1])


@given(st.integers(0, 10_000))
def test_claims_are_weighed_as_a_plain_loop_weighs_them(seed: int) -> None:
    maps, scores, keypoints, claims = scene(seed)
    image, cell = torch.tensor([0, 1, 1]), torch.tensor([3, 0, 17])
    found = signals_at(maps, STRIDES, scores, keypoints, claims, image, cell)
    assert claims.visibility is not None
    for n, (b, c) in enumerate(zip(image.tolist(), cell.tolist(), strict=True)):
        box = claims.boxes[b, c].tolist()
        rivals = [j for j in range(20) if iou(box, claims.boxes[b, j].tolist()) >= OVERLAP]
        rivals = sorted(rivals, key=lambda j: -float(scores[b, j]))[:CLAIMS]
        weight = np.array([float(scores[b, j]) for j in rivals])
        apart = (keypoints[b, rivals] - keypoints[b, c]).double().numpy()
        mean = np.average(apart, axis=0, weights=weight)
        spread = np.einsum("j,jkx,jky->kxy", weight / weight.sum(), apart - mean, apart - mean)
        assert float(found.mass[n]) == pytest.approx(weight.sum(), rel=1e-5)
        np.testing.assert_allclose(found.offset[n], mean, atol=1e-4)
        expected = np.stack([spread[:, 0, 0], spread[:, 0, 1], spread[:, 1, 1]], axis=1)
        np.testing.assert_allclose(found.moment[n], expected, atol=1e-2, rtol=1e-4)
        seen = np.average(claims.visibility[b, rivals].double().numpy(), axis=0, weights=weight)
        np.testing.assert_allclose(found.seen[n], seen, atol=1e-5)


@given(st.integers(0, 10_000))
def test_features_are_those_of_torchs_own_sampling(seed: int) -> None:
    """Points lie off the map, too."""
    maps, _, keypoints, _ = scene(seed)
    image = torch.tensor([1, 0, 1])
    points = keypoints[image, :3].flatten(1, 2)
    found = features_at(maps, STRIDES, image, points)
    parts = []
    for level, stride in zip(maps, STRIDES, strict=True):
        size = torch.tensor([level.shape[3], level.shape[2]]) * stride / 2
        grid = (points / size - 1)[:, None]
        sampled = F.grid_sample(level[image], grid, padding_mode="zeros", align_corners=False)
        parts.append(sampled[:, :, 0].transpose(1, 2))
    torch.testing.assert_close(found, torch.cat(parts, dim=2), atol=1e-4, rtol=1e-4)


def test_a_cell_alone_agrees_with_itself() -> None:
    maps, scores, keypoints, claims = scene(1, batch=1)
    boxes = claims.boxes + 100 * torch.arange(20)[None, :, None]
    found = signals_at(maps, STRIDES, scores, keypoints, Claims(boxes, None), torch.tensor([0]), torch.tensor([4]))
    assert float(found.mass[0]) == pytest.approx(float(scores[0, 4]))
    assert float(found.moment.abs().max()) == float(found.offset.abs().max()) == 0
    assert float(found.visibility.abs().max()) == float(found.seen.abs().max()) == 0


def test_columns_and_back() -> None:
    maps, scores, keypoints, claims = scene(2)
    cells = torch.tensor([1, 2, 3])
    found = signals_at(maps, STRIDES, scores, keypoints, claims, torch.tensor([0, 0, 1]), cells)
    again = Signals.of_columns(found.columns())
    assert torch.equal(again.moment, found.moment)
    torch.testing.assert_close(again.features, found.features, atol=2e-3, rtol=2e-3)
    assert torch.equal(found.select(torch.tensor([2])).keypoints, keypoints[1, 3:4])


def test_overlap_of_boxes_that_do_not_touch_is_none() -> None:
    boxes = torch.tensor([[0.0, 0, 2, 2]])
    others = torch.tensor([[[0.0, 0, 2, 2], [2, 0, 4, 2], [1, 0, 3, 2], [5, 5, 5, 5]]])
    torch.testing.assert_close(overlap(boxes, others)[0], torch.tensor([1.0, 0, 1 / 3, 0]))
