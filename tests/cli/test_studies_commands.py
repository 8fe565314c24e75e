"""The commands that study the method: outputs that cannot be written are refused before any work."""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.main import get_command

from halopose.cli.app import app
from halopose.cli.studies_commands import _fit_command
from tests.helpers import commands


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The line of a refusal. The data named do not exist: that it is about the output shows that it came first."""
    return partial(commands.refused, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("ablate", "-o file"),
        ("ablate", "-o file/out"),
        ("analyse", "-o file"),
        ("finetune", "-o file/tuned.pt"),
        ("finetune", "-o tuned.pt --work file"),
    ],
)
def test_a_file_where_a_folder_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], command: str, options: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    line = refused(command, "data.yaml", "--base", "base.pt", *options.split())
    assert line.startswith("halopose: cannot write")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("folder", ["tuned.pt", "tuned.json", "tuned.html"])
def test_a_folder_where_a_file_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir()
    line = refused("finetune", "data.yaml", "--base", "base.pt", "-o", "tuned.pt")
    assert line == f"halopose: cannot write {folder}: it is a folder, name a file\n"


@pytest.mark.parametrize("name", ["tuned.json", "tuned.html", "tuned.safetensors", "tuned", "."])
def test_a_tuned_base_is_a_pt_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], name: str
) -> None:
    """Another name would be written over by the scores, or not load after hours of training."""
    monkeypatch.chdir(tmp_path)
    line = refused("finetune", "data.yaml", "--base", "base.pt", "-o", name)
    assert "a .pt file" in line
    assert line.endswith(f" {name}\n")
    assert not list(tmp_path.iterdir())


def test_an_analysis_ends_with_a_fit_command_that_has_all_its_options() -> None:
    advice = [
        {"setting": "dispersion", "value": "full"},
        {"setting": "alpha", "value": "2"},
        {"setting": "scale-weight", "value": "off"},
    ]
    words = shlex.split(_fit_command(Path("a b.yaml"), Path("base.pt"), Path("images"), 640, advice))
    assert words[:3] == ["halopose", "fit", "a b.yaml"]
    command = vars(get_command(app))["commands"]["fit"]
    parsed = command.make_context("fit", words[2:], resilient_parsing=False).params
    assert (parsed["dispersion"], parsed["alpha"], parsed["scale_weight"]) == ("full", 2.0, False)
    assert (parsed["images"], parsed["imgsz"]) == (Path("images"), 640)
