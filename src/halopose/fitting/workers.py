"""Workers: processes of this machine, parts of a job array, ranks of torchrun.

A `WorkerPool` shares out shards; a `ProcessGroup` sums over the ranks of a training.
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
POLL = 0.2  # seconds between two looks at the progress of others

log = logging.getLogger(__name__)


Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class WorkerPool:
    """processes: that run the model here, each on cores of its own; readers: that read ahead for each of them.

    part of parts: the share of the shards that is ours, from 0; others see to the rest. engine: ``ray`` collects
    on a Ray cluster instead.

    >>> WorkerPool(part=1, parts=3).ours(8)
    [1, 4, 7]
    """

    processes: int = 1
    readers: int = 0
    part: int = 0
    parts: int = 1
    engine: Engine = "local"

    def ours(self, shards: int) -> list[int]:
        """Numbers of the shards that are ours."""
        return list(range(self.part, shards, self.parts))

    @classmethod
    def of_machine(
        cls, device: torch.device | str, workers: int | None = None, part: tuple[int, int] | None = None
    ) -> WorkerPool:
        """What suits the machine: on a CPU the model is the limit, so that workers are processes that run it on a
        core each; before a GPU they are readers, which keep it busy.
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
    """``3/8``, the third of eight, as a part from 0 and their number.

    >>> parse_part("3/8")
    (2, 8)
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise HaloposeError(f"--part says which part of how many, such as 3/8, got {text!r}")
    return int(number) - 1, int(count)


def own_device(device: str | None) -> str | None:
    """The device of this rank: of several GPUs in a machine each rank takes its own."""
    local = os.environ.get("LOCAL_RANK", "")
    return f"cuda:{local}" if device == "cuda" and local.isdecimal() and torchrun_rank() else device


def batch_for(device: torch.device | str) -> int:
    """Images at once that suit a device: on a CPU more than one gain nothing."""
    return 1 if torch.device(device).type == "cpu" else GPU_BATCH


def can_fork() -> bool:
    return "fork" in multiprocessing.get_all_start_methods()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Processes of this machine ----------------------------------------------------------------------------------

Tick = Callable[[int], None]  # told how many views are done


def share_out(
    work: Callable[[int, Tick], None], numbers: Sequence[int], processes: int, tick: Tick | None = None
) -> None:
    """``work`` on all the numbers in forked processes, an equal share each, on one core each.

    A mistake in one of them ends all. What a killed one leaves undone is left undone, with a warning.
    tick: told how many views all of them have done.
    """
    context: Any = multiprocessing.get_context("fork")
    done = context.RawArray("q", processes)
    members, ears = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forked beside threads, which the child never uses
        for number in range(processes):
            ear, mouth = context.Pipe(duplex=False)
            arguments = (work, list(numbers[number::processes]), done, number, mouth)
            members.append(context.Process(target=_member, args=arguments, daemon=True))
            members[-1].start()
            mouth.close()
            ears.append(ear)
    try:
        _attend(members, ears, lambda: tick(sum(done)) if tick else None)
    finally:
        for member in members:
            member.terminate()
            member.join()


def _attend(members: list[Any], ears: list[Connection], look: Callable[[], None]) -> None:
    """Until all have ended; raises what the first of them says."""
    while any(member.is_alive() for member in members):
        wait([member.sentinel for member in members if member.is_alive()], POLL)
        look()
        for member, ear in zip(members, ears, strict=True):
            if not member.is_alive() and (said := _heard(ear)):
                raise HaloposeError(said)
    killed = sum(member.exitcode != 0 for member in members)
    if killed:
        log.warning("%d of %d processes ended early: this one goes on with what they left", killed, len(members))


def _heard(ear: Connection) -> str:
    try:
        return str(ear.recv()) if ear.poll() else ""
    except EOFError:
        return ""


def _member(work: Callable[[int, Tick], None], numbers: list[int], done: Any, slot: int, mouth: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that waits for it stops it
    torch.set_num_threads(1)  # the threads that OpenMP had before the fork are not here
    cv2.setNumThreads(1)
    before = 0
    for number in numbers:

        def tick(views: int, before: int = before) -> None:
            done[slot] = before + views

        try:
            work(number, tick)
        except HaloposeError as error:
            mouth.send(str(error))
            return
        before = done[slot]


# Ranks of torchrun ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessGroup:
    """The ranks of a training; one alone unless torchrun started several.

    Every sum is over all ranks and the same on all of them, in an order that their number alone decides.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def joined(cls, device: torch.device | str = "cpu") -> ProcessGroup:
        """Meet the other ranks that torchrun started, if it did."""
        found = torchrun_rank()
        if found is None:
            return cls()
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if torch.device(device).type == "cuda" else "gloo")
        return cls(*found)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Sums over all ranks of values (N,), in place."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def meet(self) -> None:
        """Wait for all."""
        if self.size > 1:
            distributed.barrier()
