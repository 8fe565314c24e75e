"""The likeliest degrees of freedom and temperatures of a Student-t (paper, eq. 18)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from halopose.arrays import as_array
from halopose.calibration.estimation.profile import (
    NU_MAX,
    Pass,
    best_shape,
    dots,
    log_of_products,
    profile_nll,
)
from halopose.calibration.estimation.sample import TINY, Sample
from halopose.parallel import single_threaded
from halopose.types import Array

_LEAST_STRIDE = 8  # thinned data give the pass over all of it a good start
_THINNEST = 256  # rows
_NEAR = 0.12  # in log lam; standard error of thinned data from where that pass settles
_NEAR_ENOUGH = 0.165  # that of the grid from where it mostly does, and less is not worth a step in between
_MANY_MOMENTS = 4.0  # shapes beyond have a fourth moment, hence the second tells them well
_MOST_SPREAD = 3.0  # E[m^2] / E[m]^2 of that shape
_GRID = 24
_GRID_ROWS = 768
_MARKS = np.linspace(0, 1, _GRID)[:, None]  # of the grid, from its lower to its upper end
_REACH = 1.0  # in log lam; so far the profile can be extrapolated
_MORE_STEPS = 4  # that are taken on the extrapolated profile, for nothing
_CLOSE = 0.25  # of the correction whose cube, about what it leaves, costs the nats that may be left; the last one
_CLOSE_AT_MOST = 0.1  # in log lam
_GAIN = 1e-11  # nats that may be left
_THIN_GAIN = 0.05  # the same of thinned data, over the number of rows: chance moves them by more than that
_MAX_PASSES = 100


def student_parameters(sample: Sample) -> tuple[Tensor, Tensor]:
    """nu and tau (K,) that minimise the weighted Student-t NLL (eq. 18), nu within [NU_MIN, NU_MAX].

    In two dimensions the squared distance m follows a Lomax law with shape a = nu / 2 and scale
    lam = nu tau^2. For a given lam the best shape is 1 / E[log(1 + m / lam)], which leaves one smooth
    unknown per keypoint for a safeguarded search by Halley's steps. A grid over thinned data finds the valley;
    where it is flat more of the data, or near the Gaussian their spread, lead down into it. From there one
    pass over all of the data tells the profile around so well that the last steps need no other. The Gaussian
    limit, nu = NU_MAX, has a closed form and wins where it is better.
    """
    with single_threaded(), np.errstate(all="ignore"):  # what overflows is not taken
        return _student_parameters(sample)


def _student_parameters(sample: Sample) -> tuple[Tensor, Tensor]:
    """What is about a number a keypoint is in numpy: steps on so few cost it less than torch."""
    mean = sample.mean
    limit = np.log(as_array(mean) * (NU_MAX / 2))
    grid = sample.thinned(max(1, len(sample.mahalanobis) // _GRID_ROWS))
    log_scale, growth, at_end = _best_on_grid(grid, limit)
    shape = best_shape(growth)
    spread = _spread_where(sample, shape > _MANY_MOMENTS)
    known = (spread > 2) & (spread < _MOST_SPREAD)
    log_scale = np.where(known, np.log(as_array(mean) * spread / (spread - 2)), log_scale)
    light = at_end & (spread <= 2)  # no valley on the grid, and none beyond
    log_scale = _led(sample, log_scale, limit, shape, ~(known | light))
    log_scale, growth = _minimise_profile(sample, log_scale, light, _GAIN, *_anywhere(limit))
    gaussian = profile_nll(growth, log_scale) >= np.log(as_array(mean) / 2) + 1
    nu = np.where(gaussian, NU_MAX, 2 * best_shape(growth))
    tau = np.sqrt(np.exp(np.where(gaussian, limit, log_scale)) / nu)
    return torch.from_numpy(nu).to(mean.device), torch.from_numpy(tau).to(mean.device)


def _anywhere(limit: Array) -> tuple[Array, Array]:
    """The bracket (K,), (K,) of log lam before anything is known of it."""
    return np.full_like(limit, -np.inf), limit


def _led(sample: Sample, log_scale: Array, limit: Array, shape: Array, which: Array) -> Array:
    """log lam (K,), of keypoints ``which`` (K,) from thinned data, with as many rows as most shapes a (K,) need.

    The variance of log lam is (a + 2) (a + 1)^2 / a over the number of rows.
    """
    columns, rows = np.flatnonzero(which), len(sample.mahalanobis)
    if not len(columns) or rows < _LEAST_STRIDE * _THINNEST:
        return log_scale
    usual = float(np.sort(shape[columns])[len(columns) // 2])
    variance = (usual + 2) * (usual + 1) ** 2 / usual  # times the number of rows
    if variance / _GRID_ROWS <= _NEAR_ENOUGH**2:
        return log_scale
    thin = sample.thinned(max(_LEAST_STRIDE, int(rows / max(variance / _NEAR**2, _THINNEST)))).columns(columns)
    found = log_scale.copy()
    gain = _THIN_GAIN / len(thin.mahalanobis)
    light = np.zeros(len(columns), dtype=bool)
    found[columns], _ = _minimise_profile(thin, log_scale[columns], light, gain, *_anywhere(limit[columns]))
    return found


def _spread_where(sample: Sample, which: Array) -> Array:
    """E[m^2] / E[m]^2 (K,) of some keypoints (K,), nan of others; of a Lomax law it is 2 (a - 1) / (a - 2)."""
    spread, columns = np.full(len(which), np.nan), np.flatnonzero(which)
    if 2 * len(columns) > len(which):  # to take so many costs more than to look at all
        spread[columns] = _spread(sample)[columns]
    elif len(columns):
        spread[columns] = _spread(sample.columns(columns))
    return spread


def _spread(sample: Sample) -> Array:
    """Mean (K,) of the squares of the squared distances over the square of their mean."""
    mean, squares = as_array(sample.mean), np.zeros(sample.mahalanobis.shape[1])
    for distance, weight in sample.wide:
        squares += dots(distance, distance, weight).reshape(-1, len(mean)).sum(0)
    return squares / as_array(sample.total) / mean / mean


def _best_on_grid(sample: Sample, limit: Array) -> tuple[Array, Array, Array]:
    """log lam (K,) of the lowest NLL on a grid up to all but Gaussian tails, G there, and if it is its end."""
    lower = sample.lowest
    upper = np.maximum(limit - math.log(NU_MAX / 100), lower)
    grid = lower + _MARKS * (upper - lower)
    scale = np.exp(grid)
    distance = np.tile(as_array(sample.mahalanobis).astype(np.float64, copy=False), _GRID)  # (n, GRID * K)
    if sample.multiplies(scale):
        distance += scale.reshape(-1)
        growth = log_of_products(distance).reshape(grid.shape) - len(distance) * grid
    else:
        distance /= scale.reshape(-1)
        growth = dots(np.log1p(distance), np.tile(as_array(sample.weight), _GRID)).reshape(grid.shape)
    growth /= as_array(sample.total)
    nll, columns = profile_nll(growth, grid), np.arange(grid.shape[1])
    best = nll.argmin(0)
    middle = np.minimum(np.maximum(best, 1), _GRID - 2)
    before, here, after = nll[middle - 1, columns], nll[middle, columns], nll[middle + 1, columns]
    # Where the lowest has neighbours on both sides a parabola through the three has its minimum between these.
    aside = np.where(middle == best, (before - after) / (2 * np.maximum(before - 2 * here + after, TINY)), 0.0)
    return grid[best, columns] + aside * (grid[1] - grid[0]), growth[best, columns], best == _GRID - 1


def _minimise_profile(
    sample: Sample,
    start: Array,
    light: Array,
    gain: float,
    lower: Array,
    upper: Array,
    passes: int = _MAX_PASSES,
) -> tuple[Array, Array]:
    """log lam (K,) where the profile's slope is zero, and G there: Halley's steps inside a closing bracket.

    Keypoints with light tails stay where they are. gain: nats that may be left. lower, upper: the bracket, whose
    lower end is not looked for before it is needed. A step that is short enough goes on where the profile can be
    extrapolated. The square of what may be left of the slope there over twice the curvature are the nats that
    another pass would gain. Once most keypoints have settled, passes are over the others alone.
    """
    current = np.minimum(np.maximum(start, lower), upper)
    seen = Pass.at(sample, current)
    if not passes:
        return current, seen.growth
    profile = seen.here
    slope, curvature = profile.slope, profile.curvature
    lower = np.where(slope < 0, current, lower)
    upper = np.where(slope > 0, current, upper)
    aim = current + profile.step
    inside, still = (aim > lower) & (aim < upper), light | (slope == 0)
    if not (inside | still).all():
        lower = _raised(lower, sample, upper)
    step = np.where(still, 0.0, np.where(inside, aim, (lower + upper) / 2) - current)
    near = inside & (curvature > 0) & (np.abs(step) <= _REACH) & ~still
    close = np.minimum(_CLOSE * (2 * gain / np.abs(curvature)) ** (1 / 6), _CLOSE_AT_MOST)
    for _ in range(_MORE_STEPS):
        correction = seen.shifted(step).correction
        more = step + correction
        ahead = near & (current + more > lower) & (current + more < upper) & (np.abs(more) <= _REACH)
        step = np.where(ahead, more, step)
        if not (ahead & (np.abs(correction) > close)).any():
            break
    end = seen.shifted(step)
    slope_left = np.abs(end.slope) + (end.shape + 1) * seen.error(step)
    left = np.where(near, np.square(slope_left) / (2 * np.maximum(end.curvature, TINY)), np.abs(slope * step))
    # What is not worth a step that is too long to be extrapolated stays where G is known.
    current = current + np.where(near | (left > gain), step, 0.0)
    growth, unsettled = np.where(near, end.growth, seen.growth), np.flatnonzero(left > gain)
    if len(unsettled):
        if 2 * len(unsettled) >= len(current):
            unsettled = np.arange(len(current))
        part, low, high = sample.columns(unsettled), lower[unsettled], upper[unsettled]
        low = _raised(low, part, high)
        current[unsettled], growth[unsettled] = _minimise_profile(
            part, current[unsettled], light[unsettled], gain, low, high, passes - 1
        )
    return current, growth


def _raised(lower: Array, sample: Sample, upper: Array) -> Array:
    """The lower end (K,) of a bracket with what the least distance tells of it."""
    return np.minimum(np.maximum(lower, sample.lowest), upper)
