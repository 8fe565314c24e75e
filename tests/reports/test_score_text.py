"""Scores as text: every number of csv and table is that of the scores."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.evaluation.scores import METRICS, MetricSummary, PruningRule
from halopose.reports.score_report import main_table, render_report
from halopose.reports.score_text import TITLES, to_csv, to_text
from tests.helpers.evaluations import real_scores


def test_csv_holds_every_distribution_and_group() -> None:
    scores = real_scores(("nose", "left, eye"), edges=(1024.0, 1e9))
    rows = list(csv.DictReader(io.StringIO(to_csv(scores))))
    assert len(rows) == 2 * 3 * (1 + 2 + 3)
    by_key = {(row["pruned"], row["regime"], row["group"], row["name"]): row for row in rows}
    assert len(by_key) == len(rows)
    for pruned, part in (("no", scores), ("yes", scores.pruned)):
        for name in DISTRIBUTIONS:
            distribution = part.distribution(name)
            groups: dict[tuple[str, str], MetricSummary] = {("all", "all"): distribution}
            groups |= {("keypoint", keypoint): one for keypoint, one in distribution.per_keypoint.items()}
            groups |= {("scale", scale): one for scale, one in distribution.per_scale.items()}
            for (group, member), one in groups.items():
                row = by_key[pruned, name, group, member]
                assert int(row["count"]) == one.count
                for metric in METRICS:
                    assert float(row[metric]) == pytest.approx(one.metric(metric), rel=1e-15, nan_ok=True)


def test_table_shows_the_distributions_before_and_after_pruning() -> None:
    scores = real_scores()
    lines = to_text(scores).splitlines()
    assert lines[0].startswith(f"{scores.matched_instances} matched instances, {scores.keypoints} keypoints")
    for metric in METRICS:
        shown = next(line.split() for line in lines if line.startswith(f"{TITLES[metric]}  "))
        expected = [
            part.distribution(name).metric(metric) for name in DISTRIBUTIONS for part in (scores, scores.pruned)
        ]
        values = [float(value.replace("−", "-")) for value in shown[-6:]]
        assert values == pytest.approx(expected, abs=5.1e-4 if metric == "nll" else 5.1e-5)


def test_terminal_and_page_agree_to_the_digit() -> None:
    scores = real_scores()
    lines = to_text(scores).splitlines()
    for label, cells in main_table(scores):
        shown = next(line[len(label) :].split() for line in lines if line.startswith(f"{label}  "))
        whole, pruned = ([cell.text for cell in part] for part in (cells[:3], cells[3:]))
        assert shown == [text for pair in zip(whole, pruned, strict=True) for text in pair]
    page = render_report(scores)
    ranking = next(line for line in lines if line.startswith("ranking"))
    for value in re.findall(r"\d\.\d+", ranking)[1:]:
        assert f"<dd>{value}</dd>" in page
    for line in lines[lines.index(ranking) + 1 :]:
        for share in re.findall(r"[\d.]+\N{NO-BREAK SPACE}%", line):
            assert share in page


def test_table_lists_the_ways_to_prune() -> None:
    rules = (PruningRule("localization confidence", 0.7, 0.9), PruningRule("both", 0.625, 0.951))
    scores = real_scores()
    text = to_text(replace(scores, pruned=replace(scores.pruned, rules=rules)))
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    assert "keeps  70.0 %,  90.0 %" in text
    assert "keeps  62.5 %,  95.1 %" in text
