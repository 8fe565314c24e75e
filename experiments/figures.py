"""Figures for the documentation, drawn with matplotlib from the dictionaries that ``evaluate`` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

COLOURS = {"uncalibrated": "#9aa0a6", "gaussian": "#1f77b4", "student_t": "#d6604d"}
TITLES = {"uncalibrated": "as given", "gaussian": "Gaussian", "student_t": "Student-t"}
STYLE = {
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


def calibration_figure(metrics: dict[str, Any], others: dict[str, dict[str, Any]], folder: Path) -> None:
    """calibration.png: coverage, variance, Q-Q, scale, pruning, rivals; keypoints.png: every keypoint."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(2, 3, figsize=(11, 6.8))
        _coverage(axes[0, 0], metrics)
        _variance(axes[0, 1], metrics)
        _qq(axes[0, 2], metrics)
        _scales(axes[1, 0], metrics)
        _pruning(axes[1, 1], metrics)
        _rivals(axes[1, 2], metrics, others)
        figure.savefig(folder / "calibration.png")
        plt.close(figure)
        figure, axes = plt.subplots(2, 1, figsize=(11, 5), sharex=True)
        _keypoints(axes[0], metrics, "ace", "ACE")
        _keypoints(axes[1], metrics, "ence", "ENCE")
        figure.savefig(folder / "keypoints.png")
        plt.close(figure)


def _coverage(axes: Any, metrics: dict[str, Any]) -> None:
    levels = np.arange(1, 100) / 100
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    for name, colour in COLOURS.items():
        label = f"{TITLES[name]}, ACE {metrics[name]['ace']:.3f}"
        axes.plot(levels, metrics["curves"][name]["coverage"]["joint"], color=colour, label=label)
    axes.set(title="Coverage", xlabel="probability of the ellipse", ylabel="share of keypoints inside")
    axes.legend()


def _variance(axes: Any, metrics: dict[str, Any]) -> None:
    for name, colour in COLOURS.items():
        curve = metrics["curves"][name]["variance"]["joint"]
        x, y = np.sqrt(curve["predicted"]), np.sqrt(curve["empirical"])
        axes.plot(
            x, y, "o-", markersize=3, color=colour, label=f"{TITLES[name]}, ENCE {metrics[name]['ence']:.3f}"
        )
    limits = [min(axes.get_xlim()[0], 1), axes.get_xlim()[1]]
    axes.plot(limits, limits, color="black", linewidth=0.8)
    axes.set(title="Variance", xlabel="predicted, pixels", ylabel="found, pixels", xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20, 50, 100]))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.legend()


def _qq(axes: Any, metrics: dict[str, Any]) -> None:
    """Gaussian over all keypoints; Student-t laws differ by keypoint, so each has a line of its own."""
    for curve in metrics["curves"]["student_t"]["qq_keypoints"].values():
        points = curve["joint"]
        axes.plot(
            *(np.sqrt(points[key]) for key in ("theoretical", "empirical")), color=COLOURS["student_t"], alpha=0.25
        )
    points = metrics["curves"]["gaussian"]["qq"]["joint"]
    axes.plot(
        *(np.sqrt(points[key]) for key in ("theoretical", "empirical")),
        color=COLOURS["gaussian"],
        label="Gaussian",
    )
    axes.plot([], [], color=COLOURS["student_t"], label="Student-t, by keypoint")
    axes.plot([0, 8], [0, 8], color="black", linewidth=0.8)
    axes.set(
        title="Q-Q of the Mahalanobis distance", xlabel="theoretical", ylabel="found", xlim=(0, 8), ylim=(0, 14)
    )
    axes.legend()


def _scales(axes: Any, metrics: dict[str, Any]) -> None:
    names = [name for name, block in metrics["gaussian"]["per_scale"].items() if block["count"] >= 200]
    for offset, regime in ((-0.2, "gaussian"), (0.2, "student_t")):
        values = [metrics[regime]["per_scale"][name]["ace"] for name in names]
        axes.bar(np.arange(len(names)) + offset, values, 0.38, color=COLOURS[regime], label=TITLES[regime])
    axes.set(title="ACE by object scale", xticks=range(len(names)), xticklabels=names)
    axes.legend()


def _pruning(axes: Any, metrics: dict[str, Any]) -> None:
    curve = metrics["pruning_curve"]
    enough = np.asarray(curve["kept"]) >= 0.02  # a mean over fewer keypoints is noise
    axes.plot(np.asarray(curve["kept"])[enough], np.asarray(curve["nll"])[enough], color=COLOURS["gaussian"])
    axes.axvline(metrics["pruned"]["kept_fraction"], color="black", linewidth=0.8, linestyle=":")
    axes.set(title="Pruning (dotted: shipped threshold)", xlabel="share of keypoints kept", ylabel="NLL, Gaussian")


def _rivals(axes: Any, metrics: dict[str, Any], others: dict[str, dict[str, Any]]) -> None:
    rows = {"random": metrics["akp_random"], "visibility score": metrics["akp_visibility"]}
    rows |= {name: other["gaussian"]["akp"] for name, other in others.items()}
    rows["shipped heads"] = metrics["gaussian"]["akp"]
    colours = ["#b0bec5"] * (len(rows) - 1) + [COLOURS["gaussian"]]
    axes.barh([name.replace(", ", ",\n") for name in rows], list(rows.values()), color=colours)
    axes.set(title="Ranking (AKP)", xlim=(0.65, 0.95))
    axes.invert_yaxis()


def _keypoints(axes: Any, metrics: dict[str, Any], key: str, title: str) -> None:
    names = metrics["keypoint_names"]
    for offset, regime in ((-0.2, "gaussian"), (0.2, "student_t")):
        values = [metrics[regime]["per_keypoint"][name][key] for name in names]
        axes.bar(np.arange(len(names)) + offset, values, 0.38, color=COLOURS[regime], label=TITLES[regime])
    axes.set(ylabel=title, xticks=range(len(names)))
    axes.set_xticklabels([name.replace("_", " ") for name in names], rotation=40, ha="right")
    axes.legend()
