"""Every benchmark of ``make bench``, by part; each imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.rows import Row, cost, gibibytes, rate, seconds, share, speedup

GROWTH = (1, 10, 100)
GROWTH_SHORT = (1, 10)
STUDENT_DOF = (2.5, 4.0, 30.0)
UPDATES = {"irs": "the IRS", "radio": "the radio altimeter", "gnss": "GNSS", "vision": "vision"}
GROWING = {
    "protocol": "matching and the whole protocol",
    "calibration": "matching and calibrating",
    "store": "calibrating and one epoch of training from a feature cache",
    "annotations": "reading COCO json",
}


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        data: YOLO data yaml of photographs to collect from; None takes two that come with Ultralytics.
        short: fewer rounds and smaller data.
        most_rounds: upper limit of the rounds of every comparison.
    """

    data: Path | None = None
    short: bool = False
    most_rounds: int | None = None

    def rounds(self, full: int) -> int:
        """Rounds of a comparison that takes ``full`` rounds in a whole run."""
        count = min(full, max(3, full // 3)) if self.short else full
        return min(count, self.most_rounds or count)


@dataclass(frozen=True)
class Benchmark:
    """A function that yields rows.

    Attributes:
        names: names of the rows, without the part.
        measure: yields each row after its measurement.
        short: whether it belongs to the short subset.
    """

    names: tuple[str, ...]
    measure: Callable[[Options], Iterator[Row]]
    short: bool = False

    def has(self, part: str, patterns: tuple[str, ...]) -> bool:
        """Whether the name of a row matches a pattern."""
        return any(selected(f"{part}.{name}", patterns) for name in self.names)


@dataclass(frozen=True)
class Part:
    """Benchmarks that run in one process."""

    title: str
    benchmarks: tuple[Benchmark, ...]
    most_seconds: int = 900  # the process is ended after this time


def selected(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a row is selected by its name, by a prefix of its name up to a dot, or by a pattern."""
    return not patterns or any(fnmatchcase(name, one) or name.startswith(f"{one}.") for one in patterns)


def names() -> list[str]:
    """The name of every row."""
    return [f"{part}.{name}" for part, one in PARTS.items() for each in one.benchmarks for name in each.names]


def _protocol(extended: bool, peer: str) -> Callable[[Options], Iterator[Row]]:
    def measure(options: Options) -> Iterator[Row]:
        from benchmarks.protocol import PAPER, WHOLE, compare_protocol

        found = compare_protocol(peer, options.rounds(7), extended)
        name = f"protocol.{'' if extended else 'paper-'}{peer}"
        yield speedup(name, WHOLE if extended else PAPER, found, f"{peer}, AP alone")

    return measure


def _protocol_stages(options: Options) -> Iterator[Row]:
    from benchmarks.protocol import STAGES, protocol_costs

    costs = protocol_costs(options.rounds(3))
    yield seconds("protocol.one-thread", "processor time of the protocol on one thread", costs.whole)
    what = {name: text for _, _, name, text in STAGES}
    for name, taken in costs.stages.items():
        part = f"{100 * taken / costs.whole:.0f} %"
        yield seconds(f"protocol.stage.{name}", f"stage: {what[name]}", taken, part, better="")
    rest = costs.whole - sum(costs.stages.values())
    yield seconds("protocol.stage.rest", "stage: everything else", rest, f"{100 * rest / costs.whole:.0f} %", better="")
    what_calls = "sorting, distribution functions and factorisations within these stages"
    yield share("protocol.library-calls", what_calls, costs.libraries / costs.whole)


def _student(options: Options) -> Iterator[Row]:
    from benchmarks.student import compare_student

    for dof in STUDENT_DOF:
        if options.short and dof != 4.0:
            continue
        found, gap = compare_student(dof, options.rounds(5))
        what = f"17 Student-t families on 1,000,000 residuals, nu {dof:g}"
        yield speedup(f"student.nu-{dof:g}", what, found, f"scipy; its likelihood is better by {gap:.0e} nats at most")


def _predicting(name: str, heads: str) -> Callable[[Options], Iterator[Row]]:
    def measure(options: Options) -> Iterator[Row]:
        from benchmarks.overhead import compare_dense, compare_sparse, make_model, make_yolonas

        yolonas = name == "yolonas"
        model, conf = make_yolonas() if yolonas else (make_model(), 0.25)
        action = compare_sparse if heads == "sparse" else compare_dense
        title = "YOLO-NAS-Pose Nano" if yolonas else "YOLO11n-pose"
        what = f"predicting with {heads} heads, {title}, 640, batch 1, with NMS"
        found = action(model, conf, options.rounds(15 if yolonas else 40))
        yield cost(f"predicting.{name}-{heads}", what, found)

    return measure


def _shipped(options: Options) -> Iterator[Row]:
    from benchmarks.overhead import compare_shipped

    found = compare_shipped(options.rounds(40))
    yield cost("predicting.shipped", "predicting with the shipped heads, YOLO11n-pose", found)


def _framework(options: Options) -> Iterator[Row]:
    from benchmarks.overhead import compare_framework

    what = "predicting with the shipped heads, YOLO11n-pose"
    yield cost("predicting.framework", what, compare_framework(options.rounds(40)), "in Ultralytics' `YOLO.predict`")


def _film(options: Options) -> Iterator[Row]:
    from benchmarks.film import HEIGHT, WIDTH, compare_film

    what = f"annotated copy of a film of {WIDTH}x{HEIGHT}, a frame"
    yield cost("predicting.film", what, compare_film(options.rounds(7)), "in Ultralytics' `yolo predict save=True`")


def _regions(options: Options) -> Iterator[Row]:
    from benchmarks.regions import compare_regions

    what = "regions and joint covariances in addition"
    yield cost("predicting.regions", what, compare_regions(options.rounds(40)))


def _novelty(options: Options) -> Iterator[Row]:
    from benchmarks.overhead import compare_novelty

    what = "out-of-distribution p-values in addition, runways"
    yield cost("predicting.novelty", what, compare_novelty(options.rounds(40)))


def _starting(options: Options) -> Iterator[Row]:
    from benchmarks.starting import compare_predict, help_seconds, import_seconds

    rounds = options.rounds(5)
    yield seconds("starting.import", "`import halopose`, processor time without Python's start", import_seconds(rounds))
    yield seconds("starting.help", "`halopose --help`, processor time", help_seconds(rounds))
    what = "`halopose predict` on one photograph with its start, processor time"
    yield cost("starting.predict", what, compare_predict(rounds), "`yolo predict`")


def _gpu(options: Options) -> Iterator[Row]:
    from benchmarks.gpu import gpu_rows

    yield from gpu_rows(options.rounds(20))


def _correlation(_: Options) -> Iterator[Row]:
    from benchmarks.regions import KEYPOINTS, PERSONS, correlation_seconds

    what = f"fitting the correlation of {KEYPOINTS} keypoints to {PERSONS:,} persons"
    yield seconds("predicting.correlation", what, correlation_seconds())


def _exporting(options: Options) -> Iterator[Row]:
    from benchmarks.export import compare_export

    topk, dense, pytorch = compare_export(options.rounds(40))
    what, bare = "exported with uncertainty ({}), ONNX Runtime, YOLO11n-pose", "in Ultralytics' own export"
    yield cost("exporting.topk", what.format("topk"), topk, bare)
    yield cost("exporting.dense", what.format("dense"), dense, bare)
    yield cost("exporting.pytorch", what.format("topk"), pytorch, "in PyTorch, with uncertainty")


def _training(options: Options) -> Iterator[Row]:
    from benchmarks.epoch import compare_epoch

    found, limit, products = compare_epoch(options.rounds(5))
    what = "one epoch on the feature cache, three persons an image"
    yield speedup("training.epoch", what, found, "an epoch that runs the base model")
    what = "limit: the convolutions of an epoch, forward and backward"
    yield speedup("training.convolutions", what, limit, "the whole epoch", better="lower")
    what = "limit: matrix products with as many multiplications"
    yield speedup("training.products", what, products, "the whole epoch", better="")


def _collecting(options: Options) -> Iterator[Row]:
    from benchmarks.collecting import collecting_rows

    yield from collecting_rows(options.data, rounds=options.rounds(3))


def _plan(options: Options) -> Iterator[Row]:
    from benchmarks.plan import plan_rows

    yield from plan_rows(options.data)


def _pnp(options: Options) -> Iterator[Row]:
    from benchmarks.pnp import FRAMES, compare_fix, compare_many, compare_one, compare_position

    found, gap = compare_one(options.rounds(50))
    peer = "scipy least_squares, cost gap {:+.0e}"
    yield speedup("landing.pnp", "one weighted PnP with covariance", found, peer.format(gap))
    found, gap = compare_position(options.rounds(50))
    what = "one position with covariance, attitude given"
    yield speedup("landing.position", what, found, peer.format(gap))
    what = "position fix of one frame: position, consistency check, protection levels"
    found = compare_fix(options.rounds(50))
    yield speedup("landing.fix", what, found, "every subset of corners solved again")
    what = f"{FRAMES:,} weighted PnP at once"
    found = compare_many(options.rounds(5))
    yield speedup("landing.batch", what, found, "loop over OpenCV solvePnP and solvePnPRefineLM")


def _navigator(_: Options) -> Iterator[Row]:
    from benchmarks.navigation import update_seconds

    found = update_seconds()
    for source, name in UPDATES.items():
        yield seconds(f"landing.update-{source}", f"one update of the navigator by {name}", found[source])


def _world(_: Options) -> Iterator[Row]:
    from benchmarks.world import images_a_second

    yield rate("landing.world", "rendering the synthetic world, 640 x 384, one core", images_a_second())


def _growth(kind: str) -> Callable[[Options], Iterator[Row]]:
    def measure(options: Options) -> Iterator[Row]:
        from benchmarks.growth import GrowthError, grow

        first = None
        for times in GROWTH_SHORT if options.short else GROWTH:
            name, what = f"growth.{kind}-{times}x", f"{GROWING[kind]}, {times} x 6,352 persons"
            try:
                found = grow(kind, times)
            except GrowthError as error:
                yield Row(name, what, skipped=str(error))
                continue
            if first is None:
                first = found
                yield seconds(name, what, found.seconds, found.per_person())
            else:
                ratio = found.seconds / found.persons / (first.seconds / first.persons)
                shown = f"{found.seconds:.1f} s"
                yield Row(name, what, ratio, unit="x", better="lower", ours=shown, peer=found.per_person())
            yield gibibytes(f"{name}-memory", f"peak memory of {what}", found.peak_gib)

    return measure


def _growth_names(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}-{times}x{what}" for times in GROWTH for what in ("", "-memory"))


_STAGES = ("matching", "folds", "scores", "random-rankings", "joint", "regions", "floors", "rest")
_RUNS = ("predict-1", "predict-8", "predict-32", "collect", "train")
_GPU = (
    *(f"{run}-{what}" for run in _RUNS for what in ("waits", "mismatches")),
    *(f"{what}-{images}" for what in ("operations", "shipped") for images in (1, 8, 32)),
)
_FAST = ("fast-readers", "fast-processes")
_PLAN = (
    *("reading", "model", "windows", "writing", "epoch", "size"),
    *("readers-rate", "windows-rate", "minutes", "model-limit", "cpu-hours", "epochs-hours"),
)

PARTS = {
    "protocol": Part(
        "Protocol",
        (
            Benchmark(("paper-pycocotools",), _protocol(False, "pycocotools"), short=True),
            Benchmark(("paper-faster-coco-eval",), _protocol(False, "faster-coco-eval"), short=True),
            Benchmark(("pycocotools",), _protocol(True, "pycocotools"), short=True),
            Benchmark(("faster-coco-eval",), _protocol(True, "faster-coco-eval"), short=True),
            Benchmark(("one-thread", *(f"stage.{name}" for name in _STAGES), "library-calls"), _protocol_stages),
        ),
    ),
    "student": Part(
        "Student-t",
        (
            Benchmark(
                tuple(f"{what}-{dof:g}" for dof in STUDENT_DOF for what in ("nu", "limit")),
                _student,
                short=True,
            ),
        ),
    ),
    "predicting": Part(
        "Predicting",
        (
            Benchmark(("yolo11n-sparse",), _predicting("yolo11n", "sparse"), short=True),
            Benchmark(("yolo11n-dense",), _predicting("yolo11n", "dense")),
            Benchmark(("yolonas-sparse",), _predicting("yolonas", "sparse")),
            Benchmark(("yolonas-dense",), _predicting("yolonas", "dense")),
            Benchmark(("shipped",), _shipped, short=True),
            Benchmark(("framework",), _framework, short=True),
            Benchmark(("film",), _film, short=True),
            Benchmark(("regions",), _regions),
            Benchmark(("novelty",), _novelty, short=True),
            Benchmark(("correlation",), _correlation),
        ),
    ),
    "starting": Part("Start", (Benchmark(("import", "help", "predict"), _starting, short=True),)),
    "gpu": Part("GPU", (Benchmark(_GPU, _gpu),)),
    "exporting": Part("Exported models", (Benchmark(("topk", "dense", "pytorch"), _exporting, short=True),)),
    "training": Part("Training", (Benchmark(("epoch", "convolutions", "products"), _training, short=True),)),
    "collecting": Part(
        "Collecting",
        (
            Benchmark(
                (
                    *("processes", "model-share", "memory"),
                    *(f"{name}{what}" for name in _FAST for what in ("", "-rate", "-limit")),
                    *("memory-2-readers", "memory-16-readers"),
                ),
                _collecting,
            ),
        ),
    ),
    "plan": Part("A million images", (Benchmark(_PLAN, _plan),)),
    "landing": Part(
        "Landing",
        (
            Benchmark(("pnp", "position", "fix", "batch"), _pnp, short=True),
            Benchmark(tuple(f"update-{source}" for source in UPDATES), _navigator, short=True),
            Benchmark(("world",), _world),
        ),
    ),
    "growth": Part(
        "Growth",
        tuple(Benchmark(_growth_names(kind), _growth(kind), kind in ("protocol", "calibration")) for kind in GROWING),
        most_seconds=3600,
    ),
}
