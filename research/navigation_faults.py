"""Fault campaign: whole approaches through association, corner check and filter bank, under sensor and camera faults.

    python -m research.navigation_faults --work work/ --processes 2
    python -m research.navigation_faults --work work/ --consistency

Flies the last 6 km. The other sensors are simulated, detections are sampled from the measured errors of the shipped
detector (``research.detector_errors``), one per second. Everything after the detector is the code that ``land`` runs.
Faults begin with the first frame or after 40 s. A rerun keeps finished flights in the work folder. ``--consistency``
flies without faults at 1, 5, 10 and 20 images per second, and tests NEES and NIS.

The position is valid if there is no alert and all protection levels are within the alert limits. Hazardously misleading
information (HMI) is a valid position whose error is beyond the alert limit or the level for longer than the time to
alert. Errors are lateral and across the path.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from scipy.stats import beta, chi2

from halopose.cli.terminal import say
from halopose.data.files import write_text
from halopose.geometry.camera import Camera, Mount, exp_so3
from halopose.landing.association import expected_corners
from halopose.landing.flight import (
    VisionSensor,
    draw_initial_state,
    fusion_settings_for,
    true_trajectory,
)
from halopose.landing.landing_settings import LandingSettings
from halopose.landing.navigation.fusion import NavigationOutput, consistency
from halopose.landing.navigation.motion_model import InitialState
from halopose.landing.navigation.navigator import Navigator
from halopose.landing.navigation.sensors import (
    ATTITUDE,
    GLIDE_SLOPE,
    GNSS,
    IRS,
    LOCALIZER,
    RADIO,
    SIZES,
    DeferredMeasurement,
    IlsSite,
    Measurement,
    Sensors,
    Source,
    TrueTrajectory,
    simulate,
)
from halopose.landing.navigation.terrain import LEVEL, Terrain
from halopose.landing.recordings.replay import start_from
from halopose.landing.requirements import REQUIREMENTS, path_axes
from halopose.landing.vision_fix import VisionModel
from halopose.landing.world.approach import fly
from halopose.poses import PoseDistributions
from halopose.types import Array
from research.detector_errors import DetectorModel, measured
from research.tables import markdown

FIRST_SEED = 60_000
LATE = 40.0  # seconds, of faults that do not begin with the flight
STEP = 0.5  # seconds between the instants looked at
BATCH = 16  # flights that are begun at a time
RATES = (1.0, 5.0, 10.0, 20.0)  # images per second of the consistency test
IRS_HZ = 5.0  # for speed; its noise per root hertz is the usual one
ALL = Sensors(
    irs=replace(IRS, rate=IRS_HZ, noise=(0.03 * math.sqrt(IRS_HZ / IRS.rate),) * 3),
    attitude=replace(ATTITUDE, rate=IRS_HZ),
    gnss=replace(GNSS, rate=2.0),
    localizer=replace(LOCALIZER, rate=2.0),
    glide_slope=replace(GLIDE_SLOPE, rate=2.0),
    radio=replace(RADIO, rate=1.0),
)
ALONE = replace(ALL, gnss=None, localizer=None, glide_slope=None, radio=None)
LIMITS = REQUIREMENTS["lpv-200"].limits

Arrival = tuple[float, Measurement]  # seconds at which it is there


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: name of the fault.
        start: time in seconds at which the fault begins.
        shifted: sources whose position is off by ``shift``.
        shift: position error (3,) in metres as a function of the seconds since ``start``.
        rate: velocity error (3,) in metres per second.
        camera: kind of camera error, if any.
        value: size of the camera error.
        alone: whether only vision and IRS are used.
        sensor: further sensor fault, if any.
    """

    name: str
    start: float = 0.0
    shifted: tuple[Source, ...] = ()
    shift: tuple[float, float, float] = (0.0, 0.0, 0.0)
    rate: tuple[float, float, float] = (0.0, 0.0, 0.0)
    camera: str = ""
    value: float = 0.0
    alone: bool = False
    sensor: str = ""


