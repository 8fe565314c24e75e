"""Charts for the documentation, drawn with matplotlib from the ``Scores`` that ``evaluate`` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from halopose.evaluation.scores import CurvePoints, Scores
from halopose.protocol import Match
from halopose.types import Array

COLOURS = {"uncalibrated": "#9aa0a6", "gaussian": "#1f77b4", "student_t": "#d6604d"}
TITLES = {"uncalibrated": "as given", "gaussian": "Gaussian", "student_t": "Student-t"}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#eceff1",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "savefig.dpi": 110,
    "figure.constrained_layout.use": True,
}


def calibration_figure(scores: Scores, others: dict[str, Scores], folder: Path) -> None:
    """calibration.png: coverage, variance, Q-Q, scale, pruning, rivals; keypoints.png: every keypoint."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(2, 3, figsize=(11, 6.8))
        _coverage(axes[0, 0], scores)
        _variance(axes[0, 1], scores)
        _qq(axes[0, 2], scores)
        _scales(axes[1, 0], scores)
        _pruning(axes[1, 1], scores)
        _rivals(axes[1, 2], scores, others)
        figure.savefig(folder / "calibration.png")
        plt.close(figure)
        figure, axes = plt.subplots(2, 1, figsize=(11, 5), sharex=True)
        _keypoints(axes[0], scores, "ace", "ACE")
        _keypoints(axes[1], scores, "ence", "ENCE")
        figure.savefig(folder / "keypoints.png")
        plt.close(figure)


def learning_figure(counts: Array, skill: Array, line: tuple[float, float, float], whole: int, path: Path) -> None:
    """Skill (C, 1 + draws) over numbers of photographs (C,), extrapolated linearly in log2 to a given number.

    line: gain per doubling, skill at ``whole`` and its margin.
    """
    slope, level, margin = line
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 3.4))
        spread = 1.96 * skill[:, 1:].std(axis=1, ddof=1)
        axes.errorbar(counts, skill[:, 0], spread, fmt="o", color=COLOURS["gaussian"], capsize=3, label="measured")
        reach = np.geomspace(counts[len(counts) // 2], whole, 50)
        axes.plot(reach, level + slope * np.log2(reach / whole), "--", color="#78909c", label="drawn on")
        axes.errorbar([whole], [level], [margin], fmt="o", mfc="white", color="#78909c", capsize=3)
        axes.annotate(f"{level:.2f}", (whole, level), (-30, 8), textcoords="offset points", color="#546e7a")
        axes.set(xscale="log", xlabel="photographs, one recipe of five epochs", ylabel="skill of the ranking")
        axes.xaxis.set_major_locator(FixedLocator([*counts.tolist(), whole]))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(axis="x", labelsize=8)
        axes.legend(loc="lower right")
        figure.savefig(path)
        plt.close(figure)


def transfer_figure(rows: list[tuple[int, Match, Array]], floors: dict[Match, float], path: Path) -> None:
    """Coverage of the 95 % ellipse and ACE over the number of calibration images, matched by OKS and by box.

    Args:
        rows: Number of images (0: the shipped calibration), kind of match, and scores (1 + draws, S) whose first two
            columns are the coverage in per cent and the ACE.
        floors: Noise floor of the ACE, upper end, by kind of match.
        path: File of the picture.
    """
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.6))
        for kind, colour in (("oks", COLOURS["gaussian"]), ("box", COLOURS["student_t"])):
            own = [(count, values) for count, matched_by, values in rows if matched_by == kind]
            middle = np.array([values[0, :2] for _, values in own])
            spread = 1.96 * np.array([values[1:, :2].std(0, ddof=1) for _, values in own])
            places = np.arange(len(own)) + (0.06 if kind == "box" else -0.06)
            for column, axis in enumerate(axes):
                label = f"matched by {kind if kind == 'box' else 'OKS'}"
                axis.errorbar(
                    places, middle[:, column], spread[:, column], fmt="o-", color=colour, capsize=3, label=label
                )
        axes[0].axhline(95, color="black", linewidth=0.8)
        axes[1].axhspan(0, max(floors.values()), color="#eceff1", label="noise floor")
        names = ["shipped" if not count else str(count) for count, kind, _ in rows if kind == "oks"]
        for axis, title in zip(axes, ("95 % ellipse holds, per cent", "ACE, Student-t"), strict=True):
            axis.set(title=title, xlabel="calibration images", xticks=range(len(names)), xticklabels=names)
        axes[1].set_ylim(0)
        axes[1].legend()
        figure.savefig(path)
        plt.close(figure)


