"""The fusion filter against central differences, filterpy and chi-square distributions, and with invalid inputs."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from filterpy.common import van_loan_discretization
from filterpy.kalman import ExtendedKalmanFilter, KalmanFilter
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from halopose.errors import HaloposeError
from halopose.landing.navigation.fusion import FusedTrack, consistency, fuse, nees
from halopose.landing.navigation.motion_model import (
    BIAS,
    STATES,
    FusionSettings,
    InitialState,
    observe,
    transition,
)
from halopose.landing.navigation.sensors import (
    ATTITUDE,
    GLIDE_SLOPE,
    GNSS,
    IRS,
    LOCALIZER,
    RADIO,
    SIZES,
    GaussMarkov,
    IlsSite,
    Measurement,
    Sensors,
    Source,
    TrueTrajectory,
    in_order,
    simulate,
    vision,
)
from halopose.types import Array

SEEDS = st.integers(0, 2**32 - 1)
SITE = IlsSite()
CORRECTING: list[Source] = ["gnss", "localizer", "glide_slope", "radio", "vision"]
RUNS = 24
SLOW_IRS = replace(IRS, rate=25.0)  # a quarter of the usual rate, for speed
SETTINGS = FusionSettings(irs_rate=25.0)
BLIND = (6.0, 10.0)  # everything but the IRS is silent
START = np.diag([100.0, 100.0, 100.0, 4.0, 4.0, 4.0])


def approach(duration: float = 16.0) -> TrueTrajectory:
    """A three-degree descent that weaves, to 100 m before the threshold."""
    t = np.arange(0, duration + 0.01, 0.02)
    ahead, sway, zero = 70 * (duration - t) + 100, 0.5 * t, 0 * t
    positions = np.stack([-ahead, 15 * np.cos(sway), 15 + 0.052 * ahead + 2 * np.sin(sway)], axis=1)
    velocities = np.stack([zero + 70, -7.5 * np.sin(sway), np.cos(sway) - 0.052 * 70], axis=1)
    accelerations = np.stack([zero, -3.75 * np.cos(sway), -0.5 * np.sin(sway)], axis=1)
    return TrueTrajectory(t, positions, velocities, accelerations, np.zeros((t.size, 3)))


TRUTH = approach()


def start(rng: np.random.Generator, covariance: Array = START) -> InitialState:
    error = np.linalg.cholesky(covariance) @ rng.standard_normal(6)
    return InitialState(0.0, TRUTH.positions[0] + error[:3], TRUTH.velocities[0] + error[3:], covariance)


def camera(rng: np.random.Generator, rate: float = 10.0, outages: Any = ()) -> list[Measurement]:
    """Positions as vision gives them: uncertain mostly along the line of sight, the more the farther."""
    times = np.arange(0, 16, 1 / rate)
    for begin, end in outages:
        times = times[(times < begin) | (times >= end)]
    positions = TRUTH.position(times)
    sight = positions / np.linalg.norm(positions, axis=1)[:, None]
    far = np.linalg.norm(positions, axis=1)[:, None, None]
    covariances = (4e-4 * far + 0.1) ** 2 * np.eye(3) + (6e-3 * far) ** 2 * sight[:, :, None] * sight[:, None, :]
    noise = np.linalg.cholesky(covariances) @ rng.standard_normal((times.size, 3, 1))
    return vision(times, positions + noise[..., 0], covariances)


def on_board(**changes: Any) -> Sensors:
    return replace(Sensors(irs=SLOW_IRS, attitude=None), **changes)


@pytest.fixture(scope="module")
def flights() -> list[FusedTrack]:
    """Two dozen flights, consistent by construction, with a blind stretch in the middle."""
    outages = (BLIND,)
    gnss, localizer, glide_slope, radio = (
        replace(sensor, rate=min(sensor.rate, 10.0), outages=outages)
        for sensor in (GNSS, LOCALIZER, GLIDE_SLOPE, RADIO)
    )
    sensors = Sensors(gnss, localizer, glide_slope, radio, SLOW_IRS, attitude=None)
    tracks = []
    for seed in range(RUNS):
        rng = np.random.default_rng([seed, 99])
        measured = simulate(TRUTH, sensors, seed) + camera(rng, rate=5.0, outages=outages)
        tracks.append(fuse(measured, start(rng), replace(SETTINGS, gate=1.0), np.arange(6.2, 10, 0.2)))
    return tracks


def random_state(rng: np.random.Generator) -> Any:
    state = rng.standard_normal(STATES)
    state[:3] = rng.uniform([-6000, -300, 5], [-100, 300, 600])
    state[BIAS["radio"]] *= 0.01
    return state


@given(SEEDS, st.sampled_from(CORRECTING))
def test_measurement_jacobians_are_central_differences(seed: int, source: Source) -> None:
    state = random_state(np.random.default_rng(seed))
    rng = np.random.default_rng(seed)
    size = SIZES[source]
    given = Measurement(0.0, source, np.zeros(size), np.eye(size), rng.normal(size=(3, 3)), rng.normal(size=(3, 3)))
    (jacobian,) = observe(given, state[None], FusionSettings(site=SITE))[1]
    step = 1e-3
    high, low = (observe(given, state + sign * step * np.eye(STATES), FusionSettings(site=SITE))[0] for sign in (1, -1))
    np.testing.assert_allclose(jacobian, ((high - low) / (2 * step)).T, rtol=1e-6, atol=1e-8)


def test_transition_is_the_integral_of_the_motion() -> None:
    """Biases that stay: exact, against Van Loan's matrix exponential."""
    still = GaussMarkov((0.1,) * 3)
    steady = replace(SETTINGS, irs_bias=still, gnss_bias=still)
    density = 0.3**2 / 25
    rates = np.zeros((9, 9))
    rates[:3, 3:6], rates[3:6, 6:] = np.eye(3), -np.eye(3)
    drive = np.zeros((9, 9))
    drive[3:6, 3:6] = math.sqrt(density) * np.eye(3)
    step, noise = transition(0.13, density * np.eye(3), steady)
    np.testing.assert_allclose(step[3:5, 16:18], 0.13 * 9.80665 * np.eye(2))  # a nose too high: pushed back
    expected_step, expected_noise = van_loan_discretization(rates, drive, 0.13)
    np.testing.assert_allclose(step[:9, :9], expected_step, atol=1e-12)
    np.testing.assert_allclose(noise[:9, :9], expected_noise, atol=1e-12)


