"""Page with every table and figure of the paper, numbered as there, from a model and data of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.evaluation.scores import AXES, DistributionScores, Scores
from halopose.reports.ablation_report import PaperTable, scale_plot, summaries, variance_plots
from halopose.reports.html import digits_of, number, page, percent
from halopose.reports.plots import Axis, Curve, Plot
from halopose.reports.svg_file import svg_file
from halopose.studies.ablation import AblationResult
from halopose.studies.findings import judge
from halopose.studies.paper import PaperStudy
from halopose.studies.paper_values import ABLATION, AKP_RANDOM, CORE, MODELS, PRUNED, SCALARISATION, THRESHOLD
from halopose.types import Array

_AXIS_TITLES = {"joint": "joint", "x": "along x", "y": "along y"}
_CALIBRATED = ("gaussian", "student_t")
_MANY = 10  # keypoints whose names would overlap below a chart
_NU = {"t2": 2.0, "t4": 4.0, "t10": 10.0, "t30": 30.0}


ELSEWHERE = (
    ("Figures 14 and 17", "the paper's Large model: run this command with a larger base model"),
    ("Figures 1, 9, 10 and 22 to 25", "the paper's application: the reports of its plug-in"),
    ("Figures 11 and 26 to 28", "figures 4, 8, 6, 13 and 15 of another detector: run this command with it"),
)


@dataclass(frozen=True)
class PaperItem:
    """A table or a figure.

    Attributes:
        number: Its number in the paper, such as "Table 1".
        title: What it shows.
        note: How to read it.
        table: The table.
        plots: The charts of a figure.
        pictures: File names of pictures beside the page.
        drawing: Text of an SVG file.
    """

    number: str
    title: str
    note: str = ""
    table: PaperTable | None = None
    plots: Sequence[Plot] = ()
    pictures: Sequence[str] = ()
    drawing: str = ""

    @property
    def stem(self) -> str:
        """Start of its file names."""
        return self.number.split(" (")[0].lower().replace(" ", "-").replace(",", "")


@dataclass(frozen=True)
class PaperPage:
    """The page: introduction, items in the order of the paper, and items that other commands make."""

    title: str
    about: Sequence[str]
    items: Sequence[PaperItem]
    elsewhere: Sequence[tuple[str, str]] = ELSEWHERE


def paper_page(study: PaperStudy, pictures: Sequence[str] = ()) -> PaperPage:
    """Tables and figures of a study.

    Args:
        study: The results.
        pictures: File names of example pictures: all keypoints on the left, kept ones on the right.
    """
    scores = study.fitted
    counts = f"{scores.matched_instances:,} objects and {scores.keypoints:,} keypoints of {scores.images:,} images"
    about = [
        f"{study.model}. Heads from {study.images:,} training images. Scored on {counts}, which neither heads nor "
        "calibration have seen: detections that match an annotated object with OKS >= 0.5, labelled keypoints.",
        f"Preset: {scores.preset or 'none'}. Departures from the paper: {'; '.join(study.departures) or 'none'}.",
        *_about_given(study.given),
        "± is half the width of a 95 % interval by bootstrap over images; in tables 3 to 5 over images and "
        f"{study.ablation[0].seeds if study.ablation else 0} seeds. Numbers in italics are the paper's, for "
        "YOLO-NAS-Pose on COCO. ACE, ENCE, NLL and AKP depend on data and base model: compare the order of rows.",
    ]
    return PaperPage(f"The paper's tables and figures: {study.model}", about, list(_items(study, pictures)))


def _about_given(given: Scores | None) -> list[str]:
    """Sentence on the given artifact; none without one."""
    if given is None:
        return []
    counts = f"{given.matched_instances:,} objects of {given.images:,} images"
    return [f"Given artifact: scored on {counts}. Its departures: {'; '.join(given.departures or ()) or 'none'}."]


def _items(study: PaperStudy, pictures: Sequence[str]) -> Iterator[PaperItem]:
    scores, rows = study.fitted, {row.name: row for row in study.ablation}
    yield PaperItem("Figure 2", "Post-hoc extension of a frozen YOLO-Pose model", drawing=architecture_drawing())
    note = "Left: all keypoints. Right: kept keypoints. Lines end at the annotated keypoint; numbers are NLL."
    if pictures:
        yield PaperItem("Figures 3 and 6", "Example predictions before and after pruning", note, pictures=pictures)
    floor = "Floor: highest ACE of perfect calibration in 95 % of random samples of images."
    yield PaperItem("Table 1", "Core metrics", floor, _core(study))
    yield PaperItem(
        "Figure 4",
        "Calibration diagnostics",
        plots=[
            *(_coverage([(DISTRIBUTIONS[name], name, scores.distribution(name))]) for name in DISTRIBUTIONS),
            *(_variance([(DISTRIBUTIONS[name], name, scores.distribution(name))]) for name in DISTRIBUTIONS),
        ],
    )
    yield PaperItem(
        "Figure 5", "ACE and ENCE by keypoint", plots=[_by_keypoint(scores, name) for name in ("ace", "ence")]
    )
    yield PaperItem("Table 2", "Pruning", "Change: pruned minus all.", _pruning(study))
    yield PaperItem(
        "Figure 7",
        "Change of ACE and ENCE by keypoint after pruning",
        "Negative: better after pruning.",
        plots=[_by_keypoint(scores, name, change=True) for name in ("ace", "ence")],
    )
    if (scales := scale_plot(study.ablation)) is not None:
        yield PaperItem("Figure 8", "ACE by object scale", "All scales, the smallest included.", plots=[scales])
    yield from _ablation_tables(rows)
    yield PaperItem(
        "Figure 12",
        "Downweighting by OKS, Student-t and Gaussian objectives",
        "w(u) of a residual u in units of s kappa, or of the dispersion (appendix C).",
        plots=[downweighting_plot(scores.calibration.nu)],
    )
    whole, kept = scores.distribution, scores.pruned.distribution
    for figure, title, part in (("Figure 13", "all keypoints", whole), ("Figure 16", "kept keypoints", kept)):
        yield PaperItem(figure, f"Joint and marginal diagnostics, {title}", plots=_diagnostics(part, _CALIBRATED))
        if figure == "Figure 13":
            yield PaperItem("Figure 15", "Q-Q of the Gaussian, all keypoints", plots=_quantiles(whole("gaussian")))
    yield PaperItem(
        "Figure 18",
        "Q-Q of the Gaussian, kept keypoints",
        "Joint and marginal as in the paper, then joint for each keypoint.",
        plots=[*_quantiles(kept("gaussian")), *_keypoint_quantiles(kept("gaussian"))],
    )
    if variances := variance_plots(study.ablation):
        yield PaperItem("Figure 19", "Full and isotropic dispersions along each axis", plots=variances)
    if study.tuned is not None:
        yield from _tuned(study.tuned)


def _tuned(scores: Scores) -> Iterator[PaperItem]:
    """Figures 20 and 21: the Gaussian of a base model whose residuals were fine-tuned, before and after pruning."""
    for title, part in (("all keypoints", scores.distribution), ("kept keypoints", scores.pruned.distribution)):
        yield PaperItem(
            f"Figure 20 ({title})", f"After pOKS fine-tuning, {title}", plots=_diagnostics(part, ("gaussian",))
        )
    for title, part in (("all keypoints", scores.distribution), ("kept keypoints", scores.pruned.distribution)):
        yield PaperItem(f"Figure 21 ({title})", f"Q-Q after pOKS, {title}", plots=_quantiles(part("gaussian")))


# --- tables ---------------------------------------------------------------------------------------------


def _sets(study: PaperStudy) -> list[tuple[str, Scores]]:
    """Scores of this run, with their titles."""
    found = [("here, trained in this run", study.fitted)]
    if study.given is not None:
        found.append(("here, given artifact", study.given))
    return found


def _with_margin(scores: DistributionScores, metric: str) -> str:
    value, text = scores.metric(metric), number(scores.metric(metric), digits_of(metric))
    ends = scores.interval.get(metric)
    return text if ends is None else f"{text} ± {number(ends[1] - value, digits_of(metric))}"


def _core(study: PaperStudy) -> PaperTable:
    rows = [
        [
            f"*paper, {model}*",
            title,
            *(f"*{number(CORE[model, name][metric], digits_of(metric))}*" for metric in ("ace", "ence", "nll", "akp")),
            f"*{AKP_RANDOM[model]:.3f}*",
            "",
        ]
        for model in MODELS
        for name, title in DISTRIBUTIONS.items()
    ]
    for label, scores in _sets(study):
        match = scores.main_match
        for name, title in DISTRIBUTIONS.items():
            found = None if match is None else match.distributions.get(name)
            rows.append(
                [
                    label,
                    title,
                    *(_with_margin(scores.distribution(name), metric) for metric in ("ace", "ence", "nll", "akp")),
                    number(scores.akp_random, 4),
                    "" if found is None else f"{number(found.floors['ace'].high, 4)}",
                ]
            )
    head = ["Model", "Calibration", "ACE", "ENCE", "NLL", "AKP", "AKP, random", "ACE floor, at most"]
    return PaperTable("", head, rows)


def _pruning(study: PaperStudy) -> PaperTable:
    rows = []
    for (model, name), values in PRUNED.items():
        cells = [f"*paper, {model}*", DISTRIBUTIONS[name], ""]
        for metric in ("ace", "ence", "nll"):
            digits, change = digits_of(metric), values[metric] - CORE[model, name][metric]
            cells += [f"*{number(values[metric], digits)}*", f"*{_plus(change, digits)}*"]
        rows.append(cells)
    for label, scores in _sets(study):
        for name in _CALIBRATED:
            cells = [label, DISTRIBUTIONS[name], percent(scores.pruned.kept_fraction)]
            for metric in ("ace", "ence", "nll"):
                kept, whole = scores.pruned.distribution(name), scores.distribution(name)
                cells += [
                    _with_margin(kept, metric),
                    _plus(kept.metric(metric) - whole.metric(metric), digits_of(metric)),
                ]
            rows.append(cells)
    return PaperTable("", ["Model", "Calibration", "Kept", "ACE", "change", "ENCE", "change", "NLL", "change"], rows)


def _plus(value: float, digits: int) -> str:
    return f"{'+' if value > 0 else ''}{number(value, digits)}"


def _ablation_tables(rows: Mapping[str, AblationResult]) -> Iterator[PaperItem]:
    """Tables 3 to 5, and the paper's findings."""
    if "default" not in rows:
        return
    metrics = ("ace", "ence", "nll", "akp")
    table = [
        [
            rows[name].title,
            *(_measured(rows[name], f"gaussian.{metric}") for metric in metrics),
            *(f"*{number(value, digits_of(metric))}*" for metric, value in zip(metrics, known["Nano"], strict=True)),
            *(f"*{number(value, digits_of(metric))}*" for metric, value in zip(metrics, known["Large"], strict=True)),
        ]
        for name, known in ABLATION.items()
        if name in rows
    ]
    names = [metric.upper() for metric in metrics]
    head = ["", *names, *(f"*{model}* {name}" for model in MODELS for name in names)]
    found = "; ".join(f"{one.text}: {one.verdict}" for one in judge(list(rows.values())))
    note = f"The paper's findings: {found}."
    yield PaperItem("Table 3", "Ablations, after Gaussian calibration", note, PaperTable("", head, table))
    ours = {one.title.split(" (")[0]: one for one in summaries(list(rows.values()))}
    for figure, key, values in (
        ("Table 4", "Scalarisations", SCALARISATION),
        ("Table 5", "Threshold rules", THRESHOLD),
    ):
        own = ours[key]
        present = [name for name in values if name in rows]
        body = [
            [*cells, *(" / ".join(_short(value) for value in values[name][model]) for model in MODELS)]
            for name, cells in zip(present, own.rows, strict=True)
        ]
        body = [[*cells[: len(own.head)], *(f"*{cell}*" for cell in cells[len(own.head) :])] for cells in body]
        title = "Covariance scalarisations" if figure == "Table 4" else "Threshold rules of pruning"
        note = "The paper's columns are in the order of the columns here."
        yield PaperItem(figure, title, note, PaperTable("", [*own.head, *(f"*paper, {m}*" for m in MODELS)], body))