ALONG = np.arange(-8000.0, 3001.0, 50.0)
HILLS = Terrain(ALONG, 14.0 * (1 - np.cos(ALONG / 350.0)) * (ALONG < -500.0))
TERRAINS = {  # what the navigator believes of the ground over hills
    "profile given": HILLS,
    "profile of the last 1,500 m": Terrain(ALONG[ALONG >= -1500], HILLS.height[ALONG >= -1500]),
    "level ground believed": LEVEL,
}


def _twice(name: str, **parts: object) -> list[Case]:
    return [Case(f"{name}, from {begin}", start=start, **parts) for begin, start in (("0 s", 0.0), ("40 s", LATE))]  # type: ignore[arg-type]


def cases() -> list[Case]:
    """All faults."""
    both: tuple[Source, ...] = ("gnss", "localizer")
    found = [Case("no fault"), Case("no fault", alone=True)]
    for size in (50.0, 120.0, 250.0, 500.0):
        found += _twice(f"GNSS {size:g} m lateral", shifted=("gnss",), shift=(0.0, size, 0.0))
    found += _twice("GNSS 20 m up", shifted=("gnss",), shift=(0.0, 0.0, 20.0))
    found += _twice("GNSS meaconing, 2 s late", sensor="meaconing")
    found += [Case(f"GNSS ramp {r:g} m/s lateral", LATE, ("gnss",), rate=(0.0, r, 0.0)) for r in (0.2, 0.5, 1.0)]
    found += [Case("GNSS ramp 1 m/s up", LATE, ("gnss",), rate=(0.0, 0.0, 1.0))]
    found += [Case("GNSS stamps: one sample 1,000 s ahead", LATE, sensor="ahead")]
    found += _twice("GNSS stamps 0.4 s late", sensor="stamps")
    found += _twice("localizer 60 m at the threshold", shifted=("localizer",), shift=(0.0, 60.0, 0.0))
    found += _twice("glide slope 25 m", shifted=("glide_slope",), shift=(0.0, 0.0, 25.0))
    for r in (0.1, 0.3, 1.0):
        found += _twice(f"GNSS and localizer ramp {r:g} m/s", shifted=both, rate=(0.0, r, 0.0))
    for r in (0.1, 0.3, 1.0):
        found += [Case(f"GNSS and glide slope ramp {r:g} m/s", 0.0, ("gnss", "glide_slope"), rate=(0.0, 0.0, r))]
    found += [Case(f"hills of 0 to 28 m, {known}", sensor=f"hills, {known}") for known in TERRAINS]
    found += [Case(f"outage of {name} from 40 s", LATE, sensor=f"outage {name}") for name in ("gnss", "ils", "vision")]
    for alone in (False, True):
        found += [
            Case("runway 45 m wide, believed 60 m", camera="width", value=60 / 45, alone=alone),
            Case("pavement of 300 m taken for runway", camera="pavement", value=300.0, alone=alone),
            Case("mount pitch 0.2 degrees", camera="pitch", value=0.2, alone=alone),
            Case("mount pitch 0.5 degrees", camera="pitch", value=0.5, alone=alone),
            Case("mount yaw 0.5 degrees", camera="yaw", value=0.5, alone=alone),
            Case("pitch drifts by 0.01 degrees/s", camera="pitch drift", value=0.01, alone=alone),
            Case("focal length 1 %", camera="focal", value=0.01, alone=alone),
            Case("image stream frozen from 40 s", LATE, camera="frozen", alone=alone),
            Case("images 300 ms late", camera="latency", value=0.3, alone=alone),
            Case("parallel runway, 229 m", camera="parallel", value=229.0, alone=alone),
            Case("parallel runway, 229 m, from 40 s", LATE, camera="parallel", value=229.0, alone=alone),
            Case("taxiway for 3 s", LATE, camera="taxiway", value=150.0, alone=alone),
        ]
    return found


