"""The Node example prints what predict.py prints; where onnxruntime-node is installed beside it."""

import runpy
import shutil
from pathlib import Path

import pytest

from halopose.deploy.exporting import export_model
from halopose.deploy.graph import TopkSettings
from halopose.deploy.onnx_file import DetectionSettings, ExportSettings, write_model
from tests.helpers.models import ASSETS, ROOT, artifact_for, host_of

EXAMPLES = ROOT / "examples"
needed = shutil.which("node") and (EXAMPLES / "node" / "node_modules" / "onnxruntime-node").is_dir()
pytestmark = [
    pytest.mark.skipif(not needed, reason="needs Node, and npm install --ignore-scripts in examples/node"),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of tracing
]


def test_the_script_prints_what_predict_prints(tmp_path: Path) -> None:
    check = runpy.run_path(str(EXAMPLES / "cpp" / "check.py"))
    model, program = tmp_path / "model.onnx", tmp_path / "pose"
    settings = ExportSettings("end2end", TopkSettings(189, 144), None, DetectionSettings(0.4, 0.6, "gaussian"))
    write_model(export_model(host_of("11"), artifact_for(host_of("11"), imgsz=96), settings), model)
    program.write_text(f'#!/bin/sh\nexec node {EXAMPLES / "node" / "pose.js"} "$@"\n')
    program.chmod(0o755)
    worst, count = check["compare"](program, model, [ASSETS / "bus.jpg", ASSETS / "zidane.jpg"], 96, True)
    assert count > 3
    assert worst < check["LIMIT"]
