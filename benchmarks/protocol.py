"""The whole evaluation protocol against keypoint AP alone, on the same persons and detections."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

from faster_coco_eval import COCO as FasterCOCO
from faster_coco_eval import COCOeval_faster
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from benchmarks.interleave import Comparison, compare
from halopose.data.coco import parse_ground_truth, parse_predictions
from halopose.data.synthetic import World, synthesize
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.true_positives import match_poses

COCO_VAL = World(images=2693, persons=6352, detections_per_image=20)  # the size of COCO val2017


def compare_protocol(rounds: int = 5) -> tuple[Comparison, Comparison]:
    """Peers: AP and AR only, by pycocotools and by faster-coco-eval, which does it in C++.

    Ours: three regimes, per keypoint, per scale, before and after pruning.
    """
    truth, detections = synthesize(COCO_VAL)
    objects = parse_ground_truth("truth", truth)
    poses = parse_predictions("predictions", detections, objects)

    def ours() -> object:
        return evaluate(match_poses(poses, objects))

    peers = (_ap(COCO, COCOeval, truth, detections), _ap(FasterCOCO, COCOeval_faster, truth, detections))
    slow, fast = (compare(ours, peer, rounds) for peer in peers)
    return slow, fast


def _ap(kind: Any, evaluator: Any, truth: Any, detections: Any) -> Callable[[], None]:
    """AP and AR by one of two packages that have the same names for everything."""
    with contextlib.redirect_stdout(io.StringIO()):
        coco = kind()
        coco.dataset = copy.deepcopy(truth)
        coco.createIndex()
        results = coco.loadRes([dict(entry) for entry in detections])

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = evaluator(coco, results, "keypoints")
            evaluation.evaluate()
            evaluation.accumulate()

    return run
