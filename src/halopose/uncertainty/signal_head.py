"""A small network that corrects the heads' parameters by ``signals``, from outside the windows.

In: the trunk's last activations of a level, and ``Signals``. Out: what to add to the raw dispersion parameters.
One network for all levels and keypoints; what is theirs alone is a bias at its input and its last layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halopose.uncertainty.signals import Signals

CLAIM_INPUTS = 15
FLOOR = 1 / 64**2  # squared strides: cells that agree to a pixel or less all look alike


class SignalHead(nn.Module):
    """Adds nothing at first: its last layer starts at zero.

    hidden: width of each level's trunk; channels: of the features at a keypoint, 0 to leave them out; claims:
    whether to look at the disagreement of the cells that claim the object.
    """

    def __init__(
        self, hidden: Sequence[int], keypoints: int, outputs: int, *, width: int, channels: int, claims: bool
    ) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(into, width, bias=False) for into in hidden)
        self.features = nn.Linear(channels, width, bias=False) if channels else None
        self.claims = nn.Linear(CLAIM_INPUTS, width, bias=False) if claims else None
        self.bias = nn.Parameter(0.1 * torch.randn(len(hidden), keypoints, width))
        self.middle = nn.Linear(width, width)
        self.last = nn.Parameter(torch.zeros(keypoints, width, outputs))

    def enter(self, level: int, hidden: Tensor) -> Tensor:
        """What a level's trunk activations (N, H) bring into the network (N, K, width)."""
        entered: Tensor = self.trunk[level](hidden)[:, None] + self.bias[level]
        return entered

    def forward(self, values: Tensor, signals: Signals, strides: Tensor, *, projected: bool = False) -> Tensor:
        """Corrections (N, K, outputs) of cells with entered values (N, K, width), of levels with strides (N,).

        projected: the signals' features have been through this network's layer for them.
        """
        if self.features is not None:
            values = values + (signals.features if projected else self.features(signals.features))
        if self.claims is not None:
            values = values + self.claims(claim_inputs(signals, strides))
        values = F.silu(self.middle(F.silu(values)))
        return (values.transpose(0, 1) @ self.last).transpose(0, 1)


def claim_inputs(signals: Signals, strides: Tensor) -> Tensor:
    """Signals without the features as numbers of order one (N, K, CLAIM_INPUTS); lengths in strides (N,)."""
    stride = strides[:, None, None]
    xx, xy, yy = (signals.moment / stride**2).unbind(2)
    xx, yy = xx + FLOOR, yy + FLOOR
    away = signals.offset / stride
    low, sides = signals.box[:, None, :2], (signals.box[:, 2:] - signals.box[:, :2]).clamp_min(1.0)[:, None]
    size = sides.prod(2).sqrt()  # (N, 1)
    place = (signals.keypoints - low) / sides - 0.5
    margin = torch.minimum(signals.keypoints, signals.extent[:, None] - signals.keypoints).amin(2) / size
    seen = torch.stack([signals.visibility, signals.seen], dim=2).clamp(1e-3, 1 - 1e-3)
    row = torch.stack([signals.mass, signals.score, size[:, 0] / strides, sides[:, 0, 1] / sides[:, 0, 0]], dim=1)
    each = torch.stack([xx, yy, (away * away).sum(2) + FLOOR], dim=2)
    return torch.cat(
        [
            each.log() / 2,
            (xy / (xx * yy).sqrt())[..., None],
            away.sign() * (4 * away.abs() + 1).log(),  # near zero as it is, far away like its logarithm
            row.clamp_min(1e-4).log()[:, None].expand(-1, int(xx.shape[1]), -1),
            (seen / (1 - seen)).log() / 3,
            place.clamp(-2, 2),
            margin.clamp(-0.5, 0.5)[..., None],
        ],
        dim=2,
    )


__all__ = ["CLAIM_INPUTS", "SignalHead", "claim_inputs"]
