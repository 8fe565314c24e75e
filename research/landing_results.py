"""Figures of docs/evidence/landing.md: the shipped runway detector over approaches that were not used in training.

    python -m research.landing_results --work work/ -o results/

Flies approaches in every weather. Prints the position error of weighted, unweighted and OpenCV's PnP, the consistency
of vision and of the fused track with calibrated and uncalibrated covariances, and the effect of fog. Intervals are
95 %, by bootstrap over approaches. Detections are kept in the work folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
from scipy import stats

from halopose.cli.terminal import progress, say
from halopose.data.dataset_loading import load_dataset
from halopose.data.files import write_text
from halopose.fitting.artifact import Artifact
from halopose.fitting.pipeline import collect_validation, evaluate_artifact
from halopose.fitting.settings import FitSettings
from halopose.geometry.camera import rotation_from_angles
from halopose.geometry.observations import Observations
from halopose.geometry.pnp import solve_pose, solve_position
from halopose.hosts import model_zoo as hub
from halopose.landing import shipped_detectors
from halopose.landing.association import as_pose_distributions
from halopose.landing.flight import (
    SimulatedFlight,
    detect_in_flight,
    draw_initial_state,
    given_attitudes,
    navigate,
    simulate_sensors,
    true_trajectory,
)  # fmt: skip
from halopose.landing.landing_settings import TRUTH_RATE, CameraErrors, LandingSettings
from halopose.landing.navigation.fusion import FusedTrack, consistency, fuse
from halopose.landing.navigation.sensors import SIZES, Sensors
from halopose.landing.summary import distances, total_covariance
from halopose.landing.world.approach import fly
from halopose.landing.world.dataset_writer import write_dataset
from halopose.landing.world.scenes import TRAINING_WEATHERS, Weather
from halopose.poses import PoseDistributions
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.protocol import Protocol
from halopose.types import Array
from research.tables import cell, markdown
from research.vision_distribution import CornerErrorDistribution, corner_distribution, unit_errors

RATE = 1.0
SPREADS = ("covariance", "scale", "keep")
ARRAYS = ("boxes", "scores", "keypoints", *SPREADS, "novelty")
FIRST_SEED = 10_000  # every weather has its own: flights of one seed share path, runway and sensor errors
DRAWS = 1000
LIMIT = float(stats.chi2.ppf(0.95, 3))
ALONE = Sensors(gnss=None, localizer=None, glide_slope=None, radio=None)  # vision and IRS only
EXACT = CameraErrors(mounting=0.0, lever_arm=0.0, focal=0.0, centre=0.0, clock=0.0, latency=0.0)
INSTANTS = (4000.0, 2500.0, 1500.0, 900.0, 500.0)  # metres to the threshold at which NEES is taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--approaches", type=int, default=6, help="of each weather")
    parser.add_argument(
        "--first-seed", type=int, nargs="+", default=[FIRST_SEED], help="of clear air; twice that of haze, ..."
    )
    parser.add_argument(
        "--persistence", action="store_true", help="what is believed of vision, over flights of other seeds"
    )
    parser.add_argument("--blind", type=int, default=0, help="only NIS, of so many flights without a camera")
    parser.add_argument("--gate", action="store_true", help="only clear weather and fog, with alarms and without")
    parser.add_argument("--no-calibration", action="store_true", help="leave out the table of single scenes")
    arguments = parser.parse_args()
    if arguments.blind:
        say(blind_cell(arguments.blind))
        return
    artifact = Artifact.load(shipped_detectors.runway_artifact())
    model = UncertainPose.load_base(shipped_detectors.runway_detector(), artifact, family="gaussian")
    work = arguments.work / hub.sha256_of(shipped_detectors.runway_artifact())[:12]  # detections of other heads differ
    if arguments.persistence:
        say(persistence_table(model, work))
        return
    if arguments.gate:
        say(gate_table(model, work, arguments.approaches))
        return
    flights: dict[Weather, list[SimulatedFlight]] = {}
    with progress() as step:
        for number, weather in enumerate((*TRAINING_WEATHERS, "fog"), start=1):
            seeds = [number * first + n for first in arguments.first_seed for n in range(arguments.approaches)]
            flights[weather] = [flown(model, seed, weather, work, step) for seed in seeds]
    seen = [flight for weather in TRAINING_WEATHERS for flight in flights[weather]]
    first = [] if arguments.no_calibration else [calibration_table(model, artifact, arguments.work, work)]
    text = "\n\n".join(
        [
            *(f"### Calibration on clear scenes\n\n{table}" for table in first),
            "### Position error\n\n" + error_table(seen),
            "### Consistency\n\n" + consistency_table(seen, artifact),
            "### Weather and integrity\n\n" + weather_table(flights),
        ]
    )
    write_text(arguments.output / "landing.md", text + "\n")
    say(text)


def flown(
    model: UncertainPose, seed: int, weather: Weather, work: Path, step: Callable[[str, int, int], None]
) -> SimulatedFlight:
    """A flight without its images; detections are kept in a file."""
    settings = LandingSettings(seed=seed, weather=weather, rate=RATE)
    return refly(settings, found(model, settings, work, step))


def found(
    model: UncertainPose, settings: LandingSettings, work: Path, step: Callable[[str, int, int], None]
) -> list[PoseDistributions]:
    """Detections of every frame of an approach."""
    path = work / f"{settings.weather}-{settings.seed}.npz"
    if not path.is_file():
        label = f"{settings.weather} {settings.seed}"
        poses = detect_in_flight(model, settings, lambda what, done, total: step(label, done, total))
        work.mkdir(parents=True, exist_ok=True)
        frame = np.repeat(np.arange(len(poses)), [len(each) for each in poses])
        whole = PoseDistributions.concatenate(poses)
        offset = np.zeros_like(whole.keypoints) if whole.offset is None else whole.offset
        arrays = {**{name: getattr(whole, name) for name in ARRAYS}, "offset": offset}
        np.savez(path, frame=frame, frames=len(poses), **arrays)
    stored = np.load(path)
    return [
        PoseDistributions(**{name: stored[name][stored["frame"] == n] for name in (*ARRAYS, "offset")})
        for n in range(int(stored["frames"]))
    ]


def refly(settings: LandingSettings, poses: Sequence[PoseDistributions]) -> SimulatedFlight:
    """The same flight with these detections and settings."""
    approach = fly(settings.seed, settings.weather, TRUTH_RATE)
    truth = true_trajectory(approach)
    return navigate(approach, truth, np.arange(0.0, truth.times[-1], 1 / settings.rate), poses, settings)


# --- calibration ------------------------------------------------------------------------------------------


def calibration_table(model: UncertainPose, artifact: Artifact, drawn: Path, work: Path) -> str:
    """ACE of the corners' Gaussian on single clear scenes, over thirds of the runway's area, all and pruned."""
    data = write_dataset(drawn / "clear", {"clear": 400}, seed=3, processes=2)
    settings = FitSettings(imgsz=artifact.imgsz)
    store = collect_validation(model.host, load_dataset(data, "clear"), work / "clear", settings)
    edges = tuple(float(edge) for edge in np.quantile(store.ground_truth().area, [1 / 3, 2 / 3]))
    protocol = Protocol(bootstrap=200, area="box", scale_edges=edges)
    scores = evaluate_artifact(artifact, model.host, store, None, protocol)
    kept = f"pruned, {100 * scores.pruned.kept_fraction:.0f} % kept"
    rows = []
    for name, part in (("all corners", scores), (kept, scores.pruned)):
        sizes = [f"{part.gaussian.per_scale[scale].ace:.3f}" for scale in ("small", "medium", "large")]
        gaussian = [cell(part.gaussian, "ace"), cell(part.gaussian, "ence")]
        rows.append([name, *gaussian, *sizes, cell(part.student_t, "ace")])
    head = ["", "ACE, Gaussian", "ENCE", "small third", "middle third", "large third", "ACE, Student-t"]
    return markdown(head, rows)


# --- position error ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frames:
    """Errors (N, 3) of the camera's position over its distance by frame, and the approach (N,) of each."""

    error: Array
    approach: Array

    def rms(self, weight: Array) -> float:
        """Root mean square with every approach counted ``weight`` times."""
        each = weight[self.approach]
        return float(np.sqrt((each * (self.error**2).sum(1)).sum() / each.sum()))


