"""Pictures of a flight with made-up detections: true corners with noise of known covariance."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, f

from halopose.errors import HaloposeError
from halopose.geometry.camera import body_pose, camera_pose, rotation_from_angles
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import solve_position
from halopose.install_advice import install_command
from halopose.landing.association import CornerDetections, expected_corners
from halopose.landing.flight import Flight, Scenario, SimulatedFlight
from halopose.landing.frame_buffer import FrameBuffer
from halopose.landing.landing_settings import LandingSettings
from halopose.landing.navigation.fusion import fuse
from halopose.landing.navigation.motion_model import InitialState
from halopose.landing.navigation.sensors import GNSS, Sensors, TrueTrajectory, simulate, vision
from halopose.landing.reports.flight_pictures import Composition, draw_film, outlines, state_of, stills, write_film
from halopose.landing.vision_fix import VisionFixes
from halopose.landing.world.approach import fly
from halopose.types import Array
from tests.helpers.values import present

UNSEEN, PRUNED, EXCLUDED, DOUBTED, UNSOLVED = 2, 3, 4, 5, 6  # frames of a made-up flight where something is wrong
OUTAGE = (3.0, 5.0)  # of GNSS
GREY = 90


def fabricate(
    seed: int = 3, *, start: float = 1500.0, end: float = 900.0, dof: float | None = None, blind: bool = False
) -> SimulatedFlight:
    """A flight of one frame per second with corner noise of 0.3 to 1 pixel, over flat grey pictures.

    Five frames go wrong, or, blind, the runway is never seen.
    """
    approach = fly(seed, "clear", 20.0, start=start, end=end)
    truth = TrueTrajectory(
        approach.times, approach.positions, approach.velocities, approach.accelerations, approach.attitudes
    )
    times, position, attitude = truth.times[::20], truth.positions[::20], truth.attitudes[::20]
    world = approach.world
    corner_detections = sight_truth(world, position, attitude, np.random.default_rng([seed, 99]), dof)
    if blind:
        corner_detections.pixels[:], corner_detections.covariance[:], corner_detections.scale[:] = (
            np.nan,
            np.nan,
            np.nan,
        )
        corner_detections.keep[:], corner_detections.score[:] = False, 0.0
    fixes = fix(world, corner_detections, attitude)
    track, fused, covariance = fuse_all(truth, times, fixes, seed)
    error = position - fused
    nees = np.einsum("ni,ni->n", error, np.linalg.solve(covariance, error[..., None])[..., 0])
    picture = np.full((world.camera.height, world.camera.width, 3), GREY, dtype=np.uint8)
    images = (picture,) * len(times)
    return SimulatedFlight(
        Scenario.of_world(world),
        times,
        position,
        attitude,
        corner_detections,
        fixes,
        track,
        fused,
        covariance,
        nees,
        images,
        LandingSettings(seed=seed),
        times,
        approach,
        truth,
    )


def sight_truth(
    world: Any, position: Array, attitude: Array, rng: np.random.Generator, dof: float | None = None
) -> CornerDetections:
    """Corners with noise drawn from covariances that differ in size and direction."""
    exact = expected_corners(world.camera, world.mount, position, attitude, world.runway.corners())
    count = len(exact)
    angle = rng.uniform(0, np.pi, (count, 4))
    turn = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], -1).reshape(count, 4, 2, 2)
    spread = rng.uniform(0.3, 1.0, (count, 4, 2))
    factor = turn * spread[..., None, :]
    covariance = factor @ factor.swapaxes(-1, -2)
    pixels = exact + (factor @ rng.standard_normal((count, 4, 2, 1)))[..., 0]
    keep, score = np.ones((count, 4), dtype=bool), np.full(count, 0.9)
    pixels[UNSEEN], covariance[UNSEEN], keep[UNSEEN], score[UNSEEN] = np.nan, np.nan, False, 0.0
    keep[PRUNED, 2] = False
    keep[UNSOLVED, 1:] = False
    pixels[EXCLUDED, 3] += (9.0, 4.0)
    pixels[DOUBTED] += (6.0, -5.0)
    return CornerDetections(
        pixels, covariance, covariance.copy(), keep, score, None if dof is None else np.full((count, 4), dof)
    )


def fix(world: Any, corner_detections: CornerDetections, attitude: Array) -> VisionFixes:
    """Position with known attitude, and a chi-square check of the residuals."""
    count = len(corner_detections)
    keep, excluded = corner_detections.keep.copy(), np.full(count, -1)
    excluded[EXCLUDED], keep[EXCLUDED, 3] = 3, False
    body = rotation_from_angles(*attitude.T)
    rotation = camera_pose(body, np.zeros((count, 3)), world.mount)[0]
    solution = solve_position(
        Observations(
            world.camera,
            world.runway.corners(),
            corner_detections.pixels,
            corner_detections.covariance,
            rotation,
            mask=keep,
        )
    )
    position = body_pose(rotation, solution.position, world.mount)[1]
    covariance = solution.covariance[:, :3, :3]
    trusted = solution.converged.copy()
    reasons = list(solution.reasons)
    trusted[DOUBTED], reasons[DOUBTED] = False, "not trusted: the corners do not fit the runway"
    spread = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2))
    unmoved = np.zeros((count, 3, 3))
    statistic = np.where(solution.converged, solution.cost, np.nan)
    return VisionFixes(
        position, covariance, statistic, solution.dof, trusted, excluded, tuple(reasons), 5 * spread, unmoved
    )


def fuse_all(truth: TrueTrajectory, times: Array, fixes: VisionFixes, seed: int) -> tuple[Any, Array, Array]:
    """The track, and its position and covariance at the frames."""
    measured = simulate(truth, Sensors(gnss=replace(GNSS, outages=(OUTAGE,))), seed)
    trusted = np.where(fixes.trusted[:, None], fixes.position, np.nan)
    measured += vision(times, trusted, fixes.covariance)
    first = np.concatenate([truth.positions[0], truth.velocities[0]])
    spread = np.diag(np.square([10.0] * 3 + [1.0] * 3))
    noisy = first + np.random.default_rng(seed).standard_normal(6) * np.sqrt(np.diag(spread))
    track = fuse(measured, InitialState(truth.times[0], noisy[:3], noisy[3:], spread), times=times)
    return track, track.output.positions, track.output.covariances


@pytest.fixture(scope="module")
def flight() -> SimulatedFlight:
    return fabricate()


@pytest.fixture(scope="module")
def composition(flight: Flight) -> Composition:
    return Composition(flight)


def nearly(image: Array, colour: Any, tolerance: int = 12) -> Array:
    """Where an image (H, W, 3) in BGR has a colour given as in html."""
    red, green, blue = bytes.fromhex(colour[1:])
    return np.abs(image.astype(int) - (blue, green, red)).max(-1) <= tolerance


def camera_part(frame: Array) -> Array:
    """What lies in the camera's view, at 9/8 of its size."""
    return frame[64:496, 24:744]


