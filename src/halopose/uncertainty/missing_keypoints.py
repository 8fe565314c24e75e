"""Quadratic forms and ranks for objects of which only some keypoints are labelled.

For v (N, K, 2) and a correlation R (2K, 2K) or (N, 2K, 2K) it computes v' R^-1 v over the labelled keypoints. Objects
with the same number of labelled keypoints are processed together, without padding.

If most keypoints are labelled and all objects share R, only the block of the missing keypoints is factored: with P =
R^-1, l the labelled coordinates, u the others, and v zero there, v' (R_ll)^-1 v = v' P v - (P v)_u' (P_uu)^-1 (P v)_u
and det R_ll = det R det P_uu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from halopose.sorting import rising_order, whole_order
from halopose.types import Array

_CHUNK = 2048  # number of objects per batch


def rising_places(values: Array, labelled: Array) -> Array:
    """Return places (n,) of the labelled values (N, K) by rising value, counted in row-major order."""
    places = np.flatnonzero(labelled)
    return places.take(rising_order(values.reshape(-1).take(places)))


def places_among(places: Array, rows: Array, shape: tuple[int, int]) -> Array:
    """Convert places (n,) in an array (N, K) to places among some of its rows, in the same order."""
    moved = np.full(shape, -1)
    moved[rows] = np.arange(len(rows) * shape[1]).reshape(-1, shape[1])
    found = moved.reshape(-1).take(places)
    return found[found >= 0]


def log_shares(places: Array, labelled: Array) -> Array:
    """Return the log of the share of each keypoint's residuals that are longer (N, K); 0 without a label.

    ``places`` (n,) are the labelled keypoints by rising length.
    """
    sizes = labelled.sum(0)
    rank = np.arange(len(places)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    result = np.zeros(labelled.shape)
    own = places.take(whole_order(places % labelled.shape[1]))  # keypoint by keypoint
    result.reshape(-1)[own] = np.log1p(-(rank + 0.5) / np.repeat(sizes, sizes))
    return result


def _groups(labelled: Array, rows: Array) -> Iterator[tuple[Array, Array]]:
    """Yield objects (n,) of ``rows`` with the same number c of labelled keypoints, and the coordinates (n, 2c)
    of those.
    """
    counts = labelled[rows].sum(1)
    for count in np.flatnonzero(np.bincount(counts)).tolist():
        found = rows[counts == count]
        for start in range(0, len(found), _CHUNK):
            part = found[start : start + _CHUNK]
            keypoint = np.nonzero(labelled[part])[1]
            yield part, (2 * keypoint[:, None] + np.arange(2)).reshape(len(part), -1)


def _factored(correlation: Array, rows: Array, place: Array) -> Tensor:
    """Return Cholesky factors (n, 2c, 2c) of R at some coordinates (n, 2c) of objects (n,)."""
    if correlation.ndim == 2:
        matrix = correlation.take(len(correlation) * place[:, :, None] + place[:, None, :])
    else:
        matrix = correlation[rows[:, None, None], place[:, :, None], place[:, None, :]]
    return torch.linalg.cholesky(torch.from_numpy(matrix))


def _parted(correlation: Array, labelled: Array) -> tuple[Array, Array]:
    """Return objects (n,) with few labelled keypoints, and (m,) with most of them if they share one R."""
    counts = labelled.sum(1)
    most = 2 * counts > labelled.shape[1]
    if correlation.ndim > 2:
        most[:] = False
    return np.flatnonzero((counts > 0) & ~most), np.flatnonzero(most)


def distances(shared: Sequence[Array], correlation: Array, labelled: Array) -> tuple[list[Array], Array]:
    """Return v' R^-1 v (N,) over the labelled keypoints for each v (N, K, 2), and half the log-determinants of their R
    (N,).

    Several v of the same objects share one factorisation.
    """
    flat = np.stack([each.reshape(len(labelled), -1) for each in shared], axis=1)
    distance, log_det = np.zeros((len(labelled), len(shared))), np.zeros(len(labelled))
    few, most = _parted(correlation, labelled)
    for rows, place in _groups(labelled, few):
        root = _factored(correlation, rows, place)
        distance[rows] = _squares(root, flat[rows[:, None], :, place])
        log_det[rows] = _half_log_det(root)
    if len(most):
        precision = np.linalg.inv(correlation)
        known = np.where(np.repeat(labelled[most], 2, axis=1)[:, None], flat[most], 0.0)
        turned = _product(known, precision)
        distance[most] = np.einsum("nvi,nvi->nv", known, turned)
        log_det[most] = np.linalg.slogdet(correlation)[1] / 2
        for rows, place in _groups(~labelled[most], np.arange(len(most))):
            root = _factored(precision, rows, place)
            distance[most[rows]] -= _squares(root, turned[rows[:, None], :, place])
            log_det[most[rows]] += _half_log_det(root)
    return list(distance.T), log_det


def _product(rows: Array, matrix: Array) -> Array:
    """Multiply rows (N, V, C) by a matrix (C, C) with torch, which respects the number of threads."""
    flat = torch.from_numpy(rows.reshape(-1, len(matrix)))
    return np.asarray((flat @ torch.from_numpy(matrix)).numpy()).reshape(rows.shape)


def _squares(root: Tensor, wanted: Array) -> Array:
    """Return squared lengths (n, V) of the solutions for factors (n, C, C) and vectors (n, C, V)."""
    left = torch.linalg.solve_triangular(root, torch.from_numpy(wanted), upper=False)
    return np.asarray(left.square().sum(1).numpy())


def _half_log_det(root: Tensor) -> Array:
    return np.asarray(root.diagonal(dim1=1, dim2=2).log().sum(1).numpy())


def pairings(direction: Array, correlation: Array, labelled: Array) -> Array:
    """Return Q (N, K, K) with s' Q s = v' R^-1 v for v_k = s_k times direction_k (N, K, 2), over labelled keypoints."""
    objects, keypoints = labelled.shape
    result = np.zeros((objects, keypoints, keypoints))
    few, most = _parted(correlation, labelled)
    for rows, place in _groups(labelled, few):
        count = place.shape[1] // 2
        wide = np.zeros((len(rows), 2 * count, count))
        own = np.arange(2 * count)
        wide[:, own, own // 2] = direction.reshape(objects, -1)[rows[:, None], place]
        left = torch.linalg.solve_triangular(_factored(correlation, rows, place), torch.from_numpy(wide), upper=False)
        keypoint = place[:, ::2] // 2
        result[rows[:, None, None], keypoint[:, :, None], keypoint[:, None, :]] = (left.mT @ left).numpy()
    if len(most):
        known = np.where(labelled[most][..., None], direction[most], 0.0)
        result[most] = _pairings_of_most(known, correlation, labelled[most])
    return result


def _pairings_of_most(direction: Array, correlation: Array, labelled: Array) -> Array:
    """``pairings`` of objects with most keypoints labelled; directions are zero at the others."""
    objects, keypoints = labelled.shape
    precision = np.linalg.inv(correlation)
    own = torch.from_numpy(direction)
    columns = torch.from_numpy(precision).unflatten(1, (keypoints, 2))
    # P times each direction, (n, 2K, K): all objects' times two columns of P are one product of matrices.
    turned = torch.bmm(own.transpose(0, 1), columns.permute(1, 2, 0)).permute(1, 2, 0).contiguous().numpy()
    result = turned[:, ::2] * direction[..., :1] + turned[:, 1::2] * direction[..., 1:]
    for rows, place in _groups(~labelled, np.arange(objects)):
        if place.shape[1]:
            wanted = torch.from_numpy(turned[rows[:, None], place])
            left = torch.linalg.solve_triangular(_factored(precision, rows, place), wanted, upper=False)
            result[rows] -= (left.mT @ left).numpy()
    return np.asarray(result)
