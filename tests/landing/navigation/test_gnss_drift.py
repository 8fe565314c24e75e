"""Slow drifts of GNSS: their effect on the filter is predicted exactly, detected, and included in the levels."""

from dataclasses import replace

import numpy as np
import pytest

from halopose.landing.flight import draw_initial_state, true_trajectory
from halopose.landing.navigation.fusion import consistency
from halopose.landing.navigation.gnss_drift import CHANCE, EVERY, LONGEST, SHARE, GnssDriftMonitor
from halopose.landing.navigation.gnss_drift import RATE as DRIFTING
from halopose.landing.navigation.motion_model import STATES, FusionSettings
from halopose.landing.navigation.navigator import NavigationState, Navigator
from halopose.landing.navigation.sensors import ATTITUDE, IRS, RADIO, Fault, IlsSite, Sensors, simulate
from halopose.landing.requirements import path_axes
from halopose.landing.world.approach import fly
from tests.helpers.values import present

RATE = 25.0
SENSORS = Sensors(
    irs=replace(IRS, rate=RATE, noise=(0.015,) * 3),
    attitude=replace(ATTITUDE, rate=RATE),
    radio=replace(RADIO, rate=5.0),
)
ALONE = replace(SENSORS, localizer=None, glide_slope=None, radio=None)
SETTINGS = FusionSettings(site=IlsSite(), irs_rate=RATE)
TRUTH = true_trajectory(fly(0, "clear", 50.0, start=4000.0))


def flown(
    seed: int, sensors: Sensors, until: float = 99.0, fault: Fault | None = None, gate: float = 0.999
) -> list[NavigationState]:
    """States after every GNSS position."""
    navigator = Navigator(draw_initial_state(TRUTH, seed), replace(SETTINGS, gate=gate))
    broken = sensors if fault is None else replace(sensors, gnss=replace(present(sensors.gnss), faults=(fault,)))
    states = []
    for measurement in simulate(TRUTH, broken, seed, SETTINGS.site):
        if measurement.source != "attitude" and measurement.time <= until:
            state = navigator.update(measurement)
            if measurement.source == "gnss":
                states.append(state)
    return states


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_shift_is_what_a_drift_does_to_the_filter(axis: int) -> None:
    """GNSS and IRS are linear: the states of a flight with a drift less those of one without are exactly it."""
    began = 10.0
    drift = Fault(began, 99.0, "ramp", tuple(0.3 * (n == axis) for n in range(3)))
    usual, drifting = (flown(1, ALONE, 20.0, fault, gate=1.0)[-1] for fault in (None, drift))
    ramps = usual.filters.gnss_drift
    row = int(np.flatnonzero((np.abs(ramps.since - began) < 1e-6) & (ramps.axis == axis))[0])
    moved = drifting.filters.states[0] - usual.filters.states[0]
    np.testing.assert_allclose(moved, 0.3 * ramps.shift[row], rtol=1e-6, atol=1e-9)
    found = drifting.filters.gnss_drift
    change = (found.evidence - ramps.evidence)[row] / ramps.information[row]
    assert change == pytest.approx(0.3, rel=1e-6)  # whatever the noise, the estimated rate rises by the drift
    np.testing.assert_allclose(found.information, ramps.information)


def test_without_a_drift_distances_are_standard_normal() -> None:
    last = np.array([flown(seed, ALONE, 14.9)[-1].filters.gnss_drift.distance for seed in range(16)])
    assert last.shape == (16, 9)
    assert abs(last.mean()) < 0.3
    assert 0.8 < last.std() < 1.2


def test_without_a_drift_the_covariance_is_that_of_the_errors_and_the_overbound_is_wider() -> None:
    """NEES over 30 flights was below its bounds while drifts that were not there stood in the covariance."""
    states = [flown(seed, SENSORS, 14.9)[-1] for seed in range(30)]
    errors = np.array([state.position - TRUTH.position(np.array([state.time]))[0] for state in states])
    covariances = np.array([state.covariance[:3, :3] for state in states])
    overbounds = np.array([state.overbound for state in states])
    stated, wider = (
        np.einsum("ni,nij,nj->n", errors, np.linalg.inv(each), errors) for each in (covariances, overbounds)
    )
    assert consistency(stated, 3, 0.99).consistent
    assert wider.mean() < 0.9 * stated.mean()
    assert np.linalg.eigvalsh(overbounds - covariances).min() > -1e-9


def test_gnss_drift_without_vision_is_found_by_the_irs_and_bounded_meanwhile() -> None:
    """Half a metre a second along the path once passed five sigma of the filter without a word."""
    states = flown(0, SENSORS, fault=Fault(15.0, 99.0, "ramp", (0.5, 0.0, 0.0)))
    times = np.array([state.time for state in states])
    position = np.array([state.position for state in states])
    axes = path_axes()
    error = np.abs((position - TRUTH.position(times)) @ axes.T)
    sigma = np.sqrt([np.diagonal(axes @ state.overbound @ axes.T) for state in states])
    assert error.max() > 12.0  # and nothing takes it away
    assert (error < 5 * sigma).all()
    flagged = np.array([state.flagged for state in states])
    assert not flagged[times < 15.0].any()
    assert flagged[times > 45.0].all()


def test_old_suspicions_are_dropped() -> None:
    ramps = GnssDriftMonitor.none()
    for time in np.arange(0.0, 100.0, 0.5):
        ramps = ramps.at(time)
    assert len(ramps.since) == 3 * LONGEST / EVERY
    known = replace(ramps, information=np.ones(len(ramps.since)), evidence=np.full(len(ramps.since), 2 * CHANCE))
    assert len(known.at(200.0).since) == len(known.since) + 3


def test_the_spread_is_that_of_drifts_drawn_and_weighed_by_what_was_seen_of_them() -> None:
    """Monte Carlo posterior: drawn from the prior and weighted by the likelihood."""
    rng = np.random.default_rng(0)
    since, information = np.array([0.0, 5.0]), np.array([270.0, 60.0])
    evidence, shift = np.array([28.0, 12.0]), np.zeros((2, STATES))
    shift[:, 0], shift[:, 2] = (39.0, 20.0), (0.5, 0.1)
    ramps = GnssDriftMonitor(since, np.zeros(2, dtype=np.int64), shift, evidence, information)
    rate = DRIFTING * rng.standard_normal((2, 400_000))
    weight = np.exp(rate * evidence[:, None] - 0.5 * rate**2 * information[:, None]) * SHARE * EVERY / LONGEST
    moved = rate[..., None] * shift[:, None, :3]
    drawn = np.einsum("hn,hni,hnj->ij", weight, moved, moved) / (weight.sum() + (1 - SHARE) * rate.shape[1])
    np.testing.assert_allclose(ramps.spread, drawn, rtol=0.02, atol=1e-3)


def test_a_drift_that_could_not_have_been_noticed_is_in_the_overbound() -> None:
    """Without any information a drift is as likely as it was; with much of it and no evidence it is ruled out."""
    ramps = GnssDriftMonitor.none().at(0.0)
    shift = np.zeros((3, STATES))
    shift[range(3), range(3)] = 30.0
    unseen = replace(ramps, shift=shift)
    expected = SHARE * EVERY / LONGEST / (SHARE * EVERY / LONGEST + 1 - SHARE) * (30 * DRIFTING) ** 2
    np.testing.assert_allclose(unseen.spread, expected * np.eye(3))
    known = replace(unseen, information=np.full(3, 1e6))
    assert np.abs(known.spread).max() < 1e-3 * expected
    np.testing.assert_array_equal(GnssDriftMonitor.none().spread, 0)
