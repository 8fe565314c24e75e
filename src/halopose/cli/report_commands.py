"""Commands about this machine and about finished reports: doctor and plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from halopose.cli.terminal import say
from halopose.errors import HaloposeError


def doctor() -> None:
    """Check the installation: what is installed, what is missing, and how to fix it.

    Example: halopose doctor
    """
    from halopose.reports.environment import check_environment, to_text

    found = check_environment()
    say(to_text(found), always=True)
    if found.problems:
        raise typer.Exit(1)


def plot(
    runs: Annotated[list[str], typer.Argument(help="metrics.json or report folder; NAME=PATH names it in the legend.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Figure: .pdf, .svg, .png or .eps.")],
    distribution: Annotated[
        Literal["uncalibrated", "gaussian", "student-t"], typer.Option(help="Distribution that runs are compared in.")
    ] = "student-t",
    keypoint: Annotated[str | None, typer.Option(help="Keypoint of the Q-Q panel; default: all.")] = None,
    width: Annotated[float, typer.Option(min=2.0, max=40.0, help="Width in inches.")] = 7.0,
) -> None:
    """Draw calibration, reliability and Q-Q figures for a paper, of one or several runs.

    Example: halopose plot before=report/metrics.json after=other/metrics.json -o figure.pdf
    """
    from halopose.reports.figures import draw_figure, read_scores

    found = {}
    for text in runs:
        name, path = _named_run(text)
        if name in found:
            raise HaloposeError(f"two runs are named {name!r}: name them, as in before={path}")
        found[name] = read_scores(path)
    draw_figure(found, output, distribution=distribution, keypoint=keypoint, width=width)
    say(f"-> {output}")


def _named_run(text: str) -> tuple[str, Path]:
    """Split NAME=PATH; a path alone is named after its folder."""
    name, equals, rest = text.partition("=")
    if equals and name and not Path(text).exists():
        return name, Path(rest)
    path = Path(text)
    return (path.stem if path.suffix != ".json" or path.stem != "metrics" else path.resolve().parent.name), path
