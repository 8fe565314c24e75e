"""Integrity figures of docs/evidence/landing.md: false alarms, single wrong corners, protection levels.

    python -m research.integrity

Simulates frames of four corners with Gaussian noise and an attitude error of 0.7 mrad on a three-degree approach. The
focal length is 1,200 px, the runway 2,500 m by 45 m. A cell has 20,000 frames without a fault, or 2,000 frames with
one corner off by 3 to 50 standard deviations in a random direction.

Prints the measured over the stated alarm rate, the outcome of wrong corners, protection levels against alert limits
(the regions of a Stanford diagram), the bias from runways that are not flat, and the gain from side edges and
threshold as lines.
"""

from __future__ import annotations

import argparse

import numpy as np

from halopose.cli.terminal import say
from halopose.geometry.attitude import solve_with_attitude
from halopose.geometry.camera import Camera, exp_so3, look_at, project_points
from halopose.geometry.integrity import Assessment, Risks, Verdict, assess
from halopose.geometry.lines import Lines
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import solve_position
from halopose.landing.landing_settings import LandingSettings
from halopose.landing.requirements import REQUIREMENTS, count_stanford, path_axes
from halopose.landing.runway import RUNWAY_EDGES, runway_corners
from halopose.types import Array
from research.tables import markdown

CAMERA = Camera(1200.0, 1200.0, 319.5, 191.5, 640, 384)
CORNERS = runway_corners(2500.0, 45.0)
ATTITUDE = 7e-4  # rad, about every axis
DISTANCES = (300.0, 500.0, 1000.0, 1500.0, 2500.0, 4000.0, 6000.0)
NOISES = (0.5, 1.0, 2.0, 3.0)
SIZES = (3.0, 5.0, 7.0, 10.0, 20.0, 50.0)
RISKS = Risks(fault_probability=LandingSettings().fault_probability, pairs=LandingSettings().risks(1).pairs)
AXES = path_axes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=20_000, help="without a fault, in each cell")
    parser.add_argument("--faulty", type=int, default=2_000, help="with a wrong corner, in each row")
    given = parser.parse_args()
    say("### Alarms without a fault, over the stated 1e-3\n\n" + alarm_table(given.frames))
    say("\n### One wrong corner\n\n" + fault_table(given.faulty))
    say("\n### Levels of 2 px corners\n\n" + level_table(given.frames))
    say("\n### Runways that are not flat\n\n" + slope_table())
    say("\n### Lines beside corners\n\n" + line_table(given.faulty))


def frames(distance: float, sigma: float, count: int, seed: int) -> tuple[Array, Array, Array, Array]:
    """Pixels (N, 4, 2), covariances, rotations as given, and the true position (3,)."""
    rng = np.random.default_rng([seed, int(distance), int(10 * sigma)])
    position = np.array([-distance, 0.006 * distance, (distance + 300.0) * np.tan(np.radians(3))])
    rotation = look_at(position, [min(300.0, 0.3 * distance), 0.0, 0.0], 0.02)
    exact = project_points(CAMERA, rotation, position, CORNERS)
    pixels = exact + sigma * rng.normal(size=(count, 4, 2))
    turned = rotation @ exp_so3(ATTITUDE * rng.normal(size=(count, 3)))
    return pixels, np.broadcast_to(sigma**2 * np.eye(2), (count, 4, 2, 2)), turned, position


def judge(pixels: Array, covariance: Array, turned: Array) -> Assessment:
    return assess(
        Observations(CAMERA, CORNERS, pixels, covariance, turned, attitude_covariance=ATTITUDE**2 * np.eye(3)),
        risks=RISKS,
        axes=AXES,
    )


def alarm_table(count: int) -> str:
    rows, worst = [], 0.0
    for distance in DISTANCES:
        rates = []
        for sigma in NOISES:
            pixels, covariance, turned, _ = frames(distance, sigma, count, 1)
            rates.append(judge(pixels, covariance, turned).alarmed.mean() / RISKS.false_alarm)
        worst = max(worst, *rates)
        rows.append([f"{distance:,.0f} m", *(f"{rate:.2f}" for rate in rates)])
    return markdown(["", *(f"{sigma:g} px" for sigma in NOISES)], rows) + f"\n\nlargest: {worst:.2f}"


def fault_table(count: int) -> str:
    rows = []
    for distance in (500.0, 1500.0, 4000.0):
        for size in SIZES:
            pixels, covariance, turned, position = frames(distance, 2.0, count, 2)
            rng = np.random.default_rng(3)
            corner, angle = rng.integers(4, size=count), rng.uniform(0, 2 * np.pi, count)
            pixels[np.arange(count), corner] += 2 * size * np.stack([np.cos(angle), np.sin(angle)], axis=1)
            found = judge(pixels, covariance, turned)
            mended = found.verdict == Verdict.POINT_EXCLUDED
            right = found.excluded == corner
            error = np.abs((found.solution.position - position) @ AXES.T)
            beyond = found.trusted & (error > found.levels).any(1)
            shares = (
                found.verdict == Verdict.CONSISTENT, mended & right, mended & ~right, ~found.trusted, beyond
            )  # fmt: skip
            rows.append([f"{distance:,.0f} m, {size:g} sigma", *(f"{100 * share.mean():.1f} %" for share in shares)])
    head = [
        "2 px",
        "not noticed",
        "left out",
        "wrong one left out",
        "frame not trusted",
        "trusted, beyond a level",
    ]
    return markdown(head, rows)