@given(st.floats(0.001, 2.0), st.floats(0.01, 0.99), SEEDS)
def test_a_step_in_two_parts_is_the_same_step(dt: float, share: float, seed: int) -> None:
    root = np.random.default_rng(seed).standard_normal((3, 3))
    whole = transition(dt, root @ root.T, SETTINGS, driven=False)
    first = transition(share * dt, root @ root.T, SETTINGS, driven=False)
    second = transition((1 - share) * dt, root @ root.T, SETTINGS, driven=False)
    np.testing.assert_allclose(second[0] @ first[0], whole[0], atol=1e-12)
    np.testing.assert_allclose(second[0] @ first[1] @ second[0].T + second[1], whole[1], rtol=1e-9, atol=1e-12)


def test_bias_variance_is_stationary() -> None:
    step, noise = transition(0.7, np.eye(3), SETTINGS)
    variance = np.diag(SETTINGS.bias_variance)
    np.testing.assert_allclose(step[6:, 6:] @ variance @ step[6:, 6:].T + noise[6:, 6:], variance, rtol=1e-12)


def reference(measured: Any, initial: InitialState, filter_: Any) -> tuple[Array, Array]:
    """The same flight through filterpy, IRS and all; returns states and covariances after each measurement."""
    filter_.x = np.concatenate([initial.position, initial.velocity, np.zeros(STATES - 6)])
    filter_.P = np.zeros((STATES, STATES))
    filter_.P[:6, :6], filter_.P[6:, 6:] = initial.covariance, np.diag(SETTINGS.bias_variance)
    push, now, acceleration, density = np.zeros((STATES, 3)), 0.0, np.zeros(3), np.eye(3)
    states, covariances = [], []
    for m in measured:
        dt = m.time - now
        if dt > 0:
            push[:3], push[3:6] = dt**2 / 2 * np.eye(3), dt * np.eye(3)
            filter_.F, filter_.Q = transition(dt, density, SETTINGS)
            filter_.B = push
            filter_.predict(u=acceleration)
            now = m.time
        if m.source == "irs":
            ramp = m.value - acceleration if m.time > 0 else np.zeros(3)
            filter_.x += np.concatenate([ramp * 0.04**2 / 6, ramp * 0.04 / 2, np.zeros(STATES - 6)])
            acceleration, density = m.value, m.covariance / SETTINGS.irs_rate
        elif isinstance(filter_, ExtendedKalmanFilter):
            filter_.update(
                m.value,
                lambda x, m=m: observe(m, x[None], FusionSettings(site=SITE))[1][0],
                lambda x, m=m: observe(m, x[None], FusionSettings(site=SITE))[0][0],
                R=m.covariance,
            )
        else:
            filter_.update(m.value, R=m.covariance, H=observe(m, filter_.x[None], FusionSettings(site=SITE))[1][0])
        if m.source != "irs":
            states.append(filter_.x.copy())
            covariances.append(filter_.P.copy())
    return np.array(states), np.array(covariances)


