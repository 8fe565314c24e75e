"""Time of one update of the navigator for each kind of measurement, with all sensors in use."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from halopose.landing.flight import draw_initial_state, true_trajectory
from halopose.landing.navigation.motion_model import FusionSettings
from halopose.landing.navigation.navigator import Navigator
from halopose.landing.navigation.sensors import IlsSite, Sensors, in_order, simulate, vision
from halopose.landing.world.approach import fly

SECONDS = 10.0


def update_seconds() -> dict[str, float]:
    """Median seconds of an update by measurement source, over the first 10 seconds of an approach."""
    approach = fly(0, "clear", 100.0)
    truth, site = true_trajectory(approach), IlsSite.of_runway(approach.world.runway.length)
    times = np.arange(0.5, SECONDS, 0.5)
    fixes = vision(times, truth.position(times), np.broadcast_to(25.0 * np.eye(3), (len(times), 3, 3)))
    navigator = Navigator(draw_initial_state(truth, 0), FusionSettings(site=site))
    taken: dict[str, list[float]] = {}
    for measurement in in_order([*simulate(truth, Sensors(), 0, site), *fixes]):
        if measurement.time > SECONDS:
            break
        before = perf_counter()
        navigator.update(measurement)
        taken.setdefault(measurement.source, []).append(perf_counter() - before)
    return {source: float(np.median(each)) for source, each in taken.items()}
