"""One network with our recalibration and smoother against the ensemble Kalman smoother (EKS) with five networks.

    eks singlecam --input-dir eks/data/mirror-mouse --save-dir smoothed
    python -m research.specialists eks/data/mirror-mouse smoothed/eks_singlecam.csv

The published predictions of five networks are of a film of 2,000 frames, which shows a mouse from the side and, in a
mirror, from below. A paw has the same horizontal position in both views up to a line, so that the views check each
other without labels: the disagreement is the position in one view less the line through the other. The line, the
dispersion models and all factors are fitted on the first half of the film; the second half is measured. Intervals
resample blocks of 50 frames. Neither the data nor EKS are part of this repository. EKS runs in its own environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats
from scipy.optimize import minimize

from halopose.cli.terminal import say
from halopose.data.formats.reading import read_table
from halopose.tracking.motion import MeasurementSeries, run_smoother
from halopose.tracking.motion_fitting import fit_motion
from halopose.types import Array
from research.tables import markdown

BLOCK, DRAWS = 50, 1000
SIZE, RATE = 150.0, 250.0  # pixels from nose to tail in one view; frames per second of the film
DOF = 4.0  # of the Student-t of single predictions, as the smoother takes it
PAWS = ("paw1LH", "paw2LF", "paw3RF", "paw4RH")


@dataclass(frozen=True)
class Estimate:
    """Horizontal positions of the paws in both views.

    Attributes:
        place: Positions (T, 4, 2): from the side, from below.
        variance: Stated variances (T, 4, 2).
    """

    place: Array
    variance: Array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", type=Path, help="folder of csv files, one for each network")
    parser.add_argument("smoothed", type=Path, help="csv file of eks singlecam")
    given = parser.parse_args()
    networks = [Network.read(path) for path in sorted(given.networks.glob("*.csv"))]
    ensemble = np.stack([network.keypoints for network in networks])
    rows = []
    for name, make in METHODS.items():
        rows.append([name, "1", *judge([make(network) for network in networks])])
    spread = [Estimate(np.median(ensemble, axis=0)[..., 0], ensemble.var(axis=0)[..., 0])]
    rows.append(["median and variance of five networks", "5", *judge(spread)])
    rows.append(["EKS", "5", *judge([read_eks(given.smoothed)])])
    figures = [
        "disagreement, px",
        "95th percentile, px",
        "in 95 %, as stated",
        "in 95 %, one factor",
        "NLL, one factor",
    ]
    say(markdown(["method", "networks", *figures], rows))


@dataclass(frozen=True)
class Network:
    """Predictions of a network.

    Attributes:
        keypoints: Keypoints (T, 4, 2, 2) by paw and view.
        scores: Likelihoods (T, 4, 2).
    """

    keypoints: Array
    scores: Array

    @classmethod
    def read(cls, path: Path) -> Network:
        table = read_table(path)
        columns = [[table.names.index(f"{paw}_{view}") for view in ("top", "bot")] for paw in PAWS]
        return cls(table.keypoints[:, columns], table.scores[:, columns])

    def dispersion(self) -> Array:
        """Standard deviations (T, 4, 2) from the score, fitted on the disagreement of the first half."""
        half = len(self.scores) // 2
        doubt = np.log(1.01 - self.scores)
        slope, offset = lines(self.keypoints[..., 0])
        gap = self.keypoints[:half, :, 0, 0] - offset - slope * self.keypoints[:half, :, 1, 0]

        def deviations(parameters: Array, doubt: Array) -> Array:
            return np.exp(parameters[:2] + np.exp(parameters[2]) * (doubt - np.log(0.01)))

        def loss(parameters: Array) -> float:
            each = deviations(parameters, doubt[:half])
            total = np.sqrt(each[..., 0] ** 2 + (slope * each[..., 1]) ** 2)
            return -float(stats.t.logpdf(gap / total, DOF).mean() - np.log(total).mean())

        fitted = minimize(loss, np.array([0.5, 0.5, -1.0]), method="Nelder-Mead").x
        return deviations(fitted, doubt)

    def series(self) -> MeasurementSeries:
        """The predictions with their dispersions, as the smoother takes them."""
        count = len(self.scores)
        deviation = self.dispersion().reshape(count, -1)
        factor = deviation[..., None, None] * np.eye(2)
        used, nu = np.ones(deviation.shape, dtype=bool), np.full(deviation.shape, DOF)
        return MeasurementSeries(self.keypoints.reshape(count, -1, 2), factor, used, nu, SIZE, 1 / RATE)


def single(network: Network) -> Estimate:
    """Predictions as they are, with the variance of the score's Student-t."""
    return Estimate(network.keypoints[..., 0], network.dispersion() ** 2 * DOF / (DOF - 2))


