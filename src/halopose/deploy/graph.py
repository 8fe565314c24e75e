"""Exported graph: the unchanged model of the framework, and Cholesky factors for the best cells.

Inputs:
    images: Batch (B, 3, H, W).
    area: Edges (B, 4) of each image in the input; only with an out-of-distribution model.

Outputs:
    The outputs of the framework.
    factors: Entries l11, l21, l22 (B, M, K, 3) of the calibrated Gaussian factors, in pixels of the input.
    cells: Cell (B, M) of each row of factors, -1 for none; missing in the dense form.
    rows: Cell (B, R) of each row of the framework's output, if the framework selects rows itself.
    novelty, image_novelty: Out-of-distribution values (B, M) and (B,), if the artifact has such a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halopose.deploy.novelty_graph import NoveltyAt
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts.traceable import Traceable, Traced
from halopose.uncertainty.context_features import (
    CANDIDATES,
    Candidates,
    ContextFeatures,
    context_features_at,
    overlapping_boxes,
    take_rows,
)
from halopose.uncertainty.distributions import RAW_CHANNELS, factor_entries
from halopose.uncertainty.heads import ACTIVATIONS, LevelHead, ProbabilisticHeads

Form = Literal["topk", "dense", "end2end"]

ROUNDS = 4  # of suppression; each round resolves one more link of a chain of overlapping boxes
OVERLAP = 0.7  # IoU threshold; it only ranks cells, so that a deviation from prediction is harmless


@dataclass(frozen=True)
class TopkSettings:
    """Number of cells with factors.

    Candidates that survive non-maximum suppression are preferred. The defaults cover every detection on COCO (see
    docs/reference/exported-model.md).

    Attributes:
        candidates: Number of best cells by score that are considered.
        windows: Number of cells per level that get factors.
    """

    candidates: int = 160
    windows: int = 16


class Deployable(nn.Module):
    """Traceable model with heads; the factors contain the Gaussian temperature."""

    temperature: Tensor

    def __init__(self, model: Traceable, artifact: Artifact, form: Form, settings: TopkSettings) -> None:
        super().__init__()
        self.model = model
        if form == "dense" and artifact.heads.settings.context_features:
            raise HaloposeError("heads with context features have no dense form: export them as topk")
        self.heads = TopkHeads(artifact, settings) if form == "topk" else DenseHeads(artifact.heads)
        self.register_buffer("temperature", artifact.calibrations.gaussian.tau_.float()[:, None])

    def forward(self, images: Tensor, area: Tensor | None = None) -> tuple[Tensor, ...]:
        traced = self.model(images)
        rows = () if traced.rows is None else (traced.rows,)
        factors, *others = self.heads(traced, area)
        return (*traced.native, factors * self.temperature, *others, *rows)

    @property
    def has_novelty(self) -> bool:
        """Whether the graph has an out-of-distribution model, and therefore the input ``area``."""
        return isinstance(self.heads, TopkHeads) and self.heads.novelty is not None

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, in order."""
        rows = ["rows"] if self.model.layout == "ultralytics-end2end" else []
        cells = ["cells"] if isinstance(self.heads, TopkHeads) else []
        novelty = ["novelty", "image_novelty"] if self.has_novelty else []
        return [*self.model.output_names, "factors", *cells, *novelty, *rows]


class DenseHeads(nn.Module):
    """Factors of all cells by convolutions only, for runtimes with slow or missing gather operations."""

    def __init__(self, heads: ProbabilisticHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, traced: Traced, area: Tensor | None) -> tuple[Tensor]:
        """Factors (B, A, K, 3)."""
        factors = []
        for level, maps, stride in zip(self.heads.levels, traced.features, self.heads.strides, strict=True):
            assert isinstance(level, LevelHead)
            raw = _by_keypoint(_convolved(level, maps).flatten(2), self.heads)
            factors.append(_entries(raw, self.heads) * float(stride))
        return (torch.cat(factors, dim=3).permute(0, 3, 1, 2),)


