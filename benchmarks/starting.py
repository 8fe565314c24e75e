"""Processor time of whole commands, their start included."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.interleave import Comparison
from benchmarks.overhead import PHOTOGRAPH
from halopose.hosts.model_zoo import find_base

# As the command `yolo`; a torchvision that does not fit the installed torch is repaired first, as halopose does.
YOLO = (
    "from halopose.hosts.torchvision_shim import ensure_torchvision; ensure_torchvision(); "
    "from ultralytics.cfg import entrypoint; entrypoint()"
)


def import_seconds(rounds: int) -> float:
    """``import halopose``, without the start of Python."""
    found = [(_processor_seconds(["-c", "import halopose"]), _processor_seconds(["-c", "pass"])) for _ in range(rounds)]
    ours, bare = zip(*found, strict=True)
    return min(ours) - min(bare)


def help_seconds(rounds: int) -> float:
    """``halopose --help``."""
    return min(_processor_seconds(["-m", "halopose", "--help"]) for _ in range(rounds))


def compare_predict(rounds: int) -> Comparison:
    """``yolo predict`` against ``halopose predict``, on one photograph with its annotated picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = ["-m", "halopose", "predict", str(PHOTOGRAPH), "-o", str(folder / "ours"), "--exist-ok"]
        options = {"model": find_base(), "source": PHOTOGRAPH, "imgsz": 640, "device": "cpu", "exist_ok": True}
        options |= {"save": True, "project": folder, "name": "peer"}
        peer = ["-c", YOLO, "predict", *(f"{key}={value}" for key, value in options.items())]
        pairs = [(_processor_seconds(peer), _processor_seconds(ours)) for _ in range(rounds + 1)][1:]
    theirs, mine = zip(*pairs, strict=True)
    ratios = tuple(second / first for first, second in pairs)
    return Comparison(statistics.median(theirs), statistics.median(mine), ratios)


def _processor_seconds(arguments: Sequence[str]) -> float:
    """User and system time of a Python process on one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
