"""One frame, fast: a position with its covariance, verdict and protection levels, as ``integrity`` gives for many.

In: points (K, 3), pixels (K, 2), covariances (K, 2, 2) and the rotation (3, 3), perhaps with its covariance (3,
3). Out: an ``Assessment`` of one frame. Plain floats find the position, for numpy's calls cost more than the
arithmetic; one linearisation gives all the rest. What is out of the ordinary, an alarm or a lens, goes the long
way.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.linalg.lapack import dposv
from scipy.special import chdtrc, ndtri

from halopose.geometry.camera import Array, Camera, intrinsics_jacobian, skew
from halopose.geometry.integrity import RUNWAY_AXES, Assessment, Risks, Verdict, assess
from halopose.geometry.linear import root_of
from halopose.geometry.pnp import Minimum, Solution

_SKEW = skew(np.eye(3)).reshape(3, 9)  # a vector to its cross-product matrix
_NOWHERE = Minimum(np.full((1, 3, 3), np.nan), np.full((1, 3), np.nan), np.array([np.inf]))
_STEPS = 12
_ENOUGH = 1e-8  # chi-square that the last step may still gain
_FEWEST = 3
_NOT_FAST = 25.0  # chi-square from which a position is looked at the long way


class Fix(NamedTuple):
    """A position (3,) with its covariance (3, 3) and its chi-square; the attitude counts as exact."""

    position: Array
    covariance: Array
    cost: float


def solve_one(camera: Camera, points: Array, pixels: Array, covariance: Array, rotation: Array) -> Fix | None:
    """Position of least chi-square of one frame, all of whose points count; None if plain steps do not find it."""
    turn = rotation.tolist()
    rows = _whitened(camera, points, pixels, covariance)
    place = None if rows is None else _first(rows, turn)
    if rows is None or place is None:
        return None
    before = math.inf
    for _ in range(_STEPS):
        normal = _normal(rows, turn, place)
        if normal is None:
            return None
        n, cost = normal
        if not cost <= before * (1 + 1e-9) + _ENOUGH:
            return None
        solved = _solve(n)
        if solved is None:
            return None
        step, inverse = solved
        place = (place[0] + step[0], place[1] + step[1], place[2] + step[2])
        gain = step[0] * n[6] + step[1] * n[7] + step[2] * n[8]
        if gain <= _ENOUGH + 1e-9 * cost:
            a, b, c, d, e, f = inverse
            return Fix(np.array(place), np.array([[a, b, c], [b, d, e], [c, e, f]]), cost - gain)
        before = cost
    return None


Row = tuple[float, ...]  # x, y, z, u, v, whitening entries 11, 21, 22 of L^-1 diag(fx, fy)
Place = tuple[float, float, float]


def _whitened(camera: Camera, points: Array, pixels: Array, covariance: Array) -> list[Row] | None:
    rows: list[Row] = []
    fx, fy, cx, cy = camera.fx, camera.fy, camera.cx, camera.cy
    for (x, y, z), (u, v), ((xx, xy), (_, yy)) in zip(
        points.tolist(), pixels.tolist(), covariance.tolist(), strict=True
    ):
        area = xx * yy - xy * xy
        if not (xx > 0 and area > 0):
            return None
        first = math.sqrt(xx)
        root = math.sqrt(area)
        rows.append((x, y, z, (u - cx) / fx, (v - cy) / fy, fx / first, -fx * xy / (first * root), fy * first / root))
    return rows


def _first(rows: list[Row], turn: list[list[float]]) -> Place | None:
    """Where the rays through the pixels come nearest to the points: linear in the position."""
    (a1, a2, a3), (b1, b2, b3), (c1, c2, c3) = turn
    n = [0.0] * 9
    for x, y, z, u, v, w, _, s in rows:
        for p, q, r, k in (
            (a1 - u * c1, a2 - u * c2, a3 - u * c3, w),
            (b1 - v * c1, b2 - v * c2, b3 - v * c3, s),
        ):
            weight = k * k
            right = (p * x + q * y + r * z) * weight
            p_, q_, r_ = p * weight, q * weight, r * weight
            n[0] += p * p_
            n[1] += p * q_
            n[2] += p * r_
            n[3] += q * q_
            n[4] += q * r_
            n[5] += r * r_
            n[6] += p * right
            n[7] += q * right
            n[8] += r * right
    solved = _solve(n)
    return None if solved is None else solved[0]


def _normal(rows: list[Row], turn: list[list[float]], place: Place) -> tuple[list[float], float] | None:
    """Upper triangle and right-hand side (9) of the normal equations, and the cost; None behind the camera."""
    (a1, a2, a3), (b1, b2, b3), (c1, c2, c3) = turn
    px, py, pz = place
    n0 = n1 = n2 = n3 = n4 = n5 = n6 = n7 = n8 = cost = 0.0
    for x, y, z, u, v, w11, w21, w22 in rows:
        x, y, z = x - px, y - py, z - pz
        depth = c1 * x + c2 * y + c3 * z
        if not depth > 0:
            return None
        i = 1 / depth
        s, t = (a1 * x + a2 * y + a3 * z) * i, (b1 * x + b2 * y + b3 * z) * i
        # d(s, t) / d position, then whitened
        p1, p2, p3 = (s * c1 - a1) * i, (s * c2 - a2) * i, (s * c3 - a3) * i
        q1, q2, q3 = (t * c1 - b1) * i, (t * c2 - b2) * i, (t * c3 - b3) * i
        ru, rv = u - s, v - t
        q1, q2, q3, rv = w21 * p1 + w22 * q1, w21 * p2 + w22 * q2, w21 * p3 + w22 * q3, w21 * ru + w22 * rv
        p1, p2, p3, ru = w11 * p1, w11 * p2, w11 * p3, w11 * ru
        n0 += p1 * p1 + q1 * q1
        n1 += p1 * p2 + q1 * q2
        n2 += p1 * p3 + q1 * q3
        n3 += p2 * p2 + q2 * q2
        n4 += p2 * p3 + q2 * q3
        n5 += p3 * p3 + q3 * q3
        n6 += p1 * ru + q1 * rv
        n7 += p2 * ru + q2 * rv
        n8 += p3 * ru + q3 * rv
        cost += ru * ru + rv * rv
    return [n0, n1, n2, n3, n4, n5, n6, n7, n8], cost


def _solve(n: list[float]) -> tuple[Place, Row] | None:
    """Solution and inverse (upper triangle) of a symmetric system of three; None if not positive definite."""
    a, b, c, d, e, f, x, y, z = n
    aa, bb, cc = d * f - e * e, c * e - b * f, b * e - c * d
    determinant = a * aa + b * bb + c * cc
    if not (determinant > 0 and a > 0 and aa > 0):
        return None
    k = 1 / determinant
    inverse = (aa * k, bb * k, cc * k, (a * f - c * c) * k, (b * c - a * e) * k, (a * d - b * b) * k)
    aa, bb, cc, dd, ee, ff = inverse
    return (aa * x + bb * y + cc * z, bb * x + dd * y + ee * z, cc * x + ee * y + ff * z), inverse


def assess_one(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    rotation: Array,
    *,
    attitude: Array | None = None,
    intrinsics: Array | None = None,
    shared: Array | None = None,
    risks: Risks | None = None,
    axes: Array = RUNWAY_AXES,
) -> Assessment:
    """What ``integrity.assess`` says of one frame, all of whose points count; ``shared`` is (K, 2, M)."""
    risks = risks or Risks()
    found = None
    if not camera.distorted and len(points) >= _FEWEST:
        known = attitude, intrinsics, shared
        found = _fast(camera, points, pixels, covariance, rotation, *known, risks, axes)
    if found is not None:
        return found
    return assess(
        camera, points, pixels[None], covariance[None], rotation[None], attitude=attitude, intrinsics=intrinsics,
        shared=None if shared is None else shared[None], risks=risks, axes=axes,
    )  # fmt: skip


def _fast(
    camera: Camera,
    points: Array,
    pixels: Array,
    covariance: Array,
    rotation: Array,
    attitude: Array | None,
    intrinsics: Array | None,
    shared: Array | None,
    risks: Risks,
    axes: Array,
) -> Assessment | None:
    """The answer for a frame without an alarm; None if it takes a longer look."""
    alone = covariance if shared is None else covariance + shared @ shared.swapaxes(1, 2)
    first = solve_one(camera, points, pixels, alone, rotation)
    if first is None or first.cost > _NOT_FAST or first.position[2] <= points[:, 2].min():
        return None
    count = len(points)
    factor, root = _factors(covariance), None if attitude is None else _root(attitude)
    lens = None if intrinsics is None else root_of(intrinsics)
    seen = camera, points, pixels, factor, rotation
    rows = _rows(*seen, first.position, root, lens, shared)
    size = rows.shape[-1] - 1
    flat = rows.reshape(2 * count, size + 1)
    normal = flat.T @ flat
    normal.ravel()[3 * (size + 2) : -1 : size + 2] += 1.0
    # The minimum for an exact attitude: one step, and a look at where it led.
    _, step, failed = dposv(normal[:size, :size], normal[:size, size])
    if failed:
        return None
    position = first.position + step[:3]
    rows = _rows(*seen, position, root, lens, shared)
    each = rows.swapaxes(1, 2) @ rows  # (K, P + 1, P + 1) with the pulls and the squares of the residuals
    whole = each.sum(0)
    whole.ravel()[3 * (size + 2) : -1 : size + 2] += 1.0
    systems = np.empty((count + 1, size + 1, size + 1))
    systems[0], systems[1:] = whole, whole - each
    scale = 1 / np.sqrt(np.diagonal(whole)[:size])
    scales = scale[:, None] * scale
    inverses = np.linalg.inv(systems[:, :size, :size] * scales) * scales
    pulls = systems[:, :size, size:]
    steps = inverses @ pulls
    position = position + steps[0, :3, 0]
    costs = systems[:, size, size] - (pulls * steps)[..., 0].sum(1)
    cost, shares = float(costs[0]), np.maximum(costs[0] - costs[1:], 0.0)
    half, dof = risks.false_alarm / 2, 2 * count - 3
    if not math.isfinite(cost) or _tail_of(cost, dof) < half or math.exp(-shares.max() / 2) < half / count:
        return None
    spread = inverses[:, :3, :3]
    sigma = np.sqrt(((axes @ spread) * axes).sum(-1))  # (K + 1, A)
    fault_free, limit, faulty = _multiples(risks, count, len(axes))
    apart = np.sqrt(np.maximum(sigma[1:] ** 2 - sigma[0] ** 2, 0.0))
    levels = np.maximum(fault_free * sigma[0], (limit * apart + faulty * sigma[1:]).max(0))
    total6 = _with_attitude(inverses[0], root, attitude)
    none, degrees = np.zeros(1, dtype=np.int64), np.array([dof])
    solution = Solution(rotation[None], position[None], np.array([cost]), total6, degrees, none, _NOWHERE)
    verdict = np.array([int(Verdict.FITS)])
    every = np.ones((1, count), dtype=bool)
    return Assessment(solution, every, none - 1, verdict, levels[None], np.array([cost]), shares[None])


def _with_attitude(inverse: Array, root: Array | None, attitude: Array | None) -> Array:
    """Covariance (1, 6, 6) of position and attitude from that of position and whatever was unknown beside it."""
    total = np.zeros((1, 6, 6))
    total[0, :3, :3] = inverse[:3, :3]
    if root is not None and attitude is not None:
        across = inverse[:3, 3:6] @ root.T
        total[0, :3, 3:], total[0, 3:, :3], total[0, 3:, 3:] = across, across.T, attitude
    return total


def _rows(
    camera: Camera,
    points: Array,
    pixels: Array,
    factor: Array,
    rotation: Array,
    position: Array,
    root: Array | None,
    lens: Array | None,
    shared: Array | None,
) -> Array:
    """Whitened Jacobian (K, 2, P + 1) by the position and all else that is uncertain, and residuals as its end."""
    offset = points - position
    seen = offset @ rotation.T
    inverse = 1 / seen[:, 2:]
    image = seen[:, :2] * inverse
    focal, centre = _focal_and_centre(camera)
    by_point = (rotation[:2] - image[..., None] * rotation[2]) * (focal[:, None] * inverse[:, None])
    parts = [-by_point]
    if root is not None:
        parts.append(by_point @ ((offset @ _SKEW).reshape(-1, 3, 3) @ root))
    if lens is not None:
        parts.append(intrinsics_jacobian(camera, seen) @ lens)
    if shared is not None:
        parts.append(shared)
    parts.append((pixels - image * focal - centre)[..., None])
    return np.asarray(factor @ np.concatenate(parts, axis=2))


@lru_cache(maxsize=8)
def _focal_and_centre(camera: Camera) -> tuple[Array, Array]:
    return np.array([camera.fx, camera.fy]), np.array([camera.cx, camera.cy])


def _factors(covariance: Array) -> Array:
    """Inverse lower factors (K, 2, 2) of covariances (K, 2, 2)."""
    xx, xy = covariance[:, 0, 0], covariance[:, 0, 1]
    first, root = np.sqrt(xx), np.sqrt(xx * covariance[:, 1, 1] - xy * xy)
    factor = np.zeros_like(covariance, dtype=np.float64)
    factor[:, 0, 0] = 1 / first
    factor[:, 1, 1] = first / root
    factor[:, 1, 0] = -xy / (first * root)
    return factor


def _root(covariance: Array) -> Array:
    """A factor (3, 3) of a covariance (3, 3), also of one that knows something exactly."""
    try:
        return np.asarray(np.linalg.cholesky(covariance))
    except np.linalg.LinAlgError:
        return root_of(covariance)


def _tail_of(value: float, dof: int) -> float:

    return float(chdtrc(dof, max(value, 0.0)))


@lru_cache(maxsize=64)
def _multiples(risks: Risks, count: int, axes: int) -> tuple[float, float, float]:
    """Standard deviations for no fault, for the limit of a separation and for one fault."""

    risk = risks.integrity / axes / (count + 1)
    limit = math.sqrt(-2 * math.log(risks.false_alarm / 2 / count))
    return -float(ndtri(risk / 2)), limit, -float(ndtri(min(risk / risks.fault_probability, 0.5)))
