"""Rivals of the heads: the Fisher information of their Laplace approximation, and the labels of Leeds Sports Pose."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import torch
from research.rivals import fisher_information
from research.transfer import AREA_FACTOR, JOINTS, coco_of
from scipy.io import savemat

from halopose.data.coco import parse_ground_truth
from halopose.keypoints import Keypoints
from halopose.uncertainty.distributions import scale_tril_from_raw


def test_fisher_information_is_that_of_the_covariance() -> None:
    """The information of a zero-mean Gaussian is tr(S^-1 dS_i S^-1 dS_j) / 2, with derivatives by autograd."""
    for raw in torch.tensor([[0.2, -0.5, 0.7], [-1.0, 1.5, 0.3], [0.0, 0.0, 0.0]], dtype=torch.float64):

        def covariance(values: torch.Tensor) -> torch.Tensor:
            factor = scale_tril_from_raw(values)
            return factor @ factor.mT

        slopes = torch.autograd.functional.jacobian(covariance, raw)  # (2, 2, 3)
        inverse = torch.linalg.inv(covariance(raw))
        expected = torch.einsum("ab,bci,cd,daj->ij", inverse, slopes, inverse, slopes) / 2
        torch.testing.assert_close(fisher_information(raw), expected)


def test_joints_of_leeds_sports_pose_become_coco_persons(tmp_path: Path) -> None:
    layout = Keypoints.of(17)
    joints = np.random.default_rng(0).uniform(20, 80, (14, 3, 3))
    joints[:, 2] = 1.0
    joints[0, 2, 1] = 0.0  # the right ankle of the second person is not visible
    savemat(tmp_path / "joints.mat", {"joints": joints})
    (tmp_path / "images").mkdir()
    for number in (1, 2, 3):
        cv2.imwrite(str(tmp_path / "images" / f"im{number:05d}.jpg"), np.zeros((100, 120, 3), np.uint8))
    truth = parse_ground_truth("lsp.json", coco_of(tmp_path, 3, layout))
    ankle, hip = layout.names.index("right_ankle"), layout.names.index("left_hip")
    assert truth.labelled.sum(1).tolist() == [len(JOINTS), len(JOINTS) - 1, len(JOINTS)]
    assert truth.labelled[:, ankle].tolist() == [True, False, True]
    np.testing.assert_allclose(truth.keypoints[:, hip], joints[3, :2].T)
    assert not truth.labelled[:, :5].any()  # nose, eyes and ears
    np.testing.assert_allclose(truth.area, AREA_FACTOR * truth.boxes[:, 2:].prod(1))
