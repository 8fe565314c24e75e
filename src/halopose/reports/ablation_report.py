"""Reports of an ablation study: markdown, csv and a self-contained html page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halopose.evaluation.bootstrap import Difference
from halopose.evaluation.scores import AXES
from halopose.reports.html import digits_of, number, page, signed
from halopose.reports.plots import Axis, Curve, Plot
from halopose.studies.ablation import DEFAULT, AblationResult
from halopose.studies.findings import ENOUGH_KEYPOINTS, MATTERS, JudgedFinding, judge

COLUMNS = {
    "gaussian.ace": ("ACE", "Gaussian"),
    "gaussian.ence": ("ENCE", "Gaussian"),
    "gaussian.nll": ("NLL", "Gaussian"),
    "student_t.ace": ("ACE", "Student-t"),
    "student_t.ence": ("ENCE", "Student-t"),
    "student_t.nll": ("NLL", "Student-t"),
    "gaussian.akp": ("AKP", "Ranking"),
    "akp_skill": ("Skill", "Ranking"),
    "kept_fraction": ("Kept", "After pruning"),
    "pruned.gaussian.nll": ("NLL, Gaussian", "After pruning"),
    "pruned.student_t.nll": ("NLL, Student-t", "After pruning"),
}
REGIMES = {"gaussian": "Gaussian", "student_t": "Student-t"}
_KINDS = ("gaussian", "uncalibrated")  # colours of the default and of the row compared with it
_CSV_FIELDS = ("estimate", "low", "high", "difference", "difference_low", "difference_high")


@dataclass(frozen=True)
class AblationCell:
    """A metric of a row as text.

    Attributes:
        value: The metric.
        margin: Half the width of its 95 % interval.
        difference: Paired difference to the default; empty for the default.
        significant: Whether the interval of the difference excludes zero.
    """

    value: str
    margin: str
    difference: str
    significant: bool


def table(results: Sequence[AblationResult]) -> list[tuple[str, list[AblationCell]]]:
    """Title and cells of each row."""
    default = _named(results, DEFAULT)
    return [
        (result.title, [_cell(result, default, metric, digits_of(metric)) for metric in COLUMNS]) for result in results
    ]


def _cell(result: AblationResult, default: AblationResult | None, metric: str, digits: int) -> AblationCell:
    value, margin = number(result.estimate[metric], digits), number(result.margin(metric), digits)
    if default is None or result is default:
        return AblationCell(value, margin, "", False)
    difference = result.minus(default, metric)
    return AblationCell(value, margin, signed(difference, digits), difference.significant)


def _named(results: Sequence[AblationResult], name: str) -> AblationResult | None:
    return next((result for result in results if result.name == name), None)


def evidence(judged: JudgedFinding) -> list[str]:
    """Evidence for a finding: each part with its difference, interval and verdict."""
    return [f"{part.text}: {signed(part.difference)} ({part.verdict}, p {number(part.p, 3)})" for part in judged.parts]


@dataclass(frozen=True)
class PaperTable:
    """One of the paper's smaller tables, as text."""

    title: str
    head: list[str]
    rows: list[list[str]]


def summaries(results: Sequence[AblationResult]) -> list[PaperTable]:
    """Effect of pruning, of the scalarisation and of the threshold rule (tables 2, 4 and 5 of the paper)."""
    found = {result.name: result for result in results}
    if DEFAULT not in found:
        return []
    sizes = {DEFAULT: "trace", "determinant": "determinant", "eigenvalue": "largest eigenvalue"}
    rules = {DEFAULT: "Youden", "distance": "distance to the corner", "f1": "F1"}
    scalar = [(title, found[name]) for name, title in sizes.items() if name in found]
    rule = [(title, found[name]) for name, title in rules.items() if name in found]
    kept = [f"pruned.{regime}.{name}" for name in ("ace", "ence", "nll") for regime in REGIMES]
    labels = [f"{name}, {title}" for name in ("ACE", "ENCE", "NLL") for title in REGIMES.values()]
    return [
        PaperTable(
            "Pruning (table 2)",
            ["", "ACE", "change", "ENCE", "change", "NLL", "change"],
            [_pruned(found[DEFAULT], regime, title) for regime, title in REGIMES.items()],
        ),
        PaperTable(
            "Scalarisations (table 4)",
            ["Ranked by", *(f"AKP, {title}" for title in REGIMES.values())],
            [[title, *_values(one, [f"{regime}.akp" for regime in REGIMES])] for title, one in scalar],
        ),
        PaperTable(
            "Threshold rules (table 5)",
            ["Threshold by", "Kept", *labels],
            [[title, *_values(one, ["kept_fraction", *kept])] for title, one in rule],
        ),
    ]


def _pruned(result: AblationResult, regime: str, title: str) -> list[str]:
    cells = [title]
    for name in ("ace", "ence", "nll"):
        after, before = f"pruned.{regime}.{name}", f"{regime}.{name}"
        cells += [*_values(result, [after]), signed(result.minus(result, after, before), digits_of(name))]
    return cells


def _values(result: AblationResult, metrics: Sequence[str]) -> list[str]:
    """Metrics as text, each with half the width of its interval."""
    return [
        f"{number(result.estimate[metric], digits)} ± {number(result.margin(metric), digits)}"
        for metric, digits in ((metric, digits_of(metric)) for metric in metrics)
    ]


def notes(results: Sequence[AblationResult]) -> list[str]:
    """Notes on data and intervals."""
    counts, seeds = results[0].counts, results[0].seeds
    trained = f"mean of {seeds} trainings with different seeds" if seeds > 1 else "one training"
    return [
        f"All rows are evaluated on the same {counts['images']} images with {counts['keypoints']} keypoints of "
        f"detections that match an annotated object with OKS >= 0.5. Each value is the {trained}.",
        "± is half the width of a 95 % interval over images (bootstrap)"
        + (" and seeds together" if seeds > 1 else "; it does not cover the variation of training")
        + ". Differences to the default are paired by image and seed. P-values of findings are adjusted for the number "
        "of tests (Holm); intervals are not.",
    ]


