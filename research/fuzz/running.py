"""Damaged and hostile files through every reader: each is read or refused in one line; nothing else, and at once.

    python -m research.fuzz --cases 6000 --seed 0

Prints a table of surfaces with how many cases were read and refused. Prints every traceback, crash, hang, use of more
than 2 GB and silently wrong result with the options that reproduce it (``--only reader --seed N --cases 1``), and exits
with 1 if there is any. Each reader runs in a separate process, which is ended after too long a silence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from halopose.errors import HaloposeError
from research.fuzz import bases, files, flights, formats, graphs, inputs, outputs, relations
from research.fuzz.damage import Reader, Wrong

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MODULES = (files, bases, graphs, flights, inputs, outputs, relations, formats)
READERS = {reader.name: reader for module in MODULES for reader in module.READERS}
SURFACES = {
    "COCO json, scores": ("ground truth", "ids by name", "predictions", "score, results", "score, truth", "COCO data"),
    "calibrations, metrics": ("calibration", "metrics"),
    "artifacts, feature caches": ("artifact", "store", "stopped training"),
    "checkpoints": ("base, safetensors", "base, Ultralytics", "base, YOLO-NAS"),
    "ONNX graphs": ("ONNX base",),
    "yaml, toml, config": ("YOLO data", "yaml with anchors", "config", "camera of OpenCV", "rig of cameras"),
    "tar archives": ("tar archive",),
    "addresses": ("address",),
    "images, films, names": ("pictures, films", "names"),
    "deployed folders": ("deployed folder", "card", "predict.py"),
    "output folders": ("output folder", "full disk", "two processes"),
    "stopped and resumed runs": ("stopped predict", "changed inputs"),
    "LARD, LabelMe": ("LARD", "LabelMe"),
    "recordings, MCAP": ("flight", "images in MCAP", "messages in MCAP"),
    "tracks and scenes": ("track", "triangulate", "scene"),
    "DeepLabCut, SLEAP": ("deeplabcut csv", "deeplabcut h5", "sleap csv", "slp"),
    "OpenPose, MMPose, MediaPipe": ("openpose", "mmpose", "mediapipe"),
    "metamorphic relations": ("metamorphic scores",),
}
KINDS = ("read", "refused", "traceback", "crash", "hang", "memory", "wrong")
WORKING, WAITING = 20.0, 120.0  # seconds of the processor, and of the clock, until a case counts as a hang
MEMORY = 2 * 2**30  # bytes that a case may add; files have less than 1 MB


class Hang(BaseException):
    """Raised in a case that takes too long."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """End a case after too long a time with a traceback, on systems with such a timer."""

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


def limit_memory() -> None:
    """Make allocations beyond twice the memory of a case fail, before the machine runs out of memory."""
    if resource is not None and Path("/proc/self/statm").is_file():
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 2 * MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def peak() -> int:
    """Largest resident size of this process so far, in bytes."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def outcome(reader: Reader, folder: Path, seed: int) -> tuple[str, str]:
    """Outcome of one case, with a traceback if there was one."""
    reader.damage(folder, random.Random(f"{reader.name} {seed}"))
    before = peak()
    try:
        with time_limit():
            reader.read(folder)
    except HaloposeError as error:
        result = ("refused", "") if "\n" not in str(error).strip() else ("traceback", f"several lines: {error}")
    except Hang:
        return "hang", traceback.format_exc()
    except Wrong as error:
        return "wrong", str(error)
    except MemoryError:
        return "memory", traceback.format_exc()
    except Exception:  # noqa: BLE001, whatever it is, it is what is looked for
        return "traceback", traceback.format_exc()
    else:
        result = "read", ""
    return ("memory", f"{(peak() - before) / 2**30:.1f} GiB more") if peak() - before > MEMORY else result


def work(name: str, first: int, last: int, mouth: Connection) -> None:
    """Run the cases of a reader in a separate process and report each outcome."""
    os.environ.setdefault("OPENCV_LOG_LEVEL", "OFF")
    with tempfile.TemporaryDirectory() as place:
        READERS[name].prepare(Path(place))
        mouth.send("ready")
        limit_memory()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)  # messages of C libraries about damaged files
        for seed in range(first, last):
            mouth.send(outcome(READERS[name], Path(place), seed))


def watched(name: str, first: int, last: int) -> Iterator[tuple[int, str, str]]:
    """Seed, kind and traceback of every case; a process that dies or is silent is an outcome too."""
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


def run(cases: int, seed: int, names: list[str]) -> dict[str, Counter[str]]:
    """All cases; the outcomes by reader."""
    whole = sum(READERS[name].share for name in names)
    found: dict[str, Counter[str]] = {}
    for name in names:
        count, began = math.ceil(cases * READERS[name].share / whole), time.monotonic()
        found[name] = Counter()
        for number, kind, text in watched(name, seed, seed + count):
            found[name][kind] += 1
            if text:
                print(f"--- {kind}: --only {name!r} --seed {number} --cases 1\n{text}", flush=True)
        print(f"{name}: seeds {seed} to {seed + count - 1}, {time.monotonic() - began:.0f} s", flush=True)
    return found


def tell(name: str, counts: Counter[str]) -> None:
    print(f"{name:26}{sum(counts.values()):8}" + "".join(f"{counts[kind]:10}" for kind in KINDS), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=[*READERS], metavar="READER", help="These readers alone.")
    parser.add_argument("--json", type=Path, help="Add the counts by reader to those in this file.")
    given = parser.parse_args()
    found = run(given.cases, given.seed, given.only or [*READERS])
    if given.json is not None:
        found = added(given.json, found)
    print(f"{'surface':26}{'cases':>8}" + "".join(f"{kind:>10}" for kind in KINDS))
    whole: Counter[str] = Counter()
    for surface, names in SURFACES.items():
        counts = sum((found.get(name, Counter()) for name in names), Counter[str]())
        whole += counts
        if counts:
            tell(surface, counts)
    tell("all", whole)
    return int(sum(whole[kind] for kind in KINDS[2:]) > 0)


def added(path: Path, found: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    """Counts of earlier runs in a file, and of this one; written back."""
    before = json.loads(path.read_text()) if path.is_file() else {}
    together = {name: Counter(before.get(name, {})) + found.get(name, Counter()) for name in {**before, **found}}
    path.write_text(json.dumps(together, indent=1))
    return together
