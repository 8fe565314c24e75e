"""The whole evaluation protocol against keypoint AP alone, on the same persons and detections."""

from __future__ import annotations

import contextlib
import copy
import io
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO as FasterCOCO
from faster_coco_eval import COCOeval_faster
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scipy import special

from benchmarks.interleave import Comparison, compare
from halopose.data.coco import parse_ground_truth, parse_predictions
from halopose.data.synthetic_poses import World, synthesize
from halopose.evaluation import evaluate as evaluate_module
from halopose.evaluation import metrics
from halopose.evaluation.evaluate import evaluate
from halopose.matching import matched_poses
from halopose.matching.matched_poses import match_poses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.uncertainty import distributions

COCO_VAL = World(images=2693, persons=6352, detections_per_image=20)  # the size of COCO val2017
PAPER = "the paper's protocol: matching, five folds, three distributions, per keypoint and scale, pruned; 6,352 persons"
WHOLE = "that, and regions, joint distribution, noise floors, proper scores and groups"
PEERS: dict[str, tuple[Any, Any]] = {
    "pycocotools": (COCO, COCOeval),
    "faster-coco-eval": (FasterCOCO, COCOeval_faster),
}


def compare_protocol(peer: str, rounds: int, extended: bool) -> Comparison:
    """The protocol, the paper's or extended, against AP and AR by a package of PEERS."""
    truth, detections = synthesize(COCO_VAL)
    objects = parse_ground_truth("truth", truth)
    poses = parse_predictions("predictions", detections, objects)
    protocol = Protocol(extended=extended)
    return compare(
        lambda: evaluate(match_poses(poses, objects), protocol=protocol), _ap(*PEERS[peer], truth, detections), rounds
    )


def _ap(kind: Any, evaluator: Any, truth: Any, detections: Any) -> Callable[[], None]:
    """AP and AR by one of two packages that share their interface."""
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


@dataclass(frozen=True)
class Costs:
    """Processor time in seconds of one run of the protocol on one thread.

    Attributes:
        whole: time of the run.
        stages: time of each stage of STAGES.
        libraries: time in the functions of LIBRARIES, within and outside the stages.
    """

    whole: float
    stages: dict[str, float]
    libraries: float


def protocol_costs(rounds: int = 3) -> Costs:
    """The fastest of several runs of the protocol."""
    truth, detections = synthesize(COCO_VAL)
    objects = parse_ground_truth("truth", truth)
    poses = parse_predictions("predictions", detections, objects)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return min((_costs(poses, objects) for _ in range(rounds)), key=lambda found: found.whole)
    finally:
        torch.set_num_threads(threads)


def _costs(poses: PoseDistributions, objects: GroundTruth) -> Costs:
    stages, calls = _Stopwatch(), _Stopwatch()
    with ExitStack() as stack:
        for module, function, name, _ in STAGES:
            stack.enter_context(stages.around(module, function, name))
        for module, function in LIBRARIES:
            stack.enter_context(calls.around(module, function, function))
        begin = time.process_time()
        evaluate_module.evaluate(matched_poses.match_poses(poses, objects))
        whole = time.process_time() - begin
    return Costs(whole, stages.seconds, sum(calls.seconds.values()))


class _Stopwatch:
    """Processor time by name of functions that are looked up in their module at each call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def around(self, module: Any, function: str, name: str) -> Iterator[None]:
        """Measure a function while the context is open."""
        action = getattr(module, function)

        def timed(*given: Any, **named: Any) -> Any:
            begin = time.process_time()
            try:
                return action(*given, **named)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin

        setattr(module, function, timed)
        try:
            yield
        finally:
            setattr(module, function, action)


# Module, function, name of the row and its text.
STAGES: tuple[tuple[Any, str, str, str], ...] = (
    (matched_poses, "match_poses", "matching", "matching"),
    (evaluate_module, "cross_fitted", "folds", "fitting five folds"),
    (evaluate_module, "_one_distribution", "scores", "scoring three distributions, all keypoints and kept ones"),
    (metrics, "random_keypoint_precision", "random-rankings", "ten random rankings"),
    (evaluate_module, "joint_gains", "joint", "extended: the joint distribution"),
    (evaluate_module, "score_regions", "regions", "extended: conformal regions"),
    (evaluate_module, "score_distribution", "floors", "extended: noise floors, proper scores and groups"),
)
LIBRARIES: tuple[tuple[Any, str], ...] = (
    (np, "argsort"),
    (np, "sort"),
    (np, "lexsort"),
    (distributions, "student_cdf"),
    (special, "stdtrit"),
    (torch.linalg, "cholesky"),
    (torch.linalg, "solve_triangular"),
)
