"""Parallel execution: local processes, parts of a job array, and torchrun ranks.

A `WorkerPool` distributes shards. A `ProcessGroup` sums values over the ranks of a training run.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import cv2
import torch
from torch import Tensor, distributed

from halopose.errors import HaloposeError

MOST_READERS = 16
GPU_BATCH = 16
POLL = 0.2  # seconds between two checks of the workers' progress

log = logging.getLogger(__name__)


Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class WorkerPool:
    """How the collection of a feature cache is distributed.

    Attributes:
        processes: Number of processes on this machine that run the model, each on separate cores.
        readers: Number of processes that prefetch images for each model process.
        part: Index from 0 of the part of the shards to collect here.
        parts: Number of parts; other machines collect the others.
        engine: ``"local"``, or ``"ray"`` to collect on a Ray cluster.

    Example:
        >>> WorkerPool(part=1, parts=3).own_shards(8)
        [1, 4, 7]
    """

    processes: int = 1
    readers: int = 0
    part: int = 0
    parts: int = 1
    engine: Engine = "local"

    def own_shards(self, shards: int) -> list[int]:
        """Return the numbers of the shards that belong to this part."""
        return list(range(self.part, shards, self.parts))

    @classmethod
    def of_machine(
        cls, device: torch.device | str, workers: int | None = None, part: tuple[int, int] | None = None
    ) -> WorkerPool:
        """Choose processes and readers for this machine.

        On a CPU the model is the bottleneck: every worker is a process that runs the model on one core. On a GPU
        reading is the bottleneck: every worker is a reader.

        Args:
            device: Torch device of the model.
            workers: Number of workers; default: one per core.
            part: Index from 0 and number of parts; default: rank and world size of torchrun.
        """
        share, parts = part or torchrun_rank() or (0, 1)
        if torch.device(device).type != "cpu":
            readers = min(max(_cores() - 1, 1), MOST_READERS) if workers is None else workers
            return cls(1, readers, share, parts)
        processes = torch.get_num_threads() if workers is None else min(workers, _cores())
        return cls(max(processes, 1) if can_fork() else 1, 0, share, parts)


def torchrun_rank() -> tuple[int, int] | None:
    """Return rank and world size set by torchrun; None for a single process."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, size) if size > 1 and 0 <= rank < size else None


def parse_part(text: str) -> tuple[int, int]:
    """Parse a part such as ``3/8``, the third of eight, to its index from 0 and the number of parts.

    Example:
        >>> parse_part("3/8")
        (2, 8)
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise HaloposeError(f"--part takes the part and the number of parts, such as 3/8, got {text!r}")
    return int(number) - 1, int(count)


def own_device(device: str | None) -> str | None:
    """Return the device of this rank: with several GPUs in a machine, each rank uses another GPU."""
    local = os.environ.get("LOCAL_RANK", "")
    return f"cuda:{local}" if device == "cuda" and local.isdecimal() and torchrun_rank() else device


def batch_for(device: torch.device | str) -> int:
    """Return the batch size for a device: one image on a CPU, where larger batches are not faster."""
    return 1 if torch.device(device).type == "cpu" else GPU_BATCH


def can_fork() -> bool:
    """Return whether the platform can fork processes."""
    return "fork" in multiprocessing.get_all_start_methods()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Processes of this machine ----------------------------------------------------------------------------------

Tick = Callable[[int], None]  # called with the number of finished views


def share_out(
    work: Callable[[int, Tick], None], numbers: Sequence[int], processes: int, tick: Tick | None = None
) -> None:
    """Run ``work`` on all numbers in forked processes, one core and an equal share of the numbers each.

    Args:
        work: Called with a number and a function to call with the count of finished views.
        numbers: Numbers of the shards.
        processes: Number of processes.
        tick: Called with the number of views that all processes have finished.

    Raises:
        HaloposeError: A process failed; the others are stopped. A killed process only causes a warning, and its
            numbers remain unfinished.
    """
    context: Any = multiprocessing.get_context("fork")
    done = context.RawArray("q", processes)
    workers, receivers = [], []
    with warnings.catch_warnings():
        # Forking in a process with threads warns; the child never uses these threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        for number in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (work, list(numbers[number::processes]), done, number, sender)
            workers.append(context.Process(target=_run_worker, args=arguments, daemon=True))
            workers[-1].start()
            sender.close()
            receivers.append(receiver)
    try:
        _wait_for_all(workers, receivers, lambda: tick(sum(done)) if tick else None)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _wait_for_all(workers: list[Any], receivers: list[Connection], report: Callable[[], None]) -> None:
    """Wait until all workers have ended; raise the first error that one of them sent."""
    while any(worker.is_alive() for worker in workers):
        wait([worker.sentinel for worker in workers if worker.is_alive()], POLL)
        report()
        for worker, receiver in zip(workers, receivers, strict=True):
            if not worker.is_alive() and (message := _received_error(receiver)):
                raise HaloposeError(message)
    killed = sum(worker.exitcode != 0 for worker in workers)
    if killed:
        log.warning(
            "%d of %d processes ended early: the main process collects their remaining shards", killed, len(workers)
        )


def _received_error(receiver: Connection) -> str:
    """Return the error message that a worker sent; empty if there is none."""
    try:
        return str(receiver.recv()) if receiver.poll() else ""
    except EOFError:
        return ""


def _run_worker(
    work: Callable[[int, Tick], None], numbers: list[int], done: Any, slot: int, sender: Connection
) -> None:
    """Run in a worker process: process the numbers, count finished views in a slot of ``done``, send an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C and stops the worker
    torch.set_num_threads(1)  # OpenMP's threads do not survive the fork
    cv2.setNumThreads(1)
    before = 0
    for number in numbers:

        def tick(views: int, before: int = before) -> None:
            done[slot] = before + views

        try:
            work(number, tick)
        except HaloposeError as error:
            sender.send(str(error))
            return
        before = done[slot]


# Ranks of torchrun ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks of a training run; a single rank unless torchrun started several.

    Sums are over all ranks and identical on all of them. Their order depends on the number of ranks only.

    Attributes:
        rank: Index of this rank.
        size: Number of ranks.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def joined(cls, device: torch.device | str = "cpu") -> ProcessGroup:
        """Join the process group of torchrun, or return a single rank without torchrun."""
        found = torchrun_rank()
        if found is None:
            return cls()
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if torch.device(device).type == "cuda" else "gloo")
        return cls(*found)

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Sum values (N,) over all ranks, in place."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def meet(self) -> None:
        """Wait until all ranks arrive here."""
        if self.size > 1:
            distributed.barrier()
