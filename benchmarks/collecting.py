"""Collecting: the crew of the machine against one process, memory, how busy the model is, and a model of no cost.

python -m benchmarks.collecting --data data.yaml --images 587
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from benchmarks.interleave import Comparison, compare
from benchmarks.memory import peak_of
from benchmarks.overhead import PHOTOGRAPH, make_model
from benchmarks.stub import StubHost
from benchmarks.table import Row, as_text, faster
from halopose.data.dataset import Dataset, Objects, Record
from halopose.data.loading import load_dataset
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings
from halopose.fitting.prefetch import Reader
from halopose.fitting.workers import WorkerPool
from halopose.hosts.base import Host
from halopose.keypoints import Keypoints

IMAGES = 128  # four shards
BUSY = 2  # times as many, to see how busy the model is: starting and ending are a few per cent of so few
STUB_IMAGES = 8 * IMAGES  # so many that starting processes is little of it
BATCH_SECONDS = 2e-3
READERS = (2, 16)
READ, READ_TURNS = 64, 8  # photographs a process reads in a turn, to see what reading alone takes
SLOTS = 1024  # processes whose time is kept apart
MODEL = ("forward", "assign", "select")  # what the framework itself does


def collecting_rows(data: Path | None, images: int = IMAGES, rounds: int = 3) -> Iterator[Row]:
    """All of them; photographs from a data yaml, or two that come with Ultralytics in turns."""
    host = make_model().host
    dataset = photographs(data, host.layout, images)
    crew, settings = WorkerPool.of_machine("cpu"), CollectSettings(detections=20)
    found = _compare(host, dataset, (settings, crew), (settings, WorkerPool()), rounds)
    rate = f"{len(dataset) / found.ours:.1f} images a second"
    what = f"collecting {len(dataset)} photographs, YOLO11n-pose, 640, {crew.processes} processes, {rate}"
    yield faster(what, found, "--workers 1 --batch 1, the model on all threads")
    yield from _busy(host, photographs(data, host.layout, BUSY * images), settings, crew)
    stub = StubHost(keypoints=17, seconds=BATCH_SECONDS)
    more = replace(photographs(data, stub.layout, STUB_IMAGES), layout=stub.layout)
    torch.set_num_threads(1)  # such a model takes none of these cores
    yield from _stub_rows(stub, more, len(dataset) / found.peer, rounds)


def _stub_rows(stub: Host, dataset: Dataset, model: float, rounds: int) -> Iterator[Row]:
    """A model that takes next to no time: what is left is reading, cutting windows and writing.

    model: images a second that one process does with a real model.
    """
    cores, batched = os.cpu_count() or 1, CollectSettings(batch=16)
    limit = _reading_rate(stub, dataset, cores)
    for what, crew in (
        (f"{cores} readers, batches of 16", WorkerPool(readers=cores)),
        (f"{cores} processes, batches of 16", WorkerPool(processes=cores)),
    ):
        found = _compare(stub, dataset, (batched, crew), (CollectSettings(), WorkerPool()), rounds)
        rate, one = len(dataset) / found.ours, len(dataset) / found.peer
        yield faster(
            f"{len(dataset)} photographs, a model of 2 ms a batch, {what}, {rate:.0f} images a second",
            found,
            "one process, batch 1",
        )
        yield Row("that rate over YOLO11n-pose's in one process", f"{rate:.0f} a second", f"{model:.1f} a second",
                  f"{rate / model:.1f}")  # fmt: skip
        yield Row(
            f"its limit: {cores} processes that do nothing but decode and lay out these photographs",
            f"{limit:.0f} a second",
            f"{rate / limit:.0%} of it reached",
            f"{limit / one:.1f}",
        )
    for readers in READERS:
        peak = peak_of(lambda: _run(stub, dataset, batched, WorkerPool(readers=readers)))  # noqa: B023
        yield Row(f"its peak memory, {readers} readers", f"{peak:.2f} GiB")


def _reading_rate(stub: Host, dataset: Dataset, cores: int) -> float:
    """Photographs a second that processes read side by side, the best of some turns: what they read is let go."""
    turns = [dataset.records[begin : begin + READ] for begin in range(0, READ * cores, READ)]
    context: Any = multiprocessing.get_context("fork")
    spent = []
    with context.Pool(cores, _alone) as pool:
        for _ in range(READ_TURNS):
            begin = time.perf_counter()
            pool.map(partial(_only_read, Reader(stub.placer(), True)), turns, chunksize=1)
            spent.append(time.perf_counter() - begin)
    return READ * cores / min(spent)


def _alone() -> None:
    cv2.setNumThreads(1)


def _only_read(reader: Reader, records: Sequence[Record]) -> None:
    for record in records:
        reader((record, 640))


def _busy(host: Host, dataset: Dataset, settings: CollectSettings, crew: WorkerPool) -> Iterator[Row]:
    """Share of the processes' time that is the model's own, and, in another run, their memory in all."""
    spent = multiprocessing.get_context("fork").RawArray("d", SLOTS)
    with _timed(host, spent):
        begin = time.perf_counter()
        _run(host, dataset, settings, crew)
        wall = time.perf_counter() - begin
    yield Row(
        f"time of these processes that is the model's, {len(dataset)} photographs",
        f"{sum(spent) / (wall * crew.processes):.1%}",
    )
    peak = peak_of(lambda: _run(host, dataset, settings, crew))
    yield Row(f"their peak memory, {crew.processes} processes", f"{peak:.2f} GiB")


class _timed:
    """While it holds, the host's own methods add their seconds to the slot of their process."""

    def __init__(self, host: Host, spent: Any) -> None:
        self.host, self.spent = host, spent

    def __enter__(self) -> None:
        for name in MODEL:
            setattr(self.host, name, self._watched(getattr(self.host, name)))

    def __exit__(self, *error: object) -> None:
        for name in MODEL:
            delattr(self.host, name)

    def _watched(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = action(*given, **named)
            self.spent[os.getpid() % SLOTS] += time.perf_counter() - begin
            return result

        return watched


def _run(host: Host, dataset: Dataset, settings: CollectSettings, crew: WorkerPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        collect(host, dataset, folder, settings, crew=crew)


def _compare(
    host: Host,
    dataset: Dataset,
    ours: tuple[CollectSettings, WorkerPool],
    theirs: tuple[CollectSettings, WorkerPool],
    rounds: int,
) -> Comparison:
    with tempfile.TemporaryDirectory() as name:
        fresh = (Path(name) / str(number) for number in itertools.count())
        return compare(
            lambda: collect(host, dataset, next(fresh), ours[0], crew=ours[1]),
            lambda: collect(host, dataset, next(fresh), theirs[0], crew=theirs[1]),
            rounds,
        )


def photographs(data: Path | None, layout: Keypoints, count: int) -> Dataset:
    """So many training images of a data yaml, or two photographs that come with Ultralytics in turns."""
    if data is not None:
        found = load_dataset(data, "train", otherwise=layout)
        return replace(found, records=found.records[:count])
    files = [PHOTOGRAPH, PHOTOGRAPH.with_name("zidane.jpg")]
    objects = Objects(
        boxes=np.array([[100.0, 100.0, 400.0, 600.0]]),
        class_ids=np.zeros(1, dtype=np.int64),
        keypoints=np.full((1, len(layout), 2), 300.0),
        labelled=np.ones((1, len(layout)), dtype=bool),
        area=np.array([8e4]),
        crowd=np.zeros(1, dtype=bool),
    )
    records = tuple(Record(files[number % 2], number, objects, False, 1.0) for number in range(count))
    return Dataset(records, layout, "annotation")


def main() -> None:
    parser = argparse.ArgumentParser(description="What collecting costs.")
    parser.add_argument("--data", type=Path, help="YOLO data yaml")
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    for row in collecting_rows(given.data, given.images, given.rounds):
        print(as_text(row), flush=True)


if __name__ == "__main__":
    main()