@pytest.mark.parametrize("kind", [KalmanFilter, ExtendedKalmanFilter])
def test_agrees_with_filterpy(kind: type[Any]) -> None:
    """KalmanFilter on what is linear, GNSS and vision; ExtendedKalmanFilter on all sources.

    The reference moves its covariance with every sample of the IRS, the navigator from one update to the next, so
    that biases decay a little otherwise in between.
    """
    rng = np.random.default_rng(11)
    linear = kind is KalmanFilter
    sensors = on_board(localizer=None, glide_slope=None, radio=None) if linear else on_board()
    measured = in_order(simulate(TRUTH, sensors, 11) + camera(rng))
    initial = start(rng)
    track = fuse(measured, initial, replace(SETTINGS, gate=1.0))
    states, covariances = reference(measured, initial, kind(dim_x=STATES, dim_z=3, dim_u=3))
    np.testing.assert_allclose(track.states, states, rtol=1e-4, atol=1e-4)
    sigma = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2))
    sigma[sigma == 0] = 1.0  # constants that are known exactly
    scale = sigma[:, :, None] * sigma[:, None]
    np.testing.assert_allclose(track.covariances / scale, covariances / scale, atol=1e-3)


def anything(rng: np.random.Generator) -> list[Measurement]:
    """Up to forty measurements of any source at any time, variances over twelve decades, values far off."""
    measured = []
    for _ in range(rng.integers(41)):
        source: Source = rng.choice(["irs", *CORRECTING]).item()
        root = rng.standard_normal((SIZES[source], SIZES[source]))
        covariance = 10 ** rng.uniform(-6, 6) * (root @ root.T + 0.01 * np.eye(SIZES[source]))
        value = 10 ** rng.uniform(-3, 4) * rng.standard_normal(SIZES[source])
        measured.append(Measurement(rng.uniform(0, 20), source, value, covariance))
    return measured


@given(SEEDS, st.sampled_from([0.5, 0.999, 1.0]), st.floats(0.1, 3))
@settings(max_examples=20, deadline=None)
def test_covariances_stay_symmetric_and_positive(seed: int, gate: float, patience: float) -> None:
    measured = anything(np.random.default_rng(seed))
    track = fuse(measured, start(np.random.default_rng(0)), replace(SETTINGS, gate=gate, patience=patience))
    np.testing.assert_array_equal(track.covariances, np.swapaxes(track.covariances, 1, 2))
    variance = np.diagonal(track.covariances, axis1=1, axis2=2)
    known = np.isin(np.arange(STATES), (24, 25))  # clock and focal length are exact here
    assert (variance[:, ~known] > 0).all()
    assert not track.covariances[:, known].any()
    deviation = np.sqrt(variance[:, ~known])
    correlation = track.covariances[:, ~known][:, :, ~known] / (deviation[:, :, None] * deviation[:, None, :])
    assert (np.linalg.eigvalsh(correlation) > -1e-9).all()
    assert len(track.times) + len(track.irs_times) + len(track.ignored) == len(measured)
    assert (np.diff(track.times) >= 0).all()
    assert (track.levels > 0).all()


def test_nees_is_chi_square_over_flights(flights: list[FusedTrack]) -> None:
    """Before, at the end of and after the blind stretch; mean over all flights at one instant each."""
    for time in (1.0, 4.0, 5.9, 10.0, 10.5, 15.9):
        row = np.searchsorted(flights[0].times, time)
        for dof in (3, 6):
            values = [nees(track, TRUTH, dof)[row] for track in flights]
            assert consistency(values, dof, 0.998).consistent, (time, dof)


def test_nis_is_chi_square_for_every_source(flights: list[FusedTrack]) -> None:
    for source in CORRECTING:
        pooled = np.concatenate([track.nis_of(source) for track in flights])
        found = consistency(pooled, SIZES[source], 0.95)
        assert abs(found.mean / SIZES[source] - 1) < 0.06
        assert abs(found.inside - 0.95) < 0.01


