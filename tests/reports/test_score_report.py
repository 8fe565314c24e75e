"""The page is complete, inert and right: no external resources, no code from names, the best values marked."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.data.files import read_json, write_json
from halopose.evaluation.scores import METRICS, Scores
from halopose.reports.html import percent
from halopose.reports.score_report import main_table, render_report, rounded
from tests.helpers.evaluations import real_scores, with_distribution, with_pruned_distribution
from tests.helpers.html_pages import needs_chromium, shown

EVIL = "</script><img src=x onerror=alert(1)>\u2028{{ 7 * 7 }}"


def without_values(names: tuple[str, ...] = ("nose", "left_eye")) -> Scores:
    """The second scale has no samples, nothing is pruned, and some numbers are missing."""
    scores = replace(real_scores(names, edges=(1e9,), instances=60, prune=False), akp_skill=math.nan)
    assert math.isnan(scores.gaussian.per_scale["large"].ace)
    assert scores.pruned.threshold == -math.inf
    for distribution in DISTRIBUTIONS:
        curves = scores.pruned.distribution(distribution).curves
        curves = replace(curves, coverage={**curves.coverage, "joint": np.full(99, math.nan)})
        scores = with_pruned_distribution(scores, distribution, ence=math.nan, curves=curves)
    return scores


def shuffled(scores: Scores, seed: int) -> Scores:
    """Different numbers in every metric."""
    generator = np.random.default_rng(seed)
    for distribution in DISTRIBUTIONS:
        for change in (with_distribution, with_pruned_distribution):
            scores = change(
                scores, distribution, **{metric: float(generator.uniform(0.01, 0.99)) for metric in METRICS}
            )
    return scores


class Page(HTMLParser):
    """Elements with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script" and self.scripts:
            self.scripts[-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


def test_page_refers_to_nothing_outside() -> None:
    text = render_report(real_scores())
    for _, attributes in Page(text).elements:
        for name in ("src", "href", "action", "srcset", "data"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert "default-src 'none'" in text


def test_embedded_metrics_parse_back() -> None:
    scores = real_scores()
    data = Page(render_report(scores)).data
    assert data == rounded(scores.to_json())
    assert data["scales"][-1]["high"] is None
    given = scores.gaussian.curves.coverage["joint"]
    np.testing.assert_allclose(data["curves"]["gaussian"]["coverage"]["joint"], given, rtol=1e-4)


def test_rounding_keeps_five_digits_and_whole_numbers() -> None:
    assert rounded({"a": (1 / 3, 123456, np.float32("nan")), 1: np.array([1e-7 / 3])}) == {
        "a": [0.33333, 123456, None],
        "1": [3.3333e-8],
    }


@pytest.mark.parametrize("scores", [without_values(), real_scores(bootstrap=3)], ids=["without values", "intervals"])
def test_page_is_the_same_from_an_evaluation_and_from_its_file(scores: Scores, tmp_path: Path) -> None:
    write_json(tmp_path / "metrics.json", scores.to_json())
    assert render_report(Scores.from_json(read_json(tmp_path / "metrics.json"))) == render_report(scores)


def test_names_and_titles_are_inert() -> None:
    plain, evil = Page(render_report(real_scores(("nose",)))), render_report(real_scores((EVIL,)), title=EVIL)
    parsed = Page(evil)
    assert parsed.elements == plain.elements, "a name added or changed an element"
    assert parsed.data["keypoint_names"] == [EVIL]
    assert "\u2028" not in parsed.scripts[0]
    assert "{{ 7 * 7 }}" in evil


def test_half_a_surrogate_pair_can_be_written() -> None:
    render_report(real_scores(("\ud800",))).encode("utf-8")


@pytest.mark.parametrize("seed", range(5))
def test_best_is_the_least_but_for_akp(seed: int) -> None:
    scores = shuffled(real_scores(("nose",)), seed)
    rows = dict(zip(METRICS, main_table(scores), strict=True))
    for key, (_, cells) in rows.items():
        for part, found in ((scores, cells[:3]), (scores.pruned, cells[3:])):
            values = [part.distribution(name).metric(key) for name in DISTRIBUTIONS]
            best = max(values) if key == "akp" else min(values)
            assert [cell.best for cell in found] == [value == best for value in values]
    assert render_report(scores).count("<strong>") == 2 * len(METRICS)


def test_equal_as_shown_is_equally_best_and_missing_never_is() -> None:
    scores = real_scores()
    for distribution, value in zip(DISTRIBUTIONS, (0.10001, 0.10002, math.nan), strict=True):
        scores = with_distribution(scores, distribution, ace=value)
    shown = [(cell.text, cell.best) for cell in main_table(scores)[0][1][:3]]
    assert shown == [("0.1000", True), ("0.1000", True), ("–", False)]


def test_intervals_are_shown_where_they_exist() -> None:
    assert "<small>" not in render_report(real_scores())
    scores = with_distribution(real_scores(), "gaussian", interval={"nll": (-1.25, 2.5), "ace": (math.nan, 1.0)})
    page = render_report(replace(scores, interval={"akp_skill": (0.4, 0.6)}))
    assert page.count("<small>") == 2
    assert "<small>−1.250 to 2.500</small>" in page
    assert "<small>0.400 to 0.600</small>" in page


def test_page_reads_without_script() -> None:
    scores = replace(real_scores(), images=1234, matched_instances=5678, keypoints=9999)
    scores = replace(scores, calibration=replace(scores.calibration, source="5 folds"))
    text = render_report(scores, title="Run 7").split("<script")[0]
    assert "<h1>Run 7</h1>" in text
    summary = re.search(r'class="summary">([^<]*)', text)
    assert summary
    for words in ("1,234 images", "5,678 detections", "0.5", "9,999 labelled keypoints", "5 folds"):
        assert words in summary[1]
    assert "given predictions" in text


@pytest.mark.parametrize("count", [1, 17, 133])
def test_any_number_of_keypoints(count: int) -> None:
    text = render_report(real_scores(tuple(f"point_{k}" for k in range(count)), edges=(), instances=60))
    assert len(Page(text).data["keypoint_names"]) == count
    assert text.count('<th scope="row">point_') == count


def test_ways_to_prune_are_listed_with_what_they_keep() -> None:
    scores = real_scores()
    page = render_report(scores)
    assert [rule.name for rule in scores.pruned.rules] == ["nothing pruned", "localization confidence"]
    for rule in scores.pruned.rules:
        cells = "".join(f"<td>{percent(value)}</td>" for value in (rule.kept_fraction, rule.reliability))
        assert f'<tr><th scope="row">{rule.name}</th>{cells}</tr>' in page


def test_settings_state_the_pruning_method() -> None:
    scores = real_scores()
    threshold = f"{float(f'{scores.pruned.threshold:.5g}')}"
    assert re.search(rf"pruning threshold</\w+>\s*<\w+>{re.escape(threshold)}<", render_report(scores))
    assert re.search(r"visibility threshold</\w+>\s*<\w+>none<", render_report(scores))
    seen = replace(scores, pruned=replace(scores.pruned, visibility_threshold=0.25))
    assert re.search(r"visibility threshold</\w+>\s*<\w+>0\.25<", render_report(seen))


PROBE = """
  for (const button of document.querySelectorAll("button")) button.click();
  document.getElementById("swap").click();
  const set = (node, value, event) => { node.value = value; node.dispatchEvent(new Event(event)); };
  const select = document.querySelector("select"), slider = document.querySelector("input[type=range]");
  for (const option of select.options) set(select, option.value, "change");
  for (const value of [0, slider.max]) set(slider, value, "input");
  const root = document.documentElement;
  document.body.dataset.overflow = root.scrollWidth - root.clientWidth;
  document.body.dataset.bad = /NaN|undefined|Infinity/.test(document.querySelector("main").innerHTML);
  document.body.dataset.plots = document.querySelectorAll("svg").length;
"""


@needs_chromium
@pytest.mark.parametrize("names", [("tip",), (EVIL, *(f"a_very_long_keypoint_name_{k}" for k in range(60)))])
def test_script_draws_every_plot_and_survives_every_control(names: tuple[str, ...], tmp_path: Path) -> None:
    found = shown(render_report(without_values(names)), PROBE, 500, tmp_path)
    # Three kinds of curves by three directions, two bar charts, two pruning curves; and where there are several
    # keypoints, how they err together, as given and on a skeleton.
    assert found == {"plots": "13" if len(names) == 1 else "15", "overflow": "0", "bad": "false"}