def error_table(flights: Sequence[SimulatedFlight]) -> str:
    """RMSE of all solvers in % of the distance, over the frames that all of them solve."""
    solvers: dict[str, Callable[[SimulatedFlight], Array]] = {
        "position, attitude of the IRS as uncertain as it is, weighted": with_attitude,
        "position alone, attitude of the IRS, weighted": lambda f: _positions(f, weighted=True, full=False),
        "position alone, attitude of the IRS, unweighted": lambda f: _positions(f, weighted=False, full=False),
        "whole pose, weighted": lambda f: _positions(f, weighted=True, full=True),
        "whole pose, unweighted": lambda f: _positions(f, weighted=False, full=True),
        "whole pose, OpenCV solvePnP (IPPE) + solvePnPRefineLM": opencv_positions,
    }
    eyes = [flight.position + _lever(flight) for flight in flights]
    found = {name: [solver(flight) for flight in flights] for name, solver in solvers.items()}
    common = [
        np.all([np.isfinite(positions[n]).all(1) for positions in found.values()], axis=0) for n in range(len(flights))
    ]
    generator = np.random.default_rng(0)
    weights = np.array(
        [np.ones(len(flights))]
        + [
            np.bincount(generator.integers(len(flights), size=len(flights)), minlength=len(flights))
            for _ in range(DRAWS)
        ]
    )
    rms, median = {}, {}
    for name, positions in found.items():
        relative = [
            (positions[n] - eyes[n])[common[n]] / np.linalg.norm(eyes[n], axis=1)[common[n], None]
            for n in range(len(flights))
        ]
        approach = np.repeat(np.arange(len(flights)), [len(part) for part in relative])
        frames = Frames(np.concatenate(relative), approach)
        rms[name] = np.array([frames.rms(weight) for weight in weights])
        median[name] = float(np.median(np.linalg.norm(frames.error, axis=1)))
    rows = []
    for name, values in rms.items():
        reference = rms[
            name.replace("unweighted", "weighted").replace("OpenCV solvePnP (IPPE) + solvePnPRefineLM", "weighted")
        ]
        ratio = values / reference
        rows.append(
            [
                name,
                f"{100 * values[0]:.2f} % ± {196 * values[1:].std(ddof=1):.2f}",
                f"{100 * median[name]:.2f} %",
                "" if values is reference else f"{ratio[0]:.2f} ± {1.96 * ratio[1:].std(ddof=1):.2f}",
            ]
        )
    count = sum(int(part.sum()) for part in common)
    head = [f"{count} frames of {len(flights)} approaches", "RMSE / distance", "median", "RMSE over weighted"]
    return markdown(head, rows)


