"""``make bench``: print every ratio with what it compares."""

import os

from benchmarks.collecting import IMAGES, compare_collecting, compare_reading
from benchmarks.epoch import compare_epoch
from benchmarks.export import compare_export
from benchmarks.growth import growth
from benchmarks.interleave import Comparison
from benchmarks.overhead import compare_novelty, compare_predict, compare_shipped, make_model, make_yolonas
from benchmarks.pnp import FRAMES, compare_fix, compare_many, compare_one, compare_position
from benchmarks.protocol import compare_protocol
from benchmarks.regions import KEYPOINTS, PERSONS, compare_regions, correlation_seconds
from benchmarks.student import compare_student
from benchmarks.world import images_a_second
from halopose.fitting.crew import Crew


def main() -> None:
    print(f"{'what':48}{'ours':>10}{'peer':>10}{'ratio':>9}   peer")
    slow, fast = compare_protocol()
    print(_row("protocol, 6,352 persons, 20 detections an image", slow, "pycocotools, AP alone"))
    print(_row("protocol, 6,352 persons, 20 detections an image", fast, "faster-coco-eval, AP alone"))
    for times in (1, 10, 100):
        print(_growth(times))
    for nu in (2.5, 4.0, 30.0):
        result, gap = compare_student(nu)
        print(_row(f"17 Student-t on 1,000,000 residuals, nu {nu:g}", result, f"scipy, gap {gap:+.1e} nats"))
    for name, bench in (("YOLO11n-pose", (make_model(),)), ("YOLO-NAS-Pose N", make_yolonas())):
        sparse, dense = compare_predict(*bench)
        print(_cost(f"{name}, 640, base without uncertainty", sparse, "with sparse heads"))
        print(_cost(f"{name}, 640, base without uncertainty", dense, "with dense heads"))
    print(_cost("runways, 640, with sparse heads", compare_novelty(), "with novelty"))
    print(_cost("YOLO11n-pose, 640, base without uncertainty", compare_shipped(), "with the heads that ship"))
    print(
        _cost("YOLO11n-pose, 640, with the heads that ship", compare_regions(), "and regions, joint covariances")
    )
    correlation = f"correlation of {KEYPOINTS} keypoints, {PERSONS:,} persons"
    print(f"{correlation:48}{correlation_seconds():8.2f} s")
    topk, dense, pytorch = compare_export()
    print(_cost("YOLO11n-pose, 640, Ultralytics' own ONNX", topk, "exported with uncertainty, topk"))
    print(_cost("YOLO11n-pose, 640, Ultralytics' own ONNX", dense, "exported with uncertainty, dense"))
    print(_cost("YOLO11n-pose, 640, PyTorch with uncertainty", pytorch, "exported with uncertainty, topk"))
    one, gap = compare_one()
    peer = f"scipy least_squares, cost gap {gap:+.0e}"
    print(_micro("one weighted PnP with covariance", one, peer))
    one, gap = compare_position()
    print(_micro("one position with covariance, attitude given", one, f"scipy least_squares, cost gap {gap:+.0e}"))
    print(_micro("whole fix of one frame with levels", compare_fix(), "every subset of corners solved anew"))
    print(_row(f"{FRAMES:,} weighted PnP at once", compare_many(), "loop over OpenCV solvePnP + RefineLM"))
    print(f"{'world, 640 x 384':48}{images_a_second():8.1f} images a second and core")
    print(_row("one epoch on the match store", compare_epoch(), "one that runs the frozen base"))
    crew = Crew.of_machine("cpu")
    print(_row(f"collecting {IMAGES} images, {crew.processes} processes", compare_collecting(crew), "one process"))
    readers = os.cpu_count() or 1
    print(_row(f"the same, 2 ms a batch, {readers} readers", compare_reading(readers), "one process, batch 1"))


def _growth(times: int) -> str:
    what = f"protocol, {times} x 6,352 persons"
    found = growth(times)
    return f"{what:48}{'does not fit in memory' if found is None else f'{found[0]:8.1f} s{found[1]:8.1f} GiB'}"


def _micro(what: str, result: Comparison, peer: str) -> str:
    return f"{what:48}{result.ours * 1e6:8.0f}us{result.peer * 1e6:8.0f}us{result.ratio:8.1f}x   {peer}"


def _cost(what: str, result: Comparison, other: str) -> str:
    return f"{what:48}{result.ours * 1e3:8.1f}ms{result.peer * 1e3:8.1f}ms{result.ratio:8.3f}x   {other}"


def _row(what: str, result: Comparison, peer: str) -> str:
    return f"{what:48}{result.ours * 1e3:8.0f}ms{result.peer * 1e3:8.0f}ms{result.ratio:8.1f}x   {peer}"


main()