@dataclass(frozen=True)
class Outcome:
    """One flight.

    Attributes:
        seed: its seed.
        alerted: seconds from the start of the fault to the first alert or exclusion; None without one.
        early: whether there was an alert or exclusion before the fault.
        valid: share of the instants with a valid position.
        lost: number of times that a valid position became invalid.
        hmi: longest time in seconds with a valid position and an error beyond an alert limit.
        beyond: longest time in seconds with a valid position and an error beyond a protection level.
        error: largest error while valid, lateral and across the path, in metres.
        deviation: largest error while valid over its stated standard deviation.
        nees: squared error over covariance at 4, 2.5, 1.5, 0.9 and 0.5 km, expected 3.
        nis: mean NIS of each source over its degrees of freedom, and number of its measurements.
        flags: all words of the flags.
        cells: axis, level and error in whole metres, and count, of all instants without an alert.
    """

    seed: int
    alerted: float | None
    early: bool
    valid: float
    lost: int
    hmi: float
    beyond: float
    error: float
    deviation: float
    nees: list[float]
    nis: dict[str, tuple[float, int]]
    flags: list[str]
    cells: list[list[int]] = field(default_factory=list)


def flown(case: Case, seed: int, model: DetectorModel, rate: float = 1.0) -> Outcome:
    """Fly one approach."""
    rng = np.random.default_rng([seed, 50])
    approach = fly(FIRST_SEED + seed, "clear", 50.0)
    truth, world = true_trajectory(approach), approach.world
    settings = LandingSettings(seed=seed, rate=rate, sensors=ALONE if case.alone else ALL)
    site = IlsSite.of_runway(world.runway.length)
    hills, _, terrain = case.sensor.partition(", ")
    sensed = simulate(truth, settings.sensors, seed, site, HILLS if hills == "hills" else LEVEL)
    given = broken(case, sensed, truth, site)
    times = np.arange(0.25, truth.times[-1], 1 / rate)
    camera, mount = settings.camera.believed(world.camera, world.mount, seed)
    corners = world.runway.corners()
    detections = seen(case, model, times, truth, (world.camera, world.mount), corners, rng)
    if case.camera == "width":
        corners = corners * (1.0, case.value, 1.0)
    camera, mount = _believed(case, camera, mount)
    attitudes = logged_attitudes_at(given, times)
    if case.camera == "pitch drift":
        attitudes = attitudes + np.radians(case.value) * times[:, None] * (0.0, 1.0, 0.0)
    vision = VisionModel(camera, mount, corners, attitudes, settings)
    stamps = np.maximum(times + settings.camera.offset(seed), truth.times[0])
    start = _start(case, given, times, truth, seed, vision)
    fusion = fusion_settings_for(settings, site, camera, TERRAINS.get(terrain, LEVEL))
    images = VisionSensor(vision, stamps, detections).deferred(settings.camera.latency)
    navigator, asked = Navigator(start, fusion), np.arange(0.0, truth.times[-1], STEP).tolist()
    states, nis = [], dict[str, list[float]]()
    arriving: list[tuple[float, Measurement | DeferredMeasurement]] = [*given]
    arriving += [(image.time + image.latency, image) for image in images]
    for arrival, each in sorted(arriving, key=lambda pair: pair[0]):
        while asked and asked[0] + settings.camera.latency < arrival:
            states.append(navigator.at(asked.pop(0)))
        step = navigator.update(each).step
        if step is not None and math.isfinite(step.nis):
            nis.setdefault(step.source, []).append(step.nis / SIZES[step.source])
    output = NavigationOutput.of([*states, *map(navigator.at, asked)])
    return judged(case, seed, output, truth, {source: (float(np.mean(n)), len(n)) for source, n in nis.items()})


