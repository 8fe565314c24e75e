"""Motion and error model of the responsive filter: for display and control, where lag and jitter matter most.

The acceleration grows with the speed: a keypoint at rest is held still, and one that moves is followed at once. The
filter averages as if all errors were new in every frame. In real film most of the error lasts, which no filter can
average out; this share of the predicted covariance is therefore added to the covariance of the result.
"""

from __future__ import annotations

import numpy as np

from halopose.tracking.motion import Motion, State
from halopose.types import Array

LASTING_SHARE = 0.97  # of the error variance; the motion fitted to real films has 0.97 to 0.99
_RESTING = 0.8  # acceleration of a keypoint at rest, object sizes / s^1.5
_MOVING = 4.0  # acceleration for each unit of speed, 1 / s^0.5
_NOISE = 2.0  # a squared speed below this many times its variance counts as rest
_WHITE, _ANY_MEMORY = np.array(0.0), np.array(1.0)


def responsive_motion(state: State, size: Array, factor: float) -> Motion:
    """Motion model with accelerations (N, K) that follow the speeds of the states.

    Args:
        state: States (N, K).
        size: Sizes (N,) of the objects.
        factor: Factor of the accelerations.
    """
    dimension = state.dimension
    part = slice(dimension, 2 * dimension)
    noise = np.trace(state.covariance[..., part, part], axis1=-2, axis2=-1)
    speed = np.sqrt(np.maximum(np.square(state.mean[..., part]).sum(-1) - _NOISE * noise, 0.0))
    return Motion(factor * (_RESTING + _MOVING * speed / np.asarray(size)[..., None]), _WHITE, _ANY_MEMORY)
