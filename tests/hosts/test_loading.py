"""The host of each model, models without a host, and which modules import a framework."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from ultralytics.nn.tasks import DetectionModel

import halopose
from halopose.errors import HaloposeError
from halopose.hosts.loading import load_host
from tests.helpers.checkpoints import one_line

pytestmark = pytest.mark.usefixtures("one_thread")


def test_other_models_are_refused(tmp_path: Path) -> None:
    detector = DetectionModel("yolov8n.yaml", nc=1, verbose=False)
    with pytest.raises(HaloposeError, match="not a pose model"):
        load_host(detector)
    torch.save({"model": detector}, tmp_path / "detector.pt")
    with pytest.raises(HaloposeError, match=r"detector\.pt is not"):
        load_host(tmp_path / "detector.pt")


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Sequential(nn.Conv2d(3, 3, 1))])
def test_modules_that_are_no_yolo_are_refused(module: nn.Module, tmp_path: Path) -> None:
    torch.save({"model": module}, tmp_path / "module.pt")
    for base in (module, tmp_path / "module.pt"):
        with pytest.raises(HaloposeError) as error:
            load_host(base)
        one_line(error)


def test_only_hosts_import_a_framework() -> None:
    package = Path(halopose.__file__).parent
    for path in package.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        if {"ultralytics", "libreyolo"} & {module.split(".")[0] for module in modules}:
            rooms = ("hosts", "finetuning")  # finetuning trains base models with the framework's own trainer
            assert path.relative_to(package).parts[0] in rooms, f"{path} imports a framework"