def logged_attitudes_at(given: list[Arrival], times: Array) -> Array:
    """Logged attitudes (N, 3) at times, linear between samples."""
    known = [each for _, each in given if each.source == "attitude"]
    stamps, values = np.array([each.time for each in known]), np.array([each.value for each in known])
    return np.stack([np.interp(times, stamps, axis) for axis in np.unwrap(values, axis=0).T], axis=1)


def _start(
    case: Case, given: list[Arrival], times: Array, truth: TrueTrajectory, seed: int, vision: VisionModel
) -> InitialState:
    """Initial state as in a replay: from GNSS if available."""
    return draw_initial_state(truth, seed) if case.alone else start_from([each for _, each in given], times, [], vision)


def _believed(case: Case, camera: Camera, mount: Mount) -> tuple[Camera, Mount]:
    if case.camera == "focal":
        return replace(camera, fx=camera.fx * (1 + case.value), fy=camera.fy * (1 + case.value)), mount
    if case.camera in ("pitch", "yaw"):
        axis = (1.0, 0.0, 0.0) if case.camera == "pitch" else (0.0, 1.0, 0.0)
        turn = exp_so3(np.radians(case.value) * np.array(axis))
        return camera, Mount(turn @ mount.rotation, mount.lever_arm)
    return camera, mount


def seen(
    case: Case,
    model: DetectorModel,
    times: Array,
    truth: TrueTrajectory,
    camera: tuple[Camera, Mount],
    corners: Array,
    rng: np.random.Generator,
) -> list[PoseDistributions]:
    """Detections of all frames, with camera and runway faults."""
    late = times - case.value if case.camera == "latency" else times
    late = np.maximum(late, truth.times[0])
    wrong = times >= case.start
    looked = np.broadcast_to(corners, (len(times), 4, 3)).copy()
    if case.camera == "pavement":
        looked[:, :2, 0] -= case.value
    if case.camera == "parallel":
        looked[wrong, :, 1] += case.value
    if case.camera == "taxiway":
        during = wrong & (times < case.start + 3.0)
        looked[during, :, 1] = 0.5 * looked[during, :, 1] + case.value
    place = truth.position(late)
    exact = np.stack(
        [
            expected_corners(*camera, place[n : n + 1], truth.attitude(late[n : n + 1]), looked[n])[0]
            for n in range(len(times))
        ]
    )
    found = model.sampled(times, -place[:, 0], exact, rng)
    if case.camera == "frozen":
        last = next((n for n in range(int(np.argmax(wrong)), -1, -1) if len(found[n])), 0)
        found = [found[last] if wrong[n] else found[n] for n in range(len(times))]
    if case.sensor == "outage vision":
        found = [each[:0] if wrong[n] else each for n, each in enumerate(found)]
    return found


def broken(case: Case, given: list[Measurement], truth: TrueTrajectory, site: IlsSite) -> list[Arrival]:
    """Measurements with the fault, and their arrival times."""
    found: list[Arrival] = []
    ahead = False
    for each in given:
        arrival, after = each.time, each.time - case.start
        if after < 0:
            found.append((arrival, each))
            continue
        outage = case.sensor.removeprefix("outage ")
        if each.source in {"gnss": ("gnss",), "ils": ("localizer", "glide_slope")}.get(outage, ()):
            continue
        if each.source in case.shifted:
            each = _shifted(each, np.array(case.shift) + after * np.array(case.rate), truth, site)
        if each.source == "gnss" and case.sensor == "meaconing":
            then = np.array([max(each.time - 2.0, 0.0)])
            moved = truth.position(then)[0] - 140.0 * (each.time < 2.0) * np.eye(3)[0] * (1 - each.time / 2.0)
            each = replace(each, value=each.value + moved - truth.position(np.array([each.time]))[0])
        if each.source == "gnss" and case.sensor == "stamps":
            arrival += 0.4
            each = replace(each, time=arrival)
        if each.source == "gnss" and case.sensor == "ahead" and not ahead:
            ahead = True
            each = replace(each, time=each.time + 1000.0)
        found.append((arrival, each))
    return found


