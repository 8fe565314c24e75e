"""Figures of docs/evidence/other-tools.md: false alarms and detection delay of the calibration monitor.

    halopose world -o world/ --images 330 --seed 778
    halopose world -o fog/ --weather fog --images 200 --seed 777
    python -m research.monitor_delay world/ fog/

Streams are drawn from the p-values of rendered scenes under the shipped runway model: scenes in all
weathers of its calibration, then scenes in fog, or other scenes blurred or covered by a uniform veil.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from halopose import UncertainPose
from halopose.calibration.calibration_monitor import CalibrationMonitor
from halopose.cli.terminal import say
from halopose.data.images import read_image
from halopose.fitting.corruptions import corrupt
from halopose.types import Array
from research.tables import markdown

ALARM = 0.01
STREAMS, QUIET, LATE = 200, 200, 120  # streams, usual images before the change, images after it
FALSE_STREAMS, FALSE_LENGTH = 1000, 1000


def main() -> None:
    """Print the share of false alarms and the delays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("world", type=Path)
    parser.add_argument("fog", type=Path)
    given = parser.parse_args()
    model = UncertainPose.load("runway")
    size = model.novelty_size
    assert size is not None

    def values(folder: Path, change: Callable[[Array], Array] = lambda image: image) -> Array:
        paths = sorted(folder.iterdir())
        found = [model.predict(change(read_image(path)))[0].image_novelty for path in paths]
        return np.array([0.5 if each is None else each[0] for each in found])

    usual = values(given.world / "images" / "train")
    changed = {
        "scenes in fog": values(given.fog / "images" / "fog"),
        "uniform veil of 0.5": values(given.world / "images" / "val", veil),
        "blur of severity 2": values(given.world / "images" / "val", lambda image: corrupt(image, "blur", 2)),
        "blur of severity 3": values(given.world / "images" / "val", lambda image: corrupt(image, "blur", 3)),
    }  # fmt: skip
    false = np.mean([exchangeable(size, seed) for seed in range(FALSE_STREAMS)])
    say(
        f"{FALSE_STREAMS} exchangeable streams of {FALSE_LENGTH} images: {false:.2%} false alarms (at most {ALARM:.0%})"
    )
    rows = [[name, *delays(usual, values, size)] for name, values in changed.items()]
    say(markdown(["change", "median delay", "95 % within", "within 60 images", "alarm before the change"], rows))


def veil(image: Array) -> Array:
    """An image half covered by grey."""
    return np.asarray(cv2.addWeighted(image, 0.5, np.full_like(image, 205), 0.5, 0))


def exchangeable(size: int, seed: int) -> bool:
    """Whether a stream of values like the calibration values raises an alarm."""
    rng = np.random.default_rng(seed)
    known = np.sort(rng.normal(size=size))
    monitor = CalibrationMonitor(ALARM, calibration_size=size, seed=seed)
    places = np.searchsorted(known, rng.normal(size=FALSE_LENGTH))
    return any(monitor.update(p).alarmed for p in ((1 + size - places) / (1 + size)).tolist())


def delays(usual: Array, changed: Array, size: int) -> list[str]:
    """Delays of streams that change after ``QUIET`` images; infinite without an alarm."""
    found, early = [], 0
    for seed in range(STREAMS):
        rng = np.random.default_rng(seed)
        monitor = CalibrationMonitor(ALARM, calibration_size=size, seed=seed)
        for p in rng.choice(usual, QUIET, replace=False).tolist():
            monitor.update(p)
        early += monitor.state.alarmed
        for p in rng.choice(changed, min(LATE, len(changed)), replace=False).tolist():
            monitor.update(p)
        at = monitor.state.alarmed_at
        found.append(np.inf if at is None else max(at - QUIET, 0))
    late = np.array(found)
    quantile = float(np.sort(late)[int(np.ceil(0.95 * len(late))) - 1])
    return [f"{np.median(late):.0f}", f"{quantile:.0f}", f"{(late <= 60).mean():.1%}", f"{early / STREAMS:.1%}"]


if __name__ == "__main__":
    main()