@given(st.integers(0, 2**32 - 1), st.one_of(st.none(), st.floats(2.1, 50.0)))
@settings(max_examples=50, deadline=None)
def test_outlines_lie_where_95_percent_are_inside(seed: int, dof: float | None) -> None:
    rng = np.random.default_rng(seed)
    factor = rng.standard_normal((3, 2, 2)) + 0.1 * np.eye(2)
    scale, centre = factor @ factor.swapaxes(1, 2) + 1e-3 * np.eye(2), rng.standard_normal((3, 2))
    away = outlines(centre, scale, None if dof is None else np.full(3, dof)) - centre[:, None]
    distance = np.einsum("mpi,mij,mpj->mp", away, np.linalg.inv(scale), away)
    expected = chi2.ppf(0.95, 2) if dof is None else 2 * f.ppf(0.95, 2, dof)
    np.testing.assert_allclose(distance, expected, rtol=1e-6)


def test_states_describe_the_outcome_of_frames(flight: Flight) -> None:
    assert state_of(flight, 0) == ("solved", True)
    assert state_of(flight, UNSEEN) == ("no runway detected", False)
    assert state_of(flight, PRUNED) == ("solved, 1 pruned", True)
    assert state_of(flight, EXCLUDED) == ("solved without far left", True)
    assert state_of(flight, DOUBTED)[0].startswith("not trusted")
    assert not state_of(flight, DOUBTED)[1]
    assert state_of(flight, UNSOLVED)[0].startswith("no position: too few")


@pytest.mark.parametrize("n", [0, UNSEEN, PRUNED, EXCLUDED, DOUBTED, UNSOLVED])
def test_every_frame_draws(composition: Composition, n: int) -> None:
    frame = composition.draw(n)
    assert frame.shape == (720, 1280, 3)
    assert frame.dtype == np.uint8
    drawn = nearly(camera_part(frame), "#ff9a2e", 40).any()
    assert drawn == (n != UNSEEN)


def drawn(flight: Flight, n: int) -> Array:
    return Composition(flight).draw(n)


def test_a_used_composition_draws_as_a_new_one(flight: Flight, composition: Composition) -> None:
    composition.draw(PRUNED)
    np.testing.assert_array_equal(composition.draw(0), drawn(flight, 0))