def _shifted(each: Measurement, metres: Array, truth: TrueTrajectory, site: IlsSite) -> Measurement:
    """The measurement of an aircraft displaced by metres (3,)."""
    place = truth.position(np.array([each.time]))
    if each.source == "gnss":
        return replace(each, value=each.value + metres)
    angle = site.localizer_angle if each.source == "localizer" else site.glide_slope_angle
    return replace(each, value=each.value + angle(place + metres)[0] - angle(place)[0])


def judged(
    case: Case, seed: int, output: NavigationOutput, truth: TrueTrajectory, nis: dict[str, tuple[float, int]]
) -> Outcome:
    """Compare the navigator's output with the truth."""
    difference = output.positions - truth.position(output.times)
    error = np.abs(difference @ path_axes().T)
    sigma = np.sqrt(np.einsum("ai,nij,aj->na", path_axes(), output.covariances, path_axes()))
    valid = output.valid(REQUIREMENTS["lpv-200"])
    after = np.flatnonzero(output.flagged & (output.times >= case.start))
    bounded = error[:, 1:]
    worst = np.where(valid[:, None], bounded, 0.0)
    square = (difference * np.linalg.solve(output.covariances, difference[..., None])[..., 0]).sum(1)
    along = truth.position(output.times)[:, 0]
    looked = [int(np.argmin(np.abs(along + far))) for far in (4000.0, 2500.0, 1500.0, 900.0, 500.0)]
    return Outcome(
        seed,
        float(output.times[after[0]] - case.start) if len(after) else None,
        bool(output.flagged[output.times < case.start].any()),
        float(valid.mean()),
        int((valid[:-1] & ~valid[1:]).sum()),
        _longest((bounded > LIMITS[1:]).any(1) & valid),
        _longest((bounded > output.levels[:, 1:]).any(1) & valid),
        float(worst.max()),
        float((worst / sigma[:, 1:]).max()),
        square[looked].tolist(),
        nis,
        sorted({word for words in output.flags for word in words}),
        _cells(bounded[~output.alerted], output.levels[~output.alerted, 1:]),
    )


def _cells(error: Array, level: Array) -> list[list[int]]:
    counts: dict[tuple[int, int, int], int] = {}
    for axis in (0, 1):
        for e, bound in zip(error[:, axis], level[:, axis], strict=True):
            key = axis, int(min(bound, 60)), int(min(e, 60))
            counts[key] = counts.get(key, 0) + 1
    return [[*key, count] for key, count in sorted(counts.items())]


def _longest(wrong: Array) -> float:
    """Seconds of the longest stretch in which flags (N,) are true."""
    best = run = 0
    for each in wrong.tolist():
        run = run + 1 if each else 0
        best = max(best, run)
    return best * STEP


# --- running and reporting --------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _model(work: str, flights: int) -> DetectorModel:
    return DetectorModel.of(measured(Path(work), flights))


def _flight(work: str, flights: int, task: tuple[Case, int, float]) -> Outcome:
    case, seed, rate = task
    return flown(case, seed, _model(work, flights), rate)


def title(case: Case) -> str:
    """The case and its sensors."""
    return f"{case.name}{' (vision and IRS)' if case.alone else ''}"


