"""Views of a data set, read and laid into the model's input: here, or ahead of the model in other processes.

In: records and input sizes. Out: what was read of each, in the order asked for; only a few are ever in memory.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import cv2
import numpy as np

from halopose.data.dataset import Objects, Record
from halopose.data.images import read_encoded
from halopose.errors import HaloposeError
from halopose.hosts.base import Letterbox, Placer
from halopose.types import Array

Task = tuple[Record, int]  # an image and an input size

_BUNCH = 4  # images that a process is asked for at once: to ask takes as long as a tenth of reading one

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


@dataclass(frozen=True)
class _Slots:
    """Shared memory where processes lay pixels: several times cheaper than sending them through a pipe."""

    memory: mmap.mmap
    size: int

    def at(self, number: int, shape: tuple[int, ...]) -> Array:
        """The pixels in a slot."""
        count = int(np.prod(shape))
        return np.frombuffer(self.memory, np.uint8, count, number * self.size).reshape(shape)


_slots: _Slots | None = None  # in a process that reads: where it lays pixels
_Laid = tuple[Reading, tuple[int, ...] | None]  # a reading, and the shape of its pixels if they lie in a slot


def _read(reader: Reader, tasks: list[tuple[Task, int]]) -> list[_Laid]:
    """In a process that reads: pixels go into slots where they fit, else along with the reading."""
    return [_laid(reader(task), number) for task, number in tasks]


def _laid(reading: Reading, number: int) -> _Laid:
    view = reading.view
    if _slots is None or view is None or view.pixels.dtype != np.uint8 or view.pixels.nbytes > _slots.size:
        return reading, None
    _slots.at(number, view.pixels.shape)[:] = view.pixels
    return replace(reading, view=replace(view, pixels=np.empty(0, np.uint8))), view.pixels.shape


def read_ahead(
    reader: Reader, tasks: Iterable[Task], processes: int, depth: int, largest: int = 640, held: int = 1
) -> Generator[Reading, None, None]:
    """Readings in the order of their tasks; without processes each when it is asked for.

    At most ``depth`` of them wait for the model. If a process is killed, this one reads on: nothing is lost.
    largest: of the input sizes; room is made for so many pixels. held: how many of the last readings are looked at
    when the next is asked for: their pixels are not written over until then.
    """
    if not processes:
        yield from map(reader, tasks)
        return
    context, slots, count = _context(), None, depth + held
    if context.get_start_method() == "fork":
        slots = _Slots(mmap.mmap(-1, count * 3 * largest**2), 3 * largest**2)
    # The slot of a task is free: what was there has been taken, or is not looked at any more.
    numbered = ((task, number % count) for number, task in enumerate(tasks))
    bunch = max(1, min(_BUNCH, depth // (2 * processes)))
    waiting: deque[list[tuple[Task, int]]] = deque()
    futures: deque[Future[list[_Laid]]] = deque()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_reading, initargs=(slots,))

    def first() -> Iterator[Reading]:
        found = futures[0].result()
        futures.popleft()
        for (_, number), (reading, shape) in zip(waiting.popleft(), found, strict=True):
            if slots is not None and shape is not None and reading.view is not None:
                reading = replace(reading, view=replace(reading.view, pixels=slots.at(number, shape)))
            yield reading

    try:
        while some := list(islice(numbered, bunch)):
            waiting.append(some)
            futures.append(pool.submit(_read, reader, some))
            if len(waiting) == depth // bunch:
                yield from first()
        while waiting:
            yield from first()
    except BrokenProcessPool:
        log.warning("a process that read images was killed: the rest is read by this one")
        left = [task for some in waiting for task, _ in some]
        yield from map(reader, chain(left, (task for task, _ in numbered)))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _context() -> Any:
    """Forked where that can be: the frameworks are not imported again, and memory is shared."""
    return multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")


def _start_reading(slots: _Slots | None) -> None:
    """One thread a process, and Ctrl-C is for the one that waits for it."""
    global _slots
    _slots = slots
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cv2.setNumThreads(1)


__all__ = ["Reader", "Reading", "Task", "View", "read_ahead"]