@pytest.mark.parametrize("dof", [None, 4.0])
def test_corner_ellipses_are_drawn_where_their_distribution_says(dof: float | None) -> None:
    flight = fabricate(dof=dof)
    pixels = np.array([[100.0, 300.0], [540.0, 300.0], [540.0, 100.0], [100.0, 100.0]])
    scale = np.array([[400.0, 150.0], [150.0, 100.0]])
    flight.corner_detections.pixels[0], flight.corner_detections.scale[0] = pixels, scale
    shown = camera_part(drawn(flight, 0))
    points = outlines(pixels, np.tile(scale, (4, 1, 1)), None if dof is None else np.full(4, dof))
    reach = 1 if dof is None else np.sqrt(2 * f.ppf(0.95, 2, dof) / chi2.ppf(0.95, 2))
    assert np.ptp(points[0, :, 0]) / 2 == pytest.approx(reach * np.sqrt(400 * chi2.ppf(0.95, 2)), rel=2e-3)
    u, v = np.rint((points.reshape(-1, 2) + 0.5) * 1.125 - 0.5).astype(int).T
    orange = cv2.dilate(nearly(shown, "#ff9a2e", 60).astype(np.uint8), np.ones((3, 3)))
    assert orange[v, u].mean() > 0.97
    inside = shown[round(300.5 * 1.125) + 6, round(100.5 * 1.125) + 9].astype(int)  # a quarter of orange on grey
    np.testing.assert_allclose(inside, 0.75 * GREY + 0.25 * np.array([0x2E, 0x9A, 0xFF]), atol=3)


def test_views_show_vision_where_it_is(flight: Flight) -> None:
    """All frames have the same covariance, so a view reaches exactly four deviations to either side."""
    count = len(flight.frame_times)
    covariance = np.tile(np.diag([2500.0, 9.0, 4.0]), (count, 1, 1))
    centres = []
    for left in (0.0, 3.0):
        position = flight.position + np.array([0.0, left, 0.0])
        moved = replace(flight, vision_fixes=replace(flight.vision_fixes, position=position, covariance=covariance))
        orange = nearly(drawn(moved, 0), "#d9600a")
        top, front = orange[84:248, 828:1256], orange[508:672, 828:1256]
        centres.append([np.argwhere(top).mean(0)[0], np.argwhere(front).mean(0)[1]])
    higher, farther_left = np.array(centres[0]) - np.array(centres[1])
    assert higher == pytest.approx(164 * 3.0 / 24.0, abs=1.5)
    assert farther_left == pytest.approx(428 * 3.0 / 24.0, abs=1.5)


def test_a_blind_flight_draws() -> None:
    frame = drawn(fabricate(blind=True), 1)
    assert not nearly(camera_part(frame), "#ff9a2e", 40).any()
    assert not nearly(frame[84:700, 828:], "#d9600a").any()
    assert nearly(frame[84:700, 828:], "#0b6aa6").any()


@pytest.mark.parametrize("suffix", [".webp", ".gif", ".apng"])
def test_animation_decodes(flight: Flight, tmp_path: Path, suffix: str) -> None:
    path = write_film(draw_film(flight, most=3), tmp_path / "new" / f"film{suffix}", 4.0)
    found, film = cv2.imreadanimation(str(path))
    assert found
    shown = range(0, len(flight.frame_times), -(-len(flight.frame_times) // 3))
    assert len(film.frames) == len(shown)
    assert film.frames[0].shape[:2] == (720, 1280)
    assert list(film.durations) == [250] * len(shown)
    assert film.loop_count == 0
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_an_animation_of_a_frame_buffer_shows_what_was_kept(flight: Flight, composition: Composition) -> None:
    buffer = FrameBuffer(len(flight.frame_times), most=3)
    for image in flight.images:
        buffer.add(image)
    thinned = replace(flight, images=buffer)
    film = draw_film(thinned)
    assert len(film) == len(buffer.kept) <= 3
    for n, frame in zip(buffer.kept, film, strict=True):
        assert np.abs(frame.astype(int) - composition.draw(n)).mean() < 0.5
    with pytest.raises(HaloposeError, match="frame 1 was not"):
        Composition(thinned).draw(1)


def test_lossless_animation_holds_the_frames(flight: Flight, composition: Composition, tmp_path: Path) -> None:
    _, film = cv2.imreadanimation(str(write_film(draw_film(flight, most=2), tmp_path / "film.png")))
    np.testing.assert_array_equal(film.frames[0][..., :3], composition.draw(0))


def test_stills_decode_to_nearly_the_frames(composition: Composition) -> None:
    frame = composition.draw(0)
    (still,) = stills([frame])
    assert still.startswith(b"RIFF")
    found = present(cv2.imdecode(np.frombuffer(still, np.uint8), cv2.IMREAD_COLOR))
    assert np.abs(found.astype(int) - frame).mean() < 2


def test_mistakes_are_named(
    flight: Flight, composition: Composition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HaloposeError, match=re.escape("film.mp4: name it .webp")):
        write_film([composition.draw(0)], tmp_path / "film.mp4")
    with pytest.raises(HaloposeError, match="a rate above 0"):
        write_film([composition.draw(0)], tmp_path / "film.webp", 0.0)
    with pytest.raises(HaloposeError, match="no frame 99"):
        composition.draw(99)
    with pytest.raises(HaloposeError, match="0 images"):
        Composition(replace(flight, images=()))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HaloposeError, match=re.escape(install_command("landing"))):
        Composition(flight)
