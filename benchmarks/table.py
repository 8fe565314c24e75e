"""Rows of the table that ``make bench`` prints, on which machine and with which versions they were measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from benchmarks.interleave import Comparison

HEADINGS = ("what", "ours", "peer", "ratio")
PACKAGES = ("torch", "numpy", "scipy", "opencv-python-headless", "ultralytics", "pycocotools", "faster-coco-eval")


@dataclass(frozen=True)
class Row:
    """One measurement in words; ratio is the peer's time over ours unless ``what`` says otherwise."""

    what: str
    ours: str
    peer: str = ""
    ratio: str = ""


def faster(what: str, found: Comparison, peer: str) -> Row:
    """How many times less time ours takes."""
    return Row(what, in_time(found.ours), f"{in_time(found.peer)}, {peer}", f"{found.ratio:.1f}")


def cost(what: str, found: Comparison, without: str = "without") -> Row:
    """What something costs: the comparison's peer is with it, its ours without."""
    return Row(what, in_time(found.peer), f"{in_time(found.ours)} {without}", f"{found.ratio:.3f}")


def in_time(seconds: float) -> str:
    """Seconds in the unit that shows them, such as 3.2 ms."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            value = seconds * factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    raise AssertionError("unreachable")


def machine() -> str:
    """Date, processor, memory and versions in one paragraph."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    model = next((line.partition(":")[2].strip() for line in names if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else 0.0
    versions = ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name)))
    return (
        f"{datetime.now(timezone.utc):%d %B %Y}, {model or platform.processor()}, {os.cpu_count()} cores, "
        f"{memory:.0f} GiB, {platform.system()}; Python {platform.python_version()}, {versions}."
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def as_text(row: Row) -> str:
    """A line for a terminal."""
    return f"{row.what:62} {row.ours:>20} {row.ratio:>8}   {row.peer}".rstrip()


def as_markdown(parts: Iterable[tuple[str, Sequence[Row]]], about: str) -> str:
    """A table for each part, after a paragraph about the machine."""
    blocks = [about]
    for title, rows in parts:
        lines = [" | ".join(("", *cells, "")).strip() for cells in (HEADINGS, *map(astuple, rows))]
        blocks += [f"## {title}", "\n".join([lines[0], "|---|---|---|---|", *lines[1:]])]
    return "\n\n".join(blocks) + "\n"
