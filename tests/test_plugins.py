"""Tests of `halopose.plugins`: discovery, broken plug-ins, dataset readers and named models."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from halopose import plugins
from halopose.data.dataset_loading import load_dataset
from halopose.evaluation.scores import Scores
from halopose.fitting.pipeline import fit
from halopose.fitting.settings import FitSettings, TrainSettings
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_model
from halopose.landing.plugin import PLUGIN
from halopose.plugins import NamedModel, Plugin, load_plugins
from halopose.reports.score_report import render_report, rounded
from halopose.reports.score_text import to_text
from tests.helpers.stub import noise_pictures


@dataclass(frozen=True)
class Entry:
    """An entry point that loads a value, or raises it."""

    name: str
    loads: Any
    value: str = "some.module:THING"

    def load(self) -> Any:
        if isinstance(self.loads, Exception):
            raise self.loads
        return self.loads


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def install(*entries: Entry) -> None:
        load_plugins.cache_clear()
        monkeypatch.setattr(plugins, "entry_points", lambda group: entries)

    yield install
    load_plugins.cache_clear()


def test_plugins_load_once_in_the_order_of_their_names(install: Any) -> None:
    one, two = Plugin("one"), Plugin("two")
    install(Entry("b", two), Entry("a", one))
    assert load_plugins() == (one, two)
    assert load_plugins() is load_plugins()


@pytest.mark.parametrize("broken", [ImportError("no module named torch\nat all"), "not a plug-in"])
def test_a_broken_plugin_is_one_warning(install: Any, broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    install(Entry("broken", broken), Entry("good", Plugin("good")))
    with caplog.at_level(logging.WARNING):
        assert [plugin.name for plugin in load_plugins()] == ["good"]
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    assert "broken" in caplog.text


def test_dataset_readers_of_plugins_come_before_those_of_the_core(install: Any, tmp_path: Path) -> None:
    class Reader:
        name = "mine"

        def reads(self, path: Path) -> bool:
            return path.suffix == ".mine"

        def read(self, path: Path) -> Any:
            return "the data set"

    install(Entry("mine", Plugin("mine", dataset_readers=(Reader(),))))
    assert str(load_dataset(tmp_path / "a.mine", "")) == "the data set"


def test_models_of_plugins_load_by_name(install: Any, tmp_path: Path) -> None:
    model = NamedModel("hand", "hands, 21 keypoints", lambda: tmp_path, lambda: tmp_path)
    install(Entry("hands", Plugin("hands", models=(model,))))
    assert find_model("hand") is model
    install()
    assert find_model("hand") is None


def test_the_landing_plugin_registers_its_commands() -> None:
    app = typer.Typer()
    app.command()(lambda: None)
    PLUGIN.register(app)
    listed = CliRunner().invoke(app, ["--help"]).output
    assert "land" in listed
    assert "world" in listed


def test_plugins_import_neither_torch_nor_numpy() -> None:
    script = (
        "import sys, halopose.landing.plugin as p; p.PLUGIN.register(__import__('typer').Typer());"
        "print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_host_and_the_metric_of_the_architecture_page_need_no_other_edit(install: Any, tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    code: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, code)
    install(Entry("grid", Plugin("grid", hosts=(code["GridLoader"](),), metrics=(code["METRIC"],))))
    host = load_host("model.grid")
    pictures = noise_pictures(tmp_path / "pictures", 24)
    training, validation = (replace(pictures, records=pictures.records[part::2]) for part in (0, 1))
    settings = FitSettings(
        TrainSettings(epochs=1), imgsz=64, train_sizes=(64,), novelty_images=0, calibration_share=0.5
    )
    artifact, scores = fit(host, training, validation, tmp_path / "work", settings)
    assert artifact.card is not None
    assert 0 <= scores.custom["coverage_50"].value["pruned.gaussian"] <= 1
    assert Scores.from_json(json.loads(json.dumps(rounded(scores.to_json())))).custom.keys() == {"coverage_50"}
    assert "in 50 %" in to_text(scores)
    assert "in 50 %" in render_report(scores)
