"""Probabilistic heads: one small convolutional head for each level, with the architecture of the model's pose head.

Input: feature maps (B, C, H, W), or windows (N, C, W, W) cut around single cells. Output: Cholesky factors. Both inputs
give equal results; windows cost a few cells instead of thousands.
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

from halopose.errors import HaloposeError
from halopose.types import Array
from halopose.uncertainty.conditional_scale import ConditionalScale
from halopose.uncertainty.context_features import ContextFeatures
from halopose.uncertainty.context_head import ContextHead
from halopose.uncertainty.distributions import RAW_CHANNELS, Parameterisation, scale_tril_from_raw

Activation = Literal["silu", "relu", "identity"]
Trunk = Literal["mirrored", "last-layer"]
LevelOutput = tuple[Tensor, Tensor | None]  # raw parameters (N, K, channels), input of the context head (N, K, width)
Visit = Callable[[int, Tensor, Tensor, Tensor], None]  # level, rows (n,), windows (n, C, W, W), inside (n, W, W)

LARGEST_INVERSE = 6e4  # largest inverse bound that half precision holds
OFF_MAP = -(1 << 40)  # index of a cell outside the map
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class ConvTemplate:
    """One convolution of the model's pose head with batch norm folded in: stride 1, odd kernel, same padding."""

    weight: Tensor  # (out, in, k, k)
    bias: Tensor
    activation: Activation

    @property
    def reach(self) -> int:
        return int(self.weight.shape[-1]) // 2