def _short(value: float) -> str:
    return f"{value:.2f}" if value > 1 else f"{value:g}"


def _measured(result: AblationResult, metric: str) -> str:
    digits = digits_of(metric)
    return f"{number(result.estimate[metric], digits)} ± {number(result.margin(metric), digits)}"


# --- charts ---------------------------------------------------------------------------------------------


def _coverage(parts: Sequence[tuple[str, str, DistributionScores]], axis: str = "joint") -> Plot:
    levels = np.arange(1, 100) / 100
    suffix = "" if axis == "joint" else f"_{axis}"
    curves = [
        Curve(f"{title}, ACE {number(one.metric(f'ace{suffix}'), 4)}", kind, levels, one.curves.coverage[axis])
        for title, kind, one in parts
    ]
    ideal = Curve("", "ideal", (0, 1), (0, 1))
    title = f"Coverage, {_AXIS_TITLES[axis]}"
    return Plot(title, Axis.linear("nominal", 0, 1), Axis.linear("empirical", 0, 1), [ideal, *curves])


def _variance(parts: Sequence[tuple[str, str, DistributionScores]], axis: str = "joint") -> Plot:
    suffix = "" if axis == "joint" else f"_{axis}"
    roots = [[np.sqrt(side) for side in _pair(one.curves.variance[axis])] for _, _, one in parts]
    values = np.concatenate([side for pair in roots for side in pair])
    values = values[np.isfinite(values) & (values > 0)]
    low, high = (float(values.min()) / 1.15, float(values.max()) * 1.15) if len(values) else (0.1, 10.0)
    curves = [
        Curve(f"{title}, ENCE {number(one.metric(f'ence{suffix}'), 4)}", kind, x, y, marked=True)
        for (title, kind, one), (x, y) in zip(parts, roots, strict=True)
    ]
    return Plot(
        f"Variances, {_AXIS_TITLES[axis]}",
        Axis.log("predicted deviation, px", low, high),
        Axis.log("empirical deviation, px", low, high),
        [Curve("", "ideal", (low, high), (low, high)), *curves],
    )


