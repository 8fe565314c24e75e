"""Epipolar distances are chi-square distributed for every lens."""

from dataclasses import replace

import numpy as np
import pytest

from halopose.geometry.camera import Camera
from halopose.multiview.person_matching import epipolar_distance
from tests.helpers.rigs import film, rig, walk


@pytest.mark.parametrize("k1", [0.0, -0.3, 0.2])
def test_a_lens_changes_no_chi_square(k1: float) -> None:
    """Of each keypoint in the mean: near the edge a lens draws together what the covariance says of pixels."""
    lens = Camera(600.0, 600.0, 479.5, 359.5, 960, 720, (k1, 0.0, 0.0, 0.0, 0.0))
    one, other = (replace(view, camera=lens) for view in rig()[:2])
    truth = np.repeat(1.6 * (walk(1) - [0.0, 0.0, 1.0]) + [0.0, 0.0, 1.0], 1500, 0)
    seen = [film(view, [truth], n, 0.5, 1.5) for n, view in enumerate((one, other))]
    found = np.array([epipolar_distance(one, other, a, b)[0, 0] for a, b in zip(*seen, strict=True)])
    assert np.isfinite(found).all()
    assert np.abs(found.mean(0) - 1).max() < 0.15  # four standard errors of 1500 chi-squares