def test_inconsistency_is_found(flights: list[FusedTrack]) -> None:
    """The same flights, to a filter that believes GNSS to have no bias, fail the same test."""
    trusting = replace(SETTINGS, gate=1.0, gnss_bias=GaussMarkov((1e-6,) * 3))
    values = []
    for seed in range(10):
        rng = np.random.default_rng([seed, 99])
        track = fuse(simulate(TRUTH, on_board(), seed), start(rng), trusting)
        values.append(nees(track, TRUTH, 3)[-1])
    assert not consistency(values, 3, 0.998).consistent


def test_covariance_grows_through_an_outage_and_shrinks_after(flights: list[FusedTrack]) -> None:
    track = flights[0]
    spread = np.linalg.eigvalsh(track.output.covariances)
    assert not ((track.times >= BLIND[0] + 0.2) & (track.times < BLIND[1])).any()
    assert (np.diff(spread, axis=0) > 0).all()
    assert (np.linalg.eigvalsh(track.covariances[-1, :3, :3]) < spread[-1]).all()


def test_without_irs_the_filter_coasts() -> None:
    """The velocity stays and its variance grows with the stated density, whatever the steps."""
    fixes = vision([0.0, 0.3, 5.0], np.zeros((3, 3)), np.tile(1e12 * np.eye(3), (3, 1, 1)))  # they tell nothing
    track = fuse(fixes, InitialState(0.0, [0, 0, 9], [70, 0, 0], np.eye(6)), replace(SETTINGS, coasting=0.7))
    np.testing.assert_allclose(track.positions[-1], [350, 0, 9], atol=1e-6)
    np.testing.assert_allclose(np.diag(track.covariances[-1])[3:6], 1 + 0.7 * 5, rtol=1e-6)


def test_an_irs_sample_counts_for_its_hold() -> None:
    push = Measurement(0.0, "irs", np.array([2.0, 0.0, 0.0]), 1e-12 * np.eye(3))
    last = vision([3.0], np.zeros((1, 3)), 1e12 * np.eye(3)[None])
    track = fuse([push, *last], InitialState(0.0, [0, 0, 9], [0, 0, 0], np.eye(6)), replace(SETTINGS, irs_hold=0.5))
    np.testing.assert_allclose(track.states[-1, 3:6], [1.0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(track.positions[-1, 0], 0.25 + 2.5, atol=1e-6)


def error_at(track: FusedTrack, time: float) -> float:
    row = np.searchsorted(track.times, time) - 1
    return float(np.linalg.norm(track.positions[row] - TRUTH.position(track.times[row : row + 1])[0]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"value": np.array([1.0, np.nan, 2.0])}, "vision at 1.000 s: its value is not finite"),
        ({"covariance": np.diag([1.0, np.inf, 1.0])}, "vision at 1.000 s: its covariance is not finite"),
        ({"time": -0.5}, "vision at -0.500 s: before the start at 0.000 s"),
        ({"time": math.nan}, "vision at nan s: its time is not finite"),
    ],
)
def test_unusable_measurements_are_skipped_with_a_reason(change: dict[str, Any], reason: str) -> None:
    good = Measurement(1.0, "vision", np.array([-900.0, 0.0, 50.0]), np.eye(3))
    later = replace(good, time=2.0)
    initial = start(np.random.default_rng(0))
    track = fuse([replace(good, **change), later], initial, SETTINGS)
    assert track.ignored == (reason,)
    np.testing.assert_array_equal(track.states, fuse([later], initial, SETTINGS).states)