def smoothed(network: Network) -> Estimate:
    """Our smoother with the motion of the first half, plus the part of the dispersion that it takes for lasting."""
    series = network.series()
    motion = fit_motion([series.first(len(series) // 2)], series.seen.shape[1])
    place, spread = run_smoother(series, motion)[0].place
    lasting = float(motion.share) * network.dispersion() ** 2 * DOF / (DOF - 2)
    return Estimate(place[..., 0].reshape(lasting.shape), spread[..., 0, 0].reshape(lasting.shape) + lasting)


METHODS: dict[str, Callable[[Network], Estimate]] = {
    "one network, score-only": single,
    "one network, score-only, smoothed": smoothed,
}


def read_eks(path: Path) -> Estimate:
    """Smoothed positions and posterior variances of EKS."""
    rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
    place = {(part, coord): n for n, (part, coord) in enumerate(zip(rows[1], rows[2], strict=True))}
    values = np.array([[float(value or "nan") for value in row] for row in rows[3:]])

    def columns(coord: str) -> Array:
        return np.stack(
            [np.stack([values[:, place[f"{paw}_{v}", coord]] for v in ("top", "bot")], -1) for paw in PAWS], 1
        )

    return Estimate(columns("x"), columns("x_posterior_var"))


def lines(place: Array) -> tuple[Array, Array]:
    """Slopes and offsets (4,) from positions (T, 4, 2): fitted on the first half without its worst tenth."""
    found = []
    for paw in range(place.shape[1]):
        side, below = place[: len(place) // 2, paw].T
        good = np.ones(len(side), dtype=bool)
        for _ in range(5):
            line = np.polyfit(below[good], side[good], 1)
            left = np.abs(side - np.polyval(line, below))
            good = left <= np.quantile(left, 0.9)
        found.append(line)
    slope, offset = np.array(found).T
    return slope, offset


def judge(estimates: Sequence[Estimate]) -> list[str]:
    """Figures of the second half, means over the networks, with intervals over blocks of frames."""
    gaps, sigmas, factors = [], [], []
    for one in estimates:
        half = len(one.place) // 2
        slope, offset = lines(one.place)
        gap = one.place[..., 0] - offset - slope * one.place[..., 1]
        sigma = np.sqrt(one.variance[..., 0] + slope**2 * one.variance[..., 1])
        factors.append(np.quantile(np.abs(gap[:half] / sigma[:half]), 0.95) / 1.96)
        gaps.append(gap[half:])
        sigmas.append(sigma[half:])
    gap, sigma = np.array(gaps), np.array(sigmas)
    ratio, factor = np.abs(gap) / sigma / 1.96, np.array(factors)[:, None, None]
    density = -stats.norm.logpdf(gap, scale=sigma * factor)

    def interval(of: Callable[[Array], float]) -> str:
        blocks = gap.shape[1] // BLOCK
        rng, draws = np.random.default_rng(0), []
        for _ in range(DRAWS):
            frames = (rng.integers(blocks, size=blocks)[:, None] * BLOCK + np.arange(BLOCK)).ravel()
            draws.append(of(frames))
        low, high = np.quantile(draws, [0.025, 0.975])
        return f"{of(np.arange(gap.shape[1])):.3g} ({low:.3g} to {high:.3g})"

    return [
        interval(lambda frames: float(np.abs(gap[:, frames]).mean())),
        interval(lambda frames: float(np.quantile(np.abs(gap[:, frames]), 0.95))),
        interval(lambda frames: float((ratio[:, frames] <= 1).mean())),
        interval(lambda frames: float((ratio[:, frames] / factor <= 1).mean())),
        interval(lambda frames: float(density[:, frames].mean())),
    ]


if __name__ == "__main__":
    main()
