"""Tables and page of an ablation: the numbers are those of the results, the page is complete and inert."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np
import pytest

from halopose.evaluation.scores import METRICS as SCALARS
from halopose.fitting.settings import FitSettings
from halopose.reports.ablation_report import (
    COLUMNS,
    render_ablation,
    scale_plot,
    summaries,
    table,
    to_csv,
    to_markdown,
    variance_plots,
)
from halopose.studies.ablation import DEFAULT, SCALES, AblationResult, ablation_variants
from halopose.studies.findings import FINDINGS
from tests.helpers.html_pages import EVIL, needs_chromium, parsed, shown

METRICS = [
    *(f"{part}{regime}.{name}" for part in ("", "pruned.") for regime in ("gaussian", "student_t")
      for name in SCALARS),
    *(f"scale.{number}.ace" for number in range(SCALES)),
    "scale.spread", "akp_skill", "kept_fraction",
]  # fmt: skip


def results(names: list[str] | None = None, bootstrap: int = 20) -> list[AblationResult]:
    generator = np.random.default_rng(0)
    chosen = [row for row in ablation_variants(FitSettings()) if names is None or row.name in names]
    made = []
    for row in chosen:
        estimate = {name: generator.uniform(0.1, 0.9, 1) for name in METRICS}
        draws = {name: value + 0.05 * generator.normal(size=(1, bootstrap)) for name, value in estimate.items()}
        bins = np.geomspace(0.5, 900, 20)
        variance = {axis: {"predicted": bins, "empirical": 1.3 * bins} for axis in ("joint", "x", "y")}
        scales = [f"bin {number}" for number in range(SCALES)]
        counts = {"images": 7, "keypoints": 99}
        made.append(AblationResult(row.name, row.title, estimate, draws, variance, scales, counts))
    return made


def test_csv_holds_every_metric_and_its_paired_difference() -> None:
    made = results()
    rows = list(csv.DictReader(io.StringIO(to_csv(made))))
    assert len(rows) == len(made) * len(METRICS)
    default = made[0]
    for line, (result, metric) in zip(rows, [(r, m) for r in made for m in METRICS], strict=True):
        assert (line["row"], line["metric"]) == (result.name, metric)
        assert float(line["estimate"]) == result.estimate[metric]
        assert float(line["high"]) - float(line["low"]) == pytest.approx(2 * result.margin(metric))
        if result is default:
            assert line["difference"] == line["difference_low"] == line["difference_high"] == ""
        else:
            assert float(line["difference"]) == result.estimate[metric] - default.estimate[metric]
            draws = result.draws[metric] - default.draws[metric]
            width = float(line["difference_high"]) - float(line["difference_low"])
            assert width == pytest.approx(2 * 1.96 * draws.std(ddof=1))


def test_markdown_has_a_line_per_row_and_finding() -> None:
    made = results()
    text = to_markdown(made, "Title")
    assert text.startswith("# Title\n")
    for result in made:
        assert text.count(f"\n| {result.title} |") == (1 if result.name == DEFAULT else 2)
    for finding in FINDINGS:
        assert len(re.findall(rf"\| {finding.text} \| \*\*(reproduced|differs here|not decided)\*\* \|", text)) == 1
    widths = [line.count(" |") for line in text.splitlines() if line.startswith("| Default")]
    assert widths == [1 + len(COLUMNS)]


def test_significant_values_are_bold_and_equal_rows_are_marked() -> None:
    made = results([DEFAULT, "diagonal"])
    twin = AblationResult("f1", "Twin", made[0].values, made[0].draws, made[0].variance, made[0].scales, made[0].counts)
    rows = dict(table([*made, twin]))
    for metric, cell, same in zip(COLUMNS, rows["Diagonal dispersion"], rows["Twin"], strict=True):
        difference = made[1].minus(made[0], metric)
        assert cell.significant == (abs(difference.value) > difference.margin)
        assert cell.difference.startswith("−" if difference.value < 0 else "+")
        assert same.difference == "same"
        assert not same.significant
    assert all(cell.difference == "" for cell in rows["Default"])


def test_the_smaller_tables_of_the_paper() -> None:
    made = results()
    pruning, scalar, rules = summaries(made)
    default, named = made[0], {result.name: result for result in made}
    change = default.estimate["pruned.student_t.nll"] - default.estimate["student_t.nll"]
    assert pruning.rows[1][-1].startswith(f"{change:+.3f}".replace("-", "−"))
    draws = default.draws["pruned.student_t.nll"] - default.draws["student_t.nll"]
    assert pruning.rows[1][-1].endswith(f"± {1.96 * draws.std(ddof=1):.3f}")
    assert [row[0] for row in scalar.rows] == ["trace", "determinant", "largest eigenvalue"]
    assert scalar.rows[1][1].startswith(f"{named['determinant'].estimate['gaussian.akp']:.4f} ±")
    assert [row[0] for row in rules.rows] == ["Youden", "distance to the corner", "F1"]
    assert rules.rows[2][1].startswith(f"{named['f1'].estimate['kept_fraction']:.3f} ±")
    for one in (pruning, scalar, rules):
        assert all(len(row) == len(one.head) for row in one.rows)
        assert f"## {one.title}" in to_markdown(made, "Title")
        assert one.title in render_ablation(made, "Title")
    assert len(summaries(results([DEFAULT]))[2].rows) == 1


def test_the_page_is_whole_and_inert() -> None:
    made = results()
    text = render_ablation(made, EVIL)
    page = parsed(text)
    assert "script" not in page.tags
    assert page.urls == ["data:,"]
    assert "{{ 7 * 7 }}" in text
    assert page.tags.count("svg") == 4
    assert page.tags.count("circle") == 2 * SCALES + 3 * 2 * 20
    for result in made:
        assert result.title in text


@needs_chromium
def test_all_columns_are_there_at_1280_pixels(tmp_path: Path) -> None:
    probe = """
      const places = [...document.querySelectorAll(".scroll")];
      document.body.dataset.beyond = Math.max(...places.map((place) => place.scrollWidth - place.clientWidth));
    """
    assert shown(render_ablation(results(), "Ablation"), probe, 1280, tmp_path) == {"beyond": "0"}


def test_a_page_of_few_rows_leaves_out_plots_it_cannot_draw() -> None:
    made = results([DEFAULT])
    assert scale_plot(made) is None
    assert variance_plots(made) == []
    assert "svg" not in parsed(render_ablation(made, "few")).tags


def test_plots_stay_inside_and_leave_out_what_is_not_a_number() -> None:
    made = results([DEFAULT, "no-scale-weights", "isotropic"])
    made[0].values["scale.2.ace"][0] = float("nan")
    made[0].variance["x"]["empirical"][3] = 0.0
    first = scale_plot(made)
    assert first is not None
    plots = [first, *variance_plots(made)]
    assert [len(plots[0].dots(curve)) for curve in plots[0].curves] == [SCALES - 1, SCALES]
    assert len(plots[2].dots(plots[2].curves[1])) == 19
    for plot in plots:
        marks = [*plot.x.marks(), *plot.y.marks()]
        assert all(0 <= share <= 1 + 1e-9 for share, _ in marks)
        assert all(not np.isfinite(curve.y).all() or len(plot.dots(curve)) for curve in plot.curves if curve.label)
        assert all(curve.high is None or np.nanmax(plot.y.share(curve.high)) <= 1 + 1e-9 for curve in plot.curves)
