"""Motion and error model of keypoints: Kalman filter and smoother that use the covariance of every keypoint.

Keypoints have D = 2 (image) or D = 3 (space) coordinates. The state of a keypoint is a position x, a velocity v and a
correlated error u. The acceleration is white noise. The measurement is

    x + sqrt(share) L u + sqrt(1 - share) L n,

where L L^T is the predicted dispersion, n is white noise and u is correlated over ``memory`` seconds. Both have unit
variance: the error of one frame has the predicted dispersion, but only the white part averages out over frames. Under
a Student-t the white part has the variance 1 / weight. The weight follows from the residual, so that outliers have
little influence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from halopose.types import Array

_WEIGHT_STEPS = 3  # fixed-point iterations for the weights in the filter
_PASSES = 3  # of the smoother, with weights from the smoothed residuals
_SPEED = 3.0  # object sizes per second: standard deviation of an unknown velocity
_LEAST_WEIGHT = 1e-6


@dataclass(frozen=True)
class Motion:
    """Parameters of the motion and error model. Leading batch axes are allowed in all three.

    Attributes:
        acceleration: Square roots (K,) of the spectral density of the accelerations, in object sizes / s^1.5.
        share: Fraction of the error variance that is correlated over time, from 0 to 1.
        memory: Correlation time in seconds, in which the correlation falls to 1 / e.
    """

    acceleration: Array
    share: Array
    memory: Array

    @classmethod
    def typical(cls, keypoints: int) -> Motion:
        """Default for persons; ``fit_motion`` estimates the parameters from a film."""
        return cls(np.full(keypoints, 3.0), np.array(0.5), np.array(0.3))


class State(NamedTuple):
    """Position, velocity and correlated error: mean (..., 3 D) and covariance (..., 3 D, 3 D)."""

    mean: Array
    covariance: Array

    @property
    def dimension(self) -> int:
        """Number of coordinates D."""
        return int(self.mean.shape[-1]) // 3

    @property
    def place(self) -> tuple[Array, Array]:
        """Mean (..., D) and covariance (..., D, D) of the position."""
        size = self.dimension
        return self.mean[..., :size], self.covariance[..., :size, :size]


class Warp(NamedTuple):
    """Motion of the image between two frames: position -> linear @ position + offset."""

    linear: Array
    offset: Array


@dataclass(frozen=True)
class MeasurementSeries:
    """Measurements of one object in T frames.

    Attributes:
        seen: Keypoints (T, K, D).
        factor: Lower triangular factors (T, K, D, D) of the predicted dispersions.
        used: Whether a keypoint is used (T, K).
        nu: Degrees of freedom (T, K) of the Student-t, or None for the Gaussian.
        size: Size of the object in the units of the keypoints.
        step: Seconds between frames.
        warps: Image motion before each frame: T entries, or empty.
    """

    seen: Array
    factor: Array
    used: Array
    nu: Array | None
    size: float
    step: float
    warps: tuple[Warp | None, ...] = ()

    def __len__(self) -> int:
        return len(self.seen)

    def first(self, frames: int) -> MeasurementSeries:
        """The first frames."""
        return replace(
            self,
            seen=self.seen[:frames],
            factor=self.factor[:frames],
            used=self.used[:frames],
            nu=None if self.nu is None else self.nu[:frames],
            warps=self.warps[:frames],
        )


class Filtered(NamedTuple):
    """Result of the filter.

    Attributes:
        after: States (T, K) after the measurement of each frame.
        before: States (T, K) before the measurement of each frame.
        transitions: Transition matrices (T, 3 D, 3 D) from the previous frame.
        weight: Weights (T, K) of the measurements.
    """

    after: State
    before: State
    transitions: Array
    weight: Array


def begin(seen: Array, used: Array, size: Array | float) -> State:
    """Initial states (..., K) from the first keypoints (..., K, D); unused keypoints start at the object's centre."""
    dimension = seen.shape[-1]
    used = used[..., None]
    count = np.maximum(used.sum(-2, keepdims=True), 1)
    centre = np.where(used, seen, 0.0).sum(-2, keepdims=True) / count
    mean = np.zeros((*seen.shape[:-1], 3 * dimension))
    mean[..., :dimension] = np.where(used | ~used.any(-2, keepdims=True), seen, centre)
    spread = np.broadcast_to(np.asarray(size, dtype=np.float64)[..., None], seen.shape[:-1])[..., None]
    scale = np.concatenate([spread, _SPEED * spread, np.ones_like(spread)], axis=-1)
    variance = np.repeat(scale**2, dimension, axis=-1)
    return State(mean, variance[..., None] * np.eye(3 * dimension))