def _convolved(head: LevelHead, values: Tensor) -> Tensor:
    """Raw parameters (B, K * channels, H, W) of maps (B, C, H, W)."""
    for layer, activation in head.layers:
        values = ACTIVATIONS[activation](layer(values))
    return head.last(values)


class TopkHeads(nn.Module):
    """Factors of the best cells: windows around them are gathered, and the heads run on these windows only.

    Levels are processed jointly where possible, because each graph node has a fixed cost.
    """

    strides: Tensor
    better: Tensor

    def __init__(self, artifact: Artifact, settings: TopkSettings) -> None:
        super().__init__()
        self.settings, self.heads = settings, artifact.heads
        heads, known = artifact.heads, artifact.novelty
        self.novelty = None if known is None else NoveltyAt(known, heads.strides, settings.windows)
        strides = torch.tensor(heads.strides, dtype=torch.float32)
        self.register_buffer("strides", strides.repeat_interleave(settings.windows))
        self.register_buffer("better", torch.ones(settings.candidates, settings.candidates).tril(-1))
        self.levels = nn.ModuleList(WindowHead(level) for level in heads.levels if isinstance(level, LevelHead))

    def forward(self, traced: Traced, area: Tensor | None) -> tuple[Tensor, ...]:
        """Factors (B, M, K, 3) and cells (B, M), finest level first, and out-of-distribution values if available."""
        sizes = torch.stack(
            [torch.stack([torch.as_tensor(side) for side in maps.shape[2:]]) for maps in traced.features]
        )
        ends = sizes.prod(dim=1).cumsum(dim=0)
        starts = ends - sizes.prod(dim=1)
        score, cell = self._best(traced)
        cell_boxes = None if traced.cell_boxes is None else traced.cell_boxes.rows(cell)
        candidates, merit = cell[:, : self.settings.candidates], self._merit(traced, score, cell, cell_boxes)
        here = (candidates[:, None] >= starts[:, None]) & (candidates[:, None] < ends[:, None])
        merit, place = torch.where(here, merit[:, None], -1.0).topk(
            self.settings.windows, dim=2
        )  # (B, levels, windows)
        chosen = candidates.gather(1, place.flatten(1)).reshape(place.shape)
        cells = torch.where(merit >= 0, chosen, -1).flatten(1)
        places, inside = windows_of(
            torch.where(merit >= 0, chosen - starts[:, None], 0), sizes, max(self.heads.reaches)
        )
        hidden, pooled = zip(
            *(
                level(maps, places[:, number], inside[:, number])
                for number, (level, maps) in enumerate(zip(self.levels, traced.features, strict=True))
            ),
            strict=True,
        )
        last = (level.last for level in self.heads.levels if isinstance(level, LevelHead))
        raw = torch.cat([_linear(each, layer) for each, layer in zip(hidden, last, strict=True)], dim=1)
        context = None
        if self.heads.context_head is not None:
            added, context = self._context_correction(hidden, traced.features, score, cell_boxes, place.flatten(1))
            raw = raw + added
        factors = _entries(_by_keypoint(raw.transpose(1, 2), self.heads), self.heads)
        found = self._rescaled((factors * self.strides).permute(0, 3, 1, 2), context), cells
        if self.novelty is None or area is None:
            return found
        return *found, *self.novelty(traced, cells.clamp(min=0), pooled, area)

    def _context_correction(
        self,
        hidden: Sequence[Tensor],
        features: Sequence[Tensor],
        scores: Tensor,
        cell_boxes: Tensor | None,
        place: Tensor,
    ) -> tuple[Tensor, ContextFeatures]:
        """Correction of the raw parameters (B, M, K * channels) of candidates (B, M), and their context features."""
        network = self.heads.context_head
        assert network is not None
        if cell_boxes is None:
            raise HaloposeError(
                "this model has one cell per object and no overlapping boxes: use heads without context features"
            )
        keypoints, own, theirs = self.heads.keypoints, take_rows(cell_boxes, place), cell_boxes[..., 4:]
        points = own[..., 4 : 4 + 2 * keypoints].reshape(-1, 2, keypoints).transpose(1, 2)
        projected = self._projected(features, images_of(place), points)
        best = Candidates(scores.clamp_min(0.0), cell_boxes[..., :4], lambda chosen: take_rows(theirs, chosen))
        mine = scores.gather(1, place), own[..., :4], own[..., 4:]
        context_features = context_features_at(features, self.heads.strides, best, mine, keypoints, projected)
        each = (keypoints, self.heads.settings.width)
        entered = [
            network.enter(level, part.reshape(-1, int(part.shape[2]))).reshape(-1, self.settings.windows, *each)
            for level, part in enumerate(hidden)
        ]
        strides = (self.strides + torch.zeros_like(place)).reshape(-1)
        added = network.leave(torch.cat(entered, dim=1).reshape(-1, *each), context_features, strides, projected=True)
        return added.reshape(-1, int(place.shape[1]), each[0] * int(added.shape[2])), context_features

    def _rescaled(self, factors: Tensor, context: ContextFeatures | None) -> Tensor:
        """Factors (B, M, K, 3) with the bound and the feature-conditional scale, if the heads have them."""
        network = self.heads.context_head
        if network is None or context is None or not network.rescales:
            return factors
        trace = (factors * factors).sum(3).reshape(-1, self.heads.keypoints)
        scale = network.factor_scale(trace, context)
        return factors * scale.reshape(-1, int(factors.shape[1]), self.heads.keypoints, 1)

    def _projected(self, features: Sequence[Tensor], image: Tensor, points: Tensor) -> Tensor:
        """Features (N, K, width) at points (N, K, 2) after the linear layer of the network.

        The layer runs before the gathering where it reduces the number of channels, otherwise after it.
        """
        assert self.heads.context_head is not None
        layer = self.heads.context_head.features
        if layer is None:
            return points.new_zeros(())
        cell, share = cells_around(features, self.heads.strides, image, points)
        narrowed, wide, start = [], points.new_zeros(()), 0
        for level, weight in enumerate(layer.weight.split(self.heads.widths, dim=1)):
            rows = rows_of(features[level])
            if weight.shape[1] > weight.shape[0]:
                narrowed.append((F.linear(rows, weight), cell[level] + start, share[level]))
                start = start + rows.shape[0]
            else:
                wide = wide + F.linear(sampled(rows, cell[level], share[level], self.heads.keypoints), weight)
        if not narrowed:
            return wide
        tables, cells, shares = zip(*narrowed, strict=True)
        return wide + sampled(torch.cat(tables), torch.cat(cells, 1), torch.cat(shares, 1), self.heads.keypoints)

    def _best(self, traced: Traced) -> tuple[Tensor, Tensor]:
        """Scores and cells of the best cells, at least as many as candidates."""
        several = int(traced.scores.shape[2]) > 1
        confidence = traced.scores.amax(dim=2) if several else traced.scores.flatten(1)
        least = 0 if self.heads.context_head is None else CANDIDATES
        return best_cells(confidence, max(least, self.settings.candidates))

    def _merit(self, traced: Traced, score: Tensor, cell: Tensor, cell_boxes: Tensor | None) -> Tensor:
        """Rank values of the candidates (B, C): the score, plus 1 for those that survive suppression."""
        count = self.settings.candidates
        score, cell, classes = score[:, :count], cell[:, :count], None
        if cell_boxes is None:
            return score
        if int(traced.scores.shape[2]) > 1:
            classes = traced.scores.argmax(dim=2).gather(1, cell)
        return torch.where(score >= 0, score + suppression_mask(cell_boxes[:, :count, :4], classes, self.better), score)