def run(
    wanted: dict[str, tuple[Case, float, int]], folder: Path, given: argparse.Namespace
) -> dict[str, list[Outcome]]:
    """Fly the approaches that are not yet in the folder, for some minutes.

    Args:
        wanted: fault, images per second and number of flights, by name.
        folder: where finished flights are kept, one line each.
        given: the command line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = {name: _stored(folder / f"{_slug(name)}.jsonl") for name in wanted}
    tasks = []
    for name, (case, rate, count) in wanted.items():
        done = {each.seed for each in known[name]}
        tasks += [(name, (case, seed, rate)) for seed in range(count) if seed not in done]
    tasks.sort(key=lambda task: task[1][1])  # a run that is stopped has flown all faults equally often
    measured(given.work, given.measured)
    work, end = partial(_flight, str(given.work), given.measured), time.monotonic() + 60 * given.minutes
    with ProcessPoolExecutor(given.processes) as pool:
        for start in range(0, len(tasks), BATCH):
            if time.monotonic() > end:
                say(f"{len(tasks) - start} flights are left: run again")
                break
            batch = tasks[start : start + BATCH]
            for (name, _), outcome in zip(batch, pool.map(work, [task for _, task in batch]), strict=True):
                known[name].append(outcome)
                with (folder / f"{_slug(name)}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    return known


def _stored(path: Path) -> list[Outcome]:
    """Finished flights; a line that a stopped run left incomplete is dropped."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("}\n")]
    if len(whole) < len(lines):
        write_text(path, "".join(whole))
    return [Outcome(**json.loads(line)) for line in whole]


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def bound(count: int, total: int) -> float:
    """Upper 95 % limit of a rate."""
    return float(beta.ppf(0.95, count + 1, total - count)) if count < total else 1.0


def report(known: dict[str, list[Outcome]]) -> None:
    """Print the tables."""
    head = [
        "fault", "flights", "reported", "seconds until, median (most)", "valid", "interruptions per flight",
        "largest error while valid", "over its sigma", "beyond a level for 2 s, 6 s", "HMI, 2 s, 6 s",
    ]  # fmt: skip
    say(markdown(head, [_row(name, found) for name, found in known.items() if found]))
    every = [each for found in known.values() for each in found]
    for seconds in (2.0, 6.0):
        count = sum(each.hmi > seconds for each in every)
        beyond = sum(each.beyond > seconds for each in every)
        say(
            f"time to alert {seconds:g} s: HMI in {count} of {len(every)} flights (95 %: under "
            f"{bound(count, len(every)):.2%}), beyond a level in {beyond} (under {bound(beyond, len(every)):.2%})"
        )
    healthy = known.get("no fault", [])
    if healthy:
        false = sum(each.alerted is not None for each in healthy)
        say(f"false alerts: {false} of {len(healthy)} (95 %: under {bound(false, len(healthy)):.2%})")


def consistency_report(known: dict[str, list[Outcome]]) -> None:
    """Print NEES and NIS by rate, with the share of instants and sources within their 95 % bounds."""
    rows = []
    for name, found in known.items():
        values = np.array([each.nees for each in found])
        means = [consistency(column, 3) for column in values.T]
        cells = []
        for source in ("gnss", "localizer", "glide_slope", "radio", "vision"):
            parts = [each.nis[source] for each in found if source in each.nis]
            if parts:
                mean, count = np.average([p[0] for p in parts], weights=[p[1] for p in parts]), sum(p[1] for p in parts)
                dof = SIZES[source] * count
                low, high = chi2.ppf((0.025, 0.975), dof) / dof
                cells.append(f"{source} {mean:.3f} ({low:.3f} to {high:.3f})")
        inside = sum(each.consistent for each in means)
        by_place = ", ".join(f"{each.mean:.2f}" for each in means)
        whole = consistency(values, 3)
        rows.append(
            [name, str(len(found)), f"{whole.mean:.2f}", f"{inside} of {len(means)}: {by_place}", "; ".join(cells)]
        )
    bounds = consistency(np.full(len(next(iter(known.values()))), 3.0), 3).mean_bounds
    head = [
        "images", "flights", "NEES (3)",
        f"instants within {bounds[0]:.2f} to {bounds[1]:.2f}, and each", "NIS over expected (95 % bounds)",
    ]  # fmt: skip
    say(markdown(head, rows))


