"""The shift study on small scenes: values against direct computation, and the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.fitting.corruptions import corrupted
from halopose.fitting.novelty_fitting import collect_copies, fit_novelty
from halopose.fitting.pipeline import collect_validation
from halopose.fitting.settings import FitSettings, NoveltySettings
from halopose.reports.shift_report import HEAD, render_shift, table, to_text
from halopose.studies.shift_study import CLEAN, ShiftResult, ShiftSettings, auroc, run_shift
from tests.helpers.html_pages import EVIL, parsed
from tests.helpers.models import artifact_for, host_of, write_scenes

pytestmark = pytest.mark.usefixtures("one_thread")
KIND = "v8"
SETTINGS = ShiftSettings(kinds=("noise", "colour"), severities=(2, 5), conf=0.2, draws=5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("data"), host_of(KIND), {"train": 10, "val": 8, "test": 6})


@pytest.fixture(scope="module")
def study(data: Path, tmp_path_factory: pytest.TempPathFactory) -> ShiftResult:
    folder, host = tmp_path_factory.mktemp("work"), host_of(KIND)
    how = NoveltySettings(images=10, fewest=5, conf=0.2)
    copies = collect_copies(host, load_dataset(data, "train"), folder / "copies", 64, how)
    val = collect_validation(host, load_dataset(data, "val"), folder / "val", FitSettings(imgsz=64))
    artifact = fit_novelty(artifact_for(host), copies, val, settings=how)
    test = load_dataset(data, "test")
    others = {"darkroom": corrupted(test, "gamma", 5)}
    again = run_shift(host, artifact, test, folder / "shift", SETTINGS, others)
    assert run_shift(host, artifact, test, folder / "shift", SETTINGS, others) == again  # from what is stored
    with pytest.raises(HaloposeError, match="halopose novelty"):
        run_shift(host, replace(artifact, novelty=None), test, folder / "shift", SETTINGS)
    return again


def test_every_step_is_measured(study: ShiftResult) -> None:
    names = [(row.name, row.severity) for row in study.rows]
    assert names == [(CLEAN, 0), ("noise", 2), ("noise", 5), ("colour", 2), ("colour", 5), ("darkroom", 0)]
    for row in study.rows:
        assert row.images == 6
        assert row.detections > 0
        for share in (row.coverage, row.alarms, row.image_alarms, row.wrong):
            assert 0 <= share <= 1
        assert row.wrong_kept <= row.wrong
    assert [row.severity for row in study.of("noise")] == [0, 2, 5]
    groups = {one.group for one in study.rankings}
    assert groups == {"fitted kinds", "held-out kinds", "darkroom"}
    json.dumps(study.to_json())


def test_the_page_holds_what_was_measured(study: ShiftResult) -> None:
    page = render_shift(study, EVIL)
    parsed(page)
    assert EVIL not in page
    rows = table(study)
    assert all(len(row) == len(HEAD) for row in rows)
    for row in rows:
        assert all(text.replace(" %", "") in page for text in row)
    assert to_text(study).count("\n| ") == len(rows)


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 3)), min_size=2, max_size=30))
def test_auroc_counts_pairs(rows: list[tuple[int, bool, int]]) -> None:
    signal, label, weight = (np.array(column) for column in zip(*rows, strict=True))
    label = label.astype(bool)
    high, low = signal[label], signal[~label]
    pairs = weight[label][:, None] * weight[~label][None]
    if pairs.sum():
        wins = (high[:, None] > low) + 0.5 * (high[:, None] == low)
        assert auroc(signal, label, weight) == pytest.approx((wins * pairs).sum() / pairs.sum())
    else:
        assert np.isnan(auroc(signal, label, weight))
