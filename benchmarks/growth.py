"""Time and memory of matching and the whole protocol as the data grow, each size in a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from halopose.data.coco import parse_ground_truth, parse_predictions
from halopose.data.synthetic import World, synthesize
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.true_positives import match_poses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.types import Array

COCO_VAL = World(images=2693, persons=6352)


def growth(times: int) -> tuple[float, float] | None:
    """Seconds and peak GiB of the protocol on so many times as many persons; None where that does not fit."""
    command = [sys.executable, "-m", "benchmarks.growth", str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    seconds, memory = json.loads(done.stdout)
    return float(seconds), float(memory)


def _measure(times: int) -> tuple[float, float]:
    objects, results = synthesize(COCO_VAL)
    truth = parse_ground_truth("truth", objects)
    poses, truth = _repeated(parse_predictions("predictions", results, truth), truth, times)
    begin = time.perf_counter()
    evaluate(match_poses(poses, truth))
    return time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _repeated(poses: PoseDistributions, truth: GroundTruth, times: int) -> tuple[PoseDistributions, GroundTruth]:
    """The same images again under other ids."""
    step = int(truth.images.max()) + 1
    assert poses.image_ids is not None

    def ids(values: Array) -> Array:
        return np.concatenate([values + step * number for number in range(times)])

    def rows(values: Array) -> Array:
        return np.concatenate([values] * times)

    columns = ("class_ids", "keypoints", "labelled", "boxes", "area", "crowd", "ignore")
    more: dict[str, Any] = {name: rows(getattr(truth, name)) for name in columns}
    grown = replace(truth, images=ids(truth.images), image_ids=ids(truth.image_ids), **more)
    found = PoseDistributions.concatenate([poses] * times)
    return replace(found, image_ids=ids(poses.image_ids)), grown


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
