"""One approach from camera to fused position: fly, look, detect, solve, check, fuse.

In: a seed, a weather, the sensors on board and a model of the runway's corners. Out: a ``Flight`` with everything
that happened, frame by frame, beside the truth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halopose.landing.approach import Approach
from halopose.landing.camera import Array
from halopose.landing.fusion import FusedTrack
from halopose.landing.sensors import Truth
from halopose.landing.sighting import Sightings


@dataclass(frozen=True)
class VisionFixes:
    """What PnP makes of N sightings: the aircraft's position (N, 3) in runway axes with covariance (N, 3, 3).

    NaN where there is none. statistic (N,) is the residuals' chi-square with dof (N,) degrees of freedom, trusted
    (N,) whether the integrity check let the frame pass, excluded (N,) the corner left out or -1, reasons (N,) in
    words what became of each frame; levels (N, 2) horizontal and vertical protection levels in metres.
    """

    position: Array
    covariance: Array
    statistic: Array
    dof: Array
    trusted: Array
    excluded: Array
    reasons: tuple[str, ...]
    levels: Array

    @property
    def solved(self) -> Array:
        """Which frames have a position (N,)."""
        return np.isfinite(self.position).all(1)


@dataclass(frozen=True)
class Flight:
    """A whole approach: its N camera frames, what vision made of them, and the track fused from all sensors.

    frame_times (N,), positions and attitudes of truth at them (N, 3); fused (N, 3) and fused_covariance
    (N, 3, 3) are the filter's position at the frames, nees (N,) its squared error over its covariance.
    """

    approach: Approach
    truth: Truth
    frame_times: Array
    position: Array
    attitude: Array
    sightings: Sightings
    fixes: VisionFixes
    track: FusedTrack
    fused: Array
    fused_covariance: Array
    nees: Array
    images: tuple[Array, ...]