def _lever(flight: SimulatedFlight) -> Array:
    """From the aircraft's reference point to its camera (N, 3), in runway axes."""
    return flight.approach.world.mount.lever_arm @ rotation_from_angles(*flight.attitude.T)


def _positions(flight: SimulatedFlight, *, weighted: bool, full: bool) -> Array:
    """The camera's position (N, 3) by our solver."""
    world, corner_detections = flight.approach.world, flight.corner_detections
    spread = (
        corner_detections.covariance if weighted else np.broadcast_to(np.eye(2), corner_detections.covariance.shape)
    )
    known = (world.camera, world.runway.corners(), corner_detections.pixels, spread)
    if full:
        return solve_pose(Observations(*known)).position
    return solve_position(Observations(*known, given_rotation(flight))).position


def given_rotation(flight: SimulatedFlight) -> Array:
    """Runway to camera (N, 3, 3) by the IRS of the flight."""
    return flight.approach.world.mount.rotation @ rotation_from_angles(*given_attitudes(flight).T)


def with_attitude(flight: SimulatedFlight) -> Array:
    """The camera's position (N, 3) by the solver of ``halopose land``, before any check."""
    open_ = replace(flight.settings, integrity=False, prune=False, camera=EXACT)
    return refly(open_, as_pose_distributions(flight.corner_detections)).vision_fixes.position + _lever(flight)


def opencv_positions(flight: SimulatedFlight) -> Array:
    """The camera's position (N, 3) by OpenCV, frame by frame."""
    world = flight.approach.world
    corners, matrix = world.runway.corners(), world.camera.matrix
    result = np.full((len(flight.corner_detections), 3), np.nan)
    for n in np.flatnonzero(flight.corner_detections.seen):
        pixels = flight.corner_detections.pixels[n][:, None]
        solved, turn, shift = cv2.solvePnP(corners, pixels, matrix, None, flags=cv2.SOLVEPNP_IPPE)
        if solved:
            turn, shift = cv2.solvePnPRefineLM(corners, pixels, matrix, None, turn, shift)
            result[n] = -cv2.Rodrigues(turn)[0].T @ shift[:, 0]
    return result


# --- consistency ------------------------------------------------------------------------------------------


