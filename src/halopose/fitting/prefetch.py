"""Image loading: read and letterbox images for a model, in this process or prefetched by other processes.

The input is a sequence of tasks, each an image and an input size. Readings come out in the order of the tasks. Only
a limited number of images is in memory at a time.
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

_CHUNK = 4  # images per request to a reader process, to reduce the overhead of requests

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageTask:
    """One image at one input size.

    Attributes:
        record: Record of the image.
        objects: Annotated objects, in original pixels.
        imgsz: Input size.
        shape: Shape of the original image, (h, w, 3).
        pixels: Letterboxed image of ``Host.placer``.
        box: Letterbox.
    """

    record: Record
    objects: Objects
    imgsz: int
    shape: tuple[int, ...]
    pixels: Array
    box: Letterbox


@dataclass(frozen=True)
class Reading:
    """Result of reading an image.

    Attributes:
        state: State of the file, by which a later run detects that the image has changed.
        view: The image; None if it could not be read.
        skipped: Why it could not be read; else empty.
    """

    state: list[Any]
    view: ImageTask | None
    skipped: str


@dataclass(frozen=True)
class SentReading:
    """Part of a reading that a reader process sends back; the parent process restores the rest from the task.

    Attributes:
        state: See ``Reading``.
        skipped: See ``Reading``.
        shape: Shape of the original image.
        pixels: Letterboxed image; None if it could not be read, or if it is in shared memory.
        box: Letterbox; None if the image could not be read.
    """

    state: list[Any]
    skipped: str
    shape: tuple[int, ...] = ()
    pixels: Array | None = None
    box: Letterbox | None = None

    def of(self, task: Task) -> Reading:
        """Restore the reading of a task."""
        if self.pixels is None or self.box is None:
            return Reading(self.state, None, self.skipped)
        record, imgsz = task
        view = ImageTask(record, record.objects_in(self.shape), imgsz, self.shape, self.pixels, self.box)
        return Reading(self.state, view, self.skipped)


@dataclass(frozen=True)
class Reader:
    """Reads images for a host's model. It holds no model, so it can be sent to other processes.

    Attributes:
        place: Letterboxing function of the host.
        rectangular: Use rectangular inputs instead of square ones.
    """

    place: Placer
    rectangular: bool

    def __call__(self, task: Task) -> Reading:
        return self.read(task).of(task)

    def read(self, task: Task, buffer: Array | None = None) -> SentReading:
        """Read and letterbox the image of a task.

        Args:
            task: Image and input size.
            buffer: Bytes (n,) that the pixels may be written to.
        """
        record, imgsz = task
        try:
            encoded = read_encoded(record.path)
        except HaloposeError as error:
            return SentReading(record.state(), str(error))
        state = record.state(encoded)
        try:
            image = record.pixels(encoded)
            pixels, box = self.place(image, imgsz, self.rectangular, buffer)
        except HaloposeError as error:
            return SentReading(state, str(error))
        return SentReading(state, "", image.shape, pixels, box)


@dataclass(frozen=True)
class _Slots:
    """Shared memory for pixels, which is faster than sending them through a pipe.

    Attributes:
        memory: The shared memory.
        size: Bytes per slot.
    """

    memory: mmap.mmap
    size: int

    def buffer(self, number: int) -> Array:
        """Return the bytes (size,) of a slot."""
        return np.frombuffer(self.memory, np.uint8, self.size, number * self.size)


_slots: _Slots | None = None  # in a reader process: shared memory for its pixels
_Stored = tuple[SentReading, tuple[int, ...] | None]  # a reading, and the shape of its pixels if they are in a slot


def _read(reader: Reader, tasks: list[tuple[Task, int]]) -> list[_Stored]:
    """Run in a reader process: write pixels to the slots where they fit, else return them with the reading."""
    if _slots is None:
        return [(reader.read(task), None) for task, _ in tasks]
    buffers = [_slots.buffer(number) for _, number in tasks]
    return [_store(reader.read(task, buffer), buffer) for (task, _), buffer in zip(tasks, buffers, strict=True)]


def _store(reading: SentReading, buffer: Array) -> _Stored:
    """Write the pixels of a reading to a slot if they fit."""
    pixels = reading.pixels
    if pixels is None or pixels.dtype != np.uint8 or pixels.nbytes > buffer.nbytes:
        return reading, None
    target = laid_in(buffer, pixels.shape)
    if pixels.ctypes.data != target.ctypes.data:  # the placer did not use the buffer
        target[:] = pixels
    return replace(reading, pixels=None), pixels.shape


def read_ahead(
    reader: Reader, tasks: Iterable[Task], processes: int, depth: int, largest: int = 640, held: int = 1
) -> Generator[Reading, None, None]:
    """Yield readings in the order of their tasks.

    If a reader process is killed, this process reads the remaining images.

    Args:
        reader: Reads an image.
        tasks: Images and input sizes.
        processes: Number of reader processes; 0: this process reads each image on request.
        depth: Largest number of readings that wait for the model.
        largest: Largest input size, which determines the size of the slots.
        held: Number of previous readings whose pixels are still in use when the next one is requested. Their
            pixels are not overwritten.
    """
    if not processes:
        yield from map(reader, tasks)
        return
    context, slots, count = _context(), None, depth + held
    if context.get_start_method() == "fork":
        slots = _Slots(mmap.mmap(-1, count * 3 * largest**2), 3 * largest**2)
    # Slots are reused in turn: the reading that was in a slot before is no longer in use.
    numbered = ((task, number % count) for number, task in enumerate(tasks))
    chunk_size = max(1, min(_CHUNK, depth // (2 * processes)))
    waiting: deque[list[tuple[Task, int]]] = deque()
    futures: deque[Future[list[_Stored]]] = deque()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_reading, initargs=(slots,))

    def first() -> Iterator[Reading]:
        found = futures[0].result()
        futures.popleft()
        for (task, number), (reading, shape) in zip(waiting.popleft(), found, strict=True):
            if slots is not None and shape is not None:
                reading = replace(reading, pixels=laid_in(slots.buffer(number), shape))
            yield reading.of(task)

    try:
        while chunk := list(islice(numbered, chunk_size)):
            waiting.append(chunk)
            futures.append(pool.submit(_read, reader, chunk))
            if len(waiting) == depth // chunk_size:
                yield from first()
        while waiting:
            yield from first()
    except BrokenProcessPool:
        log.warning("a reader process was killed: the main process reads the remaining images")
        remaining = [task for chunk in waiting for task, _ in chunk]
        yield from map(reader, chain(remaining, (task for task, _ in numbered)))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _context() -> Any:
    """Fork where the platform can: frameworks are not imported again, and memory is shared."""
    return multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")


def _start_reading(slots: _Slots | None) -> None:
    """Initialise a reader process: one thread, and Ctrl-C is handled by the parent process."""
    global _slots
    _slots = slots
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cv2.setNumThreads(1)
