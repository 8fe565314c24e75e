"""What the commands share: output, progress with an estimate, and the user's mistakes as one line."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from halopose.errors import HaloposeError


def say(text: str) -> None:
    """A line for the user."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars with elapsed and remaining time on a terminal, a line per step elsewhere.

    Gives a callback (what, done, total); a new name begins a new bar.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        Remaining(),
    )
    interactive = sys.stderr.isatty()
    tasks: dict[str, int] = {}
    with Progress(*columns, disable=not interactive) as bars:

        def step(what: str, done: int, total: int) -> None:
            name = what.split(" (")[0]
            if name not in tasks:
                tasks[name] = bars.add_task(what, total=total)
                if not interactive:
                    say(f"{name} ...")
            bars.update(tasks[name], completed=done, total=total, description=what)  # type: ignore[arg-type]

        yield step


def finite(value: float) -> float:
    """For an option: neither NaN nor infinite, which a range that begins at 0 may let pass."""
    _demand(math.isfinite(value), "give a finite number", value)
    return value


def positive(value: float | None) -> float | None:
    """For an option: finite and above 0, or left out."""
    if value is not None:
        _demand(0 < value < math.inf, "give a number above 0", value)
    return value


def share(value: float) -> float:
    """For an option: a part of a whole that is not nothing."""
    _demand(0 < value <= 1, "give a number above 0 and up to 1", value)
    return value


def between(value: float) -> float:
    """For an option: neither nothing nor everything."""
    _demand(0 < value < 1, "give a number between 0 and 1, neither of them", value)
    return value


def several(value: int) -> int:
    """For an option: resamplings that a spread can be taken of, or none."""
    _demand(value != 1, "give 0 for none, or 2 and more", value)
    return value


def _demand(good: bool, advice: str, value: float) -> None:
    if not good:
        raise typer.BadParameter(f"{advice}, got {value}")


def numbers(text: str, option: str) -> list[float]:
    """Positive numbers separated by commas, each larger than the one before."""
    values = floats(text, option)
    if values[0] <= 0 or any(low >= high for low, high in pairwise(values)):
        raise HaloposeError(f"--{option} takes positive numbers in rising order, got {text!r}")
    return values


def exponents(text: str, option: str) -> list[float]:
    """Numbers separated by commas, none below 0."""
    values = floats(text, option)
    if min(values) < 0:
        raise HaloposeError(f"--{option} takes numbers from 0 on, got {text!r}")
    return values


def floats(text: str, option: str) -> list[float]:
    """Finite numbers separated by commas."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not (values and all(map(math.isfinite, values))):
        raise HaloposeError(f"--{option} takes numbers separated by commas, got {text!r}")
    return values


def write_scores(metrics: dict[str, Any], output: Path, title: str) -> None:
    """metrics.json, metrics.csv and report.html in a folder, and the table for the terminal."""
    from halopose.data.coco import write_json, write_text
    from halopose.reports import scores as report
    from halopose.reports import text as tables

    write_json(output / "metrics.json", metrics)
    write_text(output / "metrics.csv", tables.to_csv(metrics))
    write_text(output / "report.html", report.render(metrics, title))
    say(tables.to_text(metrics))
    say(f"-> {output / 'metrics.json'}, {output / 'metrics.csv'}, {output / 'report.html'}")
