"""A run of the benchmark as a JSON file: machine, versions, commit and every row."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.rows import Row

FORMAT = 1
PACKAGES = ("torch", "numpy", "scipy", "opencv-python-headless", "ultralytics", "pycocotools", "faster-coco-eval")
ROOT = Path(__file__).parents[1]


class RunError(ValueError):
    """A file that is not a run of the benchmark."""


@dataclass(frozen=True)
class Machine:
    """The computer of a run."""

    processor: str
    cores: int
    memory_gib: float
    system: str

    @classmethod
    def here(cls) -> Machine:
        """The computer that this process runs on."""
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.is_file() else []
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else 0.0
        return cls(model or platform.processor(), os.cpu_count() or 1, round(memory, 1), platform.system())


@dataclass(frozen=True)
class Run:
    """Everything that one run of the benchmark measured.

    Attributes:
        date: time of the start, ISO 8601 in UTC.
        commit: hash of the source, with ``+`` if files differed from it; empty if unknown.
        machine: where it ran.
        versions: version of Python and of each package that rows depend on.
        rows: every row in the order it was measured.
        minutes: how long the run took.
        subset: empty for a whole run, else ``short`` or ``selected``.
    """

    date: str
    commit: str
    machine: Machine
    versions: dict[str, str]
    rows: tuple[Row, ...] = field(repr=False)
    minutes: float = 0.0
    subset: str = ""

    def row(self, name: str) -> Row | None:
        """The row of that name, or None."""
        return next((row for row in self.rows if row.name == name), None)

    def about(self) -> str:
        """Date, processor, memory and versions in one paragraph."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        machine = self.machine
        return (
            f"{datetime.fromisoformat(self.date):%d %B %Y}, {machine.processor}, {machine.cores} cores, "
            f"{machine.memory_gib:.0f} GiB, {machine.system}; {versions}."
        )

    def write(self, path: Path) -> None:
        """Write the run as JSON, without the fields of rows that are empty."""
        empty = {entry.name: entry.default for entry in fields(Row)}
        rows = [{key: _short(value) for key, value in asdict(row).items() if value != empty[key]} for row in self.rows]
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **asdict(self), "rows": rows}, indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a file that `write` wrote.

        Raises:
            RunError: the file cannot be read or is no run of this format.
        """
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise RunError(f"{path} is a run of another format: measure it anew")
            rows = tuple(Row(**row) for row in found.pop("rows"))
            return cls(**{**found, "machine": Machine(**found["machine"]), "rows": rows})
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from error
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise RunError(f"{path} is not a run of the benchmark: write one with --json") from error


def _short(value: Any) -> Any:
    """Six digits of a number."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def begin(subset: str = "") -> Run:
    """A run without rows, of this machine, these versions and this commit."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Run(now, _commit(), Machine.here(), _versions(), (), subset=subset)


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