def _coverage(axes: Axes, scores: Scores) -> None:
    levels = np.arange(1, 100) / 100
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    for name, colour in COLOURS.items():
        label = f"{TITLES[name]}, ACE {scores.distribution(name).ace:.3f}"
        axes.plot(levels, scores.distribution(name).curves.coverage["joint"], color=colour, label=label)
    axes.set(title="Coverage", xlabel="probability of the ellipse", ylabel="share of keypoints inside")
    axes.legend()


def _variance(axes: Axes, scores: Scores) -> None:
    for name, colour in COLOURS.items():
        distribution = scores.distribution(name)
        label = f"{TITLES[name]}, ENCE {distribution.ence:.3f}"
        axes.plot(*_roots(distribution.curves.variance["joint"]), "o-", markersize=3, color=colour, label=label)
    limits = [min(axes.get_xlim()[0], 1), axes.get_xlim()[1]]
    axes.plot(limits, limits, color="black", linewidth=0.8)
    axes.set(title="Variance", xlabel="predicted, pixels", ylabel="found, pixels", xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20, 50, 100]))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.legend()


def _qq(axes: Axes, scores: Scores) -> None:
    """One line for the Gaussian over all keypoints; one line per keypoint for Student-t distributions."""
    for curve in scores.student_t.curves.qq_keypoints.values():
        axes.plot(*_roots(curve["joint"]), color=COLOURS["student_t"], alpha=0.25)
    if scores.gaussian.curves.qq is not None:
        axes.plot(*_roots(scores.gaussian.curves.qq["joint"]), color=COLOURS["gaussian"], label="Gaussian")
    axes.plot([], [], color=COLOURS["student_t"], label="Student-t, by keypoint")
    axes.plot([0, 8], [0, 8], color="black", linewidth=0.8)
    axes.set(title="Q-Q of the Mahalanobis distance", xlabel="theoretical", ylabel="found", xlim=(0, 8), ylim=(0, 14))
    axes.legend()


def _roots(points: CurvePoints) -> tuple[Array, Array]:
    """Square roots of both quantities of a curve, (P,) each."""
    return np.sqrt(points.expected), np.sqrt(points.empirical)


def _scales(axes: Axes, scores: Scores) -> None:
    counts = {name: summary.count for name, summary in scores.gaussian.per_scale.items() if summary.count}
    for offset, distribution in ((-0.2, "gaussian"), (0.2, "student_t")):
        values = [scores.distribution(distribution).per_scale[name].ace for name in counts]
        axes.bar(np.arange(len(values)) + offset, values, 0.38, color=COLOURS[distribution], label=TITLES[distribution])
    labels = [f"{name}\n{count} keypoints" for name, count in counts.items()]
    axes.set(title="ACE by object scale", xticks=range(len(labels)), xticklabels=labels)
    axes.legend()


def _pruning(axes: Axes, scores: Scores) -> None:
    curve = scores.pruning_curve
    enough = curve.kept >= 0.02  # a mean over fewer keypoints is too noisy
    axes.plot(curve.kept[enough], curve.nll[enough], color=COLOURS["gaussian"])
    axes.axvline(scores.pruned.kept_fraction, color="black", linewidth=0.8, linestyle=":")
    axes.set(title="Pruning (dotted: shipped threshold)", xlabel="share of keypoints kept", ylabel="NLL, Gaussian")


def _rivals(axes: Axes, scores: Scores, others: dict[str, Scores]) -> None:
    rows = {"random": scores.akp_random, "visibility score": scores.akp_visibility}
    rows |= {name: other.gaussian.akp for name, other in others.items()}
    rows["shipped heads"] = scores.gaussian.akp
    colours = ["#b0bec5"] * (len(rows) - 1) + [COLOURS["gaussian"]]
    axes.barh([name.replace(", ", ",\n") for name in rows], list(rows.values()), color=colours)
    axes.set(title="Ranking (AKP)", xlim=(0.65, 0.95))
    axes.invert_yaxis()


def _keypoints(axes: Axes, scores: Scores, metric: str, title: str) -> None:
    names = scores.keypoint_names
    for offset, distribution in ((-0.2, "gaussian"), (0.2, "student_t")):
        values = [scores.distribution(distribution).per_keypoint[name].metric(metric) for name in names]
        axes.bar(np.arange(len(names)) + offset, values, 0.38, color=COLOURS[distribution], label=TITLES[distribution])
    axes.set(ylabel=title, xticks=range(len(names)))
    axes.set_xticklabels([name.replace("_", " ") for name in names], rotation=40, ha="right")
    axes.legend()
