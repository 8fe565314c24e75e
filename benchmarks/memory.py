"""Peak memory of a process and its children; shared pages count once (Linux)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

INTERVAL = 0.05  # seconds between two readings


def peak_of(action: Callable[[], object]) -> float:
    """Peak memory in GiB of this process and its children during the action; NaN without /proc."""
    done, seen = threading.Event(), [0.0]

    def watch() -> None:
        while not done.wait(INTERVAL):
            seen[0] = max(seen[0], _held(os.getpid()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        action()
    finally:
        done.set()
        thread.join()
    return seen[0] / 2**20 or float("nan")


def _held(process: int) -> float:
    """Proportional set size of a process and its children in KiB; 0 for a process that has just ended."""
    folder = Path("/proc") / str(process)
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()
        children = [
            int(name) for task in (folder / "task").iterdir() for name in (task / "children").read_text().split()
        ]
    except OSError:
        return 0.0
    own = next((float(line.split()[1]) for line in lines if line.startswith("Pss:")), 0.0)
    return own + sum(map(_held, children))