def consistency_table(flights: Sequence[SimulatedFlight], artifact: Artifact) -> str:
    """Coverage of vision and NEES of the fused track, with covariances calibrated and as the heads give them."""
    tau = artifact.calibrations.gaussian.tau_.numpy()
    rows = []
    independent: dict[str, Any] = {"lasting": (0.0, 0.0, 0.0)}
    variants: tuple[tuple[str, Array | None, dict[str, Any]], ...] = (
        ("calibrated, all sensors", None, {}),
        ("calibrated, vision and IRS", np.ones(4), {"sensors": ALONE}),
        ("as the heads give them, vision and IRS", 1 / tau**2, {"sensors": ALONE}),
        ("calibrated, frames taken as independent, vision and IRS", np.ones(4), {"sensors": ALONE, **independent}),
    )
    for name, factor, changes in variants:
        again = list(flights)
        if factor is not None:
            again = [with_covariance(each, factor, replace(each.settings, **changes)) for each in flights]
        outside = np.concatenate([_outside(flight)[flight.vision_fixes.trusted] for flight in again])
        values = np.concatenate([_nees_at(flight) for flight in again])
        by_instant = np.array([_nees_at(flight) for flight in again])
        judged = consistency(values[np.isfinite(values)], 3)
        means = [consistency(column[np.isfinite(column)], 3) for column in by_instant.T]
        within = sum(each.consistent for each in means)
        squares = np.concatenate([((flight.fused - flight.position) ** 2).sum(1) for flight in again])
        rows.append(
            [
                name,
                f"{100 * (1 - np.nanmean(outside)):.0f} %",
                f"{judged.mean:.2f}",
                f"{within} of {len(means)}: {', '.join(f'{each.mean:.2f}' for each in means)}",
                f"{100 * judged.inside:.0f} %",
                f"{np.sqrt(np.mean(squares)):.1f} m",
                nis_cell([flight.track for flight in again]),
                str(sum(flight.track.output.flagged.any() for flight in again)),
            ]
        )
    head = [
        "covariances",
        "vision in its 95 % ellipsoid",
        "fused NEES (3)",
        "instants in bounds, and NEES at each",
        "NEES in 95 %",
        "fused RMSE",
        "NIS over expected, and if in its 95 % bounds",
        "flights flagged",
    ]
    return markdown(head, rows)


def nis_cell(tracks: Sequence[FusedTrack], digits: int = 2) -> str:
    """Mean NIS of every source over its degrees of freedom, and whether it is within its 95 % bounds."""
    parts = []
    for source in ("gnss", "localizer", "glide_slope", "radio", "vision"):
        values = np.concatenate([track.nis_of(source) for track in tracks])
        if len(values):
            held = consistency(values, SIZES[source])
            parts.append(f"{source} {held.mean / SIZES[source]:.{digits}f} {'yes' if held.consistent else 'no'}")
    return ", ".join(parts)


def blind_cell(count: int) -> str:
    """NIS of the other sensors in flights with separate seeds."""
    tracks = []
    for seed in range(3000, 3000 + count):
        approach = fly(seed, "clear", TRUTH_RATE)
        truth = true_trajectory(approach)
        fusion, measured = simulate_sensors(approach, truth, LandingSettings(seed=seed))
        tracks.append(fuse(measured, draw_initial_state(truth, seed), fusion))
    return nis_cell(tracks, 3)


def with_covariance(flight: SimulatedFlight, factor: Array, settings: LandingSettings) -> SimulatedFlight:
    """The flight again with the corners' covariances times factors (4,), and other settings."""
    corner_detections = replace(
        flight.corner_detections, covariance=flight.corner_detections.covariance * factor[:, None, None]
    )
    return refly(settings, as_pose_distributions(corner_detections))


def _outside(flight: SimulatedFlight) -> Array:
    """Which vision fixes (N,) are outside their 95 % ellipsoid; NaN without a fix."""
    distance = distances(flight.vision_fixes.position - flight.position, total_covariance(flight))
    return np.where(np.isfinite(distance), distance > LIMIT, np.nan)


def _nees_at(flight: SimulatedFlight) -> Array:
    """NEES of the fused position at the INSTANTS of an approach."""
    index = [int(np.abs(-flight.position[:, 0] - distance).argmin()) for distance in INSTANTS]
    return flight.nees[index]


