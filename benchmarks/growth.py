"""Time and peak memory of steps that read the whole data set, as it grows; each size runs in its own process."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stored import STORED, synthetic_heads, write_store
from halopose.calibration.calibrate import fit_calibrations
from halopose.data.coco import parse_ground_truth, parse_predictions, read_ground_truth
from halopose.data.synthetic_poses import World, synthesize
from halopose.evaluation.evaluate import evaluate
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.head_training import train
from halopose.fitting.pipeline import calibrate_heads
from halopose.fitting.settings import FitSettings, TrainSettings
from halopose.matching.matched_poses import match_poses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array

COCO_VAL = World(images=2693, persons=6352)
POOL = 256 * 2**20
MOST_SECONDS = 900  # of one size
_STEP = 1e-4  # relative growth of each copy, so that no two values tie
Work = Callable[[], object]


class GrowthError(RuntimeError):
    """Measuring a size failed."""


@dataclass(frozen=True)
class Growth:
    """Time and memory of one step on one size of data.

    Attributes:
        persons: size of the data.
        seconds: duration of the step.
        peak_gib: peak memory of the process.
        input_gib: memory of the process before the step.
    """

    persons: int
    seconds: float
    peak_gib: float
    input_gib: float

    def per_person(self) -> str:
        """Time and memory per person in words."""
        time_each, added = self.seconds / self.persons * 1e6, max(self.peak_gib - self.input_gib, 0.0)
        return f"{time_each:.0f} µs, {added * 2**20 / self.persons:.2g} KiB a person beside the input"


def grow(kind: str, times: int) -> Growth:
    """Measure one step on copies of the data, in a separate process.

    Args:
        kind: a key of WORKS.
        times: number of copies of COCO_VAL.

    Raises:
        GrowthError: the process failed or took too long.
    """
    command = [sys.executable, "-m", "benchmarks.growth", kind, str(times)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        raise GrowthError(f"not done after {MOST_SECONDS} s") from None
    if done.returncode:
        raise GrowthError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return Growth(*json.loads(done.stdout.splitlines()[-1]))


def _measure(kind: str, times: int) -> Growth:
    with tempfile.TemporaryDirectory() as name:
        work = WORKS[kind](times, Path(name))
        before, begin = _peak(), time.perf_counter()
        work()
        return Growth(times * COCO_VAL.persons, time.perf_counter() - begin, _peak(), before)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def _protocol(times: int, _: Path) -> Work:
    poses, truth = _persons(times)
    return lambda: evaluate(match_poses(poses, truth))


def _calibration(times: int, _: Path) -> Work:
    poses, truth = _persons(times)
    protocol = Protocol(split_student=True, visibility=True)
    return lambda: fit_calibrations(match_poses(poses, truth, protocol), protocol)


def _store(times: int, folder: Path) -> Work:
    write_store(folder, images=times * COCO_VAL.images, persons=times * COCO_VAL.persons)

    def work() -> None:
        store = MatchStore(folder)
        calibrate_heads(synthetic_heads(), store, store.images, FitSettings(imgsz=STORED))
        train(synthetic_heads(), store, TrainSettings(epochs=1, batch=4096, pool_bytes=POOL))

    return work


def _annotations(times: int, folder: Path) -> Work:
    """Another process writes the file, so that its memory does not count."""
    path = folder / "truth.json"
    code = f"from benchmarks.growth import write_annotations; write_annotations({str(path)!r}, {times})"
    subprocess.run([sys.executable, "-c", code], check=True)
    return lambda: read_ground_truth(path)


def write_annotations(path: str, times: int) -> None:
    """Write COCO json with outlines, which real files have and the reader skips."""
    objects, _ = synthesize(COCO_VAL)
    step = len(objects["images"]) + 1
    outline = [[round(0.1 * number, 1) for number in range(60)]]
    with open(path, "w", encoding="utf-8") as file:
        for key in ("images", "annotations"):
            file.write(f'{"{" if key == "images" else ", "}"{key}": [')
            for number in range(times):
                rows = [_moved(entry, key, number * step, outline) for entry in objects[key]]
                file.write((", " if number else "") + json.dumps(rows)[1:-1])
            file.write("]")
        file.write(f', "categories": {json.dumps(objects["categories"])}}}')


def _moved(entry: dict[str, Any], key: str, by: int, outline: list[list[float]]) -> dict[str, Any]:
    if key == "images":
        return {**entry, "id": entry["id"] + by}
    return {**entry, "image_id": entry["image_id"] + by, "segmentation": outline}


def _persons(times: int) -> tuple[PoseDistributions, GroundTruth]:
    """Copies of the same images under other ids, each copy slightly larger so that no values tie."""
    objects, results = synthesize(COCO_VAL)
    truth = parse_ground_truth("truth", objects)
    poses = parse_predictions("predictions", results, truth)
    step = int(truth.images.max()) + 1
    assert poses.image_ids is not None

    def ids(values: Array) -> Array:
        return np.concatenate([values + step * number for number in range(times)])

    def rows(values: Array) -> Array:
        return np.concatenate([values] * times)

    def grown(values: Array, power: int = 1) -> Array:
        """Build in place: freed temporary arrays would hide memory that the step itself needs."""
        result = np.empty((times * len(values), *values.shape[1:]))
        for number, part in enumerate(np.split(result, times)):
            np.multiply(values, (1 + _STEP * number) ** power, out=part)
        return result

    same = ("class_ids", "labelled", "crowd", "ignore", "occluded")
    truth_columns: dict[str, Any] = {name: rows(getattr(truth, name)) for name in same}
    truth_columns |= {name: grown(getattr(truth, name)) for name in ("keypoints", "boxes")}
    columns: dict[str, Any] = {
        name: rows(getattr(poses, name)) for name in ("scores", "visibility", "keep", "class_ids")
    }
    columns |= {name: grown(getattr(poses, name)) for name in ("keypoints", "boxes")}
    covariance = grown(poses.covariance, 2)
    return (
        replace(poses, image_ids=ids(poses.image_ids), covariance=covariance, scale=covariance, **columns),
        replace(
            truth,
            images=ids(truth.images),
            image_ids=ids(truth.image_ids),
            area=grown(truth.area, 2),
            **truth_columns,
        ),
    )


WORKS: dict[str, Callable[[int, Path], Work]] = {
    "protocol": _protocol,
    "calibration": _calibration,
    "store": _store,
    "annotations": _annotations,
}

if __name__ == "__main__":
    measured = _measure(sys.argv[1], int(sys.argv[2]))
    print(json.dumps(astuple(measured)))