@dataclass(frozen=True)
class HeadSettings:
    """Architecture of the heads.

    Attributes:
        parameterisation: Form of the dispersion.
        trunk: "mirrored" trains a copy of the pose head; "last-layer" keeps the pose head up to its penultimate
            features and trains the last layer alone (an ablation of the paper).
        warm_start: Whether a mirrored trunk starts from the weights of the pose head.
        overlaps: Whether the context head uses the disagreement of overlapping boxes.
        features: Whether the context head uses the feature maps at the predicted keypoints.
        width: Width of the context head.
        bounded: Whether dispersions stay below a bound that is fitted on the calibration images.
        conditional: Whether dispersions have a feature-conditional scale, see ``uncertainty.conditional_scale``.
    """

    parameterisation: Parameterisation = "full"
    trunk: Trunk = "mirrored"
    warm_start: bool = True
    overlaps: bool = False
    features: bool = False
    width: int = 64
    bounded: bool = False
    conditional: bool = False

    @property
    def context_features(self) -> bool:
        """Whether the heads need ``ContextFeatures`` in addition to their windows."""
        return self.overlaps or self.features

    def to_json(self) -> dict[str, Any]:
        """Settings as JSON values, under the names that artifacts store."""
        content = {"claims" if name == "overlaps" else name: value for name, value in asdict(self).items()}
        if not self.conditional:
            del content["conditional"]
        return content

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
    """Head of one level: trunk convolutions, then a 1x1 convolution to the dispersion parameters of K keypoints.

    Before training the output is the same at every cell: a standard deviation of one stride.
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
        # Plain lists beside the module lists: indexing a ModuleList is slow.
        self.layers = [(_convolution(conv, settings), conv.activation) for conv in template]
        self.trunk = nn.ModuleList(convolution for convolution, _ in self.layers)
        channels = RAW_CHANNELS[settings.parameterisation]
        self.last = nn.Conv2d(template[-1].weight.shape[0], keypoints * channels, 1)
        nn.init.zeros_(self.last.weight)
        if self.last.bias is not None:
            nn.init.zeros_(self.last.bias)
        self.reach = sum(conv.reach for conv in template)

    def forward(self, features: Tensor) -> Tensor:
        """Compute raw parameters (B, H, W, K, channels) at every cell of maps (B, C, H, W)."""
        for convolution, activation in self.layers:
            features = ACTIVATIONS[activation](convolution(features))
        channels = RAW_CHANNELS[self.settings.parameterisation]
        return self.last(features).permute(0, 2, 3, 1).unflatten(-1, (self.keypoints, channels))

    def hidden_at(self, windows: Tensor, inside: Tensor) -> Tensor:
        """Compute the last activations (N, H) of the trunk at the centres of windows (N, C, W, W).

        ``inside`` (N, W, W) marks the cells inside the map. The dense form sees zeros outside the map in every layer,
        so intermediate activations outside the map are set to zero here too.
        """
        windows = windows.permute(0, 2, 3, 1)
        for convolution, activation in self.layers:
            windows = ACTIVATIONS[activation](convolve_windows(windows, convolution))
            side = windows.shape[1]
            if side > 1:  # the cell itself lies on the map
                reach = (inside.shape[1] - side) // 2
                inside = inside[:, reach : reach + side, reach : reach + side]
                windows = windows * inside[..., None]
        return windows[:, 0, 0]


def convolve_windows(windows: Tensor, convolution: nn.Conv2d) -> Tensor:
    """Convolve windows (N, H, W, C) without padding."""
    if windows.shape[1:3] == convolution.weight.shape[2:]:  # one cell is left: a matrix product, which is faster
        weight = convolution.weight.permute(0, 2, 3, 1).flatten(1)
        return F.linear(windows.flatten(1), weight, convolution.bias)[:, None, None]
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


class ProbabilisticHeads(nn.Module):
    """The heads of all levels.

    Args:
        templates: Convolutions of the pose head before its last one, level by level.
        strides: Pixels per cell of each level, finest level first.
        keypoints: Number of keypoints K.
        settings: Architecture of the heads.
    """

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
        # Cells on each side on which the output of a level depends.
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
                conditional=self.settings.conditional,
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of the feature maps of each level."""
        return tuple(int(next(level.trunk.parameters()).shape[1]) for level in self.by_level)

    def dense(self, features: Sequence[Tensor]) -> Tensor:
        """Compute Cholesky factors (B, A, K, 2, 2) in input pixels at every cell of all levels."""
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
    ) -> Tensor:
        """Compute Cholesky factors (N, K, 2, 2) at selected cells.

        Args:
            features: Feature maps (B, C, H, W), one for each level.
            image: Image index (N,) of each cell; on the host it needs no copy.
            cell: Cells (N,), counted over all levels.
            context_features: Context features of the cells, for heads that use them.
            visit: Called with the windows of each level and the rows they belong to.
        """
        ends = list(accumulate(maps.shape[2] * maps.shape[3] for maps in features))
        image, cell = image.cpu(), cell.cpu()  # indices are computed on the host
        levels = [bisect(ends, place) for place in cell.tolist()]
        rows, found = [], []
        for number in sorted(set(levels)):
            chosen = torch.tensor([row for row, level in enumerate(levels) if level == number])
            start = ends[number - 1] if number else 0
            windows, inside = cut_windows(features[number], image[chosen], cell[chosen] - start, self.reaches[number])
            found.append(self._at_level(number, windows, inside))
            rows.append(chosen)
            if visit is not None:
                visit(number, chosen, windows, inside)
        if not rows:
            return features[0].new_zeros((0, self.keypoints, 2, 2))
        strides = features[0].new_tensor([self.strides[level] for level in levels])
        return self._factors(_in_order(found, rows), context_features, strides)

    def at_windows(
        self, level: int, windows: Tensor, inside: Tensor, context_features: ContextFeatures | None = None
    ) -> Tensor:
        """Compute Cholesky factors (N, K, 2, 2) in input pixels from windows (N, C, W, W) of one level."""
        strides = windows.new_full((len(windows),), self.strides[level])
        return self._factors(self._at_level(level, windows, inside), context_features, strides)

    def _at_level(self, level: int, windows: Tensor, inside: Tensor) -> LevelOutput:
        """Raw parameters and input of the context head, from windows of one level."""
        own = self.by_level[level]
        hidden = own.hidden_at(windows, inside)
        channels = RAW_CHANNELS[self.settings.parameterisation]
        raw = F.linear(hidden, own.last.weight.flatten(1), own.last.bias).reshape(-1, self.keypoints, channels)
        return raw, None if self.context_head is None else self.context_head.enter(level, hidden)

    def _factors(self, output: LevelOutput, context_features: ContextFeatures | None, strides: Tensor) -> Tensor:
        """Cholesky factors (N, K, 2, 2) in input pixels, from the outputs of levels with strides (N,)."""
        raw, entered = output
        network = self.context_head
        if network is not None and entered is not None:
            if context_features is None:
                raise HaloposeError(
                    "these heads use context features, which the feature cache lacks: collect it with --context"
                )
            raw = raw + network.leave(entered, context_features, strides)
        factors = scale_tril_from_raw(raw, self.settings.parameterisation, strides[:, None])
        if network is not None and network.rescales and context_features is not None:
            trace = torch.einsum("nkij,nkij->nk", factors, factors)
            factors = factors * network.factor_scale(trace, context_features)[..., None, None]
        return factors


