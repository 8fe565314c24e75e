"""Ablation results for readers: a markdown text, a flat csv, and a page that needs nothing but a browser.

In: the results of ``ablation.ablate``. Out: strings.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jinja2
import numpy as np

from halopose.ablation import DEFAULT, OTHER_SEED, Result
from halopose.findings import Judged, judge
from halopose.poses import Array
from halopose.resampling import Difference
from halopose.statistics import AXES

COLUMNS = {
    "gaussian.ace": ("ACE", "Gaussian", 4),
    "gaussian.ence": ("ENCE", "Gaussian", 4),
    "gaussian.nll": ("NLL", "Gaussian", 3),
    "student_t.ace": ("ACE", "Student-t", 4),
    "student_t.ence": ("ENCE", "Student-t", 4),
    "student_t.nll": ("NLL", "Student-t", 3),
    "gaussian.akp": ("AKP", "Ranking", 4),
    "akp_skill": ("Skill", "Ranking", 3),
    "kept_fraction": ("Kept", "After pruning", 3),
    "pruned.gaussian.nll": ("NLL, Gaussian", "After pruning", 3),
    "pruned.student_t.nll": ("NLL, Student-t", "After pruning", 3),
}
REGIMES = {"gaussian": "Gaussian", "student_t": "Student-t"}
_CSV_FIELDS = ("estimate", "low", "high", "difference", "difference_low", "difference_high")


@dataclass(frozen=True)
class Cell:
    """A metric of a row as text, and its difference to the default; ``decided`` if that cannot be chance."""

    value: str
    margin: str
    difference: str
    decided: bool


def table(results: Sequence[Result]) -> list[tuple[str, list[Cell]]]:
    """Title and cells of each row."""
    default = _named(results, DEFAULT)
    return [
        (result.title, [_cell(result, default, metric, digits) for metric, (_, _, digits) in COLUMNS.items()])
        for result in results
    ]


def _cell(result: Result, default: Result | None, metric: str, digits: int) -> Cell:
    value, margin = _number(result.estimate[metric], digits), _number(result.margin(metric), digits)
    if default is None or result is default:
        return Cell(value, margin, "", False)
    difference = result.minus(default, metric)
    return Cell(value, margin, _difference(difference, digits), difference.decided)


def _number(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return "–"
    text = f"{value:.{digits}f}"
    return (text if float(text) else text.lstrip("-")).replace("-", "−")


def _difference(difference: Difference, digits: int = 4) -> str:
    """Signed, with its margin; rows may also agree to the last bit."""
    if not difference.value and not difference.margin:
        return "same"
    sign = "+" if difference.value > 0 else ""
    return f"{sign}{_number(difference.value, digits)} ± {_number(difference.margin, digits)}"


def _named(results: Sequence[Result], name: str) -> Result | None:
    return next((result for result in results if result.name == name), None)


def evidence(judged: Judged) -> list[str]:
    """A finding's parts in words, each with its difference and interval."""
    return [
        f"{part.text}: {_difference(part.difference)} ({part.verdict}"
        + (f"; another seed moves it by {_number(abs(part.by_seed), 4)})" if part.by_seed is not None else ")")
        for part in judged.parts
    ]


@dataclass(frozen=True)
class Summary:
    """One of the paper's smaller tables, as text."""

    title: str
    head: list[str]
    rows: list[list[str]]


def summaries(results: Sequence[Result]) -> list[Summary]:
    """What pruning changes, how scalarisations rank, what threshold rules keep (paper, tables 2, 4 and 5)."""
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
        Summary(
            "Pruning (table 2)",
            ["", "ACE", "change", "ENCE", "change", "NLL", "change"],
            [_pruned(found[DEFAULT], regime, title) for regime, title in REGIMES.items()],
        ),
        Summary(
            "Scalarisations (table 4)",
            ["Ranked by", *(f"AKP, {title}" for title in REGIMES.values())],
            [[title, *_values(one, [f"{regime}.akp" for regime in REGIMES])] for title, one in scalar],
        ),
        Summary(
            "Threshold rules (table 5)",
            ["Threshold by", "Kept", *labels],
            [[title, *_values(one, ["kept_fraction", *kept])] for title, one in rule],
        ),
    ]


def _pruned(result: Result, regime: str, title: str) -> list[str]:
    cells = [title]
    for name in ("ace", "ence", "nll"):
        after, before = f"pruned.{regime}.{name}", f"{regime}.{name}"
        cells += [*_values(result, [after]), _difference(result.minus(result, after, before), _digits(name))]
    return cells


def _values(result: Result, metrics: Sequence[str]) -> list[str]:
    """Each with half of its interval."""
    return [
        f"{_number(result.estimate[metric], digits)} ± {_number(result.margin(metric), digits)}"
        for metric, digits in ((metric, _digits(metric)) for metric in metrics)
    ]


def _digits(metric: str) -> int:
    return 3 if metric.endswith(("nll", "kept_fraction")) else 4


def notes(results: Sequence[Result]) -> list[str]:
    """What a reader must know to read the numbers."""
    counts = results[0].counts
    lines = [
        f"{counts['images']} evaluation images, {counts['keypoints']} keypoints, all rows on the same.",
        "± is half a 95 % interval by bootstrap over images; differences are to the default and paired: both "
        "rows on the same resampled images. Of twenty intervals one misses by chance.",
    ]
    if _named(results, OTHER_SEED) is not None:
        lines.append(
            "These intervals are for the choice of images, not for the chance in training: what another seed "
            "alone changes is in the last row."
        )
    return lines


