"""Fault figures of docs/evidence/landing.md: the navigator under wrong sensors, one and two at a time.

    python -m research.navigation_faults --work work/

Flies the last 6 km with IRS, GNSS, ILS, radio altimeter and vision at 1 Hz. Vision errs by 4 % of the distance along
the line of sight and 0.2 % across; half of the error lasts for 18 s. Every fault begins in the 40th second and is
flown with 20 seeds; 200 flights have no fault.

Errors are compared with the protection levels, with five standard deviations of the position with and without each
source, and with five standard deviations of the overbound. A rerun keeps finished rows in the work folder.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from halopose.cli.terminal import say
from halopose.data.files import write_text
from halopose.landing.flight import draw_initial_state, true_trajectory
from halopose.landing.navigation.fusion import FusedTrack, fuse
from halopose.landing.navigation.motion_model import FusionSettings
from halopose.landing.navigation.sensors import (
    ATTITUDE,
    GLIDE_SLOPE,
    IRS,
    LOCALIZER,
    RADIO,
    VISION_NOISE_SCALE_DOF,
    Fault,
    GaussMarkov,
    IlsSite,
    Measurement,
    Sensors,
    TrueTrajectory,
    simulate,
    vision,
)
from halopose.landing.requirements import path_axes
from halopose.landing.world.approach import fly
from halopose.types import Array
from research.tables import markdown

START = 40.0  # seconds, of every fault
STEP = 0.5  # seconds between the instants looked at
LONGEST = 5.0  # seconds that an error may stay beyond its bound without a flag
DRIFT, PERSISTENT_SHARE = (
    GaussMarkov((1.0, 1.0, 1.0), 18.0),
    (0.62, 0.38, 0.45),
)  # of vision's error, flown and believed
RATE = 10.0  # Hz of the IRS, for speed; its noise per root hertz is the usual one
SENSORS = Sensors(
    irs=replace(IRS, rate=RATE, noise=(0.03 * math.sqrt(RATE / IRS.rate),) * 3),
    attitude=replace(ATTITUDE, rate=RATE),
    localizer=replace(LOCALIZER, rate=2.5),
    glide_slope=replace(GLIDE_SLOPE, rate=2.5),
    radio=replace(RADIO, rate=2.5),
)


def fault(kind: str, *size: float) -> Fault:
    return Fault(START, 999.0, kind, size if len(size) > 1 else size[0] if size else 0.0)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """Faults by sensor, and what is added to vision from the same second on: metres, and a share of the
    distance."""

    name: str
    faults: tuple[tuple[str, Fault], ...] = ()
    shift: tuple[float, float, float] = (0.0, 0.0, 0.0)
    stretch: float = 0.0


CASES = (
    *(Case(f"GNSS step {m:g} m lateral", (("gnss", fault("step", 0, m, 0)),)) for m in (10, 50, 200)),
    *(Case(f"GNSS step {m:g} m along", (("gnss", fault("step", m, 0, 0)),)) for m in (50, 200)),
    Case("GNSS step 10 m up", (("gnss", fault("step", 0, 0, 10)),)),
    *(Case(f"GNSS ramp {m:g} m/s lateral", (("gnss", fault("ramp", 0, m, 0)),)) for m in (0.2, 0.5, 1, 3)),
    *(Case(f"GNSS ramp {m:g} m/s along", (("gnss", fault("ramp", m, 0, 0)),)) for m in (0.2, 0.5, 3)),
    Case("GNSS frozen", (("gnss", fault("stuck")),)),
    *(Case(f"localizer {1e3 * a:g} mrad", (("localizer", fault("step", a)),)) for a in (2e-3, 5e-3)),
    Case("glide slope 3 mrad", (("glide_slope", fault("step", 3e-3)),)),
    Case("radio altimeter over terrain, 30 m", (("radio", fault("step", 30.0)),)),
    Case("radio altimeter over a slope, 1 m/s", (("radio", fault("ramp", 1.0)),)),
    Case("vision on a parallel runway, 229 m", shift=(0.0, 229.0, 0.0)),
    Case("vision 15 % too far", stretch=0.15),
    *(Case(f"IRS bias {a:g} m/s^2 lateral", (("irs", fault("step", 0, a, 0)),)) for a in (0.1, 0.3)),
    Case("GNSS step 50 m and radio 30 m", (("gnss", fault("step", 0, 50, 0)), ("radio", fault("step", 30.0)))),
    Case("GNSS ramp 1 m/s and parallel runway", (("gnss", fault("ramp", 0, 1, 0)),), (0.0, 229.0, 0.0)),
    Case(
        "GNSS ramp 1 m/s and localizer 5 mrad",
        (("gnss", fault("ramp", 0, 1, 0)), ("localizer", fault("step", 5e-3))),
    ),
    Case(
        "IRS bias .1 m/s^2 and localizer 5 mrad",
        (("irs", fault("step", 0, 0.1, 0)), ("localizer", fault("step", 5e-3))),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Of one flight: seconds from the fault to the flag or None, largest error in metres, and the longest times in
    seconds beyond the levels, and beyond five standard deviations of the overbound, without a flag."""

    flag: float | None
    early: bool
    error: float
    beyond_levels: float
    beyond_sigma: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--healthy", type=int, default=200)
    parser.add_argument("--only", default="", help="only faults whose name has this in it")
    given = parser.parse_args()
    rows = []
    for case in (case for case in (Case("no fault"), *CASES) if given.only in case.name):
        count = given.seeds if case.faults or case.stretch or any(case.shift) else given.healthy
        rows.append(_row(case.name, outcomes(case, count, given.work / "faults")))
    head = [
        "fault", "flights", "flagged", "seconds to the flag, median (most)", "largest error",
        "beyond the levels, unflagged", "beyond 5 sigma of the overbound, unflagged",
    ]  # fmt: skip
    say(markdown(head, rows))


