"""Gauss-Newton refinement of one pose in plain floats: for one frame numpy's calls cost more than the arithmetic.

In: points from their centre, normalised pixels and whitening factors, as lists, and a first pose (see ``pnp``).
Out: what ``pnp`` gets from its batch for the same frame, or None where a step fails and damping is needed.
"""

from __future__ import annotations

import math
from operator import mul
from typing import NamedTuple

Row = list[float]


class Point(NamedTuple):
    """A point from the centre, where it is seen, and the whitening's entries 11, 22 and 21."""

    x: float
    y: float
    z: float
    u: float
    v: float
    w11: float
    w22: float
    w21: float


class ScalarFit(NamedTuple):
    """Turn (3, 3), bearing (3,), normal matrix (P + 1, P + 1) and cost at the minimum."""

    turn: list[Row]
    bearing: Row
    normal: list[Row]
    cost: float


def refine(
    points: list[Point], turn: list[Row], bearing: Row, free: int, gain: float, relative_gain: float, steps: int
) -> ScalarFit | None:
    """The pose of least cost, found by undamped steps that each lower the cost; None if they do not."""
    cost = math.inf
    for _ in range(steps):
        normal = linearise(points, turn, bearing, free)
        if normal is None or not normal[free][free] < cost:
            return None
        cost = normal[free][free]
        step = solve(normal)
        if step is None:
            return None
        promise = sum(map(mul, step, normal[free]))
        turn, bearing = move(turn, bearing, step)
        if promise <= gain + relative_gain * cost:
            return ScalarFit(turn, bearing, normal, cost - promise)
    return None


def linearise(points: list[Point], turn: list[Row], bearing: Row, free: int) -> list[Row] | None:
    """Inner products (free + 1, free + 1) of the whitened Jacobian and residual; None behind the camera."""
    (t11, t12, t13), (t21, t22, t23), (t31, t32, t33) = turn
    b1, b2, _ = bearing
    rows = []
    for x, y, z, u, v, w11, w22, w21 in points:
        depth = 1 + t31 * x + t32 * y + t33 * z
        if not depth > 0:
            return None
        inverse = 1 / depth
        a, b, c = (t11 * x + t12 * y + t13 * z) * inverse, (t21 * x + t22 * y + t23 * z) * inverse, 1 - inverse
        p, q = a + b1 * inverse, b + b2 * inverse
        first = (-p * b, c + p * a, -b, inverse, 0.0, a - p * c, u - p)[6 - free :]
        second = (-c - q * b, q * a, a, 0.0, inverse, b - q * c, v - q)[6 - free :]
        rows.append([w11 * f for f in first])
        rows.append([w21 * f + w22 * s for f, s in zip(first, second)])  # noqa: B905
    columns = list(zip(*rows))  # noqa: B905
    normal: list[Row] = []
    for index, column in enumerate(columns):
        below = [row[index] for row in normal]
        normal.append(below + [sum(map(mul, column, other)) for other in columns[index:]])
    return normal


def solve(normal: list[Row]) -> Row | None:
    """Step (P,) of a normal matrix (P + 1, P + 1) by elimination; None if it is singular."""
    size = len(normal) - 1
    upper = []
    rest = [row[index:] for index, row in enumerate(normal[:size])]
    for index in range(size):
        pivot, *row = rest[index]
        if not pivot > 0:
            return None
        upper.append([value / pivot for value in row])
        for ahead, factor in enumerate(row[:-1]):
            share = factor / pivot
            below = rest[index + 1 + ahead]
            rest[index + 1 + ahead] = [old - share * value for old, value in zip(below, row[ahead:])]  # noqa: B905
    step: Row = []
    for row in reversed(upper):
        step.insert(0, row[-1] - sum(map(mul, row, step)))
    return step


def move(turn: list[Row], bearing: Row, step: Row) -> tuple[list[Row], Row]:
    """The pose after a step in rotation (by a quaternion), bearing and log inverse depth."""
    *rotation, d1, d2, growth = step
    bearing = [bearing[0] + d1, bearing[1] + d2, 1.0]
    scale = math.exp(min(growth, 100.0))
    if not rotation:
        return [[scale * value for value in row] for row in turn], bearing
    x, y, z = (value / 2 for value in rotation)
    xx, yy, zz = x * x, y * y, z * z
    scale /= 1 + xx + yy + zz
    change = (
        (1 + xx - yy - zz, 2 * (x * y - z), 2 * (x * z + y)),
        (2 * (x * y + z), 1 - xx + yy - zz, 2 * (y * z - x)),
        (2 * (x * z - y), 2 * (y * z + x), 1 - xx - yy + zz),
    )
    columns = list(zip(*turn))  # noqa: B905
    return [[scale * sum(map(mul, row, column)) for column in columns] for row in change], bearing