def to_markdown(results: Sequence[Result], title: str) -> str:
    """Findings, values and paired differences."""
    rows = table(results)
    head = ["Row", *(f"{group}: {label}" for label, group, _ in COLUMNS.values())]
    values = [[name, *(f"{cell.value} ± {cell.margin}" for cell in cells)] for name, cells in rows]
    differences = [
        [name, *(f"**{cell.difference}**" if cell.decided else cell.difference for cell in cells)]
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


def to_csv(results: Sequence[Result]) -> str:
    """A line per row and metric, all metrics."""
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


def render(results: Sequence[Result], title: str) -> str:
    """The page (html)."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("halopose"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    groups = [group for _, group, _ in COLUMNS.values()]
    page = environment.get_template("ablation.html").render(
        title=title,
        notes=notes(results),
        findings=[(one.text, one.verdict, evidence(one)) for one in judge(results)],
        groups=[(group, groups.count(group)) for group in dict.fromkeys(groups)],
        columns=[(label, number > 0 and groups[number] != groups[number - 1]) for number, label in _labels()],
        rows=table(results),
        summaries=summaries(results),
        scales=scale_plot(results),
        variances=variance_plots(results),
    )
    # A name may hold half of a surrogate pair, which a utf-8 file cannot.
    return page.encode("utf-8", "replace").decode("utf-8")


def _labels() -> list[tuple[int, str]]:
    return [(number, label) for number, (label, _, _) in enumerate(COLUMNS.values())]


@dataclass(frozen=True)
class Curve:
    """Points (x, y, low, high) of one row, all as shares of the plot's sides; ``kind`` picks the colour."""

    label: str
    kind: str
    points: list[tuple[float, float, float, float]]


@dataclass(frozen=True)
class Plot:
    """A plot ready to draw: ticks are (share of the side, text)."""

    title: str
    x_label: str
    y_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    curves: list[Curve]
    diagonal: bool = False


def scale_plot(results: Sequence[Result]) -> Plot | None:
    """ACE by object scale, with and without scale weights."""
    shown = _pair(results, "no-scale-weights")
    if shown is None:
        return None
    names = shown[0].scales
    metrics = [f"scale.{number}.ace" for number in range(len(names))]
    values = {one.name: (_of(one.estimate, metrics), np.array([one.margin(m) for m in metrics])) for one in shown}
    highest = np.nanmax([value + np.nan_to_num(margin) for value, margin in values.values()])
    top = float(highest) if highest > 0 else 1.0
    places = (np.arange(len(names)) + 0.5) / len(names)
    curves = [
        Curve(
            {DEFAULT: "With scale weights"}.get(one.name, "Without"),
            kind,
            _points(places, *(side / top for side in _sides(*values[one.name]))),
        )
        for one, kind in zip(shown, ("gaussian", "uncalibrated"), strict=True)
    ]
    return Plot(
        "ACE by object scale",
        "side of the object, px",
        "ACE",
        list(zip(places.tolist(), names, strict=True)),
        [(tick / top, f"{tick:.3g}") for tick in linear_ticks(top)],
        curves,
    )


def variance_plots(results: Sequence[Result]) -> list[Plot]:
    """Actual against predicted deviation, jointly and along each axis, of full and isotropic dispersions."""
    shown = _pair(results, "isotropic")
    if shown is None:
        return []
    return [_variance_plot(shown, axis) for axis in AXES]


def _variance_plot(shown: tuple[Result, Result], axis: str) -> Plot:
    roots = [(np.sqrt(one.variance[axis]["predicted"]), np.sqrt(one.variance[axis]["empirical"])) for one in shown]
    values = np.concatenate([side for pair in roots for side in pair])
    values = values[np.isfinite(values) & (values > 0)]
    low, high = (values.min() / 1.15, values.max() * 1.15) if len(values) else (0.1, 10.0)
    place = _logarithmic(float(low), float(high))
    suffix = "" if axis == "joint" else f"_{axis}"
    curves = [
        Curve(
            f"{label}, ENCE {_number(one.estimate[f'gaussian.ence{suffix}'], 4)}",
            kind,
            _points(place(x), place(y), place(y), place(y)),
        )
        for one, (x, y), label, kind in zip(
            shown, roots, ("Full", "Isotropic"), ("gaussian", "uncalibrated"), strict=True
        )
    ]
    ticks = [(float(place(np.array(tick))), f"{tick:g}") for tick in decade_ticks(float(low), float(high))]
    title = "Joint" if axis == "joint" else f"Along {axis}"
    return Plot(title, "predicted deviation, px", "actual deviation, px", ticks, ticks, curves, diagonal=True)


def _pair(results: Sequence[Result], name: str) -> tuple[Result, Result] | None:
    default, other = _named(results, DEFAULT), _named(results, name)
    return None if default is None or other is None else (default, other)


def _of(values: dict[str, float], names: list[str]) -> Array:
    return np.array([values[name] for name in names])


def _sides(value: Array, margin: Array) -> tuple[Array, Array, Array]:
    margin = np.nan_to_num(margin)
    return value, np.maximum(value - margin, 0), value + margin


def _points(*columns: Array) -> list[tuple[float, float, float, float]]:
    """Rows of four columns; those that are not finite are left out."""
    return [(x, y, low, high) for x, y, low, high in np.stack(columns, 1).tolist() if math.isfinite(x + y)]


def _logarithmic(low: float, high: float) -> Callable[[Array], Array]:
    def place(value: Array) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log(value / low) / math.log(high / low))

    return place


def linear_ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from zero to ``top``, about ``count`` of them."""
    power = 10.0 ** math.floor(math.log10(top / count))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= top / count * 0.999)
    return [number * step for number in range(int(top / step * (1 + 1e-9)) + 1)]


def decade_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, and three times them, between two positive numbers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 3)]
    return [tick for tick in ticks if low <= tick <= high]