def _pair(points: object) -> tuple[Array, Array]:
    return np.asarray(points.expected, float), np.asarray(points.empirical, float)  # type: ignore[attr-defined]


def _diagnostics(part: Callable[[str], DistributionScores], names: Sequence[str]) -> list[Plot]:
    """Coverage and variances, jointly and along each axis."""
    parts = [(DISTRIBUTIONS[name], name, part(name)) for name in names]
    return [kind(parts, axis) for kind in (_coverage, _variance) for axis in AXES]


def _quantiles(scores: DistributionScores) -> list[Plot]:
    """Q-Q of the distance and of both coordinates."""
    found = scores.curves.qq
    return [] if found is None else [_quantile(found[axis], f"Q-Q, {_AXIS_TITLES[axis]}", axis) for axis in AXES]


def _keypoint_quantiles(scores: DistributionScores) -> list[Plot]:
    """Q-Q of the distance for each keypoint."""
    found = scores.curves.qq_keypoints
    return [_quantile(axes["joint"], name.replace("_", " "), "joint") for name, axes in found.items()]


def _quantile(points: object, title: str, axis: str) -> Plot:
    expected, empirical = _pair(points)
    if axis == "joint":
        expected, empirical = np.sqrt(expected), np.sqrt(empirical)
    shown = np.isfinite(expected) & np.isfinite(empirical)
    high = 1.1 * float(np.abs(expected[shown]).max(initial=1.0))
    low, top = (0.0, 2 * high) if axis == "joint" else (-high, 2 * high)
    bottom = 0.0 if axis == "joint" else -2 * high
    curves = [Curve("", "ideal", (low, high), (low, high)), Curve("", "gaussian", expected, empirical)]
    return Plot(title, Axis.linear("theoretical", low, high), Axis.linear("empirical", bottom, top), curves)


