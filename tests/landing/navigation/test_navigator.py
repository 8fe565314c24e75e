"""The navigator with faulty, late and missing sources: each exclusion is reported."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.landing.flight import draw_initial_state, true_trajectory
from halopose.landing.navigation.fault_priors import FaultPriors
from halopose.landing.navigation.fusion import FusedTrack, consistency, fuse
from halopose.landing.navigation.motion_model import FusionSettings, InitialState
from halopose.landing.navigation.navigator import Navigator
from halopose.landing.navigation.sensors import (
    ATTITUDE,
    IRS,
    RADIO,
    DeferredMeasurement,
    Fault,
    GaussMarkov,
    IlsSite,
    Measurement,
    Sensors,
    in_order,
    simulate,
    vision,
)
from halopose.landing.requirements import path_axes
from halopose.landing.world.approach import fly
from halopose.types import Array
from tests.helpers.values import present

RATE = 25.0  # of the IRS: a quarter of the usual one, for speed
SLOW = Sensors(
    irs=replace(IRS, rate=RATE, noise=(0.015,) * 3),
    attitude=replace(ATTITUDE, rate=RATE),
    radio=replace(RADIO, rate=10),
)
SITE = IlsSite()
SETTINGS = FusionSettings(site=SITE, irs_rate=RATE)
TRUTH = true_trajectory(fly(0, "clear", 50.0, start=4000.0))
TIMES = np.arange(0.0, TRUTH.times[-1], 0.5)
DRIFT, SHARES = GaussMarkov((1.0, 1.0, 1.0), 18.0), (0.62, 0.38, 0.45)  # of vision's error
ALONE = replace(SLOW, gnss=None, localizer=None, glide_slope=None, radio=None)


def flown(
    seed: int = 0, sensors: Any = SLOW, extra: Any = (), settings: FusionSettings = SETTINGS, **faults: Any
) -> FusedTrack:
    """A flight of which some sensors fail, named with their faults."""
    broken = {name: replace(getattr(sensors, name), faults=(fault,)) for name, fault in faults.items()}
    measured = simulate(TRUTH, replace(sensors, **broken), seed, SITE)
    return fuse([*measured, *extra], draw_initial_state(TRUTH, seed), settings, TIMES)


def off(track: FusedTrack) -> Array:
    """Errors (N, 3) along and across the path at the times asked for."""
    return np.abs((track.output.positions - TRUTH.position(track.output.times)) @ path_axes().T)


def camera(seed: int, shift: Any = (0.0, 0.0, 0.0)) -> list[Measurement]:
    """Fixes at 2 Hz, 2 % of the distance off along the line of sight and 2 per mille across."""
    rng = np.random.default_rng([seed, 4])
    times = np.arange(0.25, TRUTH.times[-1], 0.5)
    positions = TRUTH.position(times)
    far = np.linalg.norm(positions, axis=1)[:, None, None]
    sight = positions[:, :, None] / far
    covariances = (2e-3 * far) ** 2 * np.eye(3) + (2e-2 * far) ** 2 * sight @ np.swapaxes(sight, 1, 2)
    noise = np.linalg.cholesky(covariances) @ rng.standard_normal((len(times), 3, 1))
    return vision(times, positions + noise[..., 0] + shift, covariances)


def lasting_camera(
    seed: int, lasting: tuple[float, float, float], inflation: float = 1.0, shift: float = 0.0
) -> list[Measurement]:
    """Fixes at 1 Hz, off by 4 % along the line of sight and 0.2 % across; half of the error lasts for 18 s."""
    rng = np.random.default_rng([seed, 6])
    times = np.arange(0.25, TRUTH.times[-1], 1.0)
    positions = TRUTH.position(times)
    far = np.linalg.norm(positions, axis=1)[:, None, None]
    sight = positions[:, :, None] / far
    covariances = (2e-3 * far) ** 2 * np.eye(3) + (4e-2 * far) ** 2 * sight @ np.swapaxes(sight, 1, 2)
    unit = np.sqrt(SHARES) * DRIFT.sample(len(times), 1.0, rng)
    unit = unit + np.sqrt(1 - np.array(SHARES)) * rng.standard_normal((len(times), 3))
    seen = positions + (np.linalg.cholesky(covariances) @ unit[..., None])[..., 0]
    seen[times >= 35.0, 1] += shift
    return vision(times, seen, covariances * inflation, persistent_share=lasting)


def test_an_error_that_lasts_is_a_state_and_the_gate_stays_on() -> None:
    """A constant factor of 30 on the covariance gave a NIS of 0.06 instead of 1, so nothing was rejected."""
    settings = replace(SETTINGS, vision_bias=DRIFT)
    quiet: dict[str, float] = {}
    alone = simulate(TRUTH, ALONE, 0, SITE)
    for name, lasting, factor in (("states", SHARES, 1.0), ("factor", (0.0, 0.0, 0.0), 30.0)):
        tracks = []
        for s in range(6):
            measured = [*simulate(TRUTH, ALONE, s, SITE), *lasting_camera(s, lasting, factor)]
            tracks.append(fuse(measured, draw_initial_state(TRUTH, s), settings, TIMES))
        quiet[name] = consistency(np.concatenate([track.nis_of("vision") for track in tracks]), 3).mean / 3
        error = np.array([track.output.positions[-4] - TRUTH.position(TIMES[-4:-3])[0] for track in tracks])
        spread = np.array([track.output.covariances[-4] for track in tracks])
        values = np.einsum("ni,nij,nj->n", error, np.linalg.inv(spread), error)
        assert values.mean() < 8.0  # 18 degrees of freedom: once in a thousand
        moved = lasting_camera(0, lasting, factor, shift=60.0)
        track = fuse([*alone, *moved], draw_initial_state(TRUTH, 0), settings, TIMES)
        late = (track.source == "vision") & (track.times >= 35.0) & (track.times < 37.0)
        assert track.accepted[late].all() == (name == "factor")
    assert 0.85 < quiet["states"] < 1.15
    assert quiet["factor"] < 0.12


def test_a_tilted_irs_takes_gravity_for_acceleration_and_the_filter_knows() -> None:
    """Nose up by 2 mrad too far, the platform feels 2 mrad of gravity backwards; all else is exact."""
    tilted = replace(ATTITUDE, rate=RATE, bias=GaussMarkov((0.0, 2e-3, 0.0)))
    still = replace(IRS, rate=RATE, noise=(1e-9,) * 3, bias=GaussMarkov((0.0,) * 3))
    felt = {m.time: m for m in simulate(TRUTH, Sensors(irs=still, attitude=tilted), 3, SITE) if m.source == "irs"}
    printed = [m for m in simulate(TRUTH, Sensors(irs=still, attitude=tilted), 3, SITE) if m.source == "attitude"]
    pitch = printed[0].value[1] - TRUTH.attitude(np.zeros(1))[0, 1]
    extra = np.array([felt[t].value - TRUTH.acceleration(np.array([t]))[0] for t in sorted(felt)])
    np.testing.assert_allclose(extra[:, 0], -9.80665 * pitch, atol=9.80665 * 1e-3)
    np.testing.assert_allclose(extra[:, 1:], 0, atol=1e-6)
    variance = []
    for bias in (GaussMarkov((0.0, 0.0, 0.0)), GaussMarkov((0.0, 2e-3, 0.0))):
        track = fuse(felt.values(), draw_initial_state(TRUTH, 3), replace(SETTINGS, attitude_bias=bias), TIMES)
        variance.append(track.output.covariances[-1, 0, 0])
    drift = 0.5 * 9.80665 * 2e-3 * TIMES[-1] ** 2
    assert variance[1] - variance[0] == pytest.approx(drift**2, rel=0.1)


def test_without_a_fault_nothing_is_flagged_and_levels_hold() -> None:
    for seed in range(2):
        track = flown(seed, extra=camera(seed))
        assert not track.output.flagged.any()
        assert (off(track) < 0.6 * track.output.levels).all()


@pytest.mark.parametrize("size", [50.0, 200.0])
def test_gnss_does_not_capture_the_filter(size: float) -> None:
    """Refused 24 times and then adopted, a step once ended 198.8 m off with a sigma of 1.03 m, without a word."""
    track = flown(gnss=Fault(20.0, 999.0, "step", (0.0, size, 0.0)))
    answers, during = track.output, TIMES >= 20.0
    gnss = (track.source == "gnss") & (track.times >= 20.0)
    assert not track.accepted[gnss].any()
    assert answers.flagged[TIMES >= 24.0].all()
    assert not answers.flagged[~during].any()
    assert off(track)[during, 1].max() < 12
    assert (off(track) < answers.levels).all()
    assert "GNSS excluded" in answers.flags[-1]
    localizer = (track.source == "localizer") & (track.times >= 20.0)
    assert track.accepted[localizer].mean() > 0.95  # the healthy one was rejected 552 times


@pytest.mark.parametrize(("rate", "seconds"), [(1.0, 15.0), (3.0, 8.0)])
def test_a_ramp_is_flagged_and_never_beyond_the_levels(rate: float, seconds: float) -> None:
    track = flown(gnss=Fault(10.0, 999.0, "ramp", (0.0, rate, 0.0)))
    first = TIMES[track.output.flagged][0]
    assert 10.0 < first < 10.0 + seconds
    assert (off(track) < track.output.levels).all()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gnss", Fault(20.0, 999.0, "stuck")),
        ("localizer", Fault(20.0, 999.0, "step", 5e-3)),
        ("radio", Fault(20.0, 999.0, "step", 30.0)),
        ("irs", Fault(15.0, 999.0, "step", (0.0, 0.3, 0.0))),
    ],
)
def test_the_source_that_fails_is_the_one_left_out(name: str, fault: Fault) -> None:
    faults: dict[str, Any] = {name: fault}
    track = flown(**faults)
    words = {"gnss": "GNSS", "localizer": "localizer", "radio": "radio altimeter", "irs": "IRS"}
    assert f"{words[name]} excluded" in track.output.flags[-1]
    assert (off(track) < track.output.levels).all()
    assert off(track)[-1].max() < 25


def test_a_source_comes_back_after_its_probation() -> None:
    track = flown(extra=camera(1), localizer=Fault(10.0, 20.0, "step", 5e-3))
    localizer = track.source == "localizer"
    assert not track.accepted[localizer & (track.times > 13) & (track.times < 29)].any()
    assert track.accepted[localizer & (track.times > 31)].mean() > 0.95
    assert not track.output.flagged[-1]


def test_two_that_contradict_each_other_are_both_kept_and_flagged() -> None:
    """Vision off to the side against GNSS alone: nobody else sees that axis, and the levels hold both."""
    sensors = replace(SLOW, localizer=None, glide_slope=None, radio=None)
    for shift in (0.0, 40.0):
        track = flown(sensors=sensors, extra=camera(2, (0.0, shift, 0.0)))
        assert track.output.flagged.any() == bool(shift)
        assert (off(track) < track.output.levels).all()


def test_a_filter_with_a_wrong_start_is_restarted_and_reported() -> None:
    wrong = InitialState(0.0, TRUTH.positions[0] + 300.0, TRUTH.velocities[0], 0.01 * np.eye(6))
    measured = simulate(TRUTH, ALONE, 5, SITE) + camera(5)
    track = fuse(measured, wrong, SETTINGS, TIMES)
    assert track.recovered.sum() == 1
    assert track.times[track.recovered][0] < 4
    assert track.output.flagged[(TIMES > 4) & (TIMES < 6)].all()
    assert "restarted" in {word for words in track.output.flags for word in words}
    assert not track.output.flagged[-1]
    assert (off(track)[TIMES > 10] < track.output.levels[TIMES > 10]).all()
    assert off(track)[-1].max() < 30


def test_protection_levels_grow_without_a_second_source() -> None:
    """With GNSS and IRS alone nobody would notice if GNSS lied; with the ILS to the side somebody would."""
    single = replace(SETTINGS, priors=FaultPriors(common={}))
    few, more = (
        flown(sensors=replace(SLOW, localizer=each, glide_slope=None, radio=None), settings=single).output.levels[-1]
        for each in (None, SLOW.localizer)
    )
    assert few[1] > 4 * more[1]
    assert few[0] == pytest.approx(more[0], rel=0.3)


@given(st.integers(0, 2**32 - 1), st.floats(0.02, 0.4))
@settings(max_examples=10, deadline=None)
def test_late_measurements_end_where_they_would_have_in_time(seed: int, latency: float) -> None:
    measured = [m for m in simulate(TRUTH, SLOW, seed, SITE) if m.time < 3 and m.source != "attitude"]
    rng = np.random.default_rng(seed)
    late = [m for m in measured if m.source in ("gnss", "radio") and rng.random() < 0.5]
    arrival = sorted(
        (m.time + (latency if any(m is each for each in late) else 0.0), n) for n, m in enumerate(in_order(measured))
    )
    ordered = in_order(measured)
    prompt, tardy = (
        Navigator(draw_initial_state(TRUTH, 1), SETTINGS),
        Navigator(draw_initial_state(TRUTH, 1), SETTINGS),
    )
    for measurement in ordered:
        prompt.update(measurement)
    for _, n in arrival:
        tardy.update(ordered[n])
    np.testing.assert_allclose(tardy.at(3.5).position, prompt.at(3.5).position, atol=1e-3)
    np.testing.assert_allclose(tardy.at(3.5).covariance, prompt.at(3.5).covariance, rtol=1e-3, atol=1e-6)


def test_late_measurements_are_ignored_with_a_reason() -> None:
    navigator = Navigator(draw_initial_state(TRUTH, 0), SETTINGS)
    fix = Measurement(2.0, "gnss", TRUTH.position(np.array([2.0]))[0], np.eye(3))
    before = navigator.update(fix).position
    state = navigator.update(replace(fix, time=1.4))
    assert not present(state.step).accepted
    assert present(state.step).reason == "late by 0.600 s, more than 0.5 s"
    np.testing.assert_array_equal(state.position, before)


def test_a_deferred_measurement_is_made_where_the_aircraft_is_believed_to_be() -> None:
    navigator = Navigator(draw_initial_state(TRUTH, 0), SETTINGS)
    asked = []

    def look(state: Any) -> Measurement | None:
        asked.append(state.time)
        return Measurement(state.time, "vision", state.position + 1.0, 100 * np.eye(3))

    navigator.update(Measurement(1.2, "gnss", TRUTH.position(np.array([1.2]))[0], np.eye(3)))
    state = navigator.update(DeferredMeasurement(1.0, "vision", look))
    assert asked == [1.0]
    assert state.time == 1.2
    assert present(state.step).accepted
    np.testing.assert_allclose(present(present(state.step).innovation), 1.0)
    nothing = navigator.update(DeferredMeasurement(1.3, "vision", lambda state: None))
    assert present(nothing.step).reason == "nothing was measured"


def test_past_states_within_the_lag_are_available() -> None:
    navigator = Navigator(draw_initial_state(TRUTH, 0), SETTINGS)
    states = {}
    for measurement in in_order(simulate(TRUTH, SLOW, 0, SITE)):
        if measurement.time > 5:
            break
        states[measurement.time] = navigator.update(measurement)
    time = max(t for t in states if t < 4.8)
    np.testing.assert_allclose(navigator.at(time).position, states[time].position, atol=1e-9)


def test_every_step_reports_its_innovation_and_gate() -> None:
    navigator = Navigator(draw_initial_state(TRUTH, 0), SETTINGS)
    fix = Measurement(0.5, "gnss", TRUTH.position(np.array([0.5]))[0], np.eye(3))
    step = present(navigator.update(fix).step)
    innovation, covariance = present(step.innovation), present(step.covariance)
    assert (step.source, step.accepted, step.reason) == ("gnss", True, "fits")
    assert step.nis == pytest.approx(innovation @ np.linalg.solve(covariance, innovation))
    assert step.gate == pytest.approx(16.27, abs=0.01)
    far = present(navigator.update(replace(fix, time=0.6, value=fix.value + 500)).step)
    assert (far.accepted, far.reason) == (False, "beyond the gate")


def _fix(time: float) -> Measurement:
    return Measurement(time, "gnss", np.array([-1000.0 + 70.0 * time, 0.0, 60.0]), np.eye(3))


def _standing(settings: FusionSettings | None = None) -> Navigator:
    return Navigator(InitialState(0.0, [-1000.0, 0.0, 60.0], [70.0, 0.0, 0.0], np.eye(6)), settings)


def test_a_time_stamp_far_ahead_is_refused() -> None:
    navigator = _standing()
    navigator.update(_fix(0.5))
    radio = np.array([60.0])
    navigator.update(Measurement(0.6, "radio", radio, np.eye(1)))
    step = navigator.update(_fix(1000.0)).step
    assert step is not None
    assert not step.accepted
    assert "jumps" in step.reason
    after = navigator.update(_fix(1.0)).step
    assert after is not None
    assert after.accepted
    agreed = [navigator.update(given).step for given in (_fix(1000.0), Measurement(1000.1, "radio", radio, np.eye(1)))]
    assert agreed[1] is not None
    assert "jumps" not in agreed[1].reason  # two sources agree


def test_a_late_measurement_that_raises_loses_nothing() -> None:
    def broken(_: object) -> Measurement:
        raise ValueError("no image")

    navigator, expected = _standing(), _standing()
    for time in (0.1, 0.3, 0.5):
        navigator.update(_fix(time))
        expected.update(_fix(time))
    with pytest.raises(ValueError, match="no image"):
        navigator.update(DeferredMeasurement(0.2, "vision", broken))
    np.testing.assert_array_equal(navigator.state.position, expected.state.position)
    np.testing.assert_array_equal(navigator.update(_fix(0.4)).position, expected.update(_fix(0.4)).position)


def test_a_source_that_stops_is_reported_until_it_is_back() -> None:
    silent = replace(SLOW, gnss=replace(present(SLOW.gnss), outages=((10.0, 20.0),)))
    track = flown(sensors=silent)
    told = np.array(["GNSS stopped" in words for words in track.output.flags])
    assert told[(TIMES > 12.5) & (TIMES < 19.5)].all()
    assert not told[(TIMES < 12) | (TIMES > 20.5)].any()
    assert not track.output.alerted.any()  # the levels say what is left


def test_a_reset_starts_again() -> None:
    navigator, other = (Navigator(InitialState(0.0, [-900.0, 0.0, 60.0], [70.0, 0.0, -3.5], np.eye(6))) for _ in "ab")
    navigator.update(_fix(0.5))
    later = InitialState(2.0, [-500.0, 0.0, 40.0], [70.0, 0.0, -3.5], np.eye(6))
    navigator.reset(later)
    other.reset(later)
    for state in (navigator.update(_fix(2.5)), other.update(_fix(2.5))):
        np.testing.assert_array_equal(state.position, navigator.state.position)
        assert state.filters.sources == ("gnss",)
    with pytest.raises(HaloposeError, match="initial state"):
        navigator.reset(replace(later, position=[0.0]))
