"""Figures of docs/evidence/other-tools.md: false alarms and detection delay of the calibration monitor.

    python -m research.monitor_delay
    halopose world -o world/ --images 210 --seed 778
    halopose world -o fog/ --weather fog --images 70 --seed 777
    python -m research.monitor_delay world/ fog/ --footage runway-real/

Without folders: simulated streams, compared with MAPIE's jumper martingale. With folders, streams are drawn from the
p-values of rendered scenes under the shipped runway model. Scenes in all weathers of its calibration come first. Then
come scenes in fog, or other scenes blurred, covered by a uniform veil, seen by another camera or through a moved lens.
Footage is a folder of frames of a real camera.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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

Maker = Callable[[int], Any]  # a monitor with ``update`` from a seed


def main() -> None:
    """Print the share of false alarms and the delays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("world", type=Path, nargs="?")
    parser.add_argument("fog", type=Path, nargs="?")
    parser.add_argument("--footage", type=Path)
    parser.add_argument("--streams", type=int, default=FALSE_STREAMS)
    given = parser.parse_args()
    if given.world is None:
        simulated(given.streams)
        return
    model = UncertainPose.load("runway")
    size = model.novelty_size
    assert size is not None

    def values(folder: Path, change: Callable[[Array], Array] = lambda image: image) -> Array:
        paths = sorted(path for path in folder.rglob("*") if path.suffix in (".jpg", ".png", ".webp"))
        found = [model.predict(change(read_image(path)))[0].image_novelty for path in paths]
        return np.array([0.5 if each is None else each[0] for each in found])

    usual = values(given.world / "images" / "train")
    changed = {
        "scenes in fog": values(given.fog / "images" / "fog"),
        "uniform veil of 0.5": values(given.world / "images" / "val", veil),
        "blur of severity 2": values(given.world / "images" / "val", lambda image: corrupt(image, "blur", 2)),
        "blur of severity 3": values(given.world / "images" / "val", lambda image: corrupt(image, "blur", 3)),
        "lens turned by 8 degrees": values(given.world / "images" / "val", turned),
        "lens shifted by a tenth of the width": values(given.world / "images" / "val", shifted),
        "lens with 1.4 times the focal length": values(given.world / "images" / "val", longer),
        "new camera: noise, gamma 1.6, vignette": values(given.world / "images" / "val", new_camera),
    }  # fmt: skip
    if given.footage is not None:
        changed["frames of a real camera"] = values(given.footage)
    makers = tests_of(size)
    rows = [
        [name, who, *delays(usual, values, make)] for name, values in changed.items() for who, make in makers.items()
    ]
    head = ["change", "test", "median delay", "95 % within", "within 60 images", "alarm before the change"]
    say(markdown(head, rows))


def simulated(streams: int) -> None:
    """False alarms and delay on simulated novelty values, beside MAPIE's jumper martingale."""
    size, rows = 1600, []
    for name, make in tests_of(size).items():
        false = np.mean([exchangeable(size, seed, make) for seed in range(streams)])
        cells = []
        for shift in (0.75, 1.5, 3.0):
            rng = np.random.default_rng(7)
            known = np.sort(rng.normal(size=size))
            usual, changed = (_p_values(known, rng.normal(mean, 1, 4000)) for mean in (0.0, shift))
            cells.append("{} ({})".format(*delays(usual, changed, make)[:2]))
        rows.append([name, f"{false:.1%}", *cells])
    head = ["test", f"false alarms in {streams} streams", "delay (95 %) at 0.75 sigma", "1.5 sigma", "3 sigma"]
    say(markdown(head, rows))


def tests_of(size: int) -> dict[str, Maker]:
    """The tests that are compared, for a number of calibration values."""
    return {"halopose": partial(Monitor, size), "MAPIE's jumper": partial(Jumper, size)}


class Monitor:
    """The calibration monitor."""

    def __init__(self, size: int, seed: int) -> None:
        self._monitor = CalibrationMonitor(ALARM, calibration_size=size, seed=seed)

    def update(self, p: float) -> bool:
        """Take a p-value; return whether the alarm was raised."""
        return self._monitor.update(p).alarmed


