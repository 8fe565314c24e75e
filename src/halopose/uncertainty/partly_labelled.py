"""Quadratic forms of objects of which only some keypoints are labelled, with one matrix for all of them.

In: v (N, K, 2), a correlation R (2K, 2K) or (N, 2K, 2K), labelled (N, K). Out: v' R^-1 v over the labelled ones.
Objects with equally many labelled keypoints go together, so that nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from halopose.types import Array

_CHUNK = 2048  # objects whose matrices are factored at once


def _groups(labelled: Array) -> Iterator[tuple[Array, Array]]:
    """Objects (n,) with equally many labelled keypoints c, and the coordinates (n, 2c) of those: no padding."""
    counts = labelled.sum(1)
    first = np.argsort(~labelled, axis=1, kind="stable")
    for count in np.unique(counts[counts > 0]).tolist():
        found = np.flatnonzero(counts == count)
        for start in range(0, len(found), _CHUNK):
            rows = found[start : start + _CHUNK]
            yield rows, (2 * first[rows, :count, None] + np.arange(2)).reshape(len(rows), -1)


def _factored(correlation: Array, rows: Array, place: Array) -> Tensor:
    """Cholesky factors (n, 2c, 2c) of R at some coordinates (n, 2c) of objects (n,)."""
    if correlation.ndim == 2:
        matrix = correlation.take(len(correlation) * place[:, :, None] + place[:, None, :])
    else:
        matrix = correlation[rows[:, None, None], place[:, :, None], place[:, None, :]]
    return torch.linalg.cholesky(torch.from_numpy(matrix))


def distances(shared: Sequence[Array], correlation: Array, labelled: Array) -> tuple[list[Array], Array]:
    """v' R^-1 v (N,) of the labelled keypoints of each v (N, K, 2), and half the log-determinants of their R (N,).

    Several v of the same objects are solved for with one factorisation.
    """
    flat = np.stack([each.reshape(len(labelled), -1) for each in shared], axis=-1)
    distance, log_det = np.zeros((len(shared), len(labelled))), np.zeros(len(labelled))
    for rows, place in _groups(labelled):
        root = _factored(correlation, rows, place)
        wanted = torch.from_numpy(flat[rows[:, None], place])
        left = torch.linalg.solve_triangular(root, wanted, upper=False)
        distance[:, rows] = left.square().sum(1).T.numpy()
        log_det[rows] = root.diagonal(dim1=1, dim2=2).log().sum(1).numpy()
    return list(distance), log_det


def pairings(direction: Array, correlation: Array, labelled: Array) -> Array:
    """Q (N, K, K) with s' Q s = v' R^-1 v of v_k = s_k times direction_k (N, K, 2), at labelled keypoints."""
    objects, keypoints = labelled.shape
    result = np.zeros((objects, keypoints, keypoints))
    for rows, place in _groups(labelled):
        count = place.shape[1] // 2
        wide = np.zeros((len(rows), 2 * count, count))
        own = np.arange(2 * count)
        wide[:, own, own // 2] = direction.reshape(objects, -1)[rows[:, None], place]
        left = torch.linalg.solve_triangular(
            _factored(correlation, rows, place), torch.from_numpy(wide), upper=False
        )
        keypoint = place[:, ::2] // 2
        result[rows[:, None, None], keypoint[:, :, None], keypoint[:, None, :]] = (left.mT @ left).numpy()
    return result


__all__ = ["distances", "pairings"]