def stanford(known: dict[str, list[Outcome]], path: Path) -> None:
    """Draw the Stanford diagrams of all flights: lateral and across the path, levels against errors."""
    size, side = 5, 61
    parts = []
    for axis, (name, limit) in enumerate((("lateral", LIMITS[1]), ("across the path", LIMITS[2]))):
        counts = np.zeros((side, side))
        for outcome in (each for found in known.values() for each in found):
            for _, level, error, count in (cell for cell in outcome.cells if cell[0] == axis):
                counts[level, error] += count
        left = 50 + axis * (side * size + 80)
        shade = np.log1p(counts) / max(float(np.log1p(counts).max()), 1.0)
        for level, error in np.argwhere(counts > 0).tolist():
            parts.append(
                f'<rect x="{left + error * size}" y="{20 + (side - 1 - level) * size}" width="{size}" height="{size}" '
                f'fill="#1f4e8c" fill-opacity="{0.15 + 0.85 * shade[level, error]:.2f}"/>'
            )
        bottom, edge = 20 + side * size, left + side * size
        parts += [
            f'<rect x="{left}" y="20" width="{side * size}" height="{side * size}" fill="none" stroke="#444"/>',
            f'<path d="M{left} {bottom}L{edge} 20" stroke="#a33"/>',
            f'<path d="M{left} {bottom - limit * size:g}H{edge}M{left + limit * size:g} {bottom}V20" '
            'stroke="#a33" stroke-dasharray="4"/>',
            f'<text x="{left}" y="14">{name}: level over error, alert limit {limit:g} m</text>',
            *(
                f'<text x="{left + mark * size}" y="{bottom + 14}" text-anchor="middle">{mark}</text>'
                f'<text x="{left - 5}" y="{bottom - mark * size + 4}" text-anchor="end">{mark}</text>'
                for mark in (0, 20, 40, 60)
            ),
        ]
    text = "\n".join(parts)
    write_text(
        path,
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 350" font-family="sans-serif" font-size="12">'
        f'<rect width="800" height="350" fill="white"/>\n{text}\n</svg>\n',
    )


def _row(name: str, found: list[Outcome]) -> list[str]:
    delays = [each.alerted for each in found if each.alerted is not None]
    return [
        name,
        str(len(found)),
        str(len(delays)),
        f"{np.median(delays):.1f} ({max(delays):.1f})" if delays else "",
        f"{np.mean([each.valid for each in found]):.0%}",
        f"{np.mean([each.lost for each in found]):.1f}",
        f"{max(each.error for each in found):.1f} m",
        f"{max(each.deviation for each in found):.1f}",
        *(
            ", ".join(str(sum(getattr(each, name) > seconds for each in found)) for seconds in (2.0, 6.0))
            for name in ("beyond", "hmi")
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--flights", type=int, default=16, help="flights per fault")
    parser.add_argument("--healthy", type=int, default=1500, help="flights without a fault")
    parser.add_argument("--measured", type=int, default=24, help="rendered flights that detections are sampled from")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after these; a rerun goes on")
    parser.add_argument("--stanford", type=Path, help="draw the Stanford diagrams to this svg file")
    parser.add_argument("--only", default="", help="only faults or rates whose name has this in it")
    parser.add_argument("--consistency", action="store_true", help="NEES and NIS without faults, at several rates")
    given = parser.parse_args()
    if given.consistency:
        every = [(rate, alone) for rate in RATES for alone in (False, True)]
        wanted = {
            name: (Case("no fault", alone=alone), rate, 24)
            for rate, alone in every
            if given.only in (name := f"{rate:g} Hz, {'vision and IRS' if alone else 'all sensors'}")
        }
        consistency_report(run(wanted, given.work / "navigation-consistency", given))
        return
    chosen = [case for case in cases() if given.only in title(case)]
    wanted = {
        title(case): (case, 1.0, given.flights if case.name != "no fault" or case.alone else given.healthy)
        for case in chosen
    }
    known = run(wanted, given.work / "navigation-faults", given)
    report(known)
    if given.stanford:
        stanford(known, given.stanford)


if __name__ == "__main__":
    main()