def persistence_table(model: UncertainPose, work: Path) -> str:
    """Parameters of the vision errors for ``LandingSettings``, fitted on flights with separate seeds.

    Errors are relative to the truth, with true attitude and camera, in stated standard deviations.
    """
    seen: list[tuple[LandingSettings, list[PoseDistributions]]] = []
    with progress() as step:
        for number, weather in enumerate(TRAINING_WEATHERS):
            for seed in range(500 + 10 * number, 510 + 10 * number):
                settings = LandingSettings(
                    seed=seed, weather=weather, rate=RATE, camera=EXACT, corner_variance_factor=1.0
                )
                seen.append((settings, found(model, settings, work, step)))
    corner = np.concatenate([unit_errors(*each)[1] for each in seen])
    excess, joint = corner_distribution(corner)
    wide = max(excess, 1.0)
    errors = [
        unit_errors(replace(settings, corner_variance_factor=wide, corner_correlation=joint), poses)[0]
        for settings, poses in seen
    ]
    flights = [(np.flatnonzero(known) / RATE, e[known]) for e in errors if (known := np.isfinite(e).all(1)).any()]
    known = corner[np.isfinite(corner).all((1, 2))]
    square = np.square(known).sum(2)
    beyond = int((square > stats.chi2.isf(1e-5, 2)).sum())
    return (
        f"{lag_table(errors)}\n\n{CornerErrorDistribution.fitted(flights)}, of {len(flights)} flights\n"
        f"corners: variance over stated {excess:.2f}, {joint}\n"
        f"{beyond} of {square.size} corners beyond what a Gaussian allows once in 1e5: at most "
        f"{stats.chi2.isf(0.05, 2 * beyond + 2) / 2 / square.size:.1e} of them are (95 %)"
    )


def lag_table(errors: Sequence[Array]) -> str:
    """Variance and autocorrelation of errors (N, 3) of flights by lag."""
    variance = np.nanmean(np.concatenate(errors) ** 2, axis=0)
    lags = (1, 2, 4, 8, 16, 24, 40, 60)
    rows = []
    for axis, name in enumerate(("along", "lateral", "up")):
        lagged = [np.nanmean(np.concatenate([e[n:, axis] * e[:-n, axis] for e in errors])) for n in lags]
        rows.append([name, f"{variance[axis]:.2f}", *(f"{value / variance[axis]:.2f}" for value in lagged)])
    return markdown(["error", "variance over stated", *(f"{lag} s" for lag in lags)], rows)


def weather_table(flights: Mapping[Any, list[SimulatedFlight]]) -> str:
    """By weather: share of frames with vision, trusted, outside the ellipsoid, and beyond protection levels."""
    rows = []
    for weather, group in flights.items():
        seen = np.concatenate([flight.corner_detections.seen for flight in group])
        solved = np.concatenate([flight.vision_fixes.solved for flight in group])
        trusted = np.concatenate([flight.vision_fixes.trusted for flight in group])
        outside = np.concatenate([_outside(flight) for flight in group])
        beyond = np.concatenate([_beyond(flight) for flight in group])
        rows.append(
            [
                weather,
                str(len(seen)),
                f"{100 * seen.mean():.0f} %",
                f"{100 * solved.mean():.0f} %",
                f"{100 * trusted.mean():.0f} %",
                f"{100 * np.nanmean(outside[trusted]):.0f} %" if trusted.any() else "",
                f"{int(np.nansum(beyond[trusted]))}",
            ]
        )
    head = [
        "",
        "frames",
        "detected",
        "solved",
        "trusted",
        "outside 95 %, trusted",
        "beyond PL",
    ]
    return markdown(head, rows)


def gate_table(model: UncertainPose, work: Path, approaches: int) -> str:
    """The weather table for clear air and fog, with and without flagged detections."""
    flights: dict[str, list[SimulatedFlight]] = {}
    with progress() as step:
        for number, weather in ((1, "clear"), (5, "fog")):
            for seed in range(number * FIRST_SEED, number * FIRST_SEED + approaches):
                settings = LandingSettings(seed=seed, weather=cast(Weather, weather), rate=RATE)
                poses = found(model, settings, work, step)
                for alarm in (0.0, settings.alarm):
                    name = f"{weather}, alarms at {100 * alarm:g} %" if alarm else f"{weather}, no alarms"
                    flights.setdefault(name, []).append(refly(replace(settings, alarm=alarm), poses))
    return weather_table(flights)


def _beyond(flight: SimulatedFlight) -> Array:
    """Which fixes (N,) have an error beyond their protection levels."""
    return np.asarray((np.abs(flight.vision_fixes.error(flight.position)) > flight.vision_fixes.levels).any(1))


if __name__ == "__main__":
    main()