FIX = Measurement(1.0, "vision", np.zeros(3), np.eye(3))
ORIGIN = InitialState(0.0, np.zeros(3), np.zeros(3), np.eye(6))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (
            lambda: fuse([replace(FIX, covariance=np.diag([1.0, -1.0, 1.0]))], ORIGIN),
            "vision at 1.000 s: .* definite",
        ),
        (lambda: fuse([replace(FIX, covariance=np.ones((3, 3)))], ORIGIN), "not symmetric positive definite"),
        (lambda: fuse([replace(FIX, covariance=np.eye(3) + np.eye(3, k=1))], ORIGIN), "not symmetric positive"),
        (lambda: fuse([replace(FIX, value=np.zeros(2))], ORIGIN), r"should be \(3,\) .* got \(2,\) and \(3, 3\)"),
        (
            lambda: fuse([replace(FIX, covariance=np.eye(2))], ORIGIN),
            r"covariance \(3, 3\), got \(3,\) and \(2, 2\)",
        ),
        (lambda: fuse([replace(FIX, source=cast(Any, "radar"))], ORIGIN), "unknown source 'radar'"),
        (lambda: fuse([], replace(ORIGIN, position=np.zeros(2))), r"got \(2,\), \(3,\), \(6, 6\)"),
        (lambda: fuse([], replace(ORIGIN, covariance=-np.eye(6))), "not symmetric positive definite"),
        (lambda: fuse([], replace(ORIGIN, velocity=[np.nan] * 3)), "not finite"),
        (lambda: replace(SETTINGS, gate=0.0), "gate should be"),
        (lambda: replace(SETTINGS, patience=0.0), "patience should be above"),
        (lambda: replace(SETTINGS, lag=-1.0), "lag should be 0"),
        (lambda: replace(SETTINGS, mounting=GaussMarkov((1.0,))), "mounting takes 3 sigmas, got 1"),
        (lambda: replace(SETTINGS, coasting=0.0), "should be above 0"),
        (lambda: replace(SETTINGS, irs_hold=0.03), "last to the next sample, 0.04 s, got 0.03"),
        (lambda: replace(SETTINGS, gnss_bias=GaussMarkov((1.0,))), "gnss bias takes 3 sigmas, got 1"),
        (lambda: nees(fuse([FIX], ORIGIN), TRUTH, dof=4), "dof 3.*dof 6.*got 4"),
        (lambda: consistency([np.nan], 3), "no values"),
    ],
)
def test_mistakes_are_refused_in_one_line(mistake: Callable[..., Any], words: str) -> None:
    with pytest.raises(HaloposeError, match=words) as caught:
        mistake()
    assert "\n" not in str(caught.value)


def test_attitudes_are_left_out_and_order_does_not_matter() -> None:
    rng = np.random.default_rng(8)
    measured = simulate(TRUTH, Sensors(), 8)
    without = [m for m in measured if m.source != "attitude"]
    initial = start(rng)
    track, plain = fuse(measured[::-1], initial), fuse(without, initial)
    assert set(track.source) == set(SIZES) - {"attitude", "vision", "irs"}
    assert len(track.irs_times) == sum(m.source == "irs" for m in measured)
    np.testing.assert_allclose(track.states[-1], plain.states[-1], rtol=1e-6, atol=1e-6)


@given(SEEDS, st.integers(1, 6))
def test_consistency_has_its_stated_distribution(seed: int, dof: int) -> None:
    values = np.random.default_rng(seed).chisquare(dof, 500)
    found = consistency(np.append(values, np.nan), dof, 0.9)
    assert found.count == 500
    assert found.mean == pytest.approx(values.mean())
    assert chi2.cdf(found.bounds[1], dof) - chi2.cdf(found.bounds[0], dof) == pytest.approx(0.9)
    assert found.inside == np.mean((values > found.bounds[0]) & (values < found.bounds[1]))
    assert found.mean_bounds[0] < dof < found.mean_bounds[1]


def test_an_attitude_bias_is_found_through_vision() -> None:
    """Without its states the filter believes every biased fix; with them the errors stay consistent."""
    sensitivity = np.array([[0.0, 40.0, 0.0], [-3000.0, 0.0, 0.0], [0.0, 3000.0, 0.0]])
    sensors = on_board(localizer=None, glide_slope=None, radio=None)
    sensors = replace(sensors, attitude=replace(ATTITUDE, rate=25.0, noise=(1e-7,) * 3))
    scores: dict[bool, list[Any]] = {True: [], False: []}
    for seed in range(10):
        rng = np.random.default_rng([seed, 5])
        initial = start(rng)  # the same for both
        others = simulate(TRUTH, sensors, seed)
        bias = {round(m.time * 25): m.value for m in others if m.source == "attitude"}  # it flies level
        seen = [
            replace(fix, value=fix.value + sensitivity @ bias[round(fix.time * 25)], sensitivity=sensitivity)
            for fix in camera(rng, rate=5.0)
        ]
        for known, fixes in ((True, seen), (False, [replace(fix, sensitivity=None) for fix in seen])):
            track = fuse(others + fixes, initial, replace(SETTINGS, gate=1.0, mounting=GaussMarkov((0.0,) * 3)))
            scores[known].append(nees(track, TRUTH)[-1])
    assert consistency(scores[True], 6, 0.998).consistent
    assert np.mean(scores[False]) > 2 * np.mean(scores[True])