class Jumper:
    """MAPIE's simple jumper martingale on the same ranks; its history begins with the calibration values."""

    def __init__(self, size: int, seed: int) -> None:
        from mapie.exchangeability_testing import OnlineMartingaleTest

        self._test = OnlineMartingaleTest(random_state=seed, warn=False)
        self._history = (-(np.arange(size) + 1.5) / (size + 1)).tolist()
        self._alarmed = False

    def update(self, p: float) -> bool:
        """Take a p-value; return whether the alarm was raised."""
        rank = self._test.compute_p_value(-p, np.array(self._history))
        self._history.append(-p)
        self._alarmed |= self._test.update_simple_jumper_martingale(rank) >= 1 / ALARM
        return self._alarmed


def turned(image: Array) -> Array:
    """An image turned by 8 degrees around its centre."""
    height, width = image.shape[:2]
    matrix = cv2.getRotationMatrix2D((width / 2, height / 2), 8, 1.0)
    return np.asarray(cv2.warpAffine(image, matrix, (width, height), borderMode=cv2.BORDER_REFLECT))


def shifted(image: Array) -> Array:
    """An image shifted by a tenth of its width."""
    height, width = image.shape[:2]
    matrix = np.array([[1, 0, width / 10], [0, 1, 0]], dtype=np.float64)
    return np.asarray(cv2.warpAffine(image, matrix, (width, height), borderMode=cv2.BORDER_REFLECT))


def longer(image: Array) -> Array:
    """The centre of an image, enlarged 1.4 times."""
    height, width = image.shape[:2]
    matrix = cv2.getRotationMatrix2D((width / 2, height / 2), 0, 1.4)
    return np.asarray(cv2.warpAffine(image, matrix, (width, height)))


def new_camera(image: Array) -> Array:
    """An image as another sensor records it: gamma, vignette and noise."""
    height, width = image.shape[:2]
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    light = (image / 255.0) ** 1.6 * (1 - 0.3 * (x**2 + y**2) / 2)[..., None]
    noise = np.random.default_rng(0).normal(0, 0.03, image.shape)
    return np.asarray(np.clip((light + noise) * 255, 0, 255), dtype=np.uint8)


def veil(image: Array) -> Array:
    """An image half covered by grey."""
    return np.asarray(cv2.addWeighted(image, 0.5, np.full_like(image, 205), 0.5, 0))


def _p_values(known: Array, values: Array) -> Array:
    """Conformal p-values among sorted calibration values."""
    return np.asarray((1 + len(known) - np.searchsorted(known, values)) / (1 + len(known)))


def exchangeable(size: int, seed: int, make: Maker) -> bool:
    """Whether a stream of values like the calibration values raises an alarm."""
    rng = np.random.default_rng(seed)
    known = np.sort(rng.normal(size=size))
    monitor = make(seed)
    return any(monitor.update(p) for p in _p_values(known, rng.normal(size=FALSE_LENGTH)).tolist())


def delays(usual: Array, changed: Array, make: Maker) -> list[str]:
    """Delays of streams that change after ``QUIET`` images; infinite without an alarm."""
    found, early = [], 0
    for seed in range(STREAMS):
        rng = np.random.default_rng(seed)
        monitor = make(seed)
        before = [monitor.update(p) for p in rng.choice(usual, QUIET, replace=False).tolist()]
        early += before[-1]
        after = [monitor.update(p) for p in rng.choice(changed, min(LATE, len(changed)), replace=False).tolist()]
        found.append(np.inf if not after[-1] else 0 if before[-1] else after.index(True) + 1)
    late = np.array(found)
    quantile = float(np.sort(late)[int(np.ceil(0.95 * len(late))) - 1])
    return [f"{np.median(late):.0f}", f"{quantile:.0f}", f"{(late <= 60).mean():.1%}", f"{early / STREAMS:.1%}"]


if __name__ == "__main__":
    main()
