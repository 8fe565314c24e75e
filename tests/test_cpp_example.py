"""The C++ example is compiled with OpenVINO's wheel and prints what predict.py prints."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from halopose.deploy.exporting import export_model
from halopose.deploy.graph import TopkSettings
from halopose.deploy.onnx_file import DetectionSettings, ExportSettings, write_model
from tests.helpers.models import ASSETS, ROOT, artifact_for, host_of

EXAMPLE = ROOT / "examples" / "cpp"
needed = all(shutil.which(name) for name in ("cmake", "c++")) and sys.platform == "linux"
pytestmark = [
    pytest.mark.skipif(not needed, reason="needs cmake and a C++ compiler on Linux"),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of tracing
]


def test_the_program_prints_what_predict_prints(tmp_path: Path) -> None:
    """On photographs that are enlarged and reduced, so that resizing counts."""
    pytest.importorskip("openvino")
    check = runpy.run_path(str(EXAMPLE / "check.py"))
    model = tmp_path / "model.onnx"
    settings = ExportSettings("end2end", TopkSettings(189, 144), None, DetectionSettings(0.4, 0.6, "student-t"))
    write_model(export_model(host_of("11"), artifact_for(host_of("11"), imgsz=96), settings), model)
    program = check["build"](tmp_path / "build")
    worst, count = check["compare"](program, model, [ASSETS / "bus.jpg", ASSETS / "zidane.jpg"], 96, False)
    assert count > 3
    assert worst < check["LIMIT"]
    missing = subprocess.run([program, model, tmp_path / "none.ppm"], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert "pose: cannot read" in missing.stderr
