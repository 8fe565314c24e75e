"""Out-of-distribution p-values of the exported model: compared with the package."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halopose.data.images import NamedImage
from halopose.deploy import quantise
from halopose.deploy.deployed_model import Deployed, Detecting
from halopose.deploy.novelty_graph import image_vectors
from halopose.deploy.onnx_file import ExportSettings, build, read_facts, write_model
from halopose.landing import shipped_detectors
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import sample_scene
from halopose.prediction.stream_monitor import StreamMonitor
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.runtime import predict
from halopose.types import Array
from halopose.uncertainty.novelty import pool_images
from tests.helpers.models import artifact_for, host_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def pose() -> UncertainPose:
    return UncertainPose.load_base(shipped_detectors.runway_detector(), shipped_detectors.runway_artifact())


@pytest.fixture(scope="module")
def scenes() -> list[Array]:
    """A clear and a foggy scene."""
    return [render_scene(sample_scene(900, "clear")), render_scene(sample_scene(901, "fog"))]


def cut(scenes: list[Array]) -> list[Array]:
    return [scenes[0], scenes[0][:, 40:441], scenes[1][50:331], scenes[1]]


def test_p_values_equal_those_of_the_package(pose: UncertainPose, scenes: list[Array], tmp_path: Path) -> None:
    model = build(pose.host, pose.artifact)
    for name, written in (("float", model), ("half", quantise.to_half(model))):
        write_model(written, tmp_path / f"{name}.onnx")
    found = 0
    for image in cut(scenes):
        [expected] = pose.predict(image, conf=0.05)
        for name, tolerance in (("float", 0.01), ("half", 0.1)):
            poses = Deployed(tmp_path / f"{name}.onnx").predict(image, Detecting(conf=0.05), "gaussian")
            assert poses.image_novelty == pytest.approx(expected.image_novelty, abs=tolerance)
            if name == "float":
                assert poses.novelty == pytest.approx(expected.novelty, abs=tolerance)
        found += len(expected)
    assert found >= 3


def test_eight_bits_take_novelty_along(pose: UncertainPose, scenes: list[Array], tmp_path: Path) -> None:
    small = quantise.to_int8(build(pose.host, pose.artifact), [NamedImage("", image) for image in scenes])
    write_model(small, tmp_path / "model.onnx")
    clear, fog = (predict.Model(str(tmp_path / "model.onnx")).detect(image).image_novelty for image in scenes)
    assert fog is not None
    assert clear is not None
    assert fog < clear


def test_the_dense_form_leaves_novelty_out(pose: UncertainPose) -> None:
    dense = build(pose.host, pose.artifact, ExportSettings("dense"))
    assert read_facts(dense, "").novelty is None
    assert [value.name for value in dense.graph.input] == ["images"]


def test_an_alarm_needs_novelty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scenes: list[Array], pose: UncertainPose
) -> None:
    np.save(tmp_path / "fog.npy", scenes[1])
    for host, artifact in ((host_of("11"), artifact_for(host_of("11"), imgsz=64)), (pose.host, pose.artifact)):
        write_model(build(host, artifact), tmp_path / "model.onnx")
        given_ = [str(tmp_path / "fog.npy"), "--model", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out")]
        code = predict.main([*given_, "--conf", "0.05", "--alarm", "0.05"])
        printed = capsys.readouterr()
        if artifact.novelty is None:
            assert (code, printed.err.count("\n")) == (2, 1)
            assert "halopose novelty" in printed.err
        else:
            assert code == 0
            assert "unlike anything seen" in printed.out


def test_the_monitor_of_the_runtime_is_that_of_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scenes: list[Array], pose: UncertainPose
) -> None:
    write_model(build(pose.host, pose.artifact), tmp_path / "model.onnx")
    deployed, watch = predict.Model(str(tmp_path / "model.onnx")), StreamMonitor(pose, 0.3)
    paths = [str(tmp_path / f"{n:02d}.npy") for n in range(9)]
    for n, path in enumerate(paths):
        np.save(path, scenes[n % len(scenes)])
        watch.update(cast("Any", deployed.predict(scenes[n % len(scenes)])), path)
    given_ = [*paths, "--model", str(tmp_path / "model.onnx"), "--json"]
    assert predict.main([*given_, "--monitor", "0.3"]) == 0
    said = capsys.readouterr().err
    assert f"monitor: {watch.state}" in said
    assert said.count("no longer like") == watch.state.alarmed
    assert predict.main([*given_, "--monitor", "0"]) == 2
    write_model(build(host_of("11"), artifact_for(host_of("11"), imgsz=64)), tmp_path / "model.onnx")
    assert predict.main([*given_, "--monitor", "0.3"]) == 2
    assert "halopose novelty" in capsys.readouterr().err


@given(st.integers(0, 2**31), st.integers(1, 3))
def test_image_vectors_are_means_over_the_image_alone(seed: int, batch: int) -> None:
    rng = np.random.default_rng(seed)
    strides, height, width = (8, 16), 64, 96
    maps = [torch.from_numpy(rng.normal(size=(batch, 3, height // s, width // s))).float() for s in strides]
    corners = np.sort(rng.uniform(0, 1, (batch, 2, 2)), axis=1) * [width, height]
    area = torch.from_numpy(corners.reshape(batch, 4)).float()
    expected = pool_images(maps, strides, [tuple(row) for row in area.tolist()])
    torch.testing.assert_close(image_vectors(maps, strides, area), expected, equal_nan=True)
