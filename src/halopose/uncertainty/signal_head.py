"""A small network that corrects the heads' parameters by ``signals``, from outside the windows.

In: the trunk's last activations of a level, and ``Signals``. Out: what to add to the raw dispersion parameters.
One network for all levels and keypoints; what is theirs alone is a bias at its input and its last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halopose.arrays import (
    Values,
    alike,
    as_array,
    at_least,
    between,
    joined,
    library_of,
    of_kind,
    repeated,
    stacked,
)
from halopose.types import Array
from halopose.uncertainty.signals import Signals

CLAIM_INPUTS = 15
FLOOR = 1 / 64**2  # squared strides: cells that agree to a pixel or less all look alike


class SignalHead(nn.Module):
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
        claims: bool,
        bounded: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("inverse_bound", torch.zeros(keypoints) if bounded else None)
        self.trunk = nn.ModuleList(nn.Linear(into, width, bias=False) for into in hidden)
        self.features = nn.Linear(channels, width, bias=False) if channels else None
        self.claims = nn.Linear(CLAIM_INPUTS, width, bias=False) if claims else None
        self.bias = nn.Parameter(0.1 * torch.randn(len(hidden), keypoints, width))
        self.middle = nn.Linear(width, width)
        self.last = nn.Parameter(torch.zeros(keypoints, width, outputs))

    def enter(self, level: int, hidden: Tensor) -> Tensor:
        """What a level's trunk activations (N, H) bring into the network (N, K, width)."""
        entered: Tensor = [*self.trunk][level](hidden)[:, None] + self.bias[level]
        return entered

    def shrinkage(self, trace: Values, box: Values) -> Values:
        """What to multiply factors by (N, K), so that traces (N, K) of dispersions stay below the bound.

        An object that was found at all cannot have its keypoints anywhere: what is larger than the bound comes out
        just below it, what is much smaller as it was. box (N, 4): of the objects, in the same pixels.
        """
        assert self.inverse_bound is not None
        sides = at_least(box[:, 2:] - box[:, :2], 1.0)
        share = alike(self.inverse_bound, trace) / (sides[:, 0] * sides[:, 1])[:, None]
        return 1 / library_of(trace).sqrt(1 + share * trace)

    def forward(self, values: Tensor, signals: Signals, strides: Tensor, *, projected: bool = False) -> Tensor:
        """Corrections (N, K, outputs) of cells with entered values (N, K, width), of levels with strides (N,).

        projected: the signals' features have been through this network's layer for them.
        """
        if self.features is not None:
            values = values + (signals.features if projected else self.features(signals.features))
        if self.claims is not None:
            values = values + self.claims(torch.as_tensor(claim_inputs(signals, strides)))
        values = F.silu(self.middle(F.silu(values)))
        return (values.transpose(0, 1) @ self.last).transpose(0, 1)


@dataclass(frozen=True)
class FewSignals:
    """A ``SignalHead`` in numpy, for a few detections: two thirds of torch's time.

    Weights are views of the module's own: trunk, a matrix (H, width) per level, claims (CLAIM_INPUTS, width), the
    rest as there. features (C, width) is a tensor: for a product of that size numpy wakes threads of its own.
    """

    trunk: tuple[Array, ...]
    features: Tensor | None
    claims: Array | None
    bias: tuple[Array, ...]
    middle: Array
    middle_bias: Array
    last: Array

    @classmethod
    def of(cls, head: SignalHead) -> FewSignals:
        """Views of a head's weights."""
        return cls(
            trunk=tuple(matrix_of(layer) for layer in head.trunk),
            features=None if head.features is None else head.features.weight.detach().t(),
            claims=None if head.claims is None else matrix_of(head.claims),
            bias=tuple(head.bias.detach().numpy()),
            middle=matrix_of(head.middle),
            middle_bias=head.middle.bias.detach().numpy(),
            last=head.last.detach().numpy(),
        )

    def __call__(self, values: Array, signals: Signals, strides: Array) -> Array:
        """Corrections (N, K, outputs), as ``SignalHead.forward``; it overwrites the entered values."""
        if self.claims is not None:
            values += as_array(claim_inputs(signals, of_kind(strides, signals.box))) @ self.claims
        if self.features is not None:
            rows, seen = torch.from_numpy(values).flatten(0, 1), signals.features.flatten(0, 1)
            values = torch.addmm(rows, seen, self.features).numpy().reshape(values.shape)
        values = silu(silu(values) @ self.middle + self.middle_bias)
        return np.asarray((values.transpose(1, 0, 2) @ self.last).transpose(1, 0, 2))


def claim_inputs(signals: Signals, strides: Values) -> Values:
    """Signals without the features as numbers of order one (N, K, CLAIM_INPUTS); lengths in strides (N,)."""
    library, stride, box, points = library_of(signals.box), strides[:, None, None], signals.box, signals.keypoints
    moment, away = signals.moment / (stride * stride), signals.offset / stride
    spread = moment[..., ::2] + FLOOR  # xx and yy
    far = away * away
    low, sides = box[:, None, :2], at_least(box[:, 2:] - box[:, :2], 1.0)
    width, height = sides[:, 0], sides[:, 1]
    size = library.sqrt(width * height)
    place = (points - low) / sides[:, None] - 0.5
    inner = library.minimum(points, signals.extent[:, None] - points)
    margin = library.minimum(inner[..., 0], inner[..., 1]) / size[:, None]
    seen = between(stacked([signals.visibility, signals.seen]), 1e-3, 1 - 1e-3)
    row = stacked([signals.mass, signals.score, size / strides, height / width])
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


def silu(values: Array) -> Array:
    """x times its logistic function, by a form that cannot overflow."""
    half = values * np.float32(0.5)
    return np.asarray(half + half * np.tanh(half))


def matrix_of(layer: nn.Module) -> Array:
    """The weight of a linear layer or a 1x1 convolution as (in, out)."""
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    return np.asarray(layer.weight.detach().flatten(1).numpy().T)


__all__ = ["CLAIM_INPUTS", "FewSignals", "SignalHead", "claim_inputs", "matrix_of", "silu"]
