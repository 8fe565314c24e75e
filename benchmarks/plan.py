"""Estimate the time for a million images on eight GPUs from processor times measured here.

    python -m benchmarks.plan --data data.yaml

Reading, cutting windows and writing are measured. The speed of the model on a GPU is not measured. The table gives the
rate that reading and windows allow, and the time per image below which the model is not the bottleneck.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.collecting import photographs
from benchmarks.overhead import make_model
from benchmarks.rows import Row, as_text, rate, seconds
from halopose.data.tensors import write_tensors
from halopose.fitting.collecting import VIEWS_PER_SHARD, Collection
from halopose.fitting.feature_cache import CollectSettings, MatchStore
from halopose.fitting.head_training import train
from halopose.fitting.prefetch import Reader, Reading, read_ahead
from halopose.fitting.settings import TrainSettings
from halopose.fitting.workers import MOST_READERS, WorkerPool
from halopose.hosts.base import HostOutput
from halopose.uncertainty.heads import ProbabilisticHeads

IMAGES, GPUS, EPOCHS = 1_000_000, 8, 12
Result = TypeVar("Result")


def plan_rows(data: Path | None) -> Iterator[Row]:
    """Processor time per image on one thread: reading, the model, windows, writing, and an epoch; and the estimates."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _rows(data)
    finally:
        torch.set_num_threads(threads)


def _rows(data: Path | None) -> Iterator[Row]:
    host = make_model().host
    dataset = photographs(data, host.layout, VIEWS_PER_SHARD)
    with tempfile.TemporaryDirectory() as name:
        work = Collection.open(host, dataset, Path(name), CollectSettings(), WorkerPool())
        tasks, reader = work.views(0), Reader(host.placer(), True)
        readings, reading = _timed(lambda: list(read_ahead(reader, tasks, 0, 1)))
        shard, collecting, model = _collected(work, readings)
        path = Path(name) / "shard-00000.safetensors"
        _, writing = _timed(lambda: write_tensors(path, *shard))
        size, count = path.stat().st_size / len(tasks), len(tasks)
        store = MatchStore(name)
        heads = ProbabilisticHeads(host.pose_templates(), host.strides, host.keypoint_count)
        _, epochs = _timed(lambda: train(heads, store, TrainSettings(epochs=2, holdout=0.05)))
    each = [taken / count for taken in (reading, model, collecting - model, writing, epochs / 2)]
    for name, taken in zip(("reading", "model", "windows", "writing", "epoch"), each, strict=True):
        yield seconds(f"plan.{name}", f"{name}: processor time per image on one thread", taken, better="")
    fed, cut = MOST_READERS / each[0], 1 / each[2]  # windows are cut in the process that runs the model
    limit, cores = min(fed, cut), GPUS * MOST_READERS
    tebibytes = f"{size * IMAGES / 2**40:.2f} TiB"
    yield Row(
        "plan.size", f"feature cache of {IMAGES:,} such images", size * IMAGES / 2**30, unit="GiB", ours=tebibytes
    )
    yield rate("plan.readers-rate", f"{MOST_READERS} readers could feed each of {GPUS} GPUs", fed, better="")
    yield rate("plan.windows-rate", "windows of one GPU, cut by one thread of this processor", cut, better="")
    what = f"{IMAGES:,} images on {GPUS} GPUs, if the model keeps up"
    yield _long("plan.minutes", what, IMAGES / GPUS / limit)
    yield seconds("plan.model-limit", "time per image below which the model keeps up", 1 / limit, better="")
    what = f"{IMAGES:,} images on {cores} cores and no GPU"
    yield _long("plan.cpu-hours", what, IMAGES * sum(each[:4]) / cores)
    yield _long("plan.epochs-hours", f"{EPOCHS} epochs on {cores} cores", IMAGES * each[4] * EPOCHS / cores)


def _long(name: str, what: str, taken: float) -> Row:
    """A time in minutes or hours."""
    shown = f"{taken / 60:.0f} minutes" if taken < 3600 else f"{taken / 3600:.1f} hours"
    return Row(name, what, taken, unit="s", ours=shown)


def _collected(work: Collection, readings: list[Reading]) -> tuple[Any, float, float]:
    """A shard, its processor time, and the part of that time spent in the model."""
    spent, own = [0.0], work.host.forward

    def watched(batch: Tensor) -> HostOutput:
        output, taken = _timed(lambda: own(batch))
        spent[0] += taken
        return output

    vars(work.host)["forward"] = watched
    try:
        shard, taken = _timed(lambda: work.collect(0, iter(readings)))
    finally:
        del vars(work.host)["forward"]
    return shard, taken, spent[0]


def _timed(action: Callable[[], Result]) -> tuple[Result, float]:
    begin = time.process_time()
    result = action()
    return result, time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Time for a million images, estimated.")
    parser.add_argument("--data", type=Path, help="YOLO data yaml")
    for row in plan_rows(parser.parse_args().data):
        print(as_text(row), flush=True)


if __name__ == "__main__":
    main()
