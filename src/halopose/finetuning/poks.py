"""The bounded batch-wise loss of Gaussian residual fine-tuning, pOKS (paper, appendix B).

In: residuals of the labelled keypoints of a batch, over object scale. Out: one number in [0, 1]. The mean over
objects stands inside the exponential, so that each keypoint has the optimum of a constant-variance Gaussian.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SMALLEST_AREA = 1e-9


def residual_energy(residual: Tensor, area: Tensor, sigmas: Tensor) -> Tensor:
    """e (N, K) = |r|^2 / (2 s^2 kappa^2) of residuals (N, K, 2), area s^2 (N,) and sigmas (K,), kappa = 2 sigma.

    In float32 or better: half precision overflows at a residual of 256 pixels.
    """
    dtype = torch.promote_types(residual.dtype, torch.float32)
    scale = area.to(dtype).clamp_min(_SMALLEST_AREA)[:, None] * (2 * sigmas.to(dtype)).square()
    return residual.to(dtype).square().sum(-1) / (2 * scale)


def poks_loss(energy: Tensor, labelled: Tensor, weight: Tensor | None = None) -> Tensor:
    """1 - mean_k exp(-mean_i e_ik), over the objects i that have keypoint k and the keypoints that any has.

    energy and labelled (N, K); weight (N,) of the inner means, for a framework that weighs its cells.

    Where ``torch.distributed`` runs, the means are over the batches of all processes together, and each process's
    gradient is scaled so that the mean over processes, which DistributedDataParallel takes, is the gradient of
    that common loss. All processes must then call, one without objects with N = 0. Without any labelled keypoint
    the loss is 0, with a gradient of 0.
    """
    share = torch.ones_like(energy) if weight is None else weight.to(energy.dtype)[:, None].expand_as(energy)
    share = torch.where(labelled, share, 0.0)
    used = torch.where(share > 0, energy, 0.0)  # not only a product: an unlabelled energy may be infinite
    count, total = _over_processes(share.sum(0), (share * used).sum(0))
    present = count > 0
    similarity = torch.exp(-total / torch.where(present, count, 1.0))
    kept = torch.where(present, 1 - similarity, 0.0).sum()
    return kept / present.sum().clamp_min(1)


def _over_processes(count: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Sums (K,) over all processes; the gradient flows into this process's part, times their number."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_world_size() == 1:
        return count, total
    sums = torch.stack([count, total.detach()]).double()  # the same type in every process
    torch.distributed.all_reduce(sums)
    sums = sums.to(total.dtype)
    own = torch.distributed.get_world_size() * (total - total.detach())
    return sums[0], sums[1] + own


class PoksLoss(nn.Module):
    """The loss in the form in which pose frameworks call a keypoint loss.

    ``forward`` takes predicted (N, K, 2 or more) and true keypoints (N, K, 2 or more), labelled (N, K) and
    area (N,) or (N, 1), in any common unit of length, and weight (N,) or (N, 1) if cells have one.
    """

    def __init__(self, sigmas: Tensor) -> None:
        super().__init__()
        self.sigmas = sigmas
        self._called = False

    def forward(
        self, predicted: Tensor, true: Tensor, labelled: Tensor, area: Tensor, weight: Tensor | None = None
    ) -> Tensor:
        self._called = True
        dtype = torch.promote_types(predicted.dtype, torch.float32)
        residual = true[..., :2].to(dtype) - predicted[..., :2].to(dtype)
        energy = residual_energy(residual, area.flatten(), self.sigmas)
        return poks_loss(energy, labelled.bool(), None if weight is None else weight.detach().flatten())

    def end_batch(self) -> None:
        """Join the other processes' sums if this one's batch had no objects; call once after every batch."""
        if not self._called:
            nothing = torch.zeros((0, len(self.sigmas)), device=self.sigmas.device)
            poks_loss(nothing, nothing.bool())
        self._called = False
