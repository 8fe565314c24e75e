"""Feature-conditional scale: a smooth factor on dispersions, from what one pass of the model says of a detection.

Calibration by keypoint leaves groups of keypoints miscalibrated, such as occluded ones. The factor is an additive
function of six inputs, piecewise linear between knots. ``halopose.calibration.conditional_fit`` fits it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INPUTS = ("stated sigma", "mean stated sigma", "visibility", "visibility of overlaps", "detection score", "object size")
KNOTS = 5  # of each input; the function is constant outside of them
_LEAST = 1e-3  # of scores and visibilities, and of the distance between the outer knots


@dataclass(frozen=True)
class ConditionalScale:
    """Parameters of the factor.

    Attributes:
        centre: Typical logarithm (K,) of the stated sigma over the object size, by keypoint.
        knots: Knots (F, KNOTS) of the F inputs, rising.
        weights: Weights (F, KNOTS - 1): of the input itself, then of the change of slope at each inner knot.
    """

    centre: Tensor
    knots: Tensor
    weights: Tensor

    def log_scale(self, inputs: Tensor) -> Tensor:
        """Logarithm (N, K) of the factor on Cholesky factors, for ``scale_inputs`` (N, K, F)."""
        return (scale_basis(self.centred(inputs), self.knots) * self.weights).sum(-1).sum(-1)

    def centred(self, inputs: Tensor) -> Tensor:
        """Inputs (N, K, F) with the first two relative to what is typical."""
        typical = torch.stack([self.centre, self.centre.mean().expand(self.centre.shape)], -1)
        return torch.cat([inputs[..., :2] - typical, inputs[..., 2:]], -1)


def scale_inputs(trace: Tensor, box: Tensor, score: Tensor, visibility: Tensor, seen: Tensor) -> Tensor:
    """Compute ``INPUTS`` (N, K, F) of detections.

    Args:
        trace: Traces (N, K) of the dispersions, in squared pixels of the input.
        box: Boxes (N, 4), x1 y1 x2 y2, in the same pixels.
        score: Detection scores (N,).
        visibility: Visibility scores (N, K), zero where a model has none.
        seen: Mean visibility (N, K) of the overlapping boxes.
    """
    sides = (box[:, 2:] - box[:, :2]).clamp_min(1.0)
    area = (sides[:, 0] * sides[:, 1])[:, None]
    sigma = torch.log((trace / area).clamp_min(1e-12)) / 2
    whole = [0 * sigma + each for each in (sigma.mean(1)[:, None], _log_odds(score)[:, None], torch.log(area) / 2)]
    return torch.stack([sigma, whole[0], _log_odds(visibility), _log_odds(seen), whole[1], whole[2]], -1)


def scale_basis(inputs: Tensor, knots: Tensor) -> Tensor:
    """Basis functions (..., F, KNOTS - 1) of inputs (..., F): the clipped input and its excess over inner knots."""
    low, high = knots[:, 0], knots[:, -1]
    span = (high - low).clamp_min(_LEAST)
    clipped = torch.minimum(torch.maximum(inputs, low), high)
    excess = (clipped[..., None] - knots[:, 1:-1]).clamp_min(0.0)
    return torch.cat([(clipped - knots[:, KNOTS // 2])[..., None], excess], -1) * (4 / span)[:, None]


def _log_odds(share: Tensor) -> Tensor:
    share = share.clamp(_LEAST, 1 - _LEAST)
    return torch.log(share / (1 - share))
