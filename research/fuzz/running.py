"""Damaged and hostile files through every reader: each is read or refused in one line; nothing else, and at once.

    python -m research.fuzz --cases 6000 --seed 0

Prints a table of readers with how many cases were read and refused, and every traceback, crash or hang with the
words that make it again (``--only reader --seed N --cases 1``). Exits with 1 if there is any. Each reader has a
process of its own, which is ended if it is silent for too long, and begun again at the next case.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import random
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from halopose.errors import HaloposeError
from research.fuzz import bases, files, flights
from research.fuzz.damage import Reader

READERS = {reader.name: reader for reader in (*files.READERS, *bases.READERS, *flights.READERS)}
KINDS = ("read", "refused", "traceback", "crash", "hang")
WORKING, WAITING = 20.0, 120.0  # seconds of the processor, and of the clock, until a case counts as a hang


class Hang(BaseException):
    """Raised in a case that takes too long."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Ends a case that works for too long, where the system has such a timer, to show where."""

    def stop(*_: object) -> None:
        raise Hang

    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, WORKING)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def outcome(reader: Reader, folder: Path, seed: int) -> tuple[str, str]:
    """How one case ended, and the traceback if it ended in one."""
    reader.damage(folder, random.Random(f"{reader.name} {seed}"))
    try:
        with time_limit():
            reader.read(folder)
    except HaloposeError as error:
        return ("refused", "") if "\n" not in str(error).strip() else ("traceback", f"several lines: {error}")
    except Hang:
        return "hang", traceback.format_exc()
    except Exception:  # noqa: BLE001, whatever it is, it is what is looked for
        return "traceback", traceback.format_exc()
    return "read", ""


def work(name: str, first: int, last: int, mouth: Connection) -> None:
    """Says how each case of a reader ended, in a process of its own."""
    os.environ.setdefault("OPENCV_LOG_LEVEL", "OFF")
    with tempfile.TemporaryDirectory() as place:
        READERS[name].prepare(Path(place))
        mouth.send("ready")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)  # what libraries in C say of damaged files
        for seed in range(first, last):
            mouth.send(outcome(READERS[name], Path(place), seed))


def watched(name: str, first: int, last: int) -> Iterator[tuple[int, str, str]]:
    """Seed, kind and traceback of every case; a process that dies or falls silent is one outcome of a case."""
    context: Any = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    while first < last:
        ear, mouth = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(name, first, last, mouth), daemon=True)
        process.start()
        mouth.close()
        try:
            ear.recv()
        except EOFError:
            raise SystemExit(f"{name}: no good files to damage") from None
        try:
            while first < last:
                if not ear.poll(WAITING):
                    yield first, "hang", f"silent for {WAITING:g} s"
                    break
                yield first, *ear.recv()
                first += 1
        except EOFError:
            process.join()
            yield first, "crash", f"the process ended with {process.exitcode}"
        process.kill()
        process.join()
        first += 1


def run(cases: int, seed: int, names: list[str]) -> Counter[tuple[str, str]]:
    """All cases; the outcomes by reader."""
    whole = sum(READERS[name].share for name in names)
    found: Counter[tuple[str, str]] = Counter()
    for name in names:
        count = math.ceil(cases * READERS[name].share / whole)
        for number, kind, text in watched(name, seed, seed + count):
            found[name, kind] += 1
            if text:
                print(f"--- {kind}: --only {name!r} --seed {number} --cases 1\n{text}", flush=True)
        tell(name, [found[name, kind] for kind in KINDS])
    return found


def tell(name: str, counts: list[int]) -> None:
    print(f"{name:20}{sum(counts):10}" + "".join(f"{count:10}" for count in counts), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=[*READERS], help="These readers alone.")
    given = parser.parse_args()
    print(f"{'reader':20}" + "".join(f"{kind:>10}" for kind in ("cases", *KINDS)))
    found = run(given.cases, given.seed, given.only or [*READERS])
    totals = [sum(count for (_, what), count in found.items() if what == kind) for kind in KINDS]
    tell("all", totals)
    return int(sum(totals[2:]) > 0)
