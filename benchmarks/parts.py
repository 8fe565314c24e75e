"""What ``make bench`` measures, part by part; each imports what it needs when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import Row, cost, faster, in_time

GROWTH = (1, 10, 100)


@dataclass(frozen=True)
class Part:
    """Its heading, and its rows as they are measured; photographs may come from a data yaml."""

    title: str
    rows: Callable[[Path | None], Iterator[Row]]
    most_seconds: int = 900  # after which it is ended


def _protocol(_: Path | None) -> Iterator[Row]:
    from benchmarks.protocol import compare_protocol, protocol_costs

    what = "whole protocol (three laws, per keypoint and scale, before and after pruning), 6,352 persons"
    slow, fast = compare_protocol()
    yield faster(what, slow, "pycocotools, AP alone")
    yield faster(what, fast, "faster-coco-eval, AP alone")
    costs = protocol_costs()
    yield Row("its processor time on one thread", in_time(costs.whole))
    for stage, seconds in costs.stages.items():
        yield Row(f"of that {stage}", in_time(seconds), f"{seconds / costs.whole:.0%}")
    rest = costs.whole - sum(costs.stages.values())
    yield Row("of that measuring keypoints under three laws, and all else", in_time(rest), f"{rest / costs.whole:.0%}")
    share = f"{costs.libraries / costs.whole:.0%}"
    yield Row("of that sorting, distribution functions and factorisations", in_time(costs.libraries), share)
    reached = f"{costs.at_best / fast.ours:.0%} of its speed reached"
    yield Row("its limit: threads that never waited for each other", in_time(costs.at_best), reached)


def _student(_: Path | None) -> Iterator[Row]:
    from benchmarks.student import compare_pass, compare_student

    for nu in (2.5, 4.0, 30.0):
        found, gap = compare_student(nu)
        what = f"17 Student-t families on 1,000,000 residuals, nu {nu:g}"
        yield faster(what, found, f"scipy, better by {gap:.0e} nats at most")
        yield faster("its limit: one pass over the residuals alone", compare_pass(nu), "the whole fit")


def _growth(_: Path | None) -> Iterator[Row]:
    from benchmarks.growth import KINDS, grown

    for kind, what in KINDS.items():
        first = None
        for times in GROWTH:
            found, name = grown(kind, times), f"{what}, {times} x 6,352 persons"
            if isinstance(found, str):
                yield Row(name, "skipped", found)
                continue
            first = first or found
            ratio = f"{found.seconds / first.seconds:.1f}"
            yield Row(name, f"{found.seconds:.1f} s, {found.peak:.2f} GiB", found.each(times), ratio)


def _predicting(_: Path | None) -> Iterator[Row]:
    from benchmarks.overhead import (
        compare_framework,
        compare_novelty,
        compare_predict,
        compare_shipped,
        make_model,
        make_yolonas,
    )
    from benchmarks.regions import KEYPOINTS, PERSONS, compare_regions, correlation_seconds

    nas, conf = make_yolonas()
    for name, model, least, rounds in (
        ("YOLO11n-pose", make_model(), 0.25, 40),
        ("YOLO-NAS-Pose Nano", nas, conf, 15),
    ):
        sparse, dense = compare_predict(model, least, rounds)
        yield cost(f"predicting with sparse heads, {name}, 640, batch 1, with NMS", sparse)
        yield cost("the same with dense heads", dense)
    yield cost("predicting with the heads that ship, YOLO11n-pose", compare_shipped())
    yield cost("the same", compare_framework(), "in Ultralytics' own `YOLO.predict`")
    yield cost("regions and joint covariances beside them", compare_regions())
    yield cost("novelty beside sparse heads, runways", compare_novelty())
    what = f"fitting the correlation of {KEYPOINTS} keypoints to {PERSONS:,} persons"
    yield Row(what, in_time(correlation_seconds()))


def _exporting(_: Path | None) -> Iterator[Row]:
    from benchmarks.export import compare_export

    topk, dense, pytorch = compare_export()
    yield cost("exported with uncertainty (topk), ONNX Runtime, YOLO11n-pose", topk, "in Ultralytics' own export")
    yield cost("the same with dense heads", dense, "in Ultralytics' own export")
    yield cost("exported with uncertainty (topk)", pytorch, "in PyTorch, with uncertainty")


_UPDATES = (("irs", "the IRS"), ("radio", "the radio altimeter"), ("gnss", "GNSS"), ("vision", "vision"))


def _landing(_: Path | None) -> Iterator[Row]:
    from benchmarks.navigation import update_seconds
    from benchmarks.pnp import FRAMES, compare_fix, compare_many, compare_one, compare_position
    from benchmarks.world import images_a_second

    one, gap = compare_one()
    yield faster("one weighted PnP with covariance", one, f"scipy least_squares, cost gap {gap:+.0e}")
    one, gap = compare_position()
    yield faster("one position with covariance, attitude given", one, f"scipy least_squares, cost gap {gap:+.0e}")
    yield faster(
        "whole fix of one frame: position, check, levels", compare_fix(), "every subset of corners solved anew"
    )
    yield faster(f"{FRAMES:,} weighted PnP at once", compare_many(), "loop over OpenCV solvePnP and solvePnPRefineLM")
    update = {source: 1e6 * seconds for source, seconds in update_seconds().items()}
    each = ", ".join(f"{update[source]:.0f} by {name}" for source, name in _UPDATES)
    yield Row("one update of the navigator, all sensors on board", f"{each}, in microseconds")
    yield Row("world, 640 x 384", f"{images_a_second():.0f} images a second and core")


def _training(_: Path | None) -> Iterator[Row]:
    from benchmarks.epoch import compare_epoch

    found, limit, products = compare_epoch()
    yield faster("one epoch on the match store, three persons an image", found, "running the frozen base")
    yield faster("its convolutions alone, forward and backward", limit, "the whole epoch")
    yield faster("matrix products of as many multiplications", products, "the whole epoch")


def _collecting(data: Path | None) -> Iterator[Row]:
    from benchmarks.collecting import collecting_rows

    yield from collecting_rows(data)


def _plan(data: Path | None) -> Iterator[Row]:
    from benchmarks.plan import plan_rows

    yield from plan_rows(data)


PARTS = {
    "protocol": Part("Protocol", _protocol),
    "student": Part("Student-t", _student),
    "predicting": Part("Predicting", _predicting),
    "exporting": Part("Exported models", _exporting),
    "training": Part("Training", _training),
    "collecting": Part("Collecting", _collecting),
    "plan": Part("A million images", _plan),
    "landing": Part("Landing", _landing),
    "growth": Part("Growth", _growth, most_seconds=3600),
}
