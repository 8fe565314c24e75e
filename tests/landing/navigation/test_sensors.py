"""Simulated sensors: geometry against central differences, stated errors, faults against no fault."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from halopose.errors import HaloposeError
from halopose.landing.navigation.sensors import (
    GNSS,
    IRS,
    RADIO,
    RADIO_CEILING,
    SIZES,
    Fault,
    GaussMarkov,
    IlsSite,
    Sensor,
    Sensors,
    Source,
    TrueTrajectory,
    in_order,
    simulate,
    vision,
)
from halopose.landing.navigation.terrain import LEVEL
from halopose.types import Array

SITE = IlsSite.of_runway(3000.0)
EXACT_GROUND = replace(LEVEL, sigma=0.0, growth=0.0)
POSITIONS = st.tuples(st.floats(-9000, -50), st.floats(-500, 500), st.floats(2, 900)).map(np.array)


def straight(
    duration: float = 20.0, start: Any = (-1500.0, 30.0, 95.0), velocity: Any = (70.0, -1.0, -3.5)
) -> TrueTrajectory:
    """A flight without acceleration, sampled coarsely."""
    times = np.linspace(0, duration, 41)
    velocities = np.tile(velocity, (times.size, 1))
    attitudes = np.tile([0.01, 0.05, -0.02], (times.size, 1))
    return TrueTrajectory(times, start + times[:, None] * velocities, velocities, 0 * velocities, attitudes)


def table(measurements: Any, source: str) -> tuple[Array, ...]:
    """Times (N,) and values (N, m) of one source."""
    mine = [m for m in measurements if m.source == source]
    return np.array([m.time for m in mine]), np.array([m.value for m in mine])


def central_differences(function: Callable[[Array], Array], at: Array, step: float) -> Array:
    sides = [(function(at + step * axis) - function(at - step * axis)) / (2 * step) for axis in np.eye(len(at))]
    return np.stack(sides, axis=-1)


@given(POSITIONS)
def test_ils_gradients_are_central_differences(position: Array) -> None:
    for angle in (SITE.localizer_angle, SITE.glide_slope_angle):

        def value(p: Array, f: Callable[[Array], Any] = angle) -> Array:
            return f(p[None])[0][0]

        numeric = central_differences(value, position, 1e-3)
        np.testing.assert_allclose(angle(position[None])[1][0], numeric, rtol=1e-6, atol=1e-11)


def test_ils_angles_equal_those_of_the_geometry() -> None:
    antenna = np.array(SITE.localizer)
    on_course = antenna + np.array([[-5000.0, 0.0, 200.0]])
    assert SITE.localizer_angle(on_course)[0] == 0
    left = antenna + np.array([[-1000.0, 1000 * math.tan(0.02), 50.0]])
    np.testing.assert_allclose(SITE.localizer_angle(left)[0], 0.02, rtol=1e-12)
    azimuth = np.linspace(-0.5, 0.5, 7)  # the glide path is a cone: any azimuth, the same angle
    ring = np.stack([-2000 * np.cos(azimuth), 2000 * np.sin(azimuth), 0 * azimuth + 2000 * math.tan(0.06)], axis=1)
    np.testing.assert_allclose(SITE.glide_slope_angle(SITE.glide_slope + ring)[0], 0.06 - math.radians(3), rtol=1e-12)


def test_truth_interpolates_cubics_exactly_and_angles_the_short_way() -> None:
    times = np.array([0.0, 0.7, 1.5, 3.0])
    factor, t = np.array([2.0, -1.0, 0.5]), times[:, None]
    yaw = np.stack([[3.1, -3.1, -3.0, -2.9], np.zeros(4), np.zeros(4)], axis=1)
    truth = TrueTrajectory(times, factor * t**3, 3 * factor * t**2, 6 * factor * t, yaw)
    at = np.linspace(0, 3, 31)
    np.testing.assert_allclose(truth.position(at), factor * at[:, None] ** 3, atol=1e-12)
    np.testing.assert_allclose(truth.velocity(at), 3 * factor * at[:, None] ** 2, atol=1e-12)
    np.testing.assert_allclose(truth.acceleration(at), 6 * factor * at[:, None], atol=1e-12)
    halfway = truth.attitude(np.array([0.35]))[0, 0]
    np.testing.assert_allclose(halfway, math.pi, atol=1e-12)  # from 3.1 on to -3.1, through pi and not zero


def test_gauss_markov_is_stationary_with_its_time_constant() -> None:
    paths, steps, interval, constant = 4000, 60, 0.5, 4.0
    bias = GaussMarkov((2.0,) * paths, constant).sample(steps, interval, np.random.default_rng(1))
    low, high = chi2.ppf([1e-5, 1 - 1e-5], paths) / paths
    spread = (bias / 2.0) ** 2
    assert low < spread[0].mean() < high
    assert low < spread[-1].mean() < high
    for lag in (1, 8, 30):
        correlation = np.mean(bias[lag] * bias[0]) / 4
        assert abs(correlation - math.exp(-lag * interval / constant)) < 5 / math.sqrt(paths)


def test_a_bias_that_never_forgets_is_constant() -> None:
    bias = GaussMarkov((1.0, 3.0)).sample(50, 0.1, np.random.default_rng(2))
    np.testing.assert_array_equal(bias, np.broadcast_to(bias[0], bias.shape))


@pytest.mark.parametrize("source", [source for source in SIZES if source != "vision"])
def test_noise_and_rate_are_as_stated(source: Source) -> None:
    """Without bias, what is left after the truth is white with the covariance that each measurement states."""
    truth = straight()
    sensors = Sensors()
    sensor = getattr(sensors, source)
    sensor = replace(sensor, bias=GaussMarkov((0.0,) * SIZES[source]))
    measured = [
        m for m in simulate(truth, replace(sensors, **{source: sensor}), 3, SITE, EXACT_GROUND) if m.source == source
    ]
    times, values = table(measured, source)
    np.testing.assert_allclose(np.diff(times), 1 / sensor.rate, rtol=1e-9)
    positions = truth.position(times)
    exact = {
        "irs": truth.acceleration(times),
        "attitude": truth.attitude(times),
        "gnss": positions,
        "localizer": np.arctan2(positions[:, 1:2], 3300 - positions[:, :1]),
        "glide_slope": np.arctan2(positions[:, 2:], np.linalg.norm(positions[:, :2] - [300, -120], axis=1)[:, None])
        - math.radians(3),
        "radio": positions[:, 2:],
    }[source]
    standard = np.linalg.solve(np.linalg.cholesky(measured[0].covariance), (values - exact).T).ravel()
    low, high = chi2.ppf([1e-4, 1 - 1e-4], standard.size)
    assert low < standard @ standard < high


def test_radio_bias_is_a_share_of_the_height() -> None:
    sensor = Sensor(10.0, (1e-9,), GaussMarkov((0.01,)))
    times, values = table(simulate(straight(), Sensors(radio=sensor), 4, SITE, EXACT_GROUND), "radio")
    share = values[:, 0] / straight().position(times)[:, 2] - 1
    np.testing.assert_allclose(share, share[0], atol=1e-8)
    assert 0 < abs(share[0]) < 0.05


def test_signals_end_at_their_range() -> None:
    times = np.linspace(0, 100, 101)
    positions = np.stack([50 * times - 3000, 0 * times, 1500 - 14 * times], axis=1)
    velocities = np.tile([50.0, 0.0, -14.0], (101, 1))
    measured = simulate(
        TrueTrajectory(times, positions, velocities, 0 * velocities, 0 * velocities), Sensors(), 0, SITE, EXACT_GROUND
    )
    assert table(measured, "radio")[0].min() >= (1500 - RADIO_CEILING) / 14
    assert table(measured, "glide_slope")[0].max() < 60  # over the threshold at 60 s
    assert table(measured, "gnss")[0].max() == 100


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        a.time == b.time and a.source == b.source and np.array_equal(a.value, b.value)
        for a, b in zip(one, other, strict=True)
    )


@given(st.integers(0, 2**32 - 1), st.sets(st.sampled_from(["gnss", "localizer", "radio", "irs", "attitude"])))
def test_sensors_do_not_disturb_each_other(seed: int, missing: Any) -> None:
    everything = simulate(straight(4.0), Sensors(), seed, SITE)
    fewer = simulate(straight(4.0), Sensors(**dict.fromkeys(missing)), seed, SITE)
    assert same(fewer, [m for m in everything if m.source not in missing])
    assert [m.time for m in everything] == sorted(m.time for m in everything)


def test_seeds_repeat_and_differ() -> None:
    one, again, other = (simulate(straight(4.0), Sensors(), seed, SITE) for seed in (7, 7, 8))
    assert same(one, again)
    assert not same(one, other)


def test_an_outage_only_takes_away() -> None:
    broken = Sensors(gnss=replace(GNSS, outages=((3.0, 5.0), (8.0, 8.5))))
    expected = [
        m
        for m in simulate(straight(), Sensors(), 5, SITE)
        if m.source != "gnss" or not (3.0 <= m.time < 5.0 or 8.0 <= m.time < 8.5)
    ]
    assert same(simulate(straight(), broken, 5, SITE), expected)


@pytest.mark.parametrize(
    ("fault", "added"),
    [
        (Fault(4.0, 9.0, "step", (3.0, -2.0, 1.0)), lambda t, noise: np.tile([3.0, -2.0, 1.0], (t.size, 1))),
        (Fault(4.0, 9.0, "ramp", 0.5), lambda t, noise: np.tile(0.5 * (t - 4.0)[:, None], 3)),
        (Fault(4.0, 9.0, "noise", 10.0), lambda t, noise: 9.0 * noise),
    ],
)
def test_faults_add_their_stated_error(fault: Fault, added: Callable[..., Any]) -> None:
    quiet = replace(GNSS, bias=GaussMarkov((0.0, 0.0, 0.0)))
    times, sound = table(simulate(straight(), Sensors(gnss=quiet), 6, SITE), "gnss")
    faulty_sensor = replace(quiet, faults=(fault,))
    faulty = table(simulate(straight(), Sensors(gnss=faulty_sensor), 6, SITE), "gnss")[1]
    during = (times >= 4.0) & (times < 9.0)
    np.testing.assert_array_equal(faulty[~during], sound[~during])
    noise = (sound - straight().position(times))[during]
    np.testing.assert_allclose((faulty - sound)[during], added(times[during], noise), atol=1e-9)


def test_a_stuck_sensor_repeats_its_last_value() -> None:
    stuck = Sensors(radio=replace(RADIO, faults=(Fault(4.0, 9.0, "stuck"),)))
    times, values = table(simulate(straight(), stuck, 6, SITE), "radio")
    before = np.flatnonzero(times < 4.0)[-1]
    during = (times >= 4.0) & (times < 9.0)
    np.testing.assert_array_equal(values[during], np.broadcast_to(values[before], values[during].shape))
    assert values[times >= 9.0][0] != values[before]


def test_vision_is_passed_on_as_given() -> None:
    positions, covariances = np.arange(6.0).reshape(2, 3), np.stack([np.eye(3), 4 * np.eye(3)])
    measured = vision([2.0, 1.0], positions, covariances)
    assert [m.time for m in in_order(measured)] == [1.0, 2.0]
    np.testing.assert_array_equal(table(measured, "vision")[1], positions)
    np.testing.assert_array_equal(measured[1].covariance, 4 * np.eye(3))


FLIGHT = straight()


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: replace(FLIGHT, positions=FLIGHT.positions[:, :2]), r"positions .* \(41, 3\), got \(41, 2\)"),
        (lambda: replace(FLIGHT, attitudes=FLIGHT.attitudes[1:]), r"attitudes .* \(41, 3\), got \(40, 3\)"),
        (lambda: replace(FLIGHT, velocities=FLIGHT.velocities * np.nan), "velocities .* finite"),
        (lambda: replace(FLIGHT, times=FLIGHT.times[::-1]), "later than the"),
        (lambda: replace(GNSS, rate=0.0), "above 0 Hz"),
        (lambda: replace(GNSS, noise=(1.0, 1.0, 0.0)), "noise should be above"),
        (lambda: replace(GNSS, noise=(1.0,)), "noise has 1 axes, its bias 3"),
        (lambda: replace(GNSS, outages=((2.0, 1.0),)), "an outage should end"),
        (lambda: replace(IRS, faults=(Fault(0.0, 1.0, "step", (1.0, 2.0)),)), "2 sizes, its sensor 3 axes"),
        (lambda: Fault(3.0, 3.0, "step"), "a fault should end"),
        (lambda: Fault(3.0, 4.0, cast(Any, "drift")), "unknown fault 'drift'"),
        (lambda: GaussMarkov((1.0,), 0.0), "time constant above 0"),
        (lambda: Sensors(radio=GNSS), "radio measures 1 values, its noise has 3"),
        (lambda: vision([0.0], np.zeros((1, 2)), np.zeros((1, 3, 3))), r"got \(1,\), \(1, 2\), \(1, 3, 3\)"),
    ],
)
def test_mistakes_are_named_in_one_line(mistake: Callable[..., Any], words: str) -> None:
    with pytest.raises(HaloposeError, match=words) as caught:
        mistake()
    assert "\n" not in str(caught.value)
