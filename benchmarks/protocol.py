"""The whole evaluation protocol against keypoint AP alone, on the same persons and detections."""

from __future__ import annotations

import contextlib
import copy
import io
import time
from collections.abc import Callable, Iterator, Sequence
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
from halopose.calibration import calibrate
from halopose.data.coco import parse_ground_truth, parse_predictions
from halopose.data.synthetic_poses import World, synthesize
from halopose.evaluation import evaluate as evaluate_module
from halopose.evaluation import metrics
from halopose.evaluation.evaluate import evaluate
from halopose.matching import greedy_matching, matched_poses
from halopose.matching.matched_poses import match_poses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.uncertainty import distributions

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


@dataclass(frozen=True)
class Costs:
    """Processor time of one run on one thread: of all, of each stage, and of what libraries do of it in one call.

    libraries: sorting, distribution functions and factorisations, which no order of the other work can avoid.
    at_best: what a run would take if threads, as many as there are, never waited for each other.
    """

    whole: float
    stages: dict[str, float]
    libraries: float
    at_best: float


def protocol_costs(rounds: int = 3) -> Costs:
    """The run of ``compare_protocol`` that took least."""
    truth, detections = synthesize(COCO_VAL)
    objects = parse_ground_truth("truth", truth)
    poses = parse_predictions("predictions", detections, objects)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return min((_costs(poses, objects, threads) for _ in range(rounds)), key=lambda found: found.whole)
    finally:
        torch.set_num_threads(threads)


def _costs(poses: PoseDistributions, objects: GroundTruth, threads: int) -> Costs:
    stages, calls, saved = _Stopwatch(), _Stopwatch(), _Saved(threads)
    with ExitStack() as stack:
        for module in (greedy_matching, calibrate, evaluate_module):
            stack.enter_context(saved.among(module))
        for module, name, what in STAGES:
            stack.enter_context(stages.around(module, name, what))
        for module, name in LIBRARIES:
            stack.enter_context(calls.around(module, name, name))
        begin = time.process_time()
        evaluate_module.evaluate(matched_poses.match_poses(poses, objects))
        whole = time.process_time() - begin
    return Costs(whole, stages.seconds, sum(calls.seconds.values()), whole - saved.seconds)


class _Stopwatch:
    """Processor time by name of functions that are called by their names in a module."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def around(self, module: Any, name: str, what: str) -> Iterator[None]:
        action = getattr(module, name)

        def timed(*given: Any, **named: Any) -> Any:
            begin = time.process_time()
            try:
                return action(*given, **named)
            finally:
                self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - begin

        setattr(module, name, timed)
        try:
            yield
        finally:
            setattr(module, name, action)


class _Saved:
    """Processor time that pieces would save on so many threads, the next one always on the thread that is free."""

    def __init__(self, threads: int) -> None:
        self.threads, self.seconds = threads, 0.0

    @contextlib.contextmanager
    def among(self, module: Any) -> Iterator[None]:
        action = module.side_by_side

        def one_by_one(pieces: Sequence[Callable[[], Any]]) -> list[Any]:
            busy, found = [0.0] * self.threads, []
            for piece in pieces:
                begin = time.process_time()
                found.append(piece())
                busy[busy.index(min(busy))] += time.process_time() - begin
            self.seconds += sum(busy) - max(busy)
            return found

        module.side_by_side = one_by_one
        try:
            yield
        finally:
            module.side_by_side = action


STAGES: tuple[tuple[Any, str, str], ...] = (
    (matched_poses, "match_poses", "matching"),
    (evaluate_module, "cross_fitted", "fitting five folds"),
    (evaluate_module, "_one_law", "scoring three laws, all keypoints and kept ones"),
    (evaluate_module, "joint_gains", "the joint law"),
    (evaluate_module, "score_regions", "regions"),
    (metrics, "random_keypoint_precision", "ten random rankings"),
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
