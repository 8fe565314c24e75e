"""Gauss-Newton refinement of one pose in plain floats: for one frame numpy's calls cost more than the arithmetic.

In: points from their centre, normalised pixels and whitening factors as lists, a first pose (see ``pnp_refine``).
Out: what ``pnp_refine`` gets from its batch for the same frame, or None where a step fails and damping is needed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.linalg.lapack import dposv

from halopose.geometry.camera import Array

Row = list[float]
Point = tuple[float, ...]  # x, y, z from the centre, u, v where it is seen, whitening entries 11, 22, 21


class ScalarFit(NamedTuple):
    """Turn (3, 3), bearing (3,), normal matrix (P + 1, P + 1) and cost at the minimum."""

    turn: list[Row]
    bearing: Row
    normal: Array
    cost: float


def refine(
    points: list[Point], turn: list[Row], bearing: Row, free: int, gain: float, relative_gain: float, steps: int
) -> ScalarFit | None:
    """The pose of least cost, found by undamped steps that each lower the cost; None if they do not."""
    cost = math.inf
    for _ in range(steps):
        rows = linearise(points, turn, bearing)
        if rows is None:
            return None
        columns = np.array(rows)[:, 6 - free :]
        normal = columns.T @ columns
        before, cost = cost, float(normal[free, free])
        if not cost < before:
            return None
        _, step, failed = dposv(normal[:free, :free], normal[:free, free])
        if failed:
            return None
        promise = float(step @ normal[free, :free])
        turn, bearing = move(turn, bearing, step.tolist())
        if promise <= gain + relative_gain * cost:
            return ScalarFit(turn, bearing, normal, cost - promise)
    return None


def linearise(points: list[Point], turn: list[Row], bearing: Row) -> list[tuple[float, ...]] | None:
    """Whitened Jacobian by rotation, bearing and log inverse depth, and residual (2 K, 7), if all is in front."""
    (t11, t12, t13), (t21, t22, t23), (t31, t32, t33) = turn
    b1, b2, _ = bearing
    rows: list[tuple[float, ...]] = []
    for x, y, z, u, v, w11, w22, w21 in points:
        depth = 1 + t31 * x + t32 * y + t33 * z
        if not depth > 0:
            return None
        i = 1 / depth
        a, b, c = (t11 * x + t12 * y + t13 * z) * i, (t21 * x + t22 * y + t23 * z) * i, 1 - i
        p, q = a + b1 * i, b + b2 * i
        p1, p2, p6, p7 = -p * b, c + p * a, a - p * c, u - p
        q1, q2, q6, q7 = -c - q * b, q * a, b - q * c, v - q
        rows.append((w11 * p1, w11 * p2, -w11 * b, w11 * i, 0.0, w11 * p6, w11 * p7))
        rows.append(
            (
                w21 * p1 + w22 * q1, w21 * p2 + w22 * q2, w22 * a - w21 * b, w21 * i, w22 * i,
                w21 * p6 + w22 * q6, w21 * p7 + w22 * q7,
            )
        )  # fmt: skip
    return rows


def move(turn: list[Row], bearing: Row, step: Row) -> tuple[list[Row], Row]:
    """The pose after a step in rotation (by a quaternion), bearing and log inverse depth."""
    *rotation, d1, d2, growth = step
    bearing = [bearing[0] + d1, bearing[1] + d2, 1.0]
    scale = math.exp(min(growth, 100.0))
    if not rotation:
        return [[scale * value for value in row] for row in turn], bearing
    x, y, z = rotation[0] / 2, rotation[1] / 2, rotation[2] / 2
    xx, yy, zz = x * x, y * y, z * z
    scale /= 1 + xx + yy + zz
    change = (
        (scale * (1 + xx - yy - zz), 2 * scale * (x * y - z), 2 * scale * (x * z + y)),
        (2 * scale * (x * y + z), scale * (1 - xx + yy - zz), 2 * scale * (y * z - x)),
        (2 * scale * (x * z - y), 2 * scale * (y * z + x), scale * (1 - xx - yy + zz)),
    )
    first, second, third = turn
    columns = list(zip(first, second, third, strict=True))
    return [[a * p + b * q + c * r for p, q, r in columns] for a, b, c in change], bearing
