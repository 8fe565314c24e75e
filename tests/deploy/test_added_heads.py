"""Heads added to existing ONNX files: the network does not change, and covariances equal those of the package."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from halopose.deploy.deployed_model import Deployed, Detecting
from halopose.deploy.exporting import export_model
from halopose.deploy.graph import TopkSettings
from halopose.deploy.onnx_file import ExportSettings, read_facts, write_facts, write_model
from halopose.errors import HaloposeError
from halopose.hosts.onnx.onnx_host import OnnxHost
from halopose.prediction.uncertain_pose import UncertainPose
from tests.helpers import commands, onnx_files
from tests.helpers.models import artifact_for, photograph

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
SIZE = 96
SETTINGS = ExportSettings(topk=TopkSettings(189, 144))  # all cells


def size_of(name: str) -> int:
    """One-to-one outputs need 300 cells."""
    return 160 if name == "26-one-to-one" else SIZE


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def export(name: str) -> Path:
        folder = tmp_path_factory.mktemp("files")
        if name == "11 fixed":
            return onnx_files.with_fixed_input(export("11"), folder / "fixed.onnx", 4, SIZE)
        if name == "11 half":
            return onnx_files.in_half_precision(export("11"), folder / "half.onnx")
        if name == "11 transposed":
            return onnx_files.transposed(export("11"), folder / "transposed.onnx")
        if name == "11 external":
            return onnx_files.with_external_data(export("11"), folder / "external.onnx")
        if name == "11 eight bits":
            images = np.random.default_rng(0).uniform(size=(2, 3, SIZE, SIZE)).astype(np.float32)
            return onnx_files.in_eight_bits(export("11"), folder / "eight.onnx", images)
        kind, _, opset = name.partition(" opset ")
        return onnx_files.framework_onnx(kind, folder, size_of(kind), int(opset) if opset else None)

    return export


NAMES = (
    *("11", "v8 opset 11", "12 opset 21", "26-one-to-one", "nas"),
    *("11 fixed", "11 half", "11 eight bits", "11 transposed", "11 external"),
)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_untouched_and_covariances_equal_those_of_the_package(
    name: str, file_of: Callable[[str], Path], tmp_path: Path
) -> None:
    path, size = file_of(name), size_of(name)
    host = OnnxHost(path)
    artifact = artifact_for(host, imgsz=size)
    settings = SETTINGS if size == SIZE else ExportSettings(topk=TopkSettings(525, 400))
    model, before = export_model(host, artifact, settings), onnx.load(path)
    for part in ("node", "initializer", "output", "input"):
        old, new = getattr(before.graph, part), getattr(model.graph, part)
        assert [each.SerializeToString() for each in old] == [each.SerializeToString() for each in new[: len(old)]]
    assert model.opset_import == before.opset_import
    keys = {entry.key: entry.value for entry in model.metadata_props}
    assert {entry.key: entry.value for entry in before.metadata_props}.items() <= keys.items()
    write_model(model, tmp_path / "model.onnx")
    deployed, package = Deployed(tmp_path / "model.onnx"), UncertainPose(host, artifact)
    for photo in ("bus.jpg", "zidane.jpg"):
        image = photograph(photo)
        found = deployed.predict(image, Detecting(imgsz=size), "gaussian")
        expected = package.predict(image, imgsz=size, family="gaussian")[0]
        assert len(found) == len(expected) > 0
        assert np.allclose(found.keypoints, expected.keypoints, atol=1e-2)
        trace = np.trace(expected.covariance, axis1=2, axis2=3)[..., None, None]
        tolerance = 2e-3 if "half" in name else 1e-4
        assert (np.abs(found.covariance - expected.covariance) <= tolerance * trace).all()


def test_original_outputs_are_bit_identical(file_of: Callable[[str], Path]) -> None:
    host = OnnxHost(file_of("11"))
    model = export_model(host, artifact_for(host, imgsz=SIZE), SETTINGS)
    images = np.random.default_rng(0).uniform(size=(2, 3, SIZE, SIZE)).astype(np.float32)
    sessions = [
        onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        for content in (file_of("11").read_bytes(), model.SerializeToString())
    ]
    before, after = (session.run(["output0"], {"images": images})[0] for session in sessions)
    assert np.array_equal(before, after)


def test_metadata_of_the_file_stay_when_calibration_changes(file_of: Callable[[str], Path]) -> None:
    host = OnnxHost(file_of("11"))
    model = export_model(host, artifact_for(host, imgsz=SIZE), SETTINGS)
    stride = {entry.key: entry.value for entry in model.metadata_props}["stride"]
    write_facts(model, replace(read_facts(model, "the model"), threshold=-1.0))
    keys = {entry.key: entry.value for entry in model.metadata_props}
    assert keys["stride"] == stride
    assert read_facts(model, "the model").threshold == -1.0


def test_a_file_with_a_tensor_of_the_same_name_is_refused(file_of: Callable[[str], Path], tmp_path: Path) -> None:
    model = onnx.load(file_of("11"))
    for node in model.graph.node:
        node.output[:] = ["cells" if name == host_feature(file_of("11")) else name for name in node.output]
        node.input[:] = ["cells" if name == host_feature(file_of("11")) else name for name in node.input]
    onnx.save(model, tmp_path / "clash.onnx")
    host = OnnxHost(tmp_path / "clash.onnx")
    with pytest.raises(HaloposeError, match="'cells'"):
        export_model(host, artifact_for(host, imgsz=SIZE), SETTINGS)


@cache
def host_feature(path: Path) -> str:
    return OnnxHost(path).features[0]


def test_the_command_exports_and_refuses_what_a_file_cannot_be(file_of: Callable[[str], Path], tmp_path: Path) -> None:
    host = OnnxHost(file_of("11 fixed"))
    artifact_for(host, imgsz=SIZE).save(tmp_path / "heads.safetensors")
    options = ("--base", file_of("11 fixed"), "--artifact", tmp_path / "heads.safetensors", "-o", tmp_path / "out")
    commands.run("export", *options)
    assert (tmp_path / "out" / "predict.py").is_file()
    for flag in ("--web", "--half"):
        with pytest.raises(HaloposeError, match=r"quantise|page"):
            commands.run("export", *options, flag)
