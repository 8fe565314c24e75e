"""The graph that is exported: the framework's model, unchanged, and Cholesky factors for the cells that matter.

In: images (B, 3, H, W). Out: the framework's own outputs; ``factors`` (B, M, K, 3), the entries l11, l21, l22 of
calibrated Gaussian factors in pixels of the input; ``cells`` (B, M), the cell of each row, -1 for none, where M is
not every cell in order; ``rows`` (B, R), the cells of the framework's rows, where it has chosen them itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halopose.fitting.artifact import Artifact
from halopose.hosts.tracing import Traceable, Traced
from halopose.uncertainty.distributions import RAW_CHANNELS, factor_entries
from halopose.uncertainty.heads import ACTIVATIONS, LevelHead, ProbabilisticHeads

Form = Literal["topk", "dense"]

ROUNDS = 4  # of suppression; each settles one more link of a chain of overlapping boxes
OVERLAP = 0.7  # IoU, as in prediction; it only decides which cells come first


@dataclass(frozen=True)
class TopkSettings:
    """How many cells of an image get factors.

    windows: cells a level. candidates: the best cells by score among which they are sought; those that
    suppression would keep come first. Measured on COCO (docs/deploy.md): 192 and 20 hold every detection.
    """

    candidates: int = 192
    windows: int = 20


class Deployable(nn.Module):
    """A traceable model with heads; the Gaussian temperature is in the factors."""

    temperature: Tensor

    def __init__(self, model: Traceable, artifact: Artifact, form: Form, settings: TopkSettings) -> None:
        super().__init__()
        self.model = model
        self.heads = TopkHeads(artifact.heads, settings) if form == "topk" else DenseHeads(artifact.heads)
        self.register_buffer("temperature", artifact.gaussian.tau_.float()[:, None])

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        traced = self.model(images)
        rows = () if traced.rows is None else (traced.rows,)
        *cells, factors = self.heads(traced)
        return (*traced.native, factors * self.temperature, *cells, *rows)

    @property
    def output_names(self) -> list[str]:
        rows = ["rows"] if self.model.layout == "ultralytics-end2end" else []
        cells = ["cells"] if isinstance(self.heads, TopkHeads) else []
        return [*self.model.output_names, "factors", *cells, *rows]


class DenseHeads(nn.Module):
    """Factors of every cell: convolutions alone, for runtimes that gather slowly or not at all."""

    def __init__(self, heads: ProbabilisticHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, traced: Traced) -> tuple[Tensor]:
        """Factors (B, A, K, 3)."""
        factors = []
        for level, maps, stride in zip(self.heads.levels, traced.features, self.heads.strides, strict=True):
            assert isinstance(level, LevelHead)
            raw = _by_keypoint(_convolved(level, maps).flatten(2), self.heads)
            factors.append(_entries(raw, self.heads) * float(stride))
        return (torch.cat(factors, dim=3).permute(0, 3, 1, 2),)


def _convolved(head: LevelHead, values: Tensor) -> Tensor:
    """Raw parameters (B, K * channels, H, W) of maps (B, C, H, W)."""
    for layer, activation in zip(head.trunk, head.activations, strict=True):
        values = ACTIVATIONS[activation](layer(values))
    return head.last(values)


class TopkHeads(nn.Module):
    """Factors of the cells that matter: their windows are gathered, and the heads run there alone."""

    strides: Tensor
    better: Tensor

    def __init__(self, heads: ProbabilisticHeads, settings: TopkSettings) -> None:
        super().__init__()
        self.settings, self.heads = settings, heads
        strides = torch.tensor(heads.strides, dtype=torch.float32)
        self.register_buffer("strides", strides.repeat_interleave(settings.windows))
        self.register_buffer("better", torch.ones(settings.candidates, settings.candidates).tril(-1))
        self.levels = nn.ModuleList(WindowHead(level) for level in heads.levels if isinstance(level, LevelHead))

    def forward(self, traced: Traced) -> tuple[Tensor, Tensor]:
        """Cells (B, M) and factors (B, M, K, 3), M windows over all levels, finest level first."""
        candidates, merit = self._candidates(traced)
        cells, raw, offset = [], [], 0
        for level, maps in zip(self.levels, traced.features, strict=True):
            count = maps.shape[2] * maps.shape[3]
            here = (candidates >= offset) & (candidates < offset + count)
            best, place = torch.where(here, merit, -1.0).topk(self.settings.windows, dim=1)
            cell, found = candidates.gather(1, place), best >= 0
            values = level(maps, torch.where(found, cell - offset, 0))
            raw.append(values.reshape(maps.shape[0], self.settings.windows, -1))
            cells.append(torch.where(found, cell, -1))
            offset = offset + count
        factors = _entries(_by_keypoint(torch.cat(raw, dim=1).transpose(1, 2), self.heads), self.heads)
        return torch.cat(cells, dim=1), (factors * self.strides).permute(0, 3, 1, 2)

    def _candidates(self, traced: Traced) -> tuple[Tensor, Tensor]:
        """The best cells (B, C), and what ranks them (B, C): the score, plus 1 for those that will be kept."""
        count = self.settings.candidates
        several = int(traced.scores.shape[2]) > 1
        confidence = traced.scores.amax(dim=2) if several else traced.scores[..., 0]
        # Padded, so that the graph takes small images too: -1 ranks behind every cell.
        score, cell = F.pad(confidence, (0, count), value=-1.0).topk(count, dim=1)
        cell = torch.where(score >= 0, cell, 0)
        if traced.boxes is None:
            return cell, score
        boxes = traced.boxes.gather(1, cell[..., None].expand(-1, -1, 4))
        classes = traced.scores.argmax(dim=2).gather(1, cell) if several else None
        kept = stands(boxes, classes, self.better)
        return cell, torch.where(score >= 0, score + kept, score)


class WindowHead(nn.Module):
    """A level's head at single cells, as matrix products over taps at constant offsets."""

    def __init__(self, head: LevelHead) -> None:
        super().__init__()
        self.head, self.side = head, 2 * head.reach + 1

    def forward(self, maps: Tensor, cell: Tensor) -> Tensor:
        """Raw parameters (B * M, K * channels) of maps (B, C, H, W) at cells (B, M) of this level."""
        values, inside = self._cut(maps, cell)
        side = self.side
        for layer, activation in zip(self.head.trunk, self.head.activations, strict=True):
            assert isinstance(layer, nn.Conv2d)
            kernel = int(layer.weight.shape[-1])
            values = ACTIVATIONS[activation](_product(values, layer, side))
            border, side = kernel // 2, side - kernel + 1
            inside = inside[:, border : border + side, border : border + side]
            values = values.reshape(-1, side * side, layer.weight.shape[0])
            values = values * inside.reshape(-1, side * side, 1)  # a convolution sees zeros over the border
        return _product(values, self.head.last, side)

    def _cut(self, maps: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Windows (B * M, side^2, C), zero off the map, and which of their cells lie on it (B * M, side, side)."""
        batch, channels, height, width = maps.shape
        around = torch.arange(-self.head.reach, self.head.reach + 1)
        row = torch.div(cell, width, rounding_mode="floor")[..., None] + around
        column = (cell % width)[..., None] + around
        inside = ((row >= 0) & (row < height))[..., None] & ((column >= 0) & (column < width))[:, :, None]
        place = torch.where(inside, row[..., None] * width + column[:, :, None], 0)
        place = place + (torch.arange(batch) * (height * width))[:, None, None, None]
        rows = maps.permute(0, 2, 3, 1).reshape(-1, channels)[place.reshape(-1)]
        inside = inside.reshape(-1, self.side, self.side).to(maps.dtype)
        return rows.reshape(-1, self.side**2, channels) * inside.reshape(-1, self.side**2, 1), inside


def _product(values: Tensor, layer: nn.Conv2d, side: int) -> Tensor:
    """Convolve windows (N, side^2, C) without padding, as one matrix product (N * out^2, channels)."""
    out, into, kernel, _ = layer.weight.shape
    if kernel > 1:
        values = values[:, torch.tensor(_taps(side, int(kernel)))]
    weight = layer.weight.permute(2, 3, 1, 0).reshape(kernel * kernel * into, out)
    assert layer.bias is not None
    return values.reshape(-1, kernel * kernel * into) @ weight + layer.bias


def _taps(side: int, kernel: int) -> list[int]:
    """Places in a window that each output of a convolution reads, output by output."""
    reach = range(kernel)
    outputs = range(side - kernel + 1)
    return [(row + i) * side + column + j for row in outputs for column in outputs for i in reach for j in reach]


def stands(boxes: Tensor, classes: Tensor | None, better: Tensor) -> Tensor:
    """1 for boxes (B, C, 4), best first, that greedy suppression keeps, 0 for others (B, C).

    better (C, C) is 1 where the second box comes before the first. A box falls if a better one that stands
    overlaps it. All at once instead of one by one: a round settles those whose rivals are settled, so that
    chains of up to ``ROUNDS`` boxes come out as in greedy suppression.
    """
    left, top, right, bottom = boxes.unbind(dim=2)
    shared = _overlap(left, right) * _overlap(top, bottom)
    area = (right - left) * (bottom - top)
    overlapping = shared > OVERLAP * (area[:, :, None] + area[:, None] - shared)
    if classes is not None:
        overlapping = overlapping & (classes[:, :, None] == classes[:, None])
    rivals = overlapping.to(boxes.dtype) * better
    kept = torch.ones_like(area)[..., None]
    for _ in range(ROUNDS):
        kept = (rivals @ kept < 0.5).to(boxes.dtype)
    return kept[..., 0]


def _overlap(low: Tensor, high: Tensor) -> Tensor:
    """Lengths (B, C, C) that intervals (B, C) share."""
    return (torch.minimum(high[:, :, None], high[:, None]) - torch.maximum(low[:, :, None], low[:, None])).clamp(
        min=0
    )


def _by_keypoint(raw: Tensor, heads: ProbabilisticHeads) -> Tensor:
    """(B, K, channels, M) of (B, K * channels, M)."""
    channels = RAW_CHANNELS[heads.settings.parameterisation]
    return raw.reshape(raw.shape[0], heads.keypoints, channels, -1)


def _entries(raw: Tensor, heads: ProbabilisticHeads) -> Tensor:
    """l11, l21, l22 (B, K, 3, M) in strides of raw parameters (B, K, channels, M)."""
    kind = heads.settings.parameterisation
    a = raw[:, :, 0]
    b = raw[:, :, 1] if kind == "full" else torch.zeros_like(a)
    c = a if kind == "isotropic" else raw[:, :, RAW_CHANNELS[kind] - 1]
    return torch.stack(factor_entries(a, b, c), dim=2)