def _by_keypoint(scores: Scores, metric: str, change: bool = False) -> Plot:
    """A metric, or its change by pruning, of each keypoint after both calibrations."""
    names = list(scores.keypoint_names)
    places = np.arange(len(names))
    curves = []
    for name, aside in zip(_CALIBRATED, (-0.08, 0.08), strict=True):
        whole, kept = scores.distribution(name).per_keypoint, scores.pruned.distribution(name).per_keypoint
        values = np.array([whole[one].metric(metric) for one in names])
        if change:
            values = np.array([kept[one].metric(metric) for one in names]) - values
        curves.append(Curve(DISTRIBUTIONS[name], name, places + aside, values, marked=True))
    every = np.concatenate([np.asarray(curve.y) for curve in curves])
    every = every[np.isfinite(every)]
    low, high = (float(every.min()), float(every.max())) if len(every) else (0.0, 1.0)
    low = min(low * 1.1, 0.0)
    label = f"change of {metric.upper()}" if change else metric.upper()
    short = [name.replace("left_", "l. ").replace("right_", "r. ").replace("_", " ") for name in names]
    if len(names) > _MANY:
        short = [" ".join(word[:4] for word in name.split()) for name in short]
    y = Axis.linear(label, low, max(high * 1.1, low + 1e-3))
    return Plot("", Axis.of_bins("keypoint", len(names), short), y, curves)


