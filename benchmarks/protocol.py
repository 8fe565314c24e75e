"""The whole evaluation protocol against pycocotools' keypoint AP, on the same persons and detections."""

from __future__ import annotations

import contextlib
import io

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from benchmarks.interleave import Comparison, compare
from halopose.data.coco import parse_ground_truth, parse_predictions
from halopose.data.synthetic import World, synthesize
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.true_positives import match_poses

COCO_VAL = World(images=2693, persons=6352, detections_per_image=20)  # the size of COCO val2017


def compare_protocol(rounds: int = 5) -> Comparison:
    """Peer: AP and AR only. Ours: three regimes, per keypoint, per scale, before and after pruning."""
    truth, detections = synthesize(COCO_VAL)
    objects = parse_ground_truth("truth", truth)
    poses = parse_predictions("predictions", detections, objects)
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        results = coco.loadRes([dict(entry) for entry in detections])

    def peer() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(coco, results, "keypoints")
            evaluation.evaluate()
            evaluation.accumulate()

    return compare(lambda: evaluate(match_poses(poses, objects)), peer, rounds)
