"""Measure how the shipped runway detector errs in flight, for campaigns that sample detections instead of rendering.

    python -m research.detector_errors --work work/

Renders approaches in clear air and detects the runway once per second; in the first flights five times per second at
uneven intervals, so that the autocorrelation is known from 0.05 s on. It keeps, per frame, whether the runway was
found, the stated covariances, and the errors of the corners in stated standard deviations. Camera and attitude are
exact, so all errors are the detector's. A rerun keeps finished flights in the work folder. The seeds are used by
nothing else.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import ndtr

from halopose.cli.terminal import say
from halopose.landing.association import Viewpoint, associate, detect_in_image, expected_corners, in_distribution_only
from halopose.landing.flight import rendered_images, true_trajectory
from halopose.landing.landing_settings import TRUTH_RATE, LandingSettings
from halopose.landing.shipped_detectors import load_detector
from halopose.landing.world.approach import fly
from halopose.poses import PoseDistributions
from halopose.types import Array
from research.tables import markdown

FIRST_SEED = 40_000
PATTERN_S = (0.0, 0.05, 0.15, 0.35, 0.65)  # of the frames within every second of the first flights
DENSE = 2  # number of these flights
PERSISTENT, PERSISTENCE_S, FLICKER, FLICKER_S = 0.6, 30.0, 0.24, 0.35  # of the corners' errors, by the autocorrelation
TAIL_DOF = 5.0  # of the white part
SEEN_S = 3.0  # for which a runway stays found or not
LAGS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True)
class DetectorErrors:
    """Detections of one flight, N frames.

    Attributes:
        times: seconds (N,).
        distance: from the threshold in metres (N,).
        found: whether the runway was detected (N,).
        unit: errors in stated standard deviations (N, 4, 2), NaN if not detected.
        covariance: stated covariances (N, 4, 2, 2) in pixels^2.
        dof: stated degrees of freedom (N, 4).
        score: confidence (N,).
    """

    times: Array
    distance: Array
    found: Array
    unit: Array
    covariance: Array
    dof: Array
    score: Array

    @classmethod
    def load(cls, path: Path) -> DetectorErrors:
        """Read a file written by ``save``."""
        with np.load(path) as stored:
            return cls(**{name: stored[name] for name in cls.__dataclass_fields__})

    def save(self, path: Path) -> None:
        """Write one file of arrays."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **vars(self))


def measured(work: Path, count: int) -> list[DetectorErrors]:
    """Errors of flights, measured now or read from the work folder."""
    flights = []
    model = None
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        path = work / "detector-errors" / f"{seed}.npz"
        if not path.is_file():
            model = model or load_detector()
            _measure(model, seed, PATTERN_S if seed < FIRST_SEED + DENSE else (0.0,)).save(path)
        flights.append(DetectorErrors.load(path))
    return flights


def _measure(model: object, seed: int, pattern_s: tuple[float, ...]) -> DetectorErrors:
    settings = LandingSettings(seed=seed)
    approach = fly(seed, "clear", TRUTH_RATE)
    truth = true_trajectory(approach)
    times = (np.arange(0.0, truth.times[-1] - 1)[:, None] + pattern_s).ravel()
    world, position, attitude = approach.world, truth.position(times), truth.attitude(times)
    exact = expected_corners(world.camera, world.mount, position, attitude, world.runway.corners())
    count = len(times)
    found, unit = np.zeros(count, dtype=bool), np.full((count, 4, 2), np.nan)
    covariance, dof, score = np.full((count, 4, 2, 2), np.nan), np.full((count, 4), np.nan), np.zeros(count)
    for n, image in enumerate(rendered_images(approach, truth, times, None)):
        poses = in_distribution_only(detect_in_image(model, image, settings.conf), settings.alarm)  # type: ignore[arg-type]
        sure = 25.0 * np.eye(3), attitude[n], 1e-6 * np.eye(3)
        view = Viewpoint(world.camera, world.mount, position[n], *sure)
        chosen = associate(poses, view, world.runway.corners()).index
        if chosen is None:
            continue
        found[n], covariance[n], score[n] = True, poses.covariance[chosen], poses.scores[chosen]
        dof[n] = np.inf if poses.dof is None else poses.dof[chosen]
        root = np.linalg.cholesky(covariance[n])
        unit[n] = np.linalg.solve(root, (poses.mean[chosen] - exact[n])[..., None])[..., 0]
    return DetectorErrors(times, -position[:, 0], found, unit, covariance, dof, score)