def predict(state: State, motion: Motion, size: Array | float, step: float, warp: Warp | None = None) -> State:
    """Predict the states (..., K) one time step later.

    Args:
        state: States.
        motion: Motion and error model.
        size: Sizes of the objects.
        step: Time step in seconds.
        warp: Image motion during the step.
    """
    change = transition(motion, step, state.dimension, warp)
    mean = (change @ state.mean[..., None])[..., 0]
    if warp is not None:
        mean[..., : state.dimension] += warp.offset
    density = motion.acceleration * np.asarray(size, dtype=np.float64)[..., None]
    noise = _process_noise(density, motion.memory, step, state.dimension)
    return State(mean, change @ state.covariance @ np.swapaxes(change, -1, -2) + noise)


def transition(motion: Motion, step: float, dimension: int, warp: Warp | None = None) -> Array:
    """Transition matrix (..., 3 D, 3 D) of the state mean over a time step."""
    linear = np.eye(dimension) if warp is None else warp.linear
    change = np.zeros((*motion.memory.shape, 3 * dimension, 3 * dimension))
    place, velocity, error = (slice(i * dimension, (i + 1) * dimension) for i in range(3))
    change[..., place, place] = change[..., velocity, velocity] = linear
    change[..., place, velocity] = step * linear
    change[..., error, error] = np.exp(-step / motion.memory)[..., None, None] * np.eye(dimension)
    return change


def _process_noise(density: Array, memory: Array, step: float, dimension: int) -> Array:
    """Process noise covariance (..., 3 D, 3 D) of a time step."""
    variance = density**2
    lost = np.broadcast_to(-np.expm1(-2 * step / memory), variance.shape)
    small = np.zeros((*variance.shape, 3, 3))
    small[..., 0, 0] = variance * step**3 / 3
    small[..., 0, 1] = small[..., 1, 0] = variance * step**2 / 2
    small[..., 1, 1] = variance * step
    small[..., 2, 2] = lost
    return np.kron(small, np.eye(dimension))


def update(
    state: State, motion: Motion, seen: Array, factor: Array, used: Array, nu: Array | None, weight: Array | None
) -> tuple[State, Array]:
    """Update the states (..., K) with the measurements of a frame.

    Args:
        state: Predicted states.
        motion: Motion and error model.
        seen: Keypoints (..., K, D).
        factor: Factors (..., K, D, D) of the predicted dispersions.
        used: Whether a keypoint is used (..., K).
        nu: Degrees of freedom (..., K), or None for the Gaussian.
        weight: Known weights (..., K); default weights from the residuals.

    Returns:
        Updated states, and the weights (..., K).
    """
    shape = state.mean.shape[:-1]
    if weight is not None:
        return _corrected(state, motion, seen, factor, weight, used), np.broadcast_to(weight, shape)
    weight = np.ones(shape)
    after = _corrected(state, motion, seen, factor, weight, used)
    for _ in range(0 if nu is None else _WEIGHT_STEPS):
        weight = expected_weight(after, motion, seen, factor, nu)
        after = _corrected(state, motion, seen, factor, weight, used)
    return after, weight


def expected_weight(state: State, motion: Motion, seen: Array, factor: Array, nu: Array | None) -> Array:
    """Expected Student-t weights (..., K) given the states: (nu + D) / (nu + expected squared white error)."""
    if nu is None:
        return np.ones(state.mean.shape[:-1])
    _, spread = _explained(state, motion, factor)
    inverse = np.linalg.inv(np.sqrt(1 - motion.share)[..., None, None] * factor)
    white = (inverse @ _innovation(state, motion, seen, factor)[..., None])[..., 0]
    extent = np.einsum("...ij,...jk,...ik->...", inverse, spread, inverse)
    distance = np.square(white).sum(-1) + extent
    return np.maximum((nu + state.dimension) / (nu + distance), _LEAST_WEIGHT)


def _explained(state: State, motion: Motion, factor: Array) -> tuple[Array, Array]:
    """Covariance (..., 3 D, D) of state and explained measurement, and covariance (..., D, D) of the latter.

    The explained measurement is the position plus the correlated error.
    """
    size = state.dimension
    lasting = np.sqrt(motion.share)[..., None, None] * factor
    cross = state.covariance[..., :size] + state.covariance[..., 2 * size :] @ np.swapaxes(lasting, -1, -2)
    return cross, cross[..., :size, :] + lasting @ cross[..., 2 * size :, :]


def _observed(state: State, motion: Motion, factor: Array, weight: Array) -> tuple[Array, Array]:
    """Covariance (..., 3 D, D) of state and measurement, and covariance (..., D, D) of the measurement."""
    cross, spread = _explained(state, motion, factor)
    new = ((1 - motion.share) / weight)[..., None, None] * (factor @ np.swapaxes(factor, -1, -2))
    return cross, spread + new


def _innovation(state: State, motion: Motion, seen: Array, factor: Array) -> Array:
    """Measurement minus position and correlated error (..., D)."""
    size = state.dimension
    error = np.sqrt(motion.share)[..., None] * (factor @ state.mean[..., 2 * size :, None])[..., 0]
    return np.asarray(seen - state.mean[..., :size] - error)


