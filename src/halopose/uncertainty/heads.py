"""The probabilistic heads: one small convolutional head per level that mirrors the base's pose head.

In: feature maps (B, C, H, W), or windows (N, C, W, W) cut around single cells. Out: Cholesky factors. One
implementation serves both: on windows it costs a few cells instead of thousands, with equal results.
"""

from __future__ import annotations

import copy
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halopose.arrays import Values, alike, as_array, joined, library_of, linear, of_kind, same_kind
from halopose.errors import HaloposeError
from halopose.types import Array
from halopose.uncertainty.context_features import FEW, ContextFeatures
from halopose.uncertainty.context_head import ContextHead, ContextWeights
from halopose.uncertainty.distributions import RAW_CHANNELS, Parameterisation, scale_tril_from_raw

Activation = Literal["silu", "relu", "identity"]
Trunk = Literal["mirrored", "last-layer"]
Found = tuple[Values, Values | None]  # raw parameters (N, K, channels), what enters the network beyond (N, K, width)
Visit = Callable[[int, Tensor, Tensor, Tensor], None]  # level, rows (n,), windows (n, C, W, W), inside (n, W, W)

LARGEST_INVERSE = 6e4  # of a bound: what half precision holds
FAR_OFF = -(1 << 40)  # of a cell off the map
FEW_WINDOWS = 64  # up to here a matrix product beats torch's convolution (``make bench`` needs both)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class ConvTemplate:
    """One convolution of the base's pose head, batch norm folded in: stride 1, odd kernel, same padding."""

    weight: Tensor  # (out, in, k, k)
    bias: Tensor
    activation: Activation

    @property
    def reach(self) -> int:
        return int(self.weight.shape[-1]) // 2


