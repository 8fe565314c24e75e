"""Quantised models: the base's convolutions are in few bits, decoding and heads are not, and poses stay close."""

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest

from halopose.data.images import NamedImage
from halopose.deploy import quantise
from halopose.deploy.deployed_model import Deployed, Detecting
from halopose.deploy.graph import TopkSettings
from halopose.deploy.onnx_file import ExportSettings, build, read_facts, write_model
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import shipped_artifact
from tests.helpers.models import PHOTOGRAPHS, artifact_for, host_of, photograph

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SIZE = 96


@pytest.fixture(scope="module", params=["topk", "dense"])
def model(request: pytest.FixtureRequest) -> onnx.ModelProto:
    artifact = artifact_for(host_of("v8"), imgsz=SIZE)
    return build(host_of("v8"), artifact, ExportSettings(request.param, TopkSettings(200, 100)))


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """Element types of values by name."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    return {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}


def gap(path: Path, other: Path) -> float:
    """Median difference of the keypoints of the best detections, in pixels of the photograph."""
    found, expected = (
        Deployed(file).predict(photograph("bus.jpg"), Detecting(conf=0.3), "gaussian") for file in (path, other)
    )
    nearest = np.abs(found.keypoints[:, None] - expected.keypoints[None, :5]).max((2, 3)).argmin(0)
    return float(np.median(np.abs(found.keypoints[nearest] - expected.keypoints[:5])))


def test_half_precision_ends_at_the_last_convolutions(model: onnx.ModelProto, tmp_path: Path) -> None:
    half = quantise.to_half(model)
    assert read_facts(half, "").precision == "half"
    assert half.ByteSize() < 0.75 * model.ByteSize()
    types = types_of(half)
    for node in half.graph.node:
        kinds = {types.get(name) for name in node.output}
        if node.op_type == "Conv" and not node.name.startswith(quantise.HEADS):
            assert kinds == {onnx.TensorProto.FLOAT16}, node.name
        if node.name.startswith(quantise.HEADS):
            assert onnx.TensorProto.FLOAT16 not in kinds, node.name
    assert all(types[value.name] != onnx.TensorProto.FLOAT16 for value in half.graph.output)
    write_model(half, tmp_path / "half.onnx")
    write_model(model, tmp_path / "float.onnx")
    assert 0 < gap(tmp_path / "half.onnx", tmp_path / "float.onnx") < 0.5


def test_eight_bits_leave_the_heads_in_float(model: onnx.ModelProto) -> None:
    images = (NamedImage(name, cv2.resize(photograph(name), (SIZE, SIZE))) for name in PHOTOGRAPHS)
    small = quantise.to_int8(model, images)
    assert read_facts(small, "").precision == "int8"
    made = {name: node for node in small.graph.node for name in node.output}
    for node in small.graph.node:
        quantised = any(made[name].op_type == "DequantizeLinear" for name in node.input if name in made)
        if node.name.startswith(quantise.HEADS):
            assert not quantised, node.name
        elif node.op_type == "Conv":
            assert quantised != ("/model.22/" in node.name), node.name  # the framework's own head


def test_a_trained_model_in_eight_bits_moves_by_a_fraction_of_what_it_states(
    published_base: Path, tmp_path: Path
) -> None:
    """Random weights would say nothing here: without structure, roundings pass through to the pixels."""
    heads = replace(Artifact.load(shipped_artifact()), imgsz=320)
    model = build(load_host(published_base), heads)
    small = quantise.to_int8(model, [NamedImage(name, photograph(name)) for name in PHOTOGRAPHS])
    found = []
    for name, written in (("float", model), ("int8", small)):
        write_model(written, tmp_path / f"{name}.onnx")
        deployed = Deployed(tmp_path / f"{name}.onnx")
        found.append(deployed.predict(photograph("bus.jpg"), Detecting(conf=0.5), "gaussian"))
    expected, rounded = found
    assert len(expected) == len(rounded) == 3
    nearest = np.abs(rounded.keypoints[:, None] - expected.keypoints[None]).max((2, 3)).argmin(0)
    off = np.abs(rounded.keypoints[nearest] - expected.keypoints)
    sigma = np.sqrt(np.diagonal(expected.covariance, axis1=2, axis2=3))
    assert 0 < np.median(off / sigma) < 0.2
    assert np.median(rounded.covariance[nearest] / expected.covariance) == pytest.approx(1, abs=0.1)


def test_a_model_without_convolutions_is_refused(model: str) -> None:
    empty = onnx.ModelProto()
    empty.CopyFrom(model)
    del empty.graph.node[:]
    with pytest.raises(HaloposeError, match="no convolutions"):
        quantise.to_int8(empty, [])
