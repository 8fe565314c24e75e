"""A Student-t for the keypoints that pruning keeps, and one for those it prunes.

Pruning takes out most of the large residuals. Tails fitted on all keypoints are then too heavy for what is left
and too light for what is gone, so each part gets its own (tau, nu); together they are calibrated as a whole. The
second-moment covariance stays that of all keypoints: held-out data showed no need for two.
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
        """Fit on residuals (N, K, 2), factors (N, K, 2, 2) and masks (N, K); None where all or none are kept.

        whole: the calibration of all keypoints, fitted on the same.
        """
        masks = labelled & keep, labelled & ~keep
        if not all(bool(mask.any()) for mask in masks):
            return None
        fitted = []
        for mask in masks:
            distribution = StudentTCalibration(
                whole.keypoints, min_samples=whole.min_samples, covariance=whole.covariance
            )
            distribution.fit_sample(Sample.of(residual, scale_tril, mask), quiet=True)  # a keypoint may never be pruned
            distribution.moment_tau_ = whole.moment_tau_.clone()
            fitted.append(distribution)
        return cls(*fitted)

    def widened(self, factor: Tensor) -> SplitStudentT:
        """The same with temperatures times factors (K,)."""
        return SplitStudentT(self.kept.widened(factor), self.pruned.widened(factor))

    def __call__(self, scale_tril: Tensor, keep: Tensor) -> StudentT:
        """Calibrated law of factors (..., K, 2, 2) of which ``keep`` (..., K) are kept."""
        return self.joined(self.kept(scale_tril), self.pruned(scale_tril), keep)

    @staticmethod
    def joined(kept: StudentT, pruned: StudentT, keep: Tensor) -> StudentT:
        """One law (..., K) of two: of keypoints that are kept, and of those that are not."""
        matrix = keep[..., None, None]
        scale = torch.where(matrix, kept.scale_tril, pruned.scale_tril)
        return StudentT(scale, torch.where(keep, kept.dof, pruned.dof), kept.moment)