@dataclass(frozen=True)
class HeadSettings:
    """What kind of head: which dispersion, and which trunk.

    mirrored: the pose head's architecture, trained; ``warm_start`` begins from the pose head's own weights.
    last-layer: the frozen pose head up to its penultimate features, only the last layer trained (the paper's
    ablation). claims, features: whether to look beyond the window, at the disagreement of the cells that claim
    an object, and at the features where the keypoints were predicted; width: of the network that does. bounded:
    such heads keep dispersions below what calibration images show, in areas of the object's box.
    """

    parameterisation: Parameterisation = "full"
    trunk: Trunk = "mirrored"
    warm_start: bool = True
    overlaps: bool = False
    features: bool = False
    width: int = 64
    bounded: bool = False

    @property
    def context_features(self) -> bool:
        """Whether the heads need ``ContextFeatures`` in addition to their windows."""
        return self.overlaps or self.features

    def to_json(self) -> dict[str, Any]:
        """Settings as JSON values, under the names that artifacts store."""
        return {"claims" if name == "overlaps" else name: value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> HeadSettings:
        """Settings from JSON values; missing settings take their defaults.

        Raises:
            TypeError: A setting is unknown.
        """
        return cls(**{"overlaps" if name == "claims" else name: value for name, value in content.items()})


def head_settings(
    parameterisation: Parameterisation = "full",
    trunk: Trunk = "mirrored",
    warm_start: bool = True,
    *,
    context: bool = False,
) -> HeadSettings:
    """Settings of the heads that ``fit`` trains and ``ablate`` compares.

    Args:
        parameterisation: Form of the dispersion.
        trunk: Which convolutions of the pose head are copied.
        warm_start: Start from the pose head's own weights.
        context: Use all auxiliary features (overlapping boxes and neck features), with a bound on the dispersion.
    """
    return HeadSettings(parameterisation, trunk, warm_start, overlaps=context, features=context, bounded=context)


class LevelHead(nn.Module):
    """The head of one level: trunk convolutions, then 1x1 to K times the dispersion's channels.

    The first output is the same for every cell: a standard deviation of one stride.
    """

    def __init__(
        self,
        template: Sequence[ConvTemplate],
        keypoints: int,
        settings: HeadSettings,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.keypoints = keypoints
        # Modules in plain lists, here and below: finding them in torch's own takes time.
        self.layers = [(_convolution(conv, settings), conv.activation) for conv in template]
        self.trunk = nn.ModuleList(convolution for convolution, _ in self.layers)
        channels = RAW_CHANNELS[settings.parameterisation]
        self.last = nn.Conv2d(template[-1].weight.shape[0], keypoints * channels, 1)
        nn.init.zeros_(self.last.weight)
        if self.last.bias is not None:
            nn.init.zeros_(self.last.bias)
        self.reach = sum(conv.reach for conv in template)

    def forward(self, features: Tensor) -> Tensor:
        """Raw parameters (B, H, W, K, channels) of whole maps (B, C, H, W): the dense form."""
        for convolution, activation in self.layers:
            features = ACTIVATIONS[activation](convolution(features))
        channels = RAW_CHANNELS[self.settings.parameterisation]
        return self.last(features).permute(0, 2, 3, 1).unflatten(-1, (self.keypoints, channels))

    def hidden_at(self, windows: Tensor, inside: Tensor) -> Tensor:
        """The trunk's last activations (N, H) at the centres of windows (N, C, W, W).

        inside (N, W, W) marks the cells on the map. A convolution over the border sees zeros there, and so
        must the next one: intermediate activations outside are masked, or bias and activation would leak in.
        """
        convolve = convolve_few if len(windows) <= FEW_WINDOWS else convolve_many
        windows = windows.permute(0, 2, 3, 1)
        for convolution, activation in self.layers:
            windows = ACTIVATIONS[activation](convolve(windows, convolution))
            side = windows.shape[1]
            if side > 1:  # the cell itself lies on the map
                reach = (inside.shape[1] - side) // 2
                inside = inside[:, reach : reach + side, reach : reach + side]
                windows = windows * inside[..., None]
        return windows[:, 0, 0]


def convolve_few(windows: Tensor, convolution: nn.Conv2d) -> Tensor:
    """Convolve (N, H, W, C) without padding as one matrix product: for a few detections, several times faster."""
    kernel = convolution.weight.shape[-1]
    if kernel == windows.shape[1]:
        patches = windows.flatten(1)[:, None, None]
    else:
        windows = windows.contiguous()
        count, width, _, channels = windows.shape
        each, row, column, _ = windows.stride()
        places = width - kernel + 1
        # A row of a patch lies in one piece: fewer and longer copies than if it were unfolded twice.
        shape, steps = (count, places, places, kernel, kernel * channels), (each, row, column, row, 1)
        patches = windows.as_strided(shape, steps).flatten(3)
    return F.linear(patches, convolution.weight.permute(0, 2, 3, 1).flatten(1), convolution.bias)


def convolve_many(windows: Tensor, convolution: nn.Conv2d) -> Tensor:
    """The same by torch's convolution: for training batches, half as much time again faster."""
    result = F.conv2d(windows.permute(0, 3, 1, 2), convolution.weight, convolution.bias)
    return result.permute(0, 2, 3, 1)


def _convolution(template: ConvTemplate, settings: HeadSettings) -> nn.Conv2d:
    out, into, kernel, _ = template.weight.shape
    convolution = nn.Conv2d(into, out, kernel, padding=kernel // 2)
    if settings.warm_start or settings.trunk == "last-layer":
        with torch.no_grad():
            convolution.weight.copy_(template.weight)
            convolution.bias.copy_(template.bias)  # type: ignore[union-attr]
    return convolution.requires_grad_(settings.trunk == "mirrored")


@dataclass(frozen=True)
class HeadWeights:
    """What heads apply after their trunks, tensors or arrays; last: weight (K * channels, H) and bias by level."""

    last: Sequence[tuple[Values, Values]]
    context_head: ContextWeights | None


class ProbabilisticHeads(nn.Module):
    """The heads of all levels. ``strides`` are pixels per cell, finest level first."""

    def __init__(
        self,
        templates: Sequence[Sequence[ConvTemplate]],
        strides: Sequence[int],
        keypoints: int,
        settings: HeadSettings | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings or HeadSettings()
        self.strides = tuple(strides)
        self.keypoints = keypoints
        self.by_level = [LevelHead(template, keypoints, self.settings) for template in templates]
        self.levels = nn.ModuleList(self.by_level)
        # How many cells to each side a level's output depends on.
        self.reaches = tuple(sum(convolution.reach for convolution in template) for template in templates)
        self.context_head = None
        if self.settings.context_features:
            self.context_head = ContextHead(
                [int(template[-1].weight.shape[0]) for template in templates],
                keypoints,
                RAW_CHANNELS[self.settings.parameterisation],
                width=self.settings.width,
                channels=sum(int(t[0].weight.shape[1]) for t in templates) if self.settings.features else 0,
                overlaps=self.settings.overlaps,
                bounded=self.settings.bounded,
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of the feature maps, level by level."""
        return tuple(int(next(level.trunk.parameters()).shape[1]) for level in self.by_level)

    def dense(self, features: Sequence[Tensor]) -> Tensor:
        """Cholesky factors (B, A, K, 2, 2) in input pixels at every cell of all levels."""
        if self.context_head is not None:
            raise HaloposeError("heads with context features have no dense form: use `sparse`")
        factors = [
            scale_tril_from_raw(level(maps), self.settings.parameterisation, stride).flatten(1, 2)
            for level, maps, stride in zip(self.levels, features, self.strides, strict=True)
        ]
        return torch.cat(factors, dim=1)

    def sparse(
        self,
        features: Sequence[Tensor],
        image: Tensor,
        cell: Tensor,
        context_features: ContextFeatures | None = None,
        visit: Visit | None = None,
        few: HeadWeights | None = None,
    ) -> Tensor:
        """Cholesky factors (N, K, 2, 2) at the given cells (N,) of images (N,), counted over all levels.

        signals: of those cells, for heads that look beyond their window. visit: is shown the windows of each
        level, and which rows they are of. few: ``weights`` as arrays, which save time at a few.
        """
        # Where windows lie is worked out in numpy: for a few numbers it takes a third of the time.
        images, cells = as_array(image), as_array(cell)
        weights = few if few and len(cells) <= FEW and not torch.is_grad_enabled() else self.weights()
        ends = list(accumulate(maps.shape[2] * maps.shape[3] for maps in features))
        levels = [bisect(ends, place) for place in cells.tolist()]
        rows, found = [], []
        for number in sorted(set(levels)):
            chosen = np.array([row for row, level in enumerate(levels) if level == number])
            start = ends[number - 1] if number else 0
            windows, inside = cut_windows(
                features[number], images.take(chosen), cells.take(chosen) - start, self.reaches[number]
            )
            found.append(self._at_level(number, windows, inside, weights))
            rows.append(chosen)
            if visit is not None:
                visit(number, torch.from_numpy(chosen).to(cell.device), windows, inside)
        if not rows:
            return features[0].new_zeros((0, self.keypoints, 2, 2))
        strides = np.array([self.strides[level] for level in levels], np.float32)
        return self._factors(_in_order(found, rows), context_features, strides, weights)

    def at_windows(
        self, level: int, windows: Tensor, inside: Tensor, context_features: ContextFeatures | None = None
    ) -> Tensor:
        """Cholesky factors (N, K, 2, 2) in input pixels of windows (N, C, W, W) of one level."""
        weights, strides = self.weights(), np.full(len(windows), self.strides[level], np.float32)
        return self._factors(self._at_level(level, windows, inside, weights), context_features, strides, weights)

    def weights(self, kind: Callable[[Any], Values] = lambda own: own) -> HeadWeights:
        """What is applied after the trunks, as tensors of the modules or as another kind of them."""
        last = [(kind(level.last.weight.flatten(1)), kind(level.last.bias)) for level in self.by_level]
        return HeadWeights(last, None if self.context_head is None else self.context_head.weights(kind))

    def _at_level(self, level: int, windows: Tensor, inside: Tensor, weights: HeadWeights) -> Found:
        """What windows of one level say alone."""
        weight, bias = weights.last[level]
        hidden = alike(self.by_level[level].hidden_at(windows, inside), weight)
        channels = RAW_CHANNELS[self.settings.parameterisation]
        raw = linear(hidden, weight, bias).reshape(-1, self.keypoints, channels)
        return raw, None if weights.context_head is None else weights.context_head.enter(level, hidden)

    def _factors(
        self, found: Found, context_features: ContextFeatures | None, strides: Array, weights: HeadWeights
    ) -> Tensor:
        """Cholesky factors (N, K, 2, 2) in input pixels of cells of levels with strides (N,)."""
        raw, entered = found
        if weights.context_head is not None:
            if context_features is None:
                raise HaloposeError(
                    "these heads use context features, which the store lacks: collect it with --context"
                )
            raw = raw + weights.context_head.leave(entered, context_features, of_kind(strides, context_features.box))
        factors = scale_tril_from_raw(raw, self.settings.parameterisation, of_kind(strides[:, None], raw))
        if (
            self.context_head is not None
            and self.context_head.inverse_bound is not None
            and context_features is not None
        ):
            trace = library_of(factors).einsum("nkij,nkij->nk", factors, factors)
            factors = (
                factors * self.context_head.shrinkage(trace, same_kind(context_features.box, raw))[..., None, None]
            )
        return torch.as_tensor(factors)


def with_bound(heads: ProbabilisticHeads, inverse: Array) -> ProbabilisticHeads:
    """A copy of heads whose dispersions have a bound, one over ``inverse`` (K,), as ``ContextHead`` says."""
    bounded = copy.deepcopy(heads)
    if bounded.context_head is None:
        raise HaloposeError("only heads with context features can be bounded: train them with --context")
    bounded.settings = replace(heads.settings, bounded=True)
    stored = torch.from_numpy(inverse).half().float()  # as an artifact stores it
    bounded.context_head.inverse_bound = stored.clamp(max=LARGEST_INVERSE).to(bounded.context_head.bias.device)
    return bounded


def _in_order(found: Sequence[Found], rows: Sequence[Array]) -> Found:
    """What all levels found as one, in the order that ``rows`` say."""
    if len(found) == 1:
        return found[0]
    back: Values = np.concatenate(rows).argsort()
    if not isinstance(found[0][0], np.ndarray):
        back = torch.from_numpy(back).to(found[0][0].device)
    raw, entered = zip(*found, strict=True)
    return joined([*raw], 0)[back], None if entered[0] is None else joined([*entered], 0)[back]


def cut_windows(maps: Tensor, image: Values, cell: Values, reach: int) -> tuple[Tensor, Tensor]:
    """Windows (N, C, W, W), zero off the map, and which of their cells lie on it (N, W, W).

    maps (B, C, H, W); image and cell (N,) say where the centres are, cells in row-major order.
    """
    channels, height, width = maps.shape[1:]
    row, column = np.divmod(as_array(cell), width)
    down, right = _near(height, reach) * width, _near(width, reach)
    place = down.take(row, axis=0)[:, :, None] + right.take(column, axis=0)[:, None]
    inside = place >= 0
    context_head = (place.reshape(-1) < 0).nonzero()[0]
    place = np.maximum(place + (as_array(image) * (height * width))[:, None, None], 0)
    windows = _features(maps, torch.from_numpy(place.reshape(-1)).to(maps.device))
    if len(context_head):
        windows.index_fill_(0, torch.from_numpy(context_head).to(maps.device), 0)
    return windows.reshape(*place.shape, channels).permute(0, 3, 1, 2), torch.from_numpy(inside).to(maps.device)


@lru_cache(maxsize=256)
def _near(side: int, reach: int) -> Array:
    """Cells (side, W) within reach of each cell of a row, far below zero off the map."""
    near = np.arange(side)[:, None] + np.arange(-reach, reach + 1)
    return np.where((near >= 0) & (near < side), near, FAR_OFF)


def _features(maps: Tensor, place: Tensor) -> Tensor:
    """Features (n, C) of maps (B, C, H, W) at places (n,), counted row by row over all images."""
    rows = maps.permute(0, 2, 3, 1)
    if rows.is_contiguous():  # several times faster than any indexing
        return rows.flatten(0, 2).index_select(0, place)
    size = maps.shape[2] * maps.shape[3]
    return maps.flatten(2)[place // size, :, place % size]
