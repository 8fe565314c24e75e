"""A small network that corrects the heads' parameters by ``signals``, from outside the windows.

In: the trunk's last activations of a level, and ``ContextFeatures``. Out: what to add to the raw dispersion parameters.
One network for all levels and keypoints; what is theirs alone is a bias at its input and its last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halopose.arrays import (
    Values,
    alike,
    at_least,
    between,
    joined,
    library_of,
    linear,
    repeated,
    same_kind,
    silu,
    stacked,
    turned,
)
from halopose.uncertainty.context_features import ContextFeatures

OVERLAP_INPUTS = 15
FLOOR = 1 / 64**2  # squared strides: cells that agree to a pixel or less all look alike


@dataclass(frozen=True)
class ContextWeights:
    """Weights of a ``ContextHead`` and what it does with them: tensors, or arrays, for what enters as arrays.

    trunk: (width, H) by level; features (width, C), always a tensor: for a product of that size numpy wakes
    threads of its own; claims (width, CLAIM_INPUTS); bias (levels, K, width); last (K, width, outputs).
    """

    trunk: Sequence[Values]
    features: Tensor | None
    overlaps: Values | None
    bias: Values
    middle: tuple[Values, Values]
    last: Values

    def enter(self, level: int, hidden: Values) -> Values:
        """What a level's trunk activations (N, H) bring into the network (N, K, width)."""
        return linear(hidden, self.trunk[level])[:, None] + self.bias[level]

    def leave(
        self, values: Values, context_features: ContextFeatures, strides: Values, *, projected: bool = False
    ) -> Values:
        """Corrections (N, K, outputs) of cells with entered values (N, K, width), of levels with strides (N,).

        projected: the signals' features have been through this network's layer for them.
        """
        if self.features is not None:
            seen = context_features.features if projected else F.linear(context_features.features, self.features)
            values = values + alike(seen, values)
        if self.overlaps is not None:
            values = values + linear(same_kind(overlap_inputs(context_features, strides), values), self.overlaps)
        values = silu(linear(silu(values), *self.middle))
        return turned(turned(values, 0) @ self.last, 0)


class ContextHead(nn.Module):
    """Adds nothing at first: its last layer starts at zero.

    hidden: width of each level's trunk; channels: of the features at a keypoint, 0 to leave them out; claims:
    whether to look at the disagreement of the cells that claim the object. bounded: whether there is a bound on
    dispersions, ``inverse_bound`` (K,), one over the largest trace in areas of the object's box; 0 bounds nothing.
    """

    inverse_bound: Tensor | None

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
    ) -> None:
        super().__init__()
        self.register_buffer("inverse_bound", torch.zeros(keypoints) if bounded else None)
        self.by_level = [nn.Linear(into, width, bias=False) for into in hidden]
        self.trunk = nn.ModuleList(self.by_level)
        self.features = nn.Linear(channels, width, bias=False) if channels else None
        self.overlaps = nn.Linear(OVERLAP_INPUTS, width, bias=False) if overlaps else None
        self.bias = nn.Parameter(0.1 * torch.randn(len(hidden), keypoints, width))
        self.middle = nn.Linear(width, width)
        self.last = nn.Parameter(torch.zeros(keypoints, width, outputs))

    def weights(self, kind: Callable[[Tensor], Values] = lambda own: own) -> ContextWeights:
        """What it applies, as tensors of its own or as another kind of them."""
        return ContextWeights(
            trunk=[kind(layer.weight) for layer in self.by_level],
            features=None if self.features is None else self.features.weight,
            overlaps=None if self.overlaps is None else kind(self.overlaps.weight),
            bias=kind(self.bias),
            middle=(kind(self.middle.weight), kind(self.middle.bias)),
            last=kind(self.last),
        )

    def shrinkage(self, trace: Values, box: Values) -> Values:
        """What to multiply factors by (N, K), so that traces (N, K) of dispersions stay below the bound.

        An object that was found at all cannot have its keypoints anywhere: what is larger than the bound comes out
        just below it, what is much smaller as it was. box (N, 4): of the objects, in the same pixels.
        """
        assert self.inverse_bound is not None
        sides = at_least(box[:, 2:] - box[:, :2], 1.0)
        share = alike(self.inverse_bound, trace) / (sides[:, 0] * sides[:, 1])[:, None]
        return 1 / library_of(trace).sqrt(1 + share * trace)


def overlap_inputs(context_features: ContextFeatures, strides: Values) -> Values:
    """Signals without the features as numbers of order one (N, K, CLAIM_INPUTS); lengths in strides (N,)."""
    library, stride, box, points = (
        library_of(context_features.box),
        strides[:, None, None],
        context_features.box,
        context_features.keypoints,
    )
    moment, away = context_features.moment / (stride * stride), context_features.offset / stride
    spread = moment[..., ::2] + FLOOR  # xx and yy
    far = away * away
    low, sides = box[:, None, :2], at_least(box[:, 2:] - box[:, :2], 1.0)
    width, height = sides[:, 0], sides[:, 1]
    size = library.sqrt(width * height)
    place = (points - low) / sides[:, None] - 0.5
    inner = library.minimum(points, context_features.extent[:, None] - points)
    margin = library.minimum(inner[..., 0], inner[..., 1]) / size[:, None]
    seen = between(stacked([context_features.visibility, context_features.seen]), 1e-3, 1 - 1e-3)
    row = stacked([context_features.mass, context_features.score, size / strides, height / width])
    each = joined([spread, (far[..., 0] + far[..., 1] + FLOOR)[..., None]], 2)
    together = moment[..., 1] / library.sqrt(spread[..., 0] * spread[..., 1])
    return joined(
        [
            library.log(each) / 2,
            together[..., None],
            library.sign(away) * library.log(4 * abs(away) + 1),  # near zero as it is, far away like its logarithm
            repeated(library.log(at_least(row, 1e-4)), int(points.shape[1])),
            library.log(seen / (1 - seen)) / 3,
            between(place, -2.0, 2.0),
            between(margin, -0.5, 0.5)[..., None],
        ],
        2,
    )
