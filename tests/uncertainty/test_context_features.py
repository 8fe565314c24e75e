"""Context features against plain loops: overlapping boxes, their disagreement, and interpolated features."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halopose.uncertainty.context_features import (
    MAX_OVERLAPS,
    OVERLAP,
    Candidates,
    ContextFeatures,
    context_features_at,
    features_at,
    overlapping_boxes,
    pad_by_image,
    take_rows,
)

STRIDES = (8, 16)


@dataclass(frozen=True)
class CellOutputs:
    """What cells say: boxes (B, n, 4), keypoints (B, n, K, 2), visibility (B, n, K) or None."""

    boxes: torch.Tensor
    keypoints: torch.Tensor
    visibility: torch.Tensor | None

    @property
    def points(self) -> torch.Tensor:
        """As a host gives them (B, n, 2K or 3K)."""
        points = self.keypoints.permute(0, 1, 3, 2).flatten(2)
        return points if self.visibility is None else torch.cat([points, self.visibility], dim=2)


def scene(seed: int, batch: int = 2) -> tuple[list[torch.Tensor], torch.Tensor, CellOutputs]:
    """Maps, scores (batch, 20), and predictions of 20 cells per image, many of which overlap: (batch, 20, ...)."""
    generator = torch.Generator().manual_seed(seed)
    maps = [torch.randn((batch, 3 + n, 4 >> n, 4 >> n), generator=generator) for n in range(2)]
    corner = torch.rand((batch, 20, 2), generator=generator) * 4
    boxes = torch.cat([corner, corner + 20 + 4 * torch.rand((batch, 20, 2), generator=generator)], dim=2)
    keypoints = torch.rand((batch, 20, 5, 2), generator=generator) * 44 - 6
    visibility = torch.rand((batch, 20, 5), generator=generator)
    return maps, torch.rand((batch, 20), generator=generator), CellOutputs(boxes, keypoints, visibility)


def context_features_of(
    maps: list[torch.Tensor], scores: torch.Tensor, cells: CellOutputs, image: torch.Tensor, cell: torch.Tensor
) -> ContextFeatures:
    """As a host finds them."""
    own, place = pad_by_image(image, cell, len(scores))
    best = Candidates(scores, cells.boxes, lambda chosen: take_rows(cells.points, chosen))
    mine = scores.gather(1, own), take_rows(cells.boxes, own), take_rows(cells.points, own)
    found = context_features_at(maps, STRIDES, best, mine, 5)
    return found if place is None else found.select(place)


def iou(one: list[float], other: list[float]) -> float:
    sides = [max(0.0, min(one[2 + d], other[2 + d]) - max(one[d], other[d])) for d in (0, 1)]
    area = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return sides[0] * sides[1] / (sum(area) - sides[0] * sides[1])


@given(st.integers(0, 10_000))
def test_overlaps_equal_a_plain_loop(seed: int) -> None:
    maps, scores, overlaps = scene(seed)
    keypoints = overlaps.keypoints
    image, cell = torch.tensor([0, 1, 1]), torch.tensor([3, 0, 17])
    found = context_features_of(maps, scores, overlaps, image, cell)
    assert overlaps.visibility is not None
    for n, (b, c) in enumerate(zip(image.tolist(), cell.tolist(), strict=True)):
        box = overlaps.boxes[b, c].tolist()
        rivals = [j for j in range(20) if iou(box, overlaps.boxes[b, j].tolist()) >= OVERLAP]
        rivals = sorted(rivals, key=lambda j: -float(scores[b, j]))[:MAX_OVERLAPS]
        weight = np.array([float(scores[b, j]) for j in rivals])
        apart = (keypoints[b, rivals] - keypoints[b, c]).double().numpy()
        mean = np.average(apart, axis=0, weights=weight)
        spread = np.einsum("j,jkx,jky->kxy", weight / weight.sum(), apart - mean, apart - mean)
        assert float(found.mass[n]) == pytest.approx(weight.sum(), rel=1e-5)
        np.testing.assert_allclose(found.offset[n], mean, atol=1e-4)
        expected = np.stack([spread[:, 0, 0], spread[:, 0, 1], spread[:, 1, 1]], axis=1)
        np.testing.assert_allclose(found.moment[n], expected, atol=1e-2, rtol=1e-4)
        seen = np.average(overlaps.visibility[b, rivals].double().numpy(), axis=0, weights=weight)
        np.testing.assert_allclose(found.seen[n], seen, atol=1e-5)


def between_cells(level: torch.Tensor, x: float, y: float) -> np.ndarray:
    """A map (C, H, W) at a place in cells, whose centres are whole numbers; nothing lies off the map."""
    total = np.zeros(level.shape[0])
    left, top = math.floor(x), math.floor(y)
    for column, row in ((left, top), (left + 1, top), (left, top + 1), (left + 1, top + 1)):
        if 0 <= column < level.shape[2] and 0 <= row < level.shape[1]:
            total += (1 - abs(x - column)) * (1 - abs(y - row)) * level[:, row, column].double().numpy()
    return total


@given(st.integers(0, 10_000))
def test_features_lie_between_those_of_the_cells_around(seed: int) -> None:
    """Points lie off the map, too."""
    maps, _, cells = scene(seed)
    points = cells.keypoints[:, :3]
    found = features_at(maps, STRIDES, points)
    for n, (x, y) in enumerate(points.reshape(-1, 2).tolist()):
        wanted = [
            between_cells(level[n // 15], x / stride - 0.5, y / stride - 0.5)
            for level, stride in zip(maps, STRIDES, strict=True)
        ]
        np.testing.assert_allclose(found.reshape(30, -1)[n], np.concatenate(wanted), atol=1e-4)


def test_a_cell_alone_agrees_with_itself() -> None:
    maps, scores, cells = scene(1, batch=1)
    apart = CellOutputs(cells.boxes + 100 * torch.arange(20)[None, :, None], cells.keypoints, None)
    found = context_features_of(maps, scores, apart, torch.tensor([0]), torch.tensor([4]))
    assert float(found.mass[0]) == pytest.approx(float(scores[0, 4]))
    assert float(found.moment.abs().max()) == float(found.offset.abs().max()) == 0
    assert float(found.visibility.abs().max()) == float(found.seen.abs().max()) == 0


def test_columns_and_back() -> None:
    maps, scores, cells = scene(2)
    found = context_features_of(maps, scores, cells, torch.tensor([0, 0, 1]), torch.tensor([1, 2, 3]))
    again = ContextFeatures.of_columns(found.columns())
    assert torch.equal(again.moment, found.moment)
    torch.testing.assert_close(again.features, found.features, atol=2e-3, rtol=2e-3)
    assert torch.equal(found.select(torch.tensor([2])).keypoints, cells.keypoints[1, 3:4])


@given(st.integers(0, 10_000))
def test_overlapping_boxes_are_found_by_iou(seed: int) -> None:
    boxes, others = (scene(seed + n)[2].boxes for n in range(2))
    found = overlapping_boxes(boxes[:, :3], others)
    for b, one, other in np.ndindex(2, 3, 20):
        share = iou(boxes[b, one].tolist(), others[b, other].tolist())
        if abs(share - OVERLAP) > 1e-5:
            assert bool(found[b, one, other]) == (share > OVERLAP)


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 100))
def test_cells_of_several_images_come_back_in_their_order(images: list[int], seed: int) -> None:
    cell = torch.randint(0, 50, (len(images),), generator=torch.Generator().manual_seed(seed))
    image = torch.tensor(images, dtype=torch.long)
    padded, place = pad_by_image(image, cell, 4)
    assert place is not None
    assert torch.equal(padded.flatten()[place], cell)
    assert torch.equal(place // padded.shape[1], image)
    assert len(torch.unique(place)) == len(images)
