"""Output of the commands: lines, progress bars, and scores as files and a table."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halopose.errors import printable

if TYPE_CHECKING:
    from halopose.evaluation.scores import Scores
    from halopose.fitting.feature_cache import MatchStore
    from halopose.types import Progress


_quiet = False
_python_shows = warnings.showwarning
_PLAIN = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{NO-BREAK SPACE}": " "})


def say(text: str, always: bool = False) -> None:
    """Print a line with characters that the terminal supports; in quiet mode only if ``always``."""
    if not _quiet or always:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(printable(text).translate(_PLAIN).encode(encoding, errors="replace").decode(encoding) + "\n")
        sys.stdout.flush()


class _Lines(logging.Handler):
    """Prints log records of the library as lines, warnings with a prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        warning = record.levelno >= logging.WARNING
        say(f"{'warning: ' if warning else ''}{record.getMessage()}", always=warning)


def listen(quiet: bool = False, verbose: bool = False) -> None:
    """Print log records of the library: only warnings if quiet, all if verbose."""
    global _quiet
    _quiet = quiet
    log = logging.getLogger("halopose")
    log.handlers = [_Lines()]
    log.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    log.propagate = False
    warnings.showwarning = _show


def _show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Print a warning of halopose as one line without its source; other warnings as Python does."""
    if category.__module__.startswith("halopose."):
        logging.getLogger("halopose").warning("%s", message)
    else:
        _python_shows(message, category, *place, **more)


@contextmanager
def progress() -> Iterator[Progress]:
    """Show progress bars with elapsed and remaining time on a terminal, and a line per step elsewhere.

    Yields a callback (what, done, total); a new name starts a new bar.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
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
    with Bars(*columns, disable=not interactive) as bars:

        def step(what: str, done: int, total: int) -> None:
            what = printable(what)
            name = what.split(" (")[0]
            if name not in tasks:
                tasks[name] = bars.add_task(what, total=total)
                if not interactive:
                    say(f"{name} ...")
            bars.update(tasks[name], completed=done, total=total, description=what)  # type: ignore[arg-type]

        yield step


def say_skipped(store: MatchStore) -> None:
    """Print the files that could not be read."""
    for line in store.skipped():
        say(f"skipped: {line}")


def write_scores(scores: Scores, output: Path, title: str, following: str | None = None) -> None:
    """Write metrics.json, metrics.csv and report.html; print the verdict, the next command and the table.

    Args:
        scores: The scores.
        output: Folder to write to.
        title: Title of the report.
        following: The command that usually comes next.
    """
    from halopose.data.files import write_json, write_text
    from halopose.reports import score_report as page
    from halopose.reports import score_text
    from halopose.reports.verdict import verdict

    write_json(output / "metrics.json", scores.to_json())
    write_text(output / "metrics.csv", score_text.to_csv(scores))
    write_text(output / "report.html", page.render_report(scores, title))
    for sentence in verdict(scores):
        say(sentence)
    if following is not None:
        say(f"next: {following}")
    say("")
    say(score_text.to_text(scores))
    say(f"-> {output / 'metrics.json'}, {output / 'metrics.csv'}, {output / 'report.html'}")