def best_cells(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Best scores (B, count) among scores (B, A), best first, and their cells; score -1 and cell 0 for none."""
    # Padded with -1, which ranks last, so that the trace is valid for any number of cells.
    best, cell = F.pad(scores, (0, count), value=-1.0).topk(count, dim=1)
    return best, torch.where(best >= 0, cell, 0)


def images_of(cells: Tensor) -> Tensor:
    """Image index (B * n,) of each of the cells (B, n)."""
    image = torch.arange(cells.shape[0], device=cells.device)[:, None]
    return (image + torch.zeros_like(cells, dtype=torch.long)).reshape(-1)


def rows_of(maps: Tensor) -> Tensor:
    """Features (B * H * W, C) of the cells of maps (B, C, H, W)."""
    return maps.permute(0, 2, 3, 1).reshape(-1, int(maps.shape[1]))


def sampled(rows: Tensor, cell: Tensor, share: Tensor, keypoints: int) -> Tensor:
    """Weighted sums (N, K, C) of rows (R, C) at cells (N * K, n) with shares (N * K, n)."""
    count, channels = int(cell.shape[1]), int(rows.shape[1])
    found = rows[cell.reshape(-1)].reshape(-1, count, channels)
    return (share[:, None] @ found).reshape(-1, keypoints, channels)


def cells_around(
    maps: Sequence[Tensor], strides: Sequence[int], image: Tensor, points: Tensor
) -> tuple[Tensor, Tensor]:
    """Indices (levels, N * K, 4) of the four cells around points (N, K, 2), and their bilinear weights.

    Indices count over all images of the batch. Cells off the map have weight 0.
    """
    sides = [torch.stack([torch.as_tensor(side) for side in level.shape[3:1:-1]]) for level in maps]
    sizes = torch.stack(sides).to(points)[..., None]  # (levels, 2, 1): width, height
    x_y = points.permute(2, 0, 1).reshape(2, -1)
    place = x_y / torch.tensor(strides, dtype=points.dtype, device=points.device)[:, None, None] - 0.5
    low = place.floor()
    part = place - low
    beside = torch.stack([low, low + 1])  # (2, levels, 2, N * K)
    share = torch.stack([1 - part, part]) * ((beside >= 0) & (beside < sizes))
    beside = beside.clamp_min(0).minimum(sizes - 1)
    # Single precision represents integers up to 2^24, more than the cells of any batch.
    start = image.to(points)[:, None].repeat(1, int(points.shape[1])).reshape(-1) * sizes[:, 1]
    row = (start + beside[:, :, 1]) * sizes[:, 0]  # (2, levels, N * K)
    cell, both = row[:, None] + beside[:, :, 0], share[:, None, :, 1] * share[:, :, 0]  # (2, 2, levels, N * K)
    levels = len(maps)
    return (
        cell.reshape(4, levels, -1).permute(1, 2, 0).long(),
        both.reshape(4, levels, -1).permute(1, 2, 0).contiguous(),
    )


def windows_of(cell: Tensor, sizes: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Windows around cells.

    Args:
        cell: Cells (B, L, M) of L levels.
        sizes: Heights and widths (L, 2) of the levels.
        reach: Cells on each side of the centre.

    Returns:
        Cell indices (B, L, M, side, side) and a mask that is 1 on the map. Indices off the map are 0.
    """
    around = torch.arange(-reach, reach + 1)
    height, width = sizes[:, :1, None], sizes[:, 1:, None]  # (L, 1, 1)
    row = torch.div(cell, width[..., 0], rounding_mode="floor")[..., None] + around
    column = (cell % width[..., 0])[..., None] + around
    inside = ((row >= 0) & (row < height))[..., None] & ((column >= 0) & (column < width))[..., None, :]
    place = row[..., None] * width[..., None] + column[..., None, :]
    return torch.where(inside, place, 0), inside.float()


class WindowHead(nn.Module):
    """Head of one level at single cells, as matrix products over constant offsets."""

    def __init__(self, head: LevelHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, maps: Tensor, places: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate the trunk.

        Args:
            maps: Features (B, C, H, W).
            places: Cell indices (B, M, side, side) of the windows.
            inside: Mask (B, M, side, side), 1 on the map.

        Returns:
            Last activations (B, M, hidden) of the trunk, and mean features (B, M, C) of the windows.
        """
        batch, channels, height, width = maps.shape
        side = 2 * self.head.reach + 1
        spare = (int(places.shape[3]) - side) // 2
        if spare:  # windows are as large as the largest level needs
            places, inside = places[:, :, spare:-spare, spare:-spare], inside[:, :, spare:-spare, spare:-spare]
        places = places + (torch.arange(batch) * (height * width)).reshape(-1, 1, 1, 1)
        inside = inside.reshape(-1, side, side)
        values = rows_of(maps)[places.reshape(-1)].reshape(-1, side * side, channels)
        values = values * inside.reshape(-1, side * side, 1)
        pooled = (values.sum(1) / inside.sum((1, 2))[:, None]).reshape(batch, -1, channels)
        for layer, activation in self.head.layers:
            values = ACTIVATIONS[activation](_product(values, layer, side))
            border = int(layer.weight.shape[-1]) // 2
            side -= 2 * border
            values = values.reshape(-1, side * side, layer.weight.shape[0])
            if border:
                inside = inside[:, border : border + side, border : border + side]
            if side > 1:  # convolutions see zeros off the map; the centre cell is always on the map
                values = values * inside.reshape(-1, side * side, 1)
        return values.reshape(batch, -1, self.head.last.weight.shape[1]), pooled


def _linear(values: Tensor, layer: nn.Conv2d) -> Tensor:
    """A 1x1 convolution at single cells (B, M, C)."""
    return F.linear(values, layer.weight[:, :, 0, 0], layer.bias)


def _product(values: Tensor, layer: nn.Conv2d, side: int) -> Tensor:
    """Convolve windows (N, side^2, C) without padding, as one matrix product (N * out^2, channels)."""
    out, into, kernel, _ = layer.weight.shape
    if 1 < kernel < side:
        values = values[:, torch.tensor(_taps(side, int(kernel)))]
    weight = layer.weight.permute(2, 3, 1, 0).reshape(kernel * kernel * into, out)
    assert layer.bias is not None
    return values.reshape(-1, kernel * kernel * into) @ weight + layer.bias


def _taps(side: int, kernel: int) -> list[int]:
    """Window positions that each output of a convolution reads, output by output."""
    reach = range(kernel)
    outputs = range(side - kernel + 1)
    return [(row + i) * side + column + j for row in outputs for column in outputs for i in reach for j in reach]


def suppression_mask(boxes: Tensor, classes: Tensor | None, better: Tensor) -> Tensor:
    """Mask (B, C) of the boxes that greedy non-maximum suppression keeps.

    A box is removed if a better box that is kept overlaps it. All boxes are updated in parallel; chains of up to
    ``ROUNDS`` overlapping boxes are resolved exactly.

    Args:
        boxes: Boxes (B, C, 4), best first.
        classes: Classes (B, C), or None for one class.
        better: Matrix (C, C), 1 where the second index precedes the first.
    """
    close = overlapping_boxes(boxes, boxes, OVERLAP)
    if classes is not None:
        close = close & (classes[..., None] == classes[:, None])
    rivals = close.to(boxes.dtype) * better
    kept = torch.ones_like(boxes[..., :1])
    for _ in range(ROUNDS):
        kept = (rivals @ kept < 0.5).to(boxes.dtype)
    return kept[..., 0]


def _by_keypoint(raw: Tensor, heads: ProbabilisticHeads) -> Tensor:
    """Reshape (B, K * channels, M) to (B, K, channels, M)."""
    channels = RAW_CHANNELS[heads.settings.parameterisation]
    return raw.reshape(raw.shape[0], heads.keypoints, channels, -1)


def _entries(raw: Tensor, heads: ProbabilisticHeads) -> Tensor:
    """Entries l11, l21, l22 (B, K, 3, M) in units of the stride from raw parameters (B, K, channels, M)."""
    kind = heads.settings.parameterisation
    a = raw[:, :, 0]
    b = raw[:, :, 1] if kind == "full" else torch.zeros_like(a)
    c = a if kind == "isotropic" else raw[:, :, RAW_CHANNELS[kind] - 1]
    return torch.stack(factor_entries(a, b, c), dim=2)
