"""The monitor's false-alarm probability over whole streams, its delay, and its oracle."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from halopose.calibration.calibration_monitor import CalibrationMonitor
from halopose.errors import HaloposeError
from halopose.runtime.predict import _OnlineRanks


def conformal(values: np.ndarray, known: np.ndarray) -> list[float]:
    """p-values (1 + number of known values as large) / (1 + n)."""
    ordered = np.sort(known)
    return ((1 + len(known) - np.searchsorted(ordered, values)) / (1 + len(known))).tolist()


@pytest.mark.parametrize("watch", ["novelty", "calibration"])
def test_false_alarms_over_a_thousand_exchangeable_streams(watch: str) -> None:
    alarms = 0
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        monitor = CalibrationMonitor(0.01, calibration_size=60, watch=watch, seed=seed)  # type: ignore[arg-type]
        for p in conformal(rng.normal(size=150), rng.normal(size=60)):
            monitor.update(p)
        alarms += monitor.state.alarmed
    assert alarms <= 10


def test_a_shift_is_found_soon_after_a_long_quiet_stream() -> None:
    delays = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        known = rng.normal(size=500)
        monitor = CalibrationMonitor(0.01, calibration_size=500, seed=seed)
        for p in conformal(rng.normal(size=400), known):
            monitor.update(p)
        for p in conformal(rng.normal(1.5, 1, size=100), known):
            monitor.update(p)
        at = monitor.state.alarmed_at
        delays.append(math.inf if at is None or at <= 400 else at - 400)
    assert np.quantile(delays, 0.95) <= 60


def test_ranks_of_an_exchangeable_stream_are_uniform_whatever_the_calibration_set() -> None:
    """With five calibration values and no online ranks, p-values would be six numbers."""
    found = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        ranks = _OnlineRanks(5, seed)
        found += [ranks.uniform(p) for p in conformal(rng.normal(size=20), rng.normal(size=5))][-1:]
    assert stats.kstest(found, "uniform").pvalue > 0.01


def test_ranks_are_the_conformal_p_values_of_mapie() -> None:
    """Both rank a value among the calibration values and the stream so far; ties of the stream are drawn at random."""
    mapie = pytest.importorskip("mapie.exchangeability_testing")
    rng = np.random.default_rng(5)
    known, stream = rng.normal(size=4000), rng.normal(0.3, 1.2, size=150)
    judge, ranks = mapie.OnlineMartingaleTest(random_state=0), _OnlineRanks(len(known), 0)
    for n, (value, p) in enumerate(zip(stream, conformal(stream, known), strict=True)):
        history = np.concatenate([known, stream[:n]])
        ties = conformal(stream[:n], known).count(p)
        assert abs(ranks.uniform(p) - judge.compute_p_value(value, history)) <= (ties + 1) / (len(history) + 1)


def test_the_martingale_is_a_mean_of_products_of_beta_densities() -> None:
    """Without a change of stakes: the sum over starts and bets, computed one by one."""
    rng = np.random.default_rng(3)
    values = rng.uniform(size=12)
    monitor = CalibrationMonitor(0.01)
    for p in values:
        state = monitor.update(float(p))
    bets = [(0.1, 1.0), (0.3, 1.0), (0.5, 1.0), (0.75, 1.0)]
    left = [1 / math.log2(2 + n / 8) for n in range(13)]
    total = left[12]
    for start in range(12):
        stake = left[start] - left[start + 1]
        total += stake * np.mean([np.prod(stats.beta.pdf(values[start:], a, b)) for a, b in bets])
    assert state.evidence == pytest.approx(total)


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_labels_show_errors_larger_or_smaller_than_stated(factor: float) -> None:
    monitor, draw = CalibrationMonitor(0.01, watch="calibration"), random.Random(0)
    for _ in range(400):
        monitor.update(math.exp(-(factor**2) * draw.expovariate(1.0)))  # survival of a squared distance
    assert monitor.state.alarmed


def test_settings_and_values_out_of_range_are_refused() -> None:
    for wrong in ({"alarm": 0.0}, {"alarm": 1.0}, {"calibration_size": 0}, {"watch": "birds"}):
        with pytest.raises(HaloposeError):
            CalibrationMonitor(**wrong)
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(HaloposeError):
            CalibrationMonitor().update(value)
