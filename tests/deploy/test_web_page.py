"""Web page: its arithmetic against the Python runtime (needs Node), its files, and its server."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from halopose.deploy import web_page
from halopose.deploy.graph import TopkSettings
from halopose.deploy.onnx_file import ExportSettings, build, write_model
from halopose.errors import HaloposeError
from halopose.runtime import predict
from tests.helpers.models import ROOT, artifact_for, host_of, photograph

pytestmark = pytest.mark.usefixtures("one_thread")
SOURCE = ROOT / "src" / "halopose" / "deploy" / "web" / "pose.js"
SCRIPT = """
import { readFileSync, writeFileSync } from "fs";
import { describe, ellipse, prepare, select } from "./pose.mjs";
const { facts, width, height, imgsz, conf, shapes } = JSON.parse(readFileSync("given.json"));
const input = prepare(new Uint8ClampedArray(readFileSync("pixels")), width, height, facts, imgsz);
writeFileSync("input", Buffer.from(input.data.buffer));
const outputs = {};
for (const [name, [dims, whole]] of Object.entries(shapes)) {
  const bytes = new Uint8Array(readFileSync(name)).buffer;
  outputs[name] = { dims, data: whole ? new BigInt64Array(bytes) : new Float32Array(bytes) };
}
const found = select(facts, outputs, input.box, conf, 0.7);
const laws = ["gaussian", "student-t"].map((family) => found.map((one) => describe(facts, one, family)));
const axes = found.map((one) => {
  const { scale, dof } = describe(facts, one, "student-t");
  return ellipse(scale[3], dof[3], 0.9);
});
writeFileSync("result.json", JSON.stringify({ dims: input.dims, laws, axes }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
@pytest.mark.parametrize("kind", ["11", "26-one-to-one", "nas"])
def test_the_page_computes_what_the_runtime_computes(kind: str, tmp_path: Path) -> None:
    host = host_of(kind)
    settings = ExportSettings(topk=TopkSettings(400, 100))
    write_model(build(host, artifact_for(host, imgsz=160), settings), tmp_path / "model.onnx")
    model = predict.Model(str(tmp_path / "model.onnx"))
    image = photograph("zidane.jpg")[:600, :900]
    pixels, _ = predict.prepare(image, model.facts, 160)
    outputs = model.run(pixels[None])
    rgba = np.concatenate([image[..., ::-1], np.full((*image.shape[:2], 1), 255, np.uint8)], axis=2)
    (tmp_path / "pixels").write_bytes(rgba.tobytes())
    for name, value in outputs.items():
        (tmp_path / name).write_bytes(value.tobytes())
    shapes = {name: [value.shape, value.dtype == np.int64] for name, value in outputs.items()}
    given = {"facts": vars(model.facts), "width": 900, "height": 600, "imgsz": 160, "conf": 0.4, "shapes": shapes}
    (tmp_path / "given.json").write_text(json.dumps(given))
    (tmp_path / "pose.mjs").write_bytes(SOURCE.read_bytes())
    (tmp_path / "script.mjs").write_text(SCRIPT)
    done = subprocess.run(["node", "script.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    made = np.fromfile(tmp_path / "input", np.float32).reshape(result["dims"])
    assert np.abs(made[0] - pixels).max() < 1e-6
    for family, poses in zip(predict.FAMILIES, result["laws"], strict=True):
        expected = model.predict(image, conf=0.4, family=family)
        assert len(poses) == len(expected) > 3
        for key in ("keypoints", "keep"):
            assert np.allclose([pose[key] for pose in poses], getattr(expected, key), atol=1e-3), key
        assert np.allclose([pose["box"] for pose in poses], expected.boxes, atol=1e-3)
        for key in ("covariance", "scale"):
            wanted = predict._triangle(getattr(expected, key))
            assert np.allclose([pose[key] for pose in poses], wanted, rtol=1e-5), key
    axes, angles = predict.ellipses(expected, 0.9)
    assert np.allclose([[one["major"], one["minor"]] for one in result["axes"]], axes[:, 3], rtol=1e-5)
    assert np.allclose([one["angle"] for one in result["axes"]], angles[:, 3], atol=1e-5)


def test_without_npm_and_cache_it_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOPOSE_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(HaloposeError, match="onnxruntime-web") as error:
        web_page.runtime_package()
    assert str(tmp_path / web_page.PACKAGE) in str(error.value)
    assert "\n" not in str(error.value)
    (tmp_path / web_page.PACKAGE).write_bytes(b"something else of that name")
    with pytest.raises(HaloposeError, match="cannot fetch"):
        web_page.runtime_package()


def test_the_server_refuses_ports_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        for arguments in (["many"], ["70000"], ["-1"], ["٣"], ["1", "2"], [str(taken.getsockname()[1])]):
            script = SOURCE.with_name("serve.py")
            done = subprocess.run(
                [sys.executable, script, *arguments], capture_output=True, text=True, check=False, timeout=60
            )
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
            assert "port" in done.stderr


def test_a_page_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file that the page names exists."""
    model = build(host_of("11"), artifact_for(host_of("11")))
    monkeypatch.setattr(web_page, "runtime_package", lambda: b"")
    monkeypatch.setattr(web_page, "unpacked", lambda content: dict.fromkeys(web_page.RUNTIME, b"runtime"))
    web_page.write_page(tmp_path / "web", model)
    text = "".join((tmp_path / "web" / name).read_text() for name in web_page.PAGE)
    for name in (
        "style.css",
        "app.js",
        "pose.js",
        "worker.js",
        "facts.json",
        "model.onnx",
        "ort/ort.wasm.min.mjs",
    ):
        assert name in text
        assert (tmp_path / "web" / name).is_file()
    assert "//cdn" not in text
    assert "https://" not in text
    assert json.loads((tmp_path / "web" / "facts.json").read_text())["layout"] == "ultralytics"
