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
from halopose.hosts.base import Letterbox, Placer, laid_in
from halopose.types import Array

Task = tuple[Record, int]  # an image and an input size

_BUNCH = 4  # images that a process is asked for at once: to ask takes as long as a tenth of reading one

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageTask:
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
    view: ImageTask | None
    skipped: str


@dataclass(frozen=True)
class Look:
    """All of a reading that one who has the task does not know: the rest need not be sent between processes."""

    state: list[Any]
    skipped: str
    shape: tuple[int, ...] = ()
    pixels: Array | None = None
    box: Letterbox | None = None

    def of(self, task: Task) -> Reading:
        """The reading of the task that was looked at."""
        if self.pixels is None or self.box is None:
            return Reading(self.state, None, self.skipped)
        record, imgsz = task
        view = ImageTask(record, record.objects_in(self.shape), imgsz, self.shape, self.pixels, self.box)
        return Reading(self.state, view, self.skipped)


@dataclass(frozen=True)
class Reader:
    """Reads views for a host's model. It holds no model itself, so that it can be sent to other processes."""

    place: Placer
    rectangular: bool

    def __call__(self, task: Task) -> Reading:
        return self.look(task).of(task)

    def look(self, task: Task, room: Array | None = None) -> Look:
        """What there is to be seen of a task; pixels may be laid into a room of bytes (n,)."""
        record, imgsz = task
        try:
            encoded = read_encoded(record.path)
        except HaloposeError as error:
            return Look(record.state(), str(error))
        state = record.state(encoded)
        try:
            image = record.pixels(encoded)
            pixels, box = self.place(image, imgsz, self.rectangular, room)
        except HaloposeError as error:
            return Look(state, str(error))
        return Look(state, "", image.shape, pixels, box)


@dataclass(frozen=True)
class _Slots:
    """Shared memory where processes lay pixels: several times cheaper than sending them through a pipe."""

    memory: mmap.mmap
    size: int

    def room(self, number: int) -> Array:
        """The bytes (size,) of a slot."""
        return np.frombuffer(self.memory, np.uint8, self.size, number * self.size)


_slots: _Slots | None = None  # in a process that reads: where it lays pixels
_Laid = tuple[Look, tuple[int, ...] | None]  # what was seen, and the shape of its pixels if they lie in a slot


def _read(reader: Reader, tasks: list[tuple[Task, int]]) -> list[_Laid]:
    """In a process that reads: pixels go into slots where they fit, else along with the rest."""
    if _slots is None:
        return [(reader.look(task), None) for task, _ in tasks]
    rooms = [_slots.room(number) for _, number in tasks]
    return [_laid(reader.look(task, room), room) for (task, _), room in zip(tasks, rooms, strict=True)]


def _laid(look: Look, room: Array) -> _Laid:
    pixels = look.pixels
    if pixels is None or pixels.dtype != np.uint8 or pixels.nbytes > room.nbytes:
        return look, None
    place = laid_in(room, pixels.shape)
    if pixels.ctypes.data != place.ctypes.data:  # the placer has laid them elsewhere
        place[:] = pixels
    return replace(look, pixels=None), pixels.shape


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
        for (task, number), (look, shape) in zip(waiting.popleft(), found, strict=True):
            if slots is not None and shape is not None:
                look = replace(look, pixels=laid_in(slots.room(number), shape))
            yield look.of(task)

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
