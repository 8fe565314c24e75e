"""What a million images would take on eight GPUs, from rates measured here in processor time.

    python -m benchmarks.plan --data data.yaml

Reading, windows and writing are measured; how fast a GPU runs the model is not, as there is none here: the table
says what readers and windows allow, and what the model would have to take to be the limit instead.
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
from benchmarks.table import Row, as_text, in_time
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
    """Processor time an image of one thread: reading, the model, cutting windows and writing; and of an epoch."""
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
    each = [seconds / count for seconds in (reading, model, collecting - model, writing, epochs / 2)]
    for what, seconds in zip(("reading", "the model", "windows", "writing", "an epoch"), each, strict=True):
        yield Row(f"{what}, an image, processor time of one thread", in_time(seconds))
    fed, cut = MOST_READERS / each[0], 1 / each[2]  # windows are cut in the process that runs the model
    rate = min(fed, cut)
    yield Row(f"store of {IMAGES:,} such images", f"{size * IMAGES / 2**40:.2f} TiB")
    yield Row(f"{MOST_READERS} readers could feed each of {GPUS} GPUs", f"{fed:.0f} images a second")
    yield Row("if windows took as long there as on one thread here, each would do", f"{cut:.0f} images a second")
    yield Row(f"{IMAGES:,} images then take", f"{IMAGES / GPUS / rate / 60:.0f} minutes, if the model keeps up")
    yield Row("which it does where an image takes less than", in_time(1 / rate))
    cores = GPUS * MOST_READERS
    hours = IMAGES * sum(each[:4]) / cores / 3600
    yield Row(f"the same on {cores} cores and no GPU", f"{hours:.1f} hours")
    yield Row(f"{EPOCHS} epochs on {cores} cores", f"{IMAGES * each[4] * EPOCHS / cores / 3600:.1f} hours")


def _collected(work: Collection, readings: list[Reading]) -> tuple[Any, float, float]:
    """A shard, the seconds it took, and those of them that were the model's."""
    spent, own = [0.0], work.host.forward

    def watched(batch: Tensor) -> HostOutput:
        output, seconds = _timed(lambda: own(batch))
        spent[0] += seconds
        return output

    vars(work.host)["forward"] = watched
    try:
        shard, seconds = _timed(lambda: work.collect(0, iter(readings)))
    finally:
        del vars(work.host)["forward"]
    return shard, seconds, spent[0]


def _timed(action: Callable[[], Result]) -> tuple[Result, float]:
    begin = time.process_time()
    result = action()
    return result, time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="What a million images would take.")
    parser.add_argument("--data", type=Path, help="YOLO data yaml")
    for row in plan_rows(parser.parse_args().data):
        print(as_text(row), flush=True)


if __name__ == "__main__":
    main()
