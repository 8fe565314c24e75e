"""pOKS, the bounded batch-wise loss of Gaussian residual fine-tuning (paper, appendix B).

The mean over objects is inside the exponential. The optimum of each keypoint is therefore that of a Gaussian with
constant variance.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SMALLEST_AREA = 1e-9


def residual_energy(residual: Tensor, area: Tensor, sigmas: Tensor) -> Tensor:
    """Energy e = |r|^2 / (2 s^2 kappa^2) with kappa = 2 sigma, in float32 or better.

    Half precision would overflow at a residual of 256 pixels.

    Args:
        residual: (N, K, 2) residuals r.
        area: (N,) object areas s^2.
        sigmas: (K,) keypoint sigmas.

    Returns:
        (N, K) energies.
    """
    dtype = torch.promote_types(residual.dtype, torch.float32)
    scale = area.to(dtype).clamp_min(_SMALLEST_AREA)[:, None] * (2 * sigmas.to(dtype)).square()
    return residual.to(dtype).square().sum(-1) / (2 * scale)


def poks_loss(energy: Tensor, labelled: Tensor, weight: Tensor | None = None) -> Tensor:
    """pOKS loss 1 - mean_k exp(-mean_i e_ik), a number in [0, 1].

    The inner mean is over objects i with keypoint k labelled, the outer mean over keypoints with a labelled object.
    Without a labelled keypoint the loss and its gradient are 0.

    With ``torch.distributed`` the means are over the batches of all processes. The gradient of each process is
    scaled so that the mean over processes (DistributedDataParallel) is the gradient of the common loss. All processes
    must call this function; a process without objects calls it with N = 0.

    Args:
        energy: (N, K) energies.
        labelled: (N, K) whether the keypoint is labelled.
        weight: (N,) weights of the inner means, for frameworks that weight their cells.
    """
    share = torch.ones_like(energy) if weight is None else weight.to(energy.dtype)[:, None].expand_as(energy)
    share = torch.where(labelled, share, 0.0)
    used = torch.where(share > 0, energy, 0.0)  # a product would be NaN where an unlabelled energy is infinite
    count, total = _over_processes(share.sum(0), (share * used).sum(0))
    present = count > 0
    similarity = torch.exp(-total / torch.where(present, count, 1.0))
    kept = torch.where(present, 1 - similarity, 0.0).sum()
    return kept / present.sum().clamp_min(1)


def _over_processes(count: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Sums (K,) over all processes. The gradient flows into the part of this process, times the world size."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_world_size() == 1:
        return count, total
    sums = torch.stack([count, total.detach()]).double()  # the same type in every process
    torch.distributed.all_reduce(sums)
    sums = sums.to(total.dtype)
    own = torch.distributed.get_world_size() * (total - total.detach())
    return sums[0], sums[1] + own


class PoksLoss(nn.Module):
    """pOKS with the call signature of a keypoint loss in pose frameworks.

    Args:
        sigmas: (K,) keypoint sigmas.
    """

    def __init__(self, sigmas: Tensor) -> None:
        super().__init__()
        self.sigmas = sigmas
        self._called = False

    def forward(
        self, predicted: Tensor, true: Tensor, labelled: Tensor, area: Tensor, weight: Tensor | None = None
    ) -> Tensor:
        """pOKS loss of a batch.

        Args:
            predicted: (N, K, 2 or more) predicted keypoints, in any unit of length.
            true: (N, K, 2 or more) true keypoints in the same unit.
            labelled: (N, K) whether the keypoint is labelled.
            area: (N,) or (N, 1) object areas in the squared unit.
            weight: (N,) or (N, 1) weights of the cells.
        """
        self._called = True
        dtype = torch.promote_types(predicted.dtype, torch.float32)
        residual = true[..., :2].to(dtype) - predicted[..., :2].to(dtype)
        energy = residual_energy(residual, area.flatten(), self.sigmas)
        return poks_loss(energy, labelled.bool(), None if weight is None else weight.detach().flatten())

    def end_batch(self) -> None:
        """Join the sums of the other processes if this batch had no objects. Call once after every batch."""
        if not self._called:
            nothing = torch.zeros((0, len(self.sigmas)), device=self.sigmas.device)
            poks_loss(nothing, nothing.bool())
        self._called = False
