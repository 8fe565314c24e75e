"""halopose doctor: problems are named with what to do, and nothing is downloaded."""

import os
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from halopose.cli.app import app
from halopose.install_advice import install_command
from halopose.reports import environment
from halopose.reports.environment import all_extras, check_environment, to_text


def test_every_extra_is_listed_with_its_use() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    section = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert set(all_extras()) == set(re.findall(r"^(\w+) = ", section, re.MULTILINE)) - {"dev", "docs", "fuzz"}


def test_missing_packages_are_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HALOPOSE_CACHE", str(tmp_path))
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name in ("ultralytics", "libreyolo") else name)
    monkeypatch.setattr(environment, "ensure_torchvision", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found = check_environment()
    whole = "\n".join(found.problems)
    for words in ("no pose framework", "built for another PyTorch", "1 of 8 processors"):
        assert words in whole
    assert [model.ready for model in found.models if model.name == "yolo11n-pose"] == [False]
    assert not list(tmp_path.iterdir())
    text = to_text(found)
    assert f"missing ultralytics: {install_command('ultralytics')}" in text
    assert "runway-footage" in text
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_a_sound_machine_has_no_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: name)
    monkeypatch.setattr(environment, "ensure_torchvision", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", None, raising=False)
    assert "no problems found" in to_text(check_environment())
