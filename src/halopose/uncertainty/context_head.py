"""A small network that corrects the heads' raw dispersion parameters with context features.

Input: the last activations of a level's trunk, and ``ContextFeatures``. Output: values that are added to the raw
dispersion parameters. All levels and keypoints share one network; each level and keypoint has its own input bias, and
each keypoint its own last layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halopose.uncertainty.conditional_scale import INPUTS, KNOTS, ConditionalScale, scale_inputs
from halopose.uncertainty.context_features import ContextFeatures

OVERLAP_INPUTS = 15
FLOOR = 1 / 64**2  # squared strides; keeps logarithms finite where cells agree to a fraction of a pixel


class ContextHead(nn.Module):
    """Correction network. Its last layer starts at zero, so an untrained network changes nothing.

    Args:
        hidden: Width of the trunk of each level.
        keypoints: Number of keypoints K.
        outputs: Raw dispersion parameters of a keypoint.
        width: Width of the network.
        channels: Channels of the features at a keypoint; 0 leaves these features out.
        overlaps: Whether to use the disagreement of overlapping boxes.
        bounded: Whether dispersions have an upper bound, see ``shrinkage``.
        conditional: Whether dispersions have a feature-conditional scale.

    Attributes:
        inverse_bound: Inverse (K,) of the largest trace of a dispersion, as a share of the area of the object's box; 0
            sets no bound. None if ``bounded`` is false.
        scale_centre, scale_knots, scale_weights: Parameters of the ``ConditionalScale``, or None.
    """

    inverse_bound: Tensor | None
    scale_centre: Tensor | None
    scale_knots: Tensor | None
    scale_weights: Tensor | None

    def __init__(
        self,
        hidden: Sequence[int],
        keypoints: int,
        outputs: int,
        *,
        width: int,
        channels: int,
        overlaps: bool,
        bounded: bool = False,
        conditional: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("inverse_bound", torch.zeros(keypoints) if bounded else None)
        shapes = {"scale_centre": (keypoints,), "scale_knots": (len(INPUTS), KNOTS)}
        for name, shape in {**shapes, "scale_weights": (len(INPUTS), KNOTS - 1)}.items():
            self.register_buffer(name, torch.zeros(shape) if conditional else None)
        self.by_level = [nn.Linear(into, width, bias=False) for into in hidden]
        self.trunk = nn.ModuleList(self.by_level)
        self.features = nn.Linear(channels, width, bias=False) if channels else None
        self.overlaps = nn.Linear(OVERLAP_INPUTS, width, bias=False) if overlaps else None
        self.bias = nn.Parameter(0.1 * torch.randn(len(hidden), keypoints, width))
        self.middle = nn.Linear(width, width)
        self.last = nn.Parameter(torch.zeros(keypoints, width, outputs))

    def enter(self, level: int, hidden: Tensor) -> Tensor:
        """Project trunk activations (N, H) of a level into the network (N, K, width)."""
        return F.linear(hidden, self.by_level[level].weight)[:, None] + self.bias[level]

    def leave(
        self, values: Tensor, context_features: ContextFeatures, strides: Tensor, *, projected: bool = False
    ) -> Tensor:
        """Compute corrections (N, K, outputs) of the raw dispersion parameters; arguments as ``activations``."""
        values = self.activations(values, context_features, strides, projected=projected)
        return (values.transpose(0, 1) @ self.last).transpose(0, 1)

    def activations(
        self, values: Tensor, context_features: ContextFeatures, strides: Tensor, *, projected: bool = False
    ) -> Tensor:
        """Compute the input (N, K, width) of the last layer.

        Args:
            values: Result of ``enter`` (N, K, width).
            context_features: Context features of the same cells.
            strides: Stride (N,) of the level of each cell.
            projected: Whether ``context_features.features`` have passed the network's feature layer already.
        """
        if self.features is not None:
            seen = context_features.features
            values = values + (seen if projected else F.linear(seen, self.features.weight))
        if self.overlaps is not None:
            values = values + F.linear(overlap_inputs(context_features, strides), self.overlaps.weight)
        return F.silu(F.linear(F.silu(values), self.middle.weight, self.middle.bias))

    @property
    def rescales(self) -> bool:
        """Whether ``factor_scale`` is anything but 1."""
        return self.inverse_bound is not None or self.scale_weights is not None

    def factor_scale(self, trace: Tensor, context_features: ContextFeatures) -> Tensor:
        """Return what Cholesky factors are multiplied by (N, K): the bound, then the feature-conditional scale.

        Args:
            trace: Traces (N, K) of the dispersions.
            context_features: Context features of the same cells.
        """
        found = context_features
        scale = torch.ones_like(trace) if self.inverse_bound is None else self.shrinkage(trace, found.box)
        if self.scale_centre is None or self.scale_knots is None or self.scale_weights is None:
            return scale
        conditional = ConditionalScale(self.scale_centre, self.scale_knots, self.scale_weights)
        inputs = scale_inputs(trace * scale * scale, found.box, found.score, found.visibility, found.seen)
        return scale * torch.exp(conditional.log_scale(inputs))

    def shrinkage(self, trace: Tensor, box: Tensor) -> Tensor:
        """Return factors (N, K) for the Cholesky factors, so that the traces of the dispersions stay below the bound.

        The keypoints of a detected object lie somewhere near its box. A dispersion far above the bound is reduced to
        just below it; a dispersion far below the bound stays almost unchanged.

        Args:
            trace: Traces (N, K) of the dispersions.
            box: Boxes (N, 4) of the objects, in the same pixels.
        """
        assert self.inverse_bound is not None
        sides = (box[:, 2:] - box[:, :2]).clamp_min(1.0)
        share = self.inverse_bound / (sides[:, 0] * sides[:, 1])[:, None]
        return 1 / torch.sqrt(1 + share * trace)


def overlap_inputs(context_features: ContextFeatures, strides: Tensor) -> Tensor:
    """Scale the context features, without the sampled maps, to numbers of order one (N, K, OVERLAP_INPUTS).

    Args:
        context_features: Context features of N cells.
        strides: Stride (N,) of the level of each cell, the unit of lengths.
    """
    stride, box, points = strides[:, None, None], context_features.box, context_features.keypoints
    moment, away = context_features.moment / (stride * stride), context_features.offset / stride
    spread = moment[..., ::2] + FLOOR  # xx and yy
    far = away * away
    low, sides = box[:, None, :2], (box[:, 2:] - box[:, :2]).clamp_min(1.0)
    width, height = sides[:, 0], sides[:, 1]
    size = torch.sqrt(width * height)
    place = (points - low) / sides[:, None] - 0.5
    inner = torch.minimum(points, context_features.extent[:, None] - points)
    margin = torch.minimum(inner[..., 0], inner[..., 1]) / size[:, None]
    seen = torch.stack([context_features.visibility, context_features.seen], -1).clamp(1e-3, 1 - 1e-3)
    row = torch.stack([context_features.mass, context_features.score, size / strides, height / width], -1)
    each = torch.cat([spread, (far[..., 0] + far[..., 1] + FLOOR)[..., None]], 2)
    correlation = moment[..., 1] / torch.sqrt(spread[..., 0] * spread[..., 1])
    return torch.cat(
        [
            torch.log(each) / 2,
            correlation[..., None],
            torch.sign(away) * torch.log(4 * abs(away) + 1),  # linear near zero, logarithmic far away
            torch.log(row.clamp_min(1e-4))[:, None].expand(-1, int(points.shape[1]), -1),
            torch.log(seen / (1 - seen)) / 3,
            place.clamp(-2.0, 2.0),
            margin.clamp(-0.5, 0.5)[..., None],
        ],
        2,
    )
