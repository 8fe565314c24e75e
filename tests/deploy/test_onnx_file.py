"""Model files: their content, and the errors for foreign, damaged and incomplete files."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halopose.deploy.deployed_model import Deployed, Detecting
from halopose.deploy.graph import Deployable, TopkSettings
from halopose.deploy.onnx_file import ExportSettings, build, read_model, sealed, set_temperature, write_model
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.prediction.uncertain_pose import UncertainPose
from tests.helpers.models import artifact_for, host_of, photograph
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return build(host_of("11"), artifact_for(host_of("11"), imgsz=96), ExportSettings(topk=TopkSettings(200, 100)))


def changed(model: onnx.ModelProto, **values: str | None) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for entry in list(copy.metadata_props):
        if entry.key in values:
            if values[entry.key] is None:
                copy.metadata_props.remove(entry)
            else:
                entry.value = values[entry.key]
    return copy


def test_the_file_describes_itself(model: onnx.ModelProto) -> None:
    artifact = artifact_for(host_of("11"), imgsz=96)
    kept = {entry.key: entry.value for entry in model.metadata_props}
    assert kept["format"] == "halopose-deployed-2"
    assert json.loads(kept["fingerprint"]) in artifact.base
    assert np.allclose(json.loads(kept["temperature"]), artifact.calibrations.gaussian.tau_)
    assert np.allclose(json.loads(kept["student_dof"]), artifact.calibrations.student.nu_)
    assert json.loads(kept["threshold"]) == artifact.calibrations.threshold
    assert tuple(json.loads(kept["keypoint_names"])) == artifact.layout.names
    assert not {node.op_type for node in model.graph.node} & {"NonZero", "NonMaxSuppression", "Loop", "If"}
    shapes = {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert shapes == {
        "images": ["batch", 3, "height", "width"],
        "output0": ["batch", 56, "anchors"],
        "factors": ["batch", 300, 17, 3],
        "cells": ["batch", 300],
    }
    assert model.opset_import[0].version == 17


def test_an_artifact_of_another_base_is_refused() -> None:
    with pytest.raises(HaloposeError, match="another base"):
        build(host_of("11"), artifact_for(host_of("v8")))


def test_another_temperature_scales_the_factors_and_nothing_else(model: onnx.ModelProto) -> None:
    other = changed(model)
    tau = np.linspace(0.5, 3, 17)
    set_temperature(other, tau.tolist())
    image = np.random.default_rng(0).uniform(size=(1, 3, 64, 96)).astype(np.float32)
    before, after = (
        onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            ["output0", "factors"], {"images": image}
        )
        for graph in (model, other)
    )
    ratio = tau / artifact_for(host_of("11")).calibrations.gaussian.tau_.numpy()
    assert np.array_equal(before[0], after[0])
    assert np.allclose(after[1], before[1] * ratio[:, None], rtol=1e-5)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"sigmas": None}, "'sigmas'"),
        ({"student_dof": "[1, 2"}, "'student_dof'"),
        ({"temperature": "[1.0]"}, "numbers of keypoints"),
        ({"format": "halopose-deployed-3"}, "halopose-deployed-3"),
        ({"format": None}, "halopose export"),
    ],
)
def test_foreign_and_newer_files_are_one_line_errors(
    model: onnx.ModelProto, values: dict[str, Any], line: str, tmp_path: Path
) -> None:
    write_model(changed(model, **values), tmp_path / "model.onnx")
    with pytest.raises(HaloposeError, match=r"^[^\n]*$") as error:
        UncertainPose.load(tmp_path)
    assert line in str(error.value)


@pytest.mark.parametrize("content", [b"", b"no model", None])
def test_damaged_files_are_one_line_errors(model: onnx.ModelProto, content: bytes | None, tmp_path: Path) -> None:
    whole = sealed(model)
    (tmp_path / "model.onnx").write_bytes(whole[: len(whole) // 2] if content is None else content)
    for opener in (UncertainPose.load, lambda folder: read_model(folder / "model.onnx")):
        with pytest.raises(HaloposeError, match="is damaged") as error:
            opener(tmp_path)
        assert "\n" not in str(error.value)
    with pytest.raises(HaloposeError, match="no model"):
        Deployed(tmp_path / "elsewhere")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_refused(model: onnx.ModelProto, tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(sealed(model))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "model.onnx").write_bytes(whole)
    with pytest.raises(HaloposeError, match="is damaged"):
        read_model(tmp_path / "model.onnx")
    with pytest.raises(HaloposeError, match="is damaged"):
        Deployed(tmp_path)


def test_external_data_is_refused(model: onnx.ModelProto, tmp_path: Path) -> None:
    """The checksum covers one file: weights in another file could be exchanged without notice."""
    copy = changed(model)
    onnx.external_data_helper.convert_model_to_external_data(copy, location="weights.bin", size_threshold=1024)
    onnx.save(copy, str(tmp_path / "plain.onnx"))
    outside = onnx.load(str(tmp_path / "plain.onnx"), load_external_data=False)
    with pytest.raises(HaloposeError, match="external data"):
        write_model(outside, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
    (tmp_path / "model.onnx").write_bytes(checksummed(outside.SerializeToString()))
    for opener in (Deployed, lambda folder: read_model(folder / "model.onnx")):
        with pytest.raises(HaloposeError, match="external data"):
            opener(tmp_path)


def checksummed(data: bytes) -> bytes:
    """A serialised model with a checksum that matches, independent of the writer."""
    head = onnx.ModelProto()
    entry = head.metadata_props.add()
    entry.key, entry.value = "checksum", "0" * 64
    whole = data + head.SerializeToString()  # messages that follow each other are merged
    return whole.replace(b"0" * 64, hashlib.sha256(whole).hexdigest().encode())


def test_images_and_settings_that_do_not_fit_are_one_line_errors(model: onnx.ModelProto, tmp_path: Path) -> None:
    write_model(model, tmp_path / "model.onnx")
    deployed = Deployed(tmp_path)
    for image in (np.zeros((8, 8), np.uint8), np.zeros((8, 8, 3)), np.zeros((0, 8, 3), np.uint8)):
        with pytest.raises(HaloposeError, match="uint8 arrays"):
            deployed.predict(image, Detecting(), "gaussian")
    with pytest.raises(HaloposeError, match="cauchy"):
        deployed.predict(photograph("bus.jpg"), Detecting(), "cauchy")


@pytest.mark.xfail(reason="torch's newer exporter still fails on parts of these models", strict=False)
@pytest.mark.filterwarnings("ignore")
def test_the_newer_exporter() -> None:
    pytest.importorskip("onnxscript")
    artifact: Artifact = artifact_for(host_of("11"))
    graph = Deployable(host_of("11").traceable(), artifact, "dense", TopkSettings()).eval()
    program = torch.onnx.export(graph, (torch.zeros(1, 3, 64, 96),), dynamo=True)
    onnx.checker.check_model(present(program).model_proto)