def outcomes(case: Case, count: int, work: Path) -> list[Outcome]:
    """Outcomes by seed, from a file if it exists."""
    path = work / f"{case.name.replace('/', ' per ').replace(' ', '-')}.json"
    known = [Outcome(**each) for each in json.loads(path.read_text())] if path.is_file() else []
    for seed in range(len(known), count):
        known.append(flown(case, seed))
        if len(known) % 10 == 0 or len(known) == count:
            write_text(path, json.dumps([asdict(each) for each in known]))
    return known[:count]


def flown(case: Case, seed: int) -> Outcome:
    approach = fly(seed, "clear", 50.0, start=6000.0)
    truth, site = true_trajectory(approach), IlsSite.of_runway(approach.world.runway.length)
    broken = {name: replace(getattr(SENSORS, name), faults=(each,)) for name, each in case.faults}
    measured = simulate(truth, replace(SENSORS, **broken), seed, site)
    times = np.arange(0.0, truth.times[-1], STEP)
    settings = FusionSettings(
        site=site, irs_rate=RATE, irs_hold=2 / RATE, vision_bias=DRIFT, vision_freedom=VISION_NOISE_SCALE_DOF
    )
    track = fuse([*measured, *camera(truth, seed, case)], draw_initial_state(truth, seed), settings, times)
    return judged(track, truth)


def camera(truth: TrueTrajectory, seed: int, case: Case) -> list[Measurement]:
    """Fixes at 1 Hz whose errors follow the navigator's error model, except for the fault."""
    rng = np.random.default_rng([seed, 40])
    times = np.arange(0.25, truth.times[-1], 1.0)
    positions = truth.position(times)
    far = np.linalg.norm(positions, axis=1)[:, None, None]
    sight = positions[:, :, None] / far
    covariances = (2e-3 * far) ** 2 * np.eye(3) + (4e-2 * far) ** 2 * sight @ np.swapaxes(sight, 1, 2)
    drift, share = DRIFT.sample(len(times), 1.0, rng), np.array(PERSISTENT_SHARE)
    unit = np.sqrt(share) * drift + np.sqrt(1 - share) * rng.standard_normal((len(times), 3))
    seen = positions + (np.linalg.cholesky(covariances) @ unit[..., None])[..., 0]
    wrong = (times >= START)[:, None]
    seen = seen + wrong * (np.array(case.shift) + case.stretch * positions)
    return vision(times, seen, covariances, persistent_share=PERSISTENT_SHARE)


def judged(track: FusedTrack, truth: TrueTrajectory) -> Outcome:
    answers, axes = track.output, path_axes()
    error = np.abs((answers.positions - truth.position(answers.times)) @ axes.T)
    sigma = np.sqrt(np.einsum("ai,nij,aj->na", axes, answers.overbounds, axes))
    flagged = answers.flagged
    after = np.flatnonzero(flagged & (answers.times >= START))
    return Outcome(
        float(answers.times[after[0]] - START) if len(after) else None,
        bool(flagged[answers.times < START].any()),
        float(np.linalg.norm(error, axis=1).max()),
        _longest((error > answers.levels).any(1) & ~flagged),
        _longest((error > 5 * sigma).any(1) & ~flagged),
    )


def _longest(wrong: Array) -> float:
    """Seconds of the longest stretch in which flags (N,) are true."""
    best = run = 0
    for each in wrong.tolist():
        run = run + 1 if each else 0
        best = max(best, run)
    return best * STEP


def _row(name: str, found: list[Outcome]) -> list[str]:
    delays = [each.flag for each in found if each.flag is not None]
    flagged = len(delays) if name != "no fault" else sum(each.early or each.flag is not None for each in found)
    beyond = [sum(getattr(each, field) > LONGEST for each in found) for field in ("beyond_levels", "beyond_sigma")]
    return [
        name,
        str(len(found)),
        str(flagged),
        f"{np.median(delays):.1f} ({max(delays):.1f})" if delays and name != "no fault" else "",
        f"{max(each.error for each in found):.0f} m",
        *(str(count) for count in beyond),
    ]


if __name__ == "__main__":
    main()
