"""What the commands share: output, progress with an estimate, and the user's mistakes as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def numbers(text: str, option: str) -> list[float]:
    """Positive numbers separated by commas, in rising order."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise HaloposeError(f"--{option} takes numbers separated by commas, got {text!r}") from None
    if any(not value > 0 for value in values) or sorted(values) != values:
        raise HaloposeError(f"--{option} takes positive numbers in rising order, got {text!r}")
    return values


def floats(text: str | None, option: str) -> list[float] | None:
    """Numbers separated by commas, or None."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise HaloposeError(f"--{option} takes numbers separated by commas, got {text!r}") from None


def write_scores(metrics: dict[str, Any], output: Path, title: str) -> None:
    """metrics.json, metrics.csv and report.html in a folder, and the table for the terminal."""
    from halopose import report, tables
    from halopose.files import write_json, write_text

    write_json(output / "metrics.json", metrics)
    write_text(output / "metrics.csv", tables.to_csv(metrics))
    write_text(output / "report.html", report.render(metrics, title))
    say(tables.to_text(metrics))
    say(f"-> {output / 'metrics.json'}, {output / 'metrics.csv'}, {output / 'report.html'}")
