"""Collecting by one process against a crew: with a real model, and with one that takes next to no time."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.interleave import Comparison, compare
from benchmarks.overhead import PHOTOGRAPH, make_model
from benchmarks.stub import StubHost
from halopose.data.dataset import Dataset, Objects, Record
from halopose.fitting.collecting import collect
from halopose.fitting.crew import Crew
from halopose.fitting.store import CollectSettings
from halopose.hosts.base import Host
from halopose.keypoints import Keypoints

IMAGES = 128  # four shards
BATCH_SECONDS = 2e-3


def compare_collecting(crew: Crew, rounds: int = 3) -> Comparison:
    """YOLO11n-pose at 640: the crew of the machine against one process with all of torch's threads."""
    host = make_model().host
    return _compare(host, CollectSettings(detections=20), CollectSettings(detections=20), crew, rounds)


def compare_reading(readers: int, rounds: int = 3) -> Comparison:
    """A model that takes next to no time: readers and batches of 16 against one process that reads one by one."""
    host = StubHost(keypoints=17, seconds=BATCH_SECONDS)
    return _compare(host, CollectSettings(batch=16), CollectSettings(), Crew(readers=readers), rounds)


def _compare(host: Host, ours: CollectSettings, theirs: CollectSettings, crew: Crew, rounds: int) -> Comparison:
    dataset = _photographs(host.layout)
    with tempfile.TemporaryDirectory() as name:
        fresh = (Path(name) / str(number) for number in itertools.count())
        return compare(
            lambda: collect(host, dataset, next(fresh), ours, crew=crew),
            lambda: collect(host, dataset, next(fresh), theirs),
            rounds,
        )


def _photographs(layout: Keypoints) -> Dataset:
    """Two photographs in turns, with one object each."""
    files = [PHOTOGRAPH, PHOTOGRAPH.with_name("zidane.jpg")]
    objects = Objects(
        boxes=np.array([[100.0, 100.0, 400.0, 600.0]]),
        class_ids=np.zeros(1, dtype=np.int64),
        keypoints=np.full((1, len(layout), 2), 300.0),
        labelled=np.ones((1, len(layout)), dtype=bool),
        area=np.array([8e4]),
        crowd=np.zeros(1, dtype=bool),
    )
    records = tuple(Record(files[number % 2], number, objects, False, 1.0) for number in range(IMAGES))
    return Dataset(records, layout, "annotation")