@dataclass(frozen=True)
class DetectorModel:
    """Model of the detector's errors, estimated from measured flights, for sampling other flights.

    The error of a corner in stated standard deviations is the sum of a mean that depends on the distance, a part with
    correlation time ``PERSISTENCE_S``, a part with correlation time ``FLICKER_S``, and white noise. The three random
    parts share the correlation of the eight coordinates and one scale factor per flight.

    Attributes:
        flights: measured flights, the source of the stated covariances.
        edges: edges (D + 1,) of the distance bins.
        mean: mean error of each bin (D, 8).
        found: detection rate of each bin (D,).
        root: factor (8, 8) of the covariance about the mean.
        factors: root mean square error of each flight over that of all flights (F,).
    """

    flights: tuple[DetectorErrors, ...]
    edges: Array
    mean: Array
    found: Array
    root: Array
    factors: Array

    @classmethod
    def of(cls, flights: list[DetectorErrors]) -> DetectorModel:
        """Estimate the model from flights."""
        edges = np.array([0.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0, np.inf])
        unit = np.concatenate([each.unit.reshape(-1, 8) for each in flights])
        cell = np.digitize(np.concatenate([each.distance for each in flights]), edges) - 1
        found = np.concatenate([each.found for each in flights])
        cells = range(len(edges) - 1)
        mean = np.stack([np.nanmean(unit[cell == n], axis=0) for n in cells])
        rest = (unit - mean[cell])[found]
        size = np.sqrt(np.mean(rest**2))
        each_size = [np.sqrt(np.nanmean(each.unit**2)) for each in flights]
        return cls(
            tuple(flights), edges, mean, np.array([found[cell == n].mean() for n in cells]),
            np.linalg.cholesky(np.cov(rest.T)), np.array(each_size) / max(float(np.mean(each_size)), size),
        )  # fmt: skip

    def sampled(self, times: Array, distance: Array, exact: Array, rng: np.random.Generator) -> list[PoseDistributions]:
        """Detections of a flight: at times (N,), at these distances (N,), with exact corners (N, 4, 2)."""
        step = np.diff(times, prepend=times[0])[:, None]
        parts = [
            math.sqrt(share) * _lasting(np.exp(-step / seconds), rng, 8)
            for share, seconds in ((PERSISTENT, PERSISTENCE_S), (FLICKER, FLICKER_S))
        ]
        white = rng.standard_t(TAIL_DOF, (len(times), 8)) * math.sqrt((TAIL_DOF - 2) / TAIL_DOF)
        parts.append(math.sqrt(1 - PERSISTENT - FLICKER) * white)
        cell = np.digitize(distance, self.edges) - 1
        unit = self.mean[cell] + rng.choice(self.factors) * np.sum(parts, axis=0) @ self.root.T
        luck = ndtr(_lasting(np.exp(-step / SEEN_S), rng, 1)[:, 0])
        found = []
        other = self.flights[rng.integers(len(self.flights))]
        known = np.flatnonzero(other.found)
        for n in range(len(times)):
            like = known[np.argmin(np.abs(other.distance[known] - distance[n]))]
            seen = int(luck[n] < self.found[cell[n]] and np.isfinite(exact[n]).all())
            covariance = other.covariance[like][None]
            pixels = exact[n][None] + (np.linalg.cholesky(covariance) @ unit[n].reshape(1, 4, 2, 1))[..., 0]
            boxes = np.concatenate([pixels.min(1), pixels.max(1)], axis=1)
            every = PoseDistributions(
                boxes, other.score[like][None], pixels, covariance, covariance,
                keep=np.ones((1, 4), dtype=bool), dof=other.dof[like][None],
            )  # fmt: skip
            found.append(every[:seen])
        return found


def _lasting(memory: Array, rng: np.random.Generator, size: int) -> Array:
    """Stationary unit-variance paths (N, size) that keep a share (N, 1) of their value from step to step."""
    path = rng.standard_normal((len(memory), size))
    for n in range(1, len(path)):
        path[n] = memory[n] * path[n - 1] + np.sqrt(1 - memory[n] ** 2) * path[n]
    return path


def autocorrelation(flights: list[DetectorErrors]) -> dict[float, float]:
    """Mean autocorrelation of the eight coordinates, about zero, by lag in seconds."""
    result = {}
    for lag in LAGS_S:
        products, squares = 0.0, 0.0
        for each in flights:
            unit = each.unit.reshape(-1, 8)
            one, two = np.nonzero(np.abs(each.times - each.times[:, None] - lag) < 1e-6)
            product, square = unit[one] * unit[two], (unit[one] ** 2 + unit[two] ** 2) / 2
            known = np.isfinite(product)
            products, squares = products + product[known].sum(), squares + square[known].sum()
        result[lag] = float(products / squares)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--flights", type=int, default=24)
    given = parser.parse_args()
    flights = measured(given.work, given.flights)
    model = DetectorModel.of(flights)
    rows = [[f"{lag:g} s", f"{value:.2f}"] for lag, value in autocorrelation(flights).items()]
    say(markdown(["lag", "autocorrelation of corner errors"], rows))
    head = ["from the threshold", "found", "mean of the eight coordinates, in stated standard deviations"]
    cells = zip(model.edges[:-1], model.found, model.mean, strict=True)
    rows = [
        [f"over {edge:g} m", f"{rate:.0%}", ", ".join(f"{value:+.2f}" for value in mean)] for edge, rate, mean in cells
    ]
    say(markdown(head, rows))


if __name__ == "__main__":
    main()