def downweighting_plot(nu: Array | None) -> Plot:
    """Weights w(u) of the objectives, and of the fitted Student-t.

    Args:
        nu: (K,) fitted degrees of freedom; their median is drawn.
    """
    u = np.linspace(0, 6, 121)
    curves = [
        Curve("Gaussian", "gaussian", u, np.ones_like(u)),
        Curve("OKS, exp(-u²/2)", "uncalibrated", u, np.exp(-(u**2) / 2)),
        *(Curve(f"Student-t, nu {value:g}", kind, u, value / (value + u**2)) for kind, value in _NU.items()),
    ]
    if nu is not None:
        middle = float(np.median(nu))
        curves.append(Curve(f"Student-t as fitted, median nu {middle:.1f}", "plain", u, middle / (middle + u**2)))
    return Plot("", Axis.linear("residual u", 0, 6), Axis.linear("weight w(u), 1 at u = 0", 0, 1.02), curves)


def architecture_drawing() -> str:
    """Figure 2: frozen model, probabilistic heads, and both calibrations."""
    boxes = (
        (10, 60, 100, "backbone", "frozen", "#8883"), (135, 60, 100, "neck", "frozen", "#8883"),
        (260, 15, 130, "pose heads", "frozen", "#8883"), (260, 105, 130, "probabilistic heads", "trained", "#0b6aa633"),
        (415, 105, 130, "L, Σ = L Lᵀ", "2 x 2 per keypoint", "#0b6aa633"),
        (570, 60, 165, "Gaussian N(ŷ, τ² Σ)", "for filters and PnP", "#0a7d5a33"),
        (570, 150, 165, "Student-t T(ŷ, τ² Σ)", "nu degrees of freedom", "#0a7d5a33"),
        (415, 15, 130, "keypoints ŷ", "unchanged", "#8883"),
    )  # fmt: skip
    lines = (
        (110, 85, 135, 85), (235, 75, 260, 45), (235, 95, 260, 130), (390, 40, 415, 40), (390, 130, 415, 130),
        (545, 120, 570, 90), (545, 140, 570, 170), (545, 40, 570, 70),
    )  # fmt: skip
    arrows = "".join(
        f'<line x1="{a}" y1="{b}" x2="{c}" y2="{d}" stroke="#888" marker-end="url(#a)"/>' for a, b, c, d in lines
    )
    cells = "".join(
        f'<rect x="{x}" y="{y}" width="{w}" height="50" rx="5" fill="{fill}" stroke="#888"/>'
        f'<text x="{x + w / 2}" y="{y + 22}" text-anchor="middle" font-weight="600">{name}</text>'
        f'<text x="{x + w / 2}" y="{y + 39}" text-anchor="middle">{under}</text>'
        for x, y, w, name, under, fill in boxes
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 745 210" width="745" height="210" '
        'font-family="system-ui,sans-serif" font-size="11.5" fill="#6b7280"><defs><marker id="a" viewBox="0 0 6 6" '
        'refX="6" refY="3" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L6 3L0 6z" fill="#888"/>'
        f"</marker></defs>{arrows}{cells}</svg>\n"
    )


# --- output ---------------------------------------------------------------------------------------------


def paper_files(shown: PaperPage) -> dict[str, str]:
    """Text of every file of a page by name: paper.html, paper.md, and one svg file for each chart of paper.md."""
    files = {"paper.html": _html(shown)}
    parts = [f"# {shown.title}", *shown.about]
    for item in shown.items:
        parts.append(f"## {item.number}: {item.title}")
        if item.table is not None:
            parts.append(_markdown(item.table))
        for number_, text in enumerate(_drawings(item), start=1):
            name = f"{item.stem}-{number_}.svg"
            files[name] = text
        names = [name for name in files if name.startswith(f"{item.stem}-")]
        if names:
            parts.append("\n".join(f"![{item.number}]({name})" for name in names))
        if item.pictures:
            parts.append("\n".join(f"![{item.number}]({name})" for name in item.pictures))
        parts += [item.note] if item.note else []
    parts.append("## Made by other commands")
    parts.append("\n".join(f"- {which}: {how}" for which, how in shown.elsewhere))
    files["paper.md"] = "\n\n".join(parts) + "\n"
    return files


def _drawings(item: PaperItem) -> list[str]:
    wide = len(item.plots) <= 2 and bool(item.plots)
    size = (720, 280) if wide else (240, 230)
    return [item.drawing] if item.drawing else [svg_file(plot, *size) for plot in item.plots]


def _markdown(table: PaperTable) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _html(shown: PaperPage) -> str:
    about, *rest = shown.about
    return page("paper.html", title=shown.title, summary=about, notes=rest, items=shown.items, drawings=_drawings,
                elsewhere=shown.elsewhere)  # fmt: skip