def to_markdown(results: Sequence[AblationResult], title: str) -> str:
    """Findings, values and paired differences."""
    rows = table(results)
    head = ["Row", *(f"{group}: {label}" for label, group in COLUMNS.values())]
    values = [[name, *(f"{cell.value} ± {cell.margin}" for cell in cells)] for name, cells in rows]
    differences = [
        [name, *(f"**{cell.difference}**" if cell.significant else cell.difference for cell in cells)]
        for name, cells in rows
        if any(cell.difference for cell in cells)
    ]
    findings = [[one.text, f"**{one.verdict}**", "; ".join(evidence(one))] for one in judge(results)]
    parts = [
        f"# {title}",
        "\n\n".join(notes(results)),
        "## Findings of the paper",
        _markdown_table(["Finding", "Verdict", "Evidence"], findings, "---"),
        "## Rows",
        _markdown_table(head, values),
        "## Differences to the default",
        "Bold: the interval excludes zero.",
        _markdown_table(head, differences),
    ]
    for one in summaries(results):
        parts += [f"## {one.title}", _markdown_table(one.head, one.rows)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(head: list[str], rows: list[list[str]], align: str = "--:") -> str:
    lines = [head, ["---", *[align] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def to_csv(results: Sequence[AblationResult]) -> str:
    """One line per row and metric."""
    default = _named(results, DEFAULT)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["row", "metric", *_CSV_FIELDS])
    for result in results:
        for metric, estimate in result.estimate.items():
            own = Difference(estimate, result.margin(metric))
            line = [result.name, metric, own.value, own.low, own.high]
            if default is not None and result is not default:
                paired = result.minus(default, metric)
                line += [paired.value, paired.low, paired.high]
            writer.writerow(line + [""] * (2 + len(_CSV_FIELDS) - len(line)))
    return stream.getvalue()


def render_ablation(results: Sequence[AblationResult], title: str) -> str:
    """The page (html)."""
    groups = [group for _, group in COLUMNS.values()]
    about, *rest = notes(results)
    return page(
        "ablation.html",
        title=title,
        summary=about,
        notes=rest,
        matters=", ".join(f"{name.upper()} {MATTERS[name]:g}" for name in ("ace", "ence", "nll", "akp")),
        enough=f"{ENOUGH_KEYPOINTS:,}",
        findings=[(one.text, one.verdict, evidence(one)) for one in judge(results)],
        groups=[(group, groups.count(group)) for group in dict.fromkeys(groups)],
        columns=[(label, number > 0 and groups[number] != groups[number - 1]) for number, label in _labels()],
        rows=table(results),
        summaries=summaries(results),
        scales=scale_plot(results),
        variances=variance_plots(results),
    )


def _labels() -> list[tuple[int, str]]:
    return [(number, label) for number, (label, _) in enumerate(COLUMNS.values())]


def scale_plot(results: Sequence[AblationResult]) -> Plot | None:
    """ACE by object scale, with and without scale weights."""
    shown = _pair(results, "no-scale-weights")
    if shown is None:
        return None
    names = shown[0].scales
    places = np.arange(len(names))
    curves = []
    for one, label, kind, aside in zip(shown, ("With scale weights", "Without"), _KINDS, (-0.04, 0.04), strict=True):
        metrics = [f"scale.{number}.ace" for number in range(len(names))]
        value = np.array([one.estimate[metric] for metric in metrics])
        margin = np.array([one.margin(metric) for metric in metrics])
        curves.append(Curve(label, kind, places + aside, value, value - margin, value + margin, marked=True))
    highest = max(np.nanmax([curve.y, curve.high]) for curve in curves)
    y = Axis.linear("ACE", 0, float(highest) if highest > 0 else 1.0)
    return Plot("", Axis.of_bins("side of the object, px", len(names), names), y, curves)


def variance_plots(results: Sequence[AblationResult]) -> list[Plot]:
    """Actual against predicted deviation, jointly and along each axis, of full and isotropic dispersions."""
    shown = _pair(results, "isotropic")
    return [] if shown is None else [_variance_plot(shown, axis) for axis in AXES]


def _variance_plot(shown: tuple[AblationResult, AblationResult], axis: str) -> Plot:
    roots = [(np.sqrt(one.variance[axis]["predicted"]), np.sqrt(one.variance[axis]["empirical"])) for one in shown]
    values = np.concatenate([side for pair in roots for side in pair])
    values = values[np.isfinite(values) & (values > 0)]
    low, high = (float(values.min()) / 1.15, float(values.max()) * 1.15) if len(values) else (0.1, 10.0)
    metric = "gaussian.ence" if axis == "joint" else f"gaussian.ence_{axis}"
    curves = [
        Curve(f"{label}, ENCE {number(one.estimate[metric], 4)}", kind, x, y, marked=True)
        for one, (x, y), label, kind in zip(shown, roots, ("Full", "Isotropic"), _KINDS, strict=True)
    ]
    return Plot(
        "Joint" if axis == "joint" else f"Along {axis}",
        Axis.log("predicted deviation, px", low, high),
        Axis.log("actual deviation, px", low, high),
        [Curve("", "ideal", (low, high), (low, high)), *curves],
    )


def _pair(results: Sequence[AblationResult], name: str) -> tuple[AblationResult, AblationResult] | None:
    default, other = _named(results, DEFAULT), _named(results, name)
    return None if default is None or other is None else (default, other)