def _corrected(state: State, motion: Motion, seen: Array, factor: Array, weight: Array, used: Array) -> State:
    """Kalman update with known weights of the white errors."""
    cross, total = _observed(state, motion, factor, weight)
    gain = np.where(used[..., None, None], cross @ np.linalg.inv(total), 0.0)
    mean = state.mean + (gain @ _innovation(state, motion, seen, factor)[..., None])[..., 0]
    covariance = state.covariance - gain @ np.swapaxes(cross, -1, -2)
    return State(mean, (covariance + np.swapaxes(covariance, -1, -2)) / 2)


def run_filter(measured: MeasurementSeries, motion: Motion, weights: Array | None = None) -> Filtered:
    """Filter all frames.

    Args:
        measured: Measurements of one object.
        motion: Motion and error model.
        weights: Known weights (T, K); default weights from the residuals.
    """
    filled = np.nan_to_num(measured.seen)
    state = begin(filled[0], measured.used[0], measured.size)
    before, after, found, changes = [], [], [], []
    for frame in range(len(measured)):
        warp = measured.warps[frame] if measured.warps else None
        if frame:
            state = predict(state, motion, measured.size, measured.step, warp)
        before.append(state)
        nu = None if measured.nu is None else measured.nu[frame]
        weight = None if weights is None else weights[frame]
        seen, factor, used = filled[frame], measured.factor[frame], measured.used[frame]
        state, weight = update(state, motion, seen, factor, used, nu, weight)
        after.append(state)
        found.append(weight)
        changes.append(transition(motion, measured.step, state.dimension, warp))
    joined = [State(*(np.stack(part) for part in zip(*states, strict=True))) for states in (after, before)]
    return Filtered(joined[0], joined[1], np.stack(changes), np.stack(found))


def log_likelihood(measured: MeasurementSeries, motion: Motion) -> Array:
    """Log-likelihoods (G, K) of the measurements for G motion models, up to a constant.

    The innovation of each frame is Gaussian, or Student-t with the predicted covariance as its scale.

    Args:
        measured: Measurements of one object.
        motion: Motion models with a leading axis G.
    """
    filled = np.nan_to_num(measured.seen)
    first = begin(filled[0], measured.used[0], measured.size)
    shape = np.broadcast_shapes(motion.acceleration.shape, motion.share.shape, first.mean.shape[:-1])
    state = State(
        np.broadcast_to(first.mean, (*shape, first.mean.shape[-1])),
        np.broadcast_to(first.covariance, (*shape, *first.covariance.shape[-2:])),
    )
    total, weight = np.zeros(shape), np.ones(shape)
    for frame, (seen, factor, used) in enumerate(zip(filled, measured.factor, measured.used, strict=True)):
        warp = measured.warps[frame] if measured.warps else None
        if frame:
            state = predict(state, motion, measured.size, measured.step, warp)
        _, spread = _observed(state, motion, factor, np.ones(shape))
        left = _innovation(state, motion, seen, factor)
        distance = np.einsum("...i,...i->...", left, np.linalg.solve(spread, left[..., None])[..., 0])
        likely = distance
        if measured.nu is not None:
            nu = measured.nu[frame]
            likely = (nu + state.dimension) * np.log1p(distance / nu)
            weight = (nu + state.dimension) / (nu + distance)
        if frame:  # the first frame initialises the state
            total -= np.where(used, 0.5 * (likely + np.log(np.linalg.det(spread))), 0.0)
        state = _corrected(state, motion, seen, factor, weight, used)
    return total


def run_smoother(measured: MeasurementSeries, motion: Motion) -> tuple[State, Filtered]:
    """Rauch-Tung-Striebel smoother.

    Under a Student-t the weights are computed again from the smoothed states, which are more accurate.

    Args:
        measured: Measurements of one object.
        motion: Motion and error model.

    Returns:
        Smoothed states (T, K) and the result of the causal filter.
    """
    causal = filtered = run_filter(measured, motion)
    smoothed = _backward(filtered)
    for _ in range(0 if measured.nu is None else _PASSES - 1):
        weight = expected_weight(smoothed, motion, np.nan_to_num(measured.seen), measured.factor, measured.nu)
        filtered = run_filter(measured, motion, weight)
        smoothed = _backward(filtered)
    return smoothed, causal


def _backward(filtered: Filtered) -> State:
    mean, covariance = filtered.after.mean.copy(), filtered.after.covariance.copy()
    for frame in range(len(mean) - 2, -1, -1):
        change = filtered.transitions[frame + 1]
        ahead = filtered.before.covariance[frame + 1]
        crossed = change @ covariance[frame]
        gain = np.swapaxes(np.linalg.solve(ahead, crossed), -1, -2)
        step = mean[frame + 1] - filtered.before.mean[frame + 1]
        mean[frame] += (gain @ step[..., None])[..., 0]
        covariance[frame] += gain @ (covariance[frame + 1] - ahead) @ np.swapaxes(gain, -1, -2)
    return State(mean, (covariance + np.swapaxes(covariance, -1, -2)) / 2)