def level_table(count: int) -> str:
    rows = []
    for distance in DISTANCES:
        pixels, covariance, turned, position = frames(distance, 2.0, count, 4)
        found = judge(pixels, covariance, turned)
        error = (found.solution.position - position) @ AXES.T
        sigma = error[found.trusted].std(0)
        cells = [f"{sigma[a]:.1f} / {np.median(found.levels[:, a]):.0f} m" for a in range(3)]
        for name in ("lpv-200", "cat-1", "cat-2"):
            regions = [
                count_stanford(error[found.trusted, a], found.levels[found.trusted, a], REQUIREMENTS[name].limits[a])
                for a in (1, 2)
            ]
            worst = min(each.available for each in regions) / max(regions[0].total, 1)
            misled = sum(each.misleading + each.hazardous for each in regions)
            cells.append(f"{100 * worst:.0f} %, {misled}")
        rows.append([f"{distance:,.0f} m", *cells])
    head = [
        "",
        "along: sigma / level",
        "lateral",
        "across the path",
        "LPV-200: available, misled",
        "CAT I",
        "CAT II",
    ]
    return markdown(head, rows)


def slope_table() -> str:
    """Bias from 3 km of exact pixels, solved as flat and with the corners' own heights."""
    eye = np.array([-3000.0, 0.0, 172.9])
    rotation = look_at(eye, [300.0, 0.0, 0.0])[None]
    runways = {
        "rises by .10 %": (runway_corners(2500.0, 45.0, heights=(0, 0, 2.5, 2.5)), CORNERS),
        "rises by 1.0 %": (runway_corners(2500.0, 45.0, heights=(0, 0, 25, 25)), CORNERS),
        "300 m before a displaced threshold": (runway_corners(2500.0, 45.0, displaced=300.0), CORNERS),
        "800 by 18 m": (runway_corners(800.0, 18.0), runway_corners(800.0, 18.0)),
    }
    rows = []
    for name, (true, flat) in runways.items():
        pixels = project_points(CAMERA, rotation, eye[None], true)
        spread = np.broadcast_to(4 * np.eye(2), (1, 4, 2, 2))
        cells = []
        for points in (flat, true):
            off = solve_position(Observations(CAMERA, points, pixels, spread, rotation)).position[0] - eye
            cells.append(f"{off[0]:+.1f} m along, {off[2]:+.1f} m up")
        rows.append([name, *cells])
    return markdown(["exact pixels from 3 km", "as flat, from the threshold", "with its own corners"], rows)


def line_table(count: int) -> str:
    """Spread of positions from 2 px corners alone, and with lines of 0.5 px at a fifth and four fifths of them."""
    rows = []
    for distance in (500.0, 1500.0, 4000.0):
        pixels, covariance, turned, position = frames(distance, 2.0, count, 5)
        exact = look_at(position, [min(300.0, 0.3 * distance), 0.0, 0.0], 0.02)
        for name, edges in (("corners", ()), ("and sides", RUNWAY_EDGES[:2]), ("and threshold", RUNWAY_EDGES)):
            lines = seen_lines(np.array(edges), exact, position, count) if edges else None
            found = solve_with_attitude(
                Observations(CAMERA, CORNERS, pixels, covariance, turned, ATTITUDE**2 * np.eye(3), lines=lines)
            )
            error = (found.position - position)[found.converged]
            spread = found.covariance[found.converged][:, :3, :3]
            inside = np.einsum("ni,nij,nj->n", error, np.linalg.inv(spread), error) < 7.815
            cells = [f"{sigma:.1f} m" for sigma in (error @ AXES.T).std(0)]
            rows.append([f"{distance:,.0f} m, {name}", *cells, f"{100 * inside.mean():.1f} %"])
    return markdown(["2 px corners, 0.5 px lines", "along", "lateral", "across the path", "in 95 %"], rows)


def seen_lines(edges: Array, rotation: Array, position: Array, count: int) -> Lines:
    """Edges of the runway as seen from a position (3,), with noise of 0.5 px across them."""
    ends, rng = CORNERS[edges], np.random.default_rng(6)
    places = ends[:, :1] + np.array([[0.2], [0.8]]) * (ends[:, 1:] - ends[:, :1])
    stations = project_points(CAMERA, rotation, position, places.reshape(-1, 3)).reshape(1, -1, 2, 2)
    spread = np.broadcast_to(0.25 * np.eye(2 * len(edges)), (count, 2 * len(edges), 2 * len(edges)))
    return Lines(stations + 0.5 * rng.normal(size=(count, *stations.shape[1:])), spread, ends)


if __name__ == "__main__":
    main()
