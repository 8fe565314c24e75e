"""Collecting features: several processes against one, memory, the model's share of the time, and a fast model.

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
from benchmarks.rows import Row, as_text, gibibytes, rate, share, speedup
from benchmarks.stub import StubHost
from halopose.data.dataset import Dataset, Objects, Record
from halopose.data.dataset_loading import load_dataset
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings
from halopose.fitting.prefetch import Reader
from halopose.fitting.workers import WorkerPool
from halopose.hosts.base import Host
from halopose.keypoints import Keypoints

IMAGES = 128  # four shards
SHARE_IMAGES = 2 * IMAGES  # for the model's share: starting and ending count less with more images
STUB_IMAGES = 8 * IMAGES  # enough to hide the time of starting processes
BATCH_SECONDS = 2e-3
READERS = (2, 16)
READ, READ_TURNS = 64, 8  # photographs per process and round, for the read rate
SLOTS = 1024  # processes whose times are stored separately
MODEL = ("forward", "assign", "select")  # methods that run the framework


def collecting_rows(data: Path | None, images: int = IMAGES, rounds: int = 3) -> Iterator[Row]:
    """All rows of collecting, on photographs from a data yaml or on two from Ultralytics."""
    host = make_model().host
    dataset = photographs(data, host.layout, images)
    workers, settings = WorkerPool.of_machine("cpu"), CollectSettings(detections=20)
    found = _compare(host, dataset, (settings, workers), (settings, WorkerPool()), rounds)
    what = f"collecting {len(dataset)} photographs, YOLO11n-pose, 640, {workers.processes} processes"
    what = f"{what}, {len(dataset) / found.ours:.1f} images/s"
    yield speedup("collecting.processes", what, found, "--workers 1 --batch 1, the model on all threads")
    yield from _share_rows(host, photographs(data, host.layout, SHARE_IMAGES), settings, workers)
    stub = StubHost(keypoints=17, seconds=BATCH_SECONDS)
    more = replace(photographs(data, stub.layout, STUB_IMAGES), layout=stub.layout)
    torch.set_num_threads(1)  # the stub uses almost no processor time
    yield from _stub_rows(stub, more, len(dataset) / found.peer, rounds)


def _stub_rows(stub: Host, dataset: Dataset, model: float, rounds: int) -> Iterator[Row]:
    """A model that takes almost no time, which leaves reading, cutting windows and writing.

    Args:
        stub: the fast model.
        dataset: photographs to collect from.
        model: images/s of one process with a real model.
        rounds: rounds of each comparison.
    """
    cores, batched = os.cpu_count() or 1, CollectSettings(batch=16)
    limit = _reading_rate(stub, dataset, cores)
    for kind, workers in (("readers", WorkerPool(readers=cores)), ("processes", WorkerPool(processes=cores))):
        found = _compare(stub, dataset, (batched, workers), (CollectSettings(), WorkerPool()), rounds)
        reached, name = len(dataset) / found.ours, f"collecting.fast-{kind}"
        what = f"{len(dataset)} photographs, a model of 2 ms a batch, {cores} {kind}, batches of 16"
        yield speedup(name, what, found, "one process, batch 1")
        yield rate(f"{name}-rate", "its rate", reached, f"{model:.1f} images/s by YOLO11n-pose in one process")
        what = f"share of the rate at which {cores} processes only decode and resize these photographs"
        yield share(f"{name}-limit", what, reached / limit, f"{limit:.0f} images/s", better="higher")
    for readers in READERS:
        peak = peak_of(lambda: _run(stub, dataset, batched, WorkerPool(readers=readers)))  # noqa: B023
        yield gibibytes(f"collecting.memory-{readers}-readers", f"peak memory, the fast model, {readers} readers", peak)


def _reading_rate(stub: Host, dataset: Dataset, cores: int) -> float:
    """Images/s that parallel processes read without other work, the best of several rounds."""
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


def _share_rows(host: Host, dataset: Dataset, settings: CollectSettings, workers: WorkerPool) -> Iterator[Row]:
    """The model's share of the processes' time and, from another run, their peak memory."""
    spent = multiprocessing.get_context("fork").RawArray("d", SLOTS)
    with _timed(host, spent):
        begin = time.perf_counter()
        _run(host, dataset, settings, workers)
        wall = time.perf_counter() - begin
    what = f"the model's share of the processes' time, {len(dataset)} photographs"
    yield share("collecting.model-share", what, sum(spent) / (wall * workers.processes), better="higher")
    peak = peak_of(lambda: _run(host, dataset, settings, workers))
    yield gibibytes("collecting.memory", f"peak memory of {workers.processes} processes", peak)


class _timed:
    """While open, the host's methods add their seconds to the slot of their process."""

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


def _run(host: Host, dataset: Dataset, settings: CollectSettings, workers: WorkerPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        collect(host, dataset, folder, settings, workers=workers)


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
            lambda: collect(host, dataset, next(fresh), ours[0], workers=ours[1]),
            lambda: collect(host, dataset, next(fresh), theirs[0], workers=theirs[1]),
            rounds,
        )


def photographs(data: Path | None, layout: Keypoints, count: int) -> Dataset:
    """The first training images of a data yaml, or two photographs from Ultralytics, repeated."""
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
    parser = argparse.ArgumentParser(description="The cost of collecting features.")
    parser.add_argument("--data", type=Path, help="YOLO data yaml")
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    for row in collecting_rows(given.data, given.images, given.rounds):
        print(as_text(row), flush=True)


if __name__ == "__main__":
    main()
