"""Time and peak memory of what sees all of the data, as the data grow; each size in a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stored import HEADS, STORED, grown_store
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
MOST_SECONDS = 900  # for one size
_STEP = 1e-4  # by which a copy is larger than the one before
Work = Callable[[], object]


@dataclass(frozen=True)
class Grown:
    """Seconds, the peak in GiB, and what the process held before it began."""

    seconds: float
    peak: float
    before: float

    def each(self, times: int) -> str:
        """Time and memory of a person."""
        persons = times * COCO_VAL.persons
        added = max(self.peak - self.before, 0.0)
        return f"{self.seconds / persons * 1e6:.0f} µs, {added * 2**20 / persons:.2g} KiB a person beside the input"


def grown(kind: str, times: int) -> Grown | str:
    """Measure one of KINDS on so many times as many persons; in words what came between."""
    command = [sys.executable, "-m", "benchmarks.growth", kind, str(times)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not done after {MOST_SECONDS} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"ended {done.returncode}"])[-1]
    return Grown(*json.loads(done.stdout.splitlines()[-1]))


def _measure(kind: str, times: int) -> Grown:
    with tempfile.TemporaryDirectory() as name:
        work = WORKS[kind](times, Path(name))
        before, begin = _peak(), time.perf_counter()
        work()
        return Grown(time.perf_counter() - begin, _peak(), before)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def _protocol(times: int, _: Path) -> Work:
    poses, truth = _persons(times)
    return lambda: evaluate(match_poses(poses, truth))


def _calibration(times: int, _: Path) -> Work:
    poses, truth = _persons(times)
    protocol = Protocol(tails=True, visibility=True)
    return lambda: fit_calibrations(match_poses(poses, truth, protocol), protocol)


def _store(times: int, folder: Path) -> Work:
    grown_store(folder, images=times * COCO_VAL.images, persons=times * COCO_VAL.persons)

    def work() -> None:
        store = MatchStore(folder)
        calibrate_heads(HEADS(), store, store.images, FitSettings(imgsz=STORED))
        train(HEADS(), store, TrainSettings(epochs=1, batch=4096, pool_bytes=POOL))

    return work


def _annotations(times: int, folder: Path) -> Work:
    """The file is written by another process, whose memory is not ours."""
    path = folder / "truth.json"
    code = f"from benchmarks.growth import write_annotations; write_annotations({str(path)!r}, {times})"
    subprocess.run([sys.executable, "-c", code], check=True)
    return lambda: read_ground_truth(path)


def write_annotations(path: str, times: int) -> None:
    """COCO json with outlines, which nobody needs here but every such file has."""
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
    """The same images again under other ids, each copy a little larger: nothing is equal that would not be."""
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
        """Written in place: nothing that is let go of again hides how much memory comes on top of the input."""
        result = np.empty((times * len(values), *values.shape[1:]))
        for number, part in enumerate(np.split(result, times)):
            np.multiply(values, (1 + _STEP * number) ** power, out=part)
        return result

    same = ("class_ids", "labelled", "crowd", "ignore")
    truth_columns: dict[str, Any] = {name: rows(getattr(truth, name)) for name in same}
    truth_columns |= {name: grown(getattr(truth, name)) for name in ("keypoints", "boxes")}
    same = ("scores", "visibility", "keep", "class_ids")
    columns: dict[str, Any] = {name: rows(getattr(poses, name)) for name in same}
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


KINDS = {
    "protocol": "matching and the whole protocol",
    "calibration": "matching and calibrating",
    "store": "calibrating and one epoch of training from a store",
    "annotations": "reading COCO json",
}
WORKS: dict[str, Callable[[int, Path], Work]] = {
    "protocol": _protocol,
    "calibration": _calibration,
    "store": _store,
    "annotations": _annotations,
}

if __name__ == "__main__":
    measured = _measure(sys.argv[1], int(sys.argv[2]))
    print(json.dumps([measured.seconds, measured.peak, measured.before]))
