"""What heads do after their trunks, in numpy: for a few detections half of torch's time (``make bench`` needs it).

In: a trunk's last activations, and ``Signals``. Out: raw dispersion parameters, those of the modules themselves up
to rounding. Weights are views of the modules' own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from halopose.arrays import as_array, of_kind
from halopose.types import Array
from halopose.uncertainty.signal_head import SignalHead, claim_inputs
from halopose.uncertainty.signals import Signals


@dataclass(frozen=True)
class FewSignals:
    """A ``SignalHead``: trunk, a matrix (H, width) per level, claims (CLAIM_INPUTS, width), the rest as there.

    features (C, width) is a tensor: for a product of that size numpy wakes threads of its own, beside torch's.
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
            trunk=tuple(_matrix(layer) for layer in head.trunk),
            features=None if head.features is None else head.features.weight.detach().t(),
            claims=None if head.claims is None else _matrix(head.claims),
            bias=tuple(head.bias.detach().numpy()),
            middle=_matrix(head.middle),
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


@dataclass(frozen=True)
class FewHeads:
    """Last layers (H, K * channels) and their biases level by level, and the network beyond the windows."""

    last: tuple[tuple[Array, Array], ...]
    keypoints: int
    beyond: FewSignals | None

    @classmethod
    def of(cls, last: list[nn.Conv2d], keypoints: int, beyond: SignalHead | None) -> FewHeads:
        """Views of the weights of 1x1 convolutions and of a network."""
        layers = []
        for layer in last:
            assert layer.bias is not None
            layers.append((_matrix(layer), layer.bias.detach().numpy()))
        return cls(tuple(layers), keypoints, None if beyond is None else FewSignals.of(beyond))

    def at_level(self, level: int, hidden: Tensor) -> tuple[Array, Array | None]:
        """Raw parameters (N, K, channels) of activations (N, H), and what enters the network (N, K, width)."""
        values, (weight, bias) = hidden.numpy(), self.last[level]
        raw = (values @ weight + bias).reshape(len(values), self.keypoints, -1)
        if self.beyond is None:
            return raw, None
        return raw, (values @ self.beyond.trunk[level])[:, None] + self.beyond.bias[level]


def silu(values: Array) -> Array:
    """x times its logistic function, by a form that cannot overflow."""
    half = values * np.float32(0.5)
    return np.asarray(half + half * np.tanh(half))


def _matrix(layer: nn.Module) -> Array:
    """The weight of a linear layer or a 1x1 convolution as (in, out)."""
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    return np.asarray(layer.weight.detach().flatten(1).numpy().T)


__all__ = ["FewHeads", "FewSignals", "silu"]
