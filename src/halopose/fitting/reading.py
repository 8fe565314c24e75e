"""Views of a data set, read and laid into the model's input: here, or ahead of the model in other processes.

In: records and input sizes. Out: what was read of each, in the order asked for; only a few are ever in memory.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from typing import Any

import cv2

from halopose.data.dataset import Objects, Record
from halopose.data.images import read_encoded
from halopose.errors import HaloposeError
from halopose.hosts.base import Letterbox, Placer
from halopose.types import Array

Task = tuple[Record, int]  # an image and an input size

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class View:
    """One image at one input size: its objects, its own shape, and its pixels as ``Host.placer`` lays them."""

    record: Record
    objects: Objects
    imgsz: int
    shape: tuple[int, ...]
    pixels: Array
    box: Letterbox


@dataclass(frozen=True)
class Reading:
    """What a later run compares to see whether the image has changed, and the view, or why there is none."""

    state: list[Any]
    view: View | None
    skipped: str


@dataclass(frozen=True)
class Reader:
    """Reads views for a host's model. It holds no model itself, so that it can be sent to other processes."""

    place: Placer
    rectangular: bool

    def __call__(self, task: Task) -> Reading:
        record, imgsz = task
        try:
            encoded = read_encoded(record.path)
        except HaloposeError as error:
            return Reading(record.state(), None, str(error))
        state = record.state(encoded)
        try:
            image, objects = record.read(encoded)
            pixels, box = self.place(image, imgsz, self.rectangular)
        except HaloposeError as error:
            return Reading(state, None, str(error))
        return Reading(state, View(record, objects, imgsz, image.shape, pixels, box), "")


def read_ahead(
    reader: Reader, tasks: Iterable[Task], processes: int, depth: int
) -> Generator[Reading, None, None]:
    """Readings in the order of their tasks; without processes each when it is asked for.

    At most ``depth`` of them wait for the model. If a process is killed, this one reads on: nothing is lost.
    """
    if not processes:
        yield from map(reader, tasks)
        return
    tasks = iter(tasks)
    waiting: deque[tuple[Task, Future[Reading]]] = deque()
    pool = ProcessPoolExecutor(processes, mp_context=_context(), initializer=_start_reading)
    try:
        for task in tasks:
            waiting.append((task, pool.submit(reader, task)))
            if len(waiting) == depth:
                yield waiting[0][1].result()
                waiting.popleft()
        while waiting:
            yield waiting[0][1].result()
            waiting.popleft()
    except BrokenProcessPool:
        log.warning("a process that read images was killed: the rest is read by this one")
        left = [task for task, _ in waiting]
        yield from map(reader, chain(left, tasks))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _context() -> Any:
    """Forked where that can be: the frameworks are not imported again, and memory is shared."""
    return multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")


def _start_reading() -> None:
    """One thread a process, and Ctrl-C is for the one that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cv2.setNumThreads(1)


__all__ = ["Reader", "Reading", "Task", "View", "read_ahead"]
