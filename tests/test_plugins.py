"""Tests of `halopose.plugins`: discovery, broken plug-ins, dataset readers and named models."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from halopose import plugins
from halopose.data.dataset_loading import load_dataset
from halopose.hosts.model_zoo import find_model
from halopose.landing.plugin import PLUGIN
from halopose.plugins import NamedModel, Plugin, load_plugins


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


def test_a_dataset_reader_is_asked_before_the_formats_of_the_core(install: Any, tmp_path: Path) -> None:
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