def with_bound(heads: ProbabilisticHeads, inverse: Array) -> ProbabilisticHeads:
    """Copy heads and give their dispersions an upper bound.

    Args:
        heads: Heads with context features.
        inverse: Inverse bound (K,), see ``ContextHead``.
    """
    bounded = copy.deepcopy(heads)
    if bounded.context_head is None:
        raise HaloposeError("only heads with context features can be bounded: train them with --context")
    bounded.settings = replace(heads.settings, bounded=True)
    stored = torch.from_numpy(inverse).half().float()  # the precision of an artifact
    bounded.context_head.inverse_bound = stored.clamp(max=LARGEST_INVERSE).to(bounded.context_head.bias.device)
    return bounded


def with_conditional_scale(heads: ProbabilisticHeads, scale: ConditionalScale) -> ProbabilisticHeads:
    """Copy heads and give their dispersions a feature-conditional scale; an earlier one is replaced."""
    changed = copy.deepcopy(heads)
    if changed.context_head is None:
        raise HaloposeError("only heads with context features can have a conditional scale: train them with --context")
    changed.settings = replace(heads.settings, conditional=True)
    for name, values in vars(scale).items():
        stored = values.half().float()  # the precision of an artifact
        setattr(changed.context_head, f"scale_{name}", stored.to(changed.context_head.bias.device))
    return changed


def without_conditional_scale(heads: ProbabilisticHeads) -> ProbabilisticHeads:
    """Heads without a feature-conditional scale; the same heads if they have none."""
    if not heads.settings.conditional or heads.context_head is None:
        return heads
    changed = copy.deepcopy(heads)
    assert changed.context_head is not None
    changed.settings = replace(heads.settings, conditional=False)
    for name in ("scale_centre", "scale_knots", "scale_weights"):
        setattr(changed.context_head, name, None)
    return changed


def _in_order(found: Sequence[LevelOutput], rows: Sequence[Tensor]) -> LevelOutput:
    """Outputs of all levels in one tensor, in the order of ``rows``."""
    if len(found) == 1:
        return found[0]
    back = torch.cat([*rows]).argsort()
    raw, entered = zip(*found, strict=True)
    return torch.cat(raw)[back], None if entered[0] is None else torch.cat(entered)[back]


def cut_windows(maps: Tensor, image: Tensor, cell: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Cut windows around cells out of feature maps.

    Args:
        maps: Feature maps (B, C, H, W) of one level.
        image: Image index (N,) of each cell.
        cell: Cells (N,) in row-major order.
        reach: Cells on each side of the centre.

    Returns:
        Windows (N, C, W, W), zero outside the map, and a mask (N, W, W) of the cells inside the map.
    """
    channels, height, width = maps.shape[1:]
    row, column = np.divmod(cell.cpu().numpy(), width)
    down, right = _near(height, reach) * width, _near(width, reach)
    place = down.take(row, axis=0)[:, :, None] + right.take(column, axis=0)[:, None]
    inside = place >= 0
    outside = (place.reshape(-1) < 0).nonzero()[0]
    place = np.maximum(place + (image.cpu().numpy() * (height * width))[:, None, None], 0)
    windows = _features(maps, torch.from_numpy(place.reshape(-1)).to(maps.device))
    if len(outside):
        windows.index_fill_(0, torch.from_numpy(outside).to(maps.device), 0)
    return windows.reshape(*place.shape, channels).permute(0, 3, 1, 2), torch.from_numpy(inside).to(maps.device)


@lru_cache(maxsize=256)
def _near(side: int, reach: int) -> Array:
    """Cells (side, W) within reach of each cell of a row; ``OFF_MAP`` outside the map."""
    near = np.arange(side)[:, None] + np.arange(-reach, reach + 1)
    return np.where((near >= 0) & (near < side), near, OFF_MAP)


def _features(maps: Tensor, place: Tensor) -> Tensor:
    """Select features (n, C) of maps (B, C, H, W) at places (n,), counted in row-major order over all images."""
    rows = maps.permute(0, 2, 3, 1)
    if rows.is_contiguous():  # several times faster than any indexing
        return rows.flatten(0, 2).index_select(0, place)
    size = maps.shape[2] * maps.shape[3]
    return maps.flatten(2)[place // size, :, place % size]
