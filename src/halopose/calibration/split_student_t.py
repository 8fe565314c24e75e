"""Separate Student-t calibrations for the keypoints that pruning keeps and removes.

Pruning removes most of the large residuals. A Student-t fitted on all keypoints then has too heavy tails for kept
keypoints and too light ones for pruned keypoints, so each part has its own (tau, nu). The second-moment covariance is
that of all keypoints: held-out data showed no benefit of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halopose.calibration.calibrators import StudentTCalibration
from halopose.calibration.estimation import Sample
from halopose.uncertainty.distributions import StudentT


@dataclass(frozen=True)
class SplitStudentT:
    """Calibrations of kept and of pruned keypoints."""

    kept: StudentTCalibration
    pruned: StudentTCalibration

    @classmethod
    def fit(
        cls,
        whole: StudentTCalibration,
        residual: Tensor,
        scale_tril: Tensor,
        labelled: Tensor,
        keep: Tensor,
    ) -> SplitStudentT | None:
        """Fit on residuals (N, K, 2), factors (N, K, 2, 2) and masks (N, K); None if all or none are kept.

        ``whole`` is the calibration of all keypoints on the same data.
        """
        masks = labelled & keep, labelled & ~keep
        if not all(bool(mask.any()) for mask in masks):
            return None
        fitted = []
        for mask in masks:
            distribution = StudentTCalibration(
                whole.keypoints, min_samples=whole.min_samples, covariance=whole.covariance
            )
            # a keypoint may have no pruned samples
            distribution.fit_sample(Sample.of(residual, scale_tril, mask), quiet=True)
            distribution.moment_tau_ = whole.moment_tau_.clone()
            fitted.append(distribution)
        return cls(*fitted)

    def widened(self, factor: Tensor) -> SplitStudentT:
        """Return a copy with temperatures times factors (K,)."""
        return SplitStudentT(self.kept.widened(factor), self.pruned.widened(factor))

    def __call__(self, scale_tril: Tensor, keep: Tensor) -> StudentT:
        """Return the calibrated distribution of factors (..., K, 2, 2) of which ``keep`` (..., K) are kept."""
        return self.joined(self.kept(scale_tril), self.pruned(scale_tril), keep)

    @staticmethod
    def joined(kept: StudentT, pruned: StudentT, keep: Tensor) -> StudentT:
        """Merge the distributions (..., K) of kept and of pruned keypoints."""
        matrix = keep[..., None, None]
        scale = torch.where(matrix, kept.scale_tril, pruned.scale_tril)
        return StudentT(scale, torch.where(keep, kept.dof, pruned.dof), kept.moment)
