"""The page of fine-tuning: the outcome follows from the intervals, the numbers are those of the scores."""

from __future__ import annotations

import re

import numpy as np
import pytest

from halopose.evaluation.metrics import LEVELS
from halopose.evaluation.scores import AXES
from halopose.reports.finetuning_report import coverage_plots, outcome, render_finetuning, table, to_text
from halopose.studies.finetuning_study import REPORT_METRICS, BaseModelScores, differences
from tests.helpers.html_pages import EVIL, parsed

REGIMES = ("gaussian", "student_t")
NOISE = 0.002
METRICS = {*REPORT_METRICS, *(f"{regime}.ace{suffix}" for regime in REGIMES for suffix in ("", "_x", "_y"))}


def scored(**bases: tuple[float, float]) -> dict[str, BaseModelScores]:
    """Models by name with (Gaussian ACE, AP) and independent noise in their draws."""
    made = {}
    for seed, (name, (ace, ap)) in enumerate(bases.items()):
        generator = np.random.default_rng(seed)
        estimate = dict.fromkeys(sorted(METRICS), 0.5) | {"gaussian.ace": ace, "ap": ap}
        draws = {metric: value + NOISE * generator.normal(size=200) for metric, value in estimate.items()}
        coverage = {regime: {axis: LEVELS + ace * np.sin(3 * LEVELS) for axis in AXES} for regime in REGIMES}
        made[name] = BaseModelScores(estimate, draws, coverage, nu=3.0 + seed, matched_instances=1234)
    return made


def test_improved_and_due_to_poks() -> None:
    text = outcome(scored(before=(0.06, 0.7), poks=(0.02, 0.68), oks=(0.061, 0.7)))
    assert re.search(r"lowers .*from 0.0600 to 0.0200 \(−0.0400 ± 0.00", text)
    assert re.search(r"control .*0.0610, 0.0410 ± 0.00\d\d above pOKS\. .* is due to pOKS", text)
    assert re.search(r"AP falls .*0.0200 ± 0.00\d\d.* 0.0200 ± 0.00\d\d below .*control\.$", text)


def test_improved_in_part_by_longer_training() -> None:
    text = outcome(scored(before=(0.06, 0.7), poks=(0.02, 0.7), oks=(0.04, 0.7)))
    assert re.search("control .*0.0400, 0.0200 ± .* above.* partly due", text)
    assert "significantly (0.0000 ± 0.00" in text


def test_improved_but_the_control_too() -> None:
    text = outcome(scored(before=(0.06, 0.7), poks=(0.02, 0.72), oks=(0.021, 0.72)))
    assert "lowers the Gaussian ACE" in text
    assert re.search(r"0.0210, not significantly different \(\+0.0010", text)
    assert "not shown" in text
    assert "rises by 0.0200 ±" in text
    better = outcome(scored(before=(0.06, 0.7), poks=(0.04, 0.7), oks=(0.02, 0.7)))
    assert re.search("0.0200, 0.0200 ± .* below pOKS.* not due", better)


def test_improved_but_the_control_is_between() -> None:
    text = outcome(scored(before=(0.06, 0.7), poks=(0.052, 0.7), oks=(0.056, 0.7)))
    assert re.search("0.0560.* not shown", text)


def test_a_worse_result() -> None:
    text = outcome(scored(before=(0.02, 0.7), poks=(0.06, 0.7), oks=(0.02, 0.7)))
    assert "ACE from 0.0200 to 0.0600 (+0.0400" in text
    assert "is due to pOKS" in text


def test_no_significant_change() -> None:
    text = outcome(scored(before=(0.06, 0.7), poks=(0.059, 0.7), oks=(0.06, 0.7)))
    assert re.search(r"not significantly change .*0.0600 before, 0.0590 after", text)
    assert "due to" not in text
    assert "0.0600, not significantly different (" in text
    assert "AP does not change" in text


@pytest.mark.parametrize("loss", ["poks", "oks"])
def test_no_control(loss: str) -> None:
    bases = {"before": (0.06, 0.7), loss: (0.02, 0.68)}
    text = outcome(scored(**bases))
    assert "lowers the Gaussian ACE" in text
    assert ("Without a control" in text) == (loss == "poks")
    assert "The control" not in text


def test_a_single_draw_is_not_significant() -> None:
    made = scored(before=(0.06, 0.7), poks=(0.02, 0.7))
    for one in made.values():
        one.draws["ap"] = one.draws["ap"][:1]
    assert "AP does not change" in outcome(made)


def test_table_holds_every_shown_metric_and_bold_is_decided() -> None:
    made = scored(before=(0.06, 0.7), poks=(0.02, 0.68), oks=(0.06, 0.7))
    rows = table(made)
    between = differences(made)
    for (name, values, paired), metric in zip(rows, REPORT_METRICS, strict=False):
        assert name == REPORT_METRICS[metric]
        assert [float(value) for value, _ in values] == [one.estimate[metric] for one in made.values()]
        assert [decided for _, decided in paired] == [pair[metric].significant for pair in between.values()]
    assert [value for value, _ in rows[len(REPORT_METRICS)][1]] == ["3.0", "4.0", "5.0"]
    assert all(len(values) == 3 and len(paired) == 3 for _, values, paired in rows)


def test_coverage_is_drawn_to_one_scale_and_inside() -> None:
    plots = coverage_plots(scored(before=(0.2, 0.7), poks=(0.02, 0.7), oks=(0.03, 0.7)))
    assert len(plots) == len({plot.title for plot in plots}) == 6
    assert len({(plot.y.low, plot.y.high) for plot in plots}) == 1
    for plot in plots:
        zero, *curves = plot.curves
        np.testing.assert_allclose(np.array(plot.line(zero)), np.array([[0, plot.y.share(0)], [1, plot.y.share(0)]]))
        assert len(curves) == 3
        for curve in curves:
            x, y = np.array(plot.line(curve)).T
            np.testing.assert_allclose(x, LEVELS[2::4])
            ace = {"Before": 0.2, "pOKS": 0.02, "OKS": 0.03}[curve.label.split(",")[0]]
            np.testing.assert_allclose(plot.y.low + y * (plot.y.high - plot.y.low), ace * np.sin(3 * x), atol=1e-12)


@pytest.mark.parametrize("bases", [("before", "poks", "oks"), ("before", "poks"), ("before", "oks")])
def test_the_page_is_whole_and_inert(bases: tuple[str, ...]) -> None:
    chosen = dict.fromkeys(bases, (0.03, 0.7))
    text = render_finetuning(scored(**chosen), EVIL)
    page = parsed(text)
    assert "script" not in page.tags
    assert page.urls == ["data:,"]
    assert "{{ 7 * 7 }}" in text
    assert page.tags.count("svg") == 6
    assert page.tags.count("polyline") == 6 * (1 + len(bases))
    for title in REPORT_METRICS.values():
        assert title in text


def test_terminal_and_page_agree_to_the_digit() -> None:
    scores = scored(before=(0.06, 0.7), poks=(0.02, 0.68), oks=(0.061, 0.7))
    page = render_finetuning(scores, "title")
    shown = re.findall(r"[+−]?\d+\.\d+", to_text(scores))
    assert len(shown) > 6 * len(REPORT_METRICS)
    for value in shown:
        assert value in page
