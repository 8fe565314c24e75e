"""Figures for papers from metrics.json: calibration, reliability of variances and Q-Q, of one or several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.data.files import read_json
from halopose.errors import HaloposeError
from halopose.evaluation.scores import Scores
from halopose.install_advice import install_command
from halopose.types import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_SUFFIXES = (".pdf", ".svg", ".png", ".eps")
Distribution = Literal["uncalibrated", "gaussian", "student-t"]
# Distinguishable with colour vision deficiency.
_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#000000",
)
_DASHES = ("-", "--", "-.", ":")
_TITLES = {"uncalibrated": "as given"}


@dataclass(frozen=True)
class _Line:
    """One curve of each panel."""

    label: str
    scores: Scores
    distribution: str
    style: Mapping[str, Any]


def read_scores(path: Path | str) -> Scores:
    """Read metrics.json, or the metrics.json of a report folder.

    Raises:
        HaloposeError: The file is missing or has other content.
    """
    path = Path(path)
    path = path / "metrics.json" if path.is_dir() else path
    return Scores.from_json(read_json(path))


def draw_figure(
    runs: Mapping[str, Scores],
    path: Path | str,
    *,
    distribution: Distribution = "student-t",
    keypoint: str | None = None,
    width: float = 7.0,
) -> None:
    """Write a figure of three panels: coverage, variances and quantiles.

    One run is drawn with all three distributions, several runs with one.

    Args:
        runs: Scores by the name of the run in the legend.
        path: File to write; the suffix chooses the format: .pdf, .svg, .png or .eps.
        distribution: Distribution that is drawn if there are several runs.
        keypoint: Name of the keypoint of the Q-Q panel; default: all keypoints. A Student-t has its own quantiles for
            each keypoint, so its squared distances over all keypoints are first transformed to those of a Gaussian of
            equal probability.
        width: Width in inches, 7 for both columns of a paper.

    Raises:
        HaloposeError: The suffix or the keypoint is unknown, or matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix.lower() not in FIGURE_SUFFIXES:
        raise HaloposeError(f"cannot draw {path.name}: the suffix must be one of {', '.join(FIGURE_SUFFIXES)}")
    for name, scores in runs.items():
        if keypoint is not None and keypoint not in scores.keypoint_names:
            raise HaloposeError(f"{name} has no keypoint {keypoint!r}: it has {', '.join(scores.keypoint_names)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise HaloposeError(f"figures need matplotlib: {install_command('plot')}") from None
    lines = _lines(runs, distribution.replace("-", "_"))
    fonts: Any = {"font.size": 8, "pdf.fonttype": 42, "svg.fonttype": "none"}
    fonts |= {"axes.titlesize": 9, "axes.linewidth": 0.6, "lines.linewidth": 1.2}
    with rc_context(fonts):
        figure = Figure(figsize=(width, 0.40 * width), layout="constrained")
        panels = figure.subplots(1, 3)
        _coverage(panels[0], lines)
        _variances(panels[1], lines)
        _quantiles(panels[2], lines, keypoint)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=300)
        except OSError as error:
            raise HaloposeError(f"cannot write {path}: {error.strerror or error}") from None


def _lines(runs: Mapping[str, Scores], distribution: str) -> list[_Line]:
    """The curves: all distributions of one run, or one of several runs."""
    if len(runs) == 1:
        [scores] = runs.values()
        pairs = [(_TITLES.get(name, title), scores, name) for name, title in DISTRIBUTIONS.items()]
    else:
        pairs = [(label, scores, distribution) for label, scores in runs.items()]
    return [
        _Line(
            f"{label} (ACE {scores.distribution(name).ace:.4f})",
            scores,
            name,
            {"color": _COLOURS[number % len(_COLOURS)], "linestyle": _DASHES[number % len(_DASHES)]},
        )
        for number, (label, scores, name) in enumerate(pairs)
    ]


def _coverage(axes: Axes, lines: Sequence[_Line]) -> None:
    """Empirical minus nominal coverage of the ellipses."""
    levels = np.arange(1, 100)
    axes.axhline(0.0, color="0.6", linewidth=0.6)
    for line in lines:
        curve = _values(line.scores.distribution(line.distribution).curves.coverage["joint"])
        if len(curve) == len(levels):
            axes.plot(levels, 100 * curve - levels, label=line.label, **line.style)
    axes.set(xlabel="nominal probability, %", ylabel="coverage - nominal, %", xlim=(0, 100))
    axes.set_title("Coverage of ellipses")


def _variances(axes: Axes, lines: Sequence[_Line]) -> None:
    """Empirical against predicted standard deviations in bins of equal count."""
    ends: list[float] = []
    for line in lines:
        points = line.scores.distribution(line.distribution).curves.variance["joint"]
        predicted, empirical = (np.sqrt(_values(part)) for part in (points.expected, points.empirical))
        shown = (predicted > 0) & (empirical > 0)
        axes.plot(predicted[shown], empirical[shown], marker="o", markersize=2.5, **line.style)
        ends += [*predicted[shown], *empirical[shown]]
    if ends:
        low, high = min(ends) / 1.15, max(ends) * 1.15
        axes.plot([low, high], [low, high], color="0.6", linewidth=0.6, zorder=0)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="predicted deviation, px", ylabel="empirical deviation, px", title="Reliability of variances")


def _quantiles(axes: Axes, lines: Sequence[_Line], keypoint: str | None) -> None:
    """Empirical against theoretical quantiles of the Mahalanobis distance."""
    ends = [1.0]
    for line in lines:
        curves = line.scores.distribution(line.distribution).curves
        found = curves.qq if keypoint is None else curves.qq_keypoints.get(keypoint)
        if found is None:
            theoretical, empirical = _transformed(_values(curves.coverage["joint"]))
        else:
            theoretical, empirical = _values(found["joint"].expected), _values(found["joint"].empirical)
        axes.plot(np.sqrt(theoretical), np.sqrt(empirical), **line.style)
        ends += np.sqrt(theoretical[np.isfinite(theoretical)]).tolist()
    high = 1.25 * max(ends)
    axes.plot([0, high], [0, high], color="0.6", linewidth=0.6, zorder=0)
    title = "Q-Q" if keypoint is None else f"Q-Q, {keypoint.replace('_', ' ')}"
    axes.set(xlabel="theoretical distance", ylabel="empirical distance", xlim=(0, high), ylim=(0, high), title=title)


def _transformed(coverage: Array) -> tuple[Array, Array]:
    """Q-Q points of squared distances that are transformed to those of a Gaussian, from coverage at 1 to 99 %."""
    nominal = np.arange(1, len(coverage) + 1) / 100
    with np.errstate(divide="ignore"):
        return -2 * np.log1p(-coverage), -2 * np.log1p(-nominal)


def _values(values: Any) -> Array:
    """Floats; None becomes NaN."""
    return np.array(values, dtype=float)
