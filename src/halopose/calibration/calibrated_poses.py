"""Calibrated distributions of detections: the step from the heads' Cholesky factors to ``PoseDistributions``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from halopose.boxes import box_area
from halopose.calibration.calibrators import Calibrations
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.types import Array, Family
from halopose.uncertainty.distributions import StudentT
from halopose.uncertainty.pruning import keep_mask, localization_confidence


def calibrated_poses(
    detections: PoseDistributions,
    factors: Array,
    calibrations: Calibrations,
    layout: Keypoints,
    family: Family,
) -> PoseDistributions:
    """Calibrate N detections and choose the keypoints to keep (eq. 22).

    Args:
        detections: uncalibrated detections in pixels of the image; their covariances are replaced.
        factors: the heads' Cholesky factors (N, K, 2, 2) in the same pixels.
        calibrations: everything that was fitted after training.
        layout: names, sigmas and area factor of the K keypoints.
        family: distribution of the result, "gaussian" or "student-t".
    """
    area = box_area(detections.boxes)  # the annotated area is unknown at inference
    dispersion = np.asarray(factors @ factors.swapaxes(-1, -2))
    covariance = scale = calibrations.gaussian.covariance(dispersion)
    confidence = localization_confidence(covariance, area * layout.area_factor, layout.kappa)
    keep = keep_mask(confidence, calibrations.threshold, detections.visibility, calibrations.visibility_threshold)
    dof = None
    if family != "gaussian":
        distribution = calibrations.distribution(torch.from_numpy(factors), family, torch.from_numpy(keep))
        covariance, scale = distribution.covariance.numpy(), distribution.scale.numpy()
        dof = distribution.dof.numpy() if isinstance(distribution, StudentT) else None
    optional: dict[str, Any] = {}
    if calibrations.offset is not None:
        optional["offset"] = calibrations.offset.numpy() * np.sqrt(area)[:, None, None]
    if calibrations.regions is not None:
        optional |= {"regions": calibrations.regions, "dispersion": dispersion}
    if calibrations.correlation is not None:
        optional["correlation"] = calibrations.correlation.of_objects(area)
        optional["joint_dof"] = calibrations.correlation.dof
    return replace(detections, covariance=covariance, scale=scale, dof=dof, keep=keep, **optional)
