"""The page is whole, inert and right: nothing from outside, nothing from names run, the best marked."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.evaluation.protocol import REGIMES as EVALUATED
from halopose.evaluation.protocol import SCALAR_METRICS
from halopose.reports.scores import REGIMES, main_table, render, rounded

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "</script><img src=x onerror=alert(1)>\u2028{{ 7 * 7 }}"


def block(generator: np.random.Generator, names: list[str], scales: list[str]) -> dict[str, Any]:
    def scalars() -> dict[str, Any]:
        values = {key: float(generator.uniform(0.01, 0.99)) for key in SCALAR_METRICS}
        return {**values, "nll": float(generator.normal()), "count": 500}

    return {
        **scalars(),
        "per_keypoint": {name: scalars() for name in names},
        "per_scale": {name: scalars() for name in scales},
    }


def curve(generator: np.random.Generator, names: list[str], student: bool) -> dict[str, Any]:
    def quantiles() -> dict[str, Any]:
        values = np.sort(generator.normal(size=9))
        return {
            "joint": {"theoretical": values**2, "empirical": values**2},
            **{axis: {"theoretical": values, "empirical": 3 * values} for axis in ("x", "y")},
        }

    spread = np.geomspace(0.1, 900, 20)
    return {
        "coverage": {axis: np.sort(generator.uniform(size=99)) for axis in ("joint", "x", "y")},
        "variance": {axis: {"predicted": spread, "empirical": spread * 1.3} for axis in ("joint", "x", "y")},
        "moments": {"empirical": np.eye(2), "predicted": 2 * np.eye(2)},
        "qq": None if student else quantiles(),
        "qq_keypoints": {name: quantiles() for name in names},
    }


def make(names: list[str], scales: tuple[str, ...] = ("small", "large"), seed: int = 0) -> dict[str, Any]:
    """Metrics of random numbers in the shape that ``evaluate`` gives, arrays included."""
    generator = np.random.default_rng(seed)
    kept = np.linspace(0.01, 1, 101)
    shape = (len(names), len(scales))
    return {
        "settings": {"oks_threshold": 0.5, "scale_edges": (1024.0,), "seed": 0},
        "given_family": "gaussian",
        "calibration": {"source": "5 folds", **{key: [1.5] * len(names) for key in ("tau", "nu", "tau_t")}},
        "images": 1234,
        "matched_instances": 5678,
        "keypoints": 9999,
        "keypoint_names": names,
        "scales": [{"name": name, "low": 0.0, "high": math.inf, "instances": 100} for name in scales],
        "akp_random": 0.8,
        "akp_visibility": 0.85,
        "akp_skill": 0.5,
        **{regime: block(generator, names, list(scales)) for regime in EVALUATED},
        "pruned": {
            "kept_fraction": 0.7,
            "threshold": -0.3,
            **{regime: block(generator, names, list(scales)) for regime in EVALUATED},
        },
        "pruning_curve": {"kept": kept, "reliability": 1 - kept / 10, "threshold": -kept, "nll": 3 + kept},
        "cells": {
            "count": np.full(shape, 200),
            **{r: {k: generator.uniform(size=shape) for k in ("50", "90", "95")} for r in EVALUATED},
        },
        "curves": {r: curve(generator, names, r == "student_t") for r in EVALUATED},
        "curves_pruned": {r: curve(generator, [], r == "student_t") for r in EVALUATED},
    }


def without_values(metrics: dict[str, Any]) -> dict[str, Any]:
    """The second scale has no samples, nothing is pruned."""
    for regime in EVALUATED:
        for part in (metrics, metrics["pruned"]):
            part[regime]["per_scale"]["large"] = {**dict.fromkeys(SCALAR_METRICS, math.nan), "count": 0}
        metrics["cells"][regime]["95"][:, 1] = math.nan
        metrics["pruned"][regime]["ence"] = math.nan
        metrics["curves_pruned"][regime]["coverage"]["joint"] = np.full(99, math.nan)
    metrics["cells"]["count"][:, 1] = 0
    metrics["pruned"].update(kept_fraction=1.0, threshold=-math.inf)
    metrics["akp_skill"] = math.nan
    return metrics


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


def test_regimes_are_those_of_the_evaluation() -> None:
    assert tuple(REGIMES) == EVALUATED


def test_page_refers_to_nothing_outside() -> None:
    text = render(make(["nose", "left_eye"]))
    for _, attributes in Page(text).elements:
        for name in ("src", "href", "action", "srcset", "data"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert "default-src 'none'" in text


def test_embedded_metrics_parse_back() -> None:
    metrics = make(["nose", "left_eye"])
    data = Page(render(metrics)).data
    assert data == rounded(metrics)
    assert data["scales"][0]["high"] is None
    given = metrics["curves"]["gaussian"]["coverage"]["joint"]
    np.testing.assert_allclose(data["curves"]["gaussian"]["coverage"]["joint"], given, rtol=1e-4)


def test_rounding_keeps_five_digits_and_whole_numbers() -> None:
    assert rounded({"a": (1 / 3, 123456, np.float32("nan")), 1: np.array([1e-7 / 3])}) == {
        "a": [0.33333, 123456, None],
        "1": [3.3333e-8],
    }


def test_page_is_the_same_from_arrays_and_from_json() -> None:
    metrics = without_values(make(["nose", "left_eye"]))
    assert render(json.loads(json.dumps(rounded(metrics)))) == render(metrics)


def test_names_and_titles_are_inert() -> None:
    plain, evil = Page(render(make(["nose"]))), render(make([EVIL]), title=EVIL)
    parsed = Page(evil)
    assert parsed.elements == plain.elements, "a name added or changed an element"
    assert parsed.data["keypoint_names"] == [EVIL]
    assert "\u2028" not in parsed.scripts[0]
    assert "{{ 7 * 7 }}" in evil


def test_half_a_surrogate_pair_can_be_written() -> None:
    render(make(["\ud800"])).encode("utf-8")


@pytest.mark.parametrize("seed", range(5))
def test_best_is_the_least_but_for_akp(seed: int) -> None:
    metrics = make(["nose"], seed=seed)
    rows = dict(zip(SCALAR_METRICS, main_table(metrics), strict=True))
    for key, (_, cells) in rows.items():
        for part, found in ((metrics, cells[:3]), (metrics["pruned"], cells[3:])):
            values = [part[regime][key] for regime in EVALUATED]
            best = max(values) if key == "akp" else min(values)
            assert [cell.best for cell in found] == [value == best for value in values]
    assert render(metrics).count("<strong>") == 2 * len(SCALAR_METRICS)


def test_equal_as_shown_is_equally_best_and_missing_never_is() -> None:
    metrics = make(["nose"])
    for regime, value in zip(EVALUATED, (0.10001, 0.10002, math.nan), strict=True):
        metrics[regime]["ace"] = value
    shown = [(cell.text, cell.best) for cell in main_table(metrics)[0][1][:3]]
    assert shown == [("0.1000", True), ("0.1000", True), ("–", False)]


def test_intervals_are_shown_where_they_exist() -> None:
    metrics = make(["nose"])
    assert "<small>" not in render(metrics)
    metrics["gaussian"]["interval"] = {"nll": [-1.25, 2.5], "ace": [math.nan, 1.0]}
    metrics["interval"] = {"akp_skill": [0.4, 0.6]}
    page = render(metrics)
    assert page.count("<small>") == 2
    assert "<small>−1.250 to 2.500</small>" in page
    assert "<small>0.4000 to 0.6000</small>" in page


def test_page_reads_without_script() -> None:
    text = render(make(["nose"]), title="Run 7").split("<script")[0]
    assert "<h1>Run 7</h1>" in text
    assert "1,234 images, 5,678 matched instances, 9,999 keypoints. Calibration: 5 folds." in text
    assert "As given, the predictions are" in text


@pytest.mark.parametrize("count", [1, 17, 133])
def test_any_number_of_keypoints(count: int) -> None:
    text = render(make([f"point_{k}" for k in range(count)], scales=("scale 1",)))
    assert len(Page(text).data["keypoint_names"]) == count
    assert text.count('<th scope="row">point_') == count


def test_no_metrics_no_page() -> None:
    with pytest.raises(HaloposeError, match="uncalibrated is missing"):
        render({"keypoints": 3})


PROBE = """<script>addEventListener("load", () => {
  for (const button of document.querySelectorAll("button")) button.click();
  const set = (node, value, event) => { node.value = value; node.dispatchEvent(new Event(event)); };
  const select = document.querySelector("select"), slider = document.querySelector("input");
  for (const option of select.options) set(select, option.value, "change");
  for (const value of [0, slider.max]) set(slider, value, "input");
  const root = document.documentElement;
  document.body.dataset.overflow = root.scrollWidth - root.clientWidth;
  document.body.dataset.bad = /NaN|undefined|Infinity/.test(document.querySelector("main").innerHTML);
  document.body.dataset.plots = document.querySelectorAll("svg").length;
});</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("names", [["tip"], [EVIL, *(f"a_very_long_keypoint_name_{k}" for k in range(60))]])
def test_script_draws_every_plot_and_survives_every_control(names: list[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    text = render(without_values(make(names))).replace("</body>", PROBE + "</body>")
    page.write_text(text, encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900"]
    command += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body is not None
    # Three kinds of curves by three directions, two bar charts, two pruning curves.
    assert 'data-plots="13"' in body[0]
    assert 'data-overflow="0"' in body[0]
    assert 'data-bad="false"' in body[0]
