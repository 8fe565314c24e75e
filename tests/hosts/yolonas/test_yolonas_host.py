"""The YOLO-NAS host: letterbox, templates, forward pass, and checkpoints of SuperGradients and LibreYOLO."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from halopose.cli.app import app
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts.loading import load_host
from halopose.hosts.yolonas import yolonas_host as yolonas
from halopose.hosts.yolonas.yolonas_host import YoloNASHost
from halopose.prediction.uncertain_pose import UncertainPose
from tests.helpers.checkpoints import Foreign, Payload, one_line, tensors_in, views
from tests.helpers.models import (
    framework_on,
    host_of,
    photograph,
    pose_model,
    write_scenes,
)

pytestmark = pytest.mark.usefixtures("one_thread")
IMGSZ = 160


@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from([64, 160, 320, 672]))
def test_letterbox_of_yolonas(height: int, width: int, size: int) -> None:
    host, image = host_of("nas"), np.zeros((height, width, 3), np.uint8)
    if min(height, width) * min(size, 640) / max(height, width) <= 0.5:
        with pytest.raises(HaloposeError, match="vanishes"):
            host.preprocess([image], size, True)
        return
    batch, [box] = host.preprocess([image], size, True)
    assert batch.shape == (1, 3, size, size)
    rows, columns = (np.nonzero((batch[0, 0] == 0).any(axis).numpy())[0] for axis in (1, 0))
    assert (rows[0], columns[0]) == (0, 0)
    corner = box.to_input(np.array([width, height]))
    assert np.abs(corner - [len(columns), len(rows)]).max() <= 0.5 + 1e-9  # whole pixels, but one ratio
    assert max(len(rows), len(columns)) == min(size, 640)  # larger inputs are padded, not filled


def test_templates_of_yolonas_decode_to_its_keypoints() -> None:
    """Trunk and last layer give offsets; keypoints are (offset + anchor - 0.5) * stride. ReLU, windows 5, 5, 7."""
    host: Any = host_of("nas")
    output = host.forward(host.preprocess([photograph("bus.jpg")], 96, True)[0])
    found = []
    for level, (maps, template) in enumerate(zip(output.features, host.pose_templates(), strict=True)):
        for conv in template:
            assert conv.activation == "relu"
            maps = torch.nn.functional.conv2d(maps, conv.weight, conv.bias, padding=conv.reach).relu()
        offsets = getattr(host.model.heads, f"head{level + 1}").pose_pred(maps)[0].unflatten(0, (17, 2))
        rows, columns = torch.meshgrid(*(torch.arange(side) for side in maps.shape[2:]), indexing="ij")
        found.append(((offsets + torch.stack([columns, rows])) * host.strides[level]).flatten(2).permute(2, 0, 1))
    torch.testing.assert_close(torch.cat(found), output.keypoints[0], rtol=1e-4, atol=1e-2)
    assert [[conv.weight.shape[-1] for conv in template] for template in host.pose_templates()] == [
        [1, 3, 3], [1, 3, 3], [1, 3, 3, 3],
    ]  # fmt: skip


def test_forward_of_yolonas_is_the_models_own() -> None:
    model = pose_model("nas")
    batch, _ = host_of("nas").preprocess(views(), 96, True)
    with torch.no_grad():
        expected = tensors_in(model(batch))
    found = host_of("nas").forward(batch)
    assert len(expected) == 11
    assert all(torch.equal(one, other) for one, other in zip(tensors_in(found.raw), expected, strict=True))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("something wanted the network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


def supergradients(net: nn.Module, **more: Any) -> dict[str, Any]:
    """A checkpoint as SuperGradients writes one: weights among metrics, versions and processing parameters."""
    return {
        "net": net.state_dict(),
        "acc": np.float32(0.59),
        "epoch": 3,
        "metrics": {"valid": {"AP": np.float64(0.59), "loss": 1.5}},
        "packages": {"torch": "1.13.1"},
        "processing_params": {"conf": 0.05, "edge_links": [[0, 1]], "edge_colors": np.zeros((1, 3), np.int64)},
        **more,
    }


def test_supergradients_checkpoints_load(tmp_path: Path, offline: None) -> None:
    net, averaged = pose_model("nas", (4, 3), seed=1), pose_model("nas", (4, 3))
    for name, more, model in (("both.pth", {"ema_net": averaged.state_dict()}, averaged), ("net.pth", {}, net)):
        torch.save(supergradients(net, **more), tmp_path / name)
        host = load_host(tmp_path / name)
        assert isinstance(host, YoloNASHost)
        assert host.fingerprints == YoloNASHost(model).fingerprints
        assert (host.description, host.keypoint_count, host.class_names) == (name, 4, ("object",))


def test_weights_are_found_under_any_name() -> None:
    net, averaged = ({"heads.head1.pose_pred.weight": torch.full((8, 3), value)} for value in (1.0, 2.0))
    parallel = {f"module.{name}": value for name, value in averaged.items()}
    for checkpoint in (
        {"net": net, "ema_net": averaged},
        {"net": averaged, "ema_net": None},
        {"net": net, "ema_net": parallel},
        {"model": averaged, "train_model": net},
        averaged,
    ):
        assert yolonas._weights(checkpoint, "here").keys() == averaged.keys()
        assert next(iter(yolonas._weights(checkpoint, "here").values()))[0, 0] == 2


def nas_model(size: str, **options: Any) -> Any:
    from libreyolo.models.yolonas.nn import LibreYOLONASPoseModel

    return LibreYOLONASPoseModel(size, **options)


def test_constants_that_some_versions_saved_are_no_obstacle() -> None:
    with torch.device("meta"):
        model = nas_model("n")
        state = model.state_dict()
        assert yolonas._build(state | dict(model.named_buffers()), "here").config == "n"
        for name in ("heads.head1.extra.weight", "heads.head1.reg_pred.weight"):
            with pytest.raises(HaloposeError, match="here does not fit") as error:
                yolonas._build(state | {name: torch.zeros(4, 4)}, "here")
            one_line(error)


def test_libreyolo_checkpoints_load_with_what_they_say(tmp_path: Path, offline: None) -> None:
    from libreyolo.utils.serialization import wrap_libreyolo_checkpoint

    model = pose_model("nas", (5, 3), 3)
    content = wrap_libreyolo_checkpoint(
        model.state_dict(), model_family="yolonas", size="n", task="pose", nc=3, names={0: "a", 1: "b", 2: "c"},
        imgsz=320, config={"assigner_multiply_by_pose_oks": False}, oks_sigmas=[0.1, 0.2, 0.3, 0.4, 0.5],
    )  # fmt: skip
    torch.save(content, tmp_path / "best.pt")
    host: Any = load_host(tmp_path / "best.pt")
    assert host.fingerprints == YoloNASHost(model).fingerprints
    assert host.class_names == ("a", "b", "c")
    sigmas = host.layout.sigmas
    assert sigmas == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert not host._criterion(sigmas).assigner.multiply_by_pose_oks
    assert YoloNASHost.load(tmp_path / "best.pt", oks_factor=True)._criterion(sigmas).assigner.multiply_by_pose_oks


@pytest.mark.parametrize(("size", "millions"), [("n", 9.9), ("s", 22.2), ("m", 58.2), ("l", 79.4)])
def test_model_size_follows_from_the_weights(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = yolonas._build(nas_model(size, num_keypoints=4).state_dict(), "here")
    assert model.config == size
    assert sum(value.numel() for value in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


def test_foreign_pickles_of_yolonas_are_refused_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    contents = {
        "hidden.pth": supergradients(pose_model("nas"), extra=Payload(marker)),
        "foreign.pth": supergradients(pose_model("nas"), ema_net=Foreign()),
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(HaloposeError, match=name) as error:
            load_host(tmp_path / name)
        assert "it holds " in one_line(error)
        assert "unsafe" in one_line(error)
        assert not marker.exists()
    load_host(tmp_path / "hidden.pth", unsafe=True)
    assert marker.exists()  # the payload does work


def test_wrong_yolonas_checkpoints_are_one_line_errors(tmp_path: Path, offline: None) -> None:
    state = pose_model("nas").state_dict()
    contents = {
        "detector.pth": {name: value for name, value in state.items() if "pose_pred" not in name},
        "lacking.pth": {name: value for name, value in state.items() if not name.startswith("neck.neck1")},
        "width.pth": state | {"heads.head1.cls_pred.weight": torch.zeros(18, 50, 1, 1)},
        "list.pth": [state],
        "whole.pth": state,
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / name)
    whole = (tmp_path / "whole.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[: len(whole) // 2])
    for name in ("detector.pth", "lacking.pth", "width.pth", "list.pth", "cut.pth", "missing.pth"):
        with pytest.raises(HaloposeError, match=name) as error:
            YoloNASHost.load(tmp_path / name)
        one_line(error)
    with pytest.raises(HaloposeError, match="one-to-one"):
        load_host(tmp_path / "whole.pth", end2end=True)


def test_yolonas_takes_pose_models_only() -> None:
    from libreyolo.models.yolonas.nn import LibreYOLONASModel

    with torch.device("meta"):
        detector = LibreYOLONASModel("s")
    with pytest.raises(HaloposeError, match="not a YOLO-NAS"):
        load_host(detector)


def test_yolonas_all_the_way(tmp_path: Path) -> None:
    """The command line from a checkpoint to an artifact, and predictions with it."""
    model = pose_model("nas")
    torch.save(supergradients(model), tmp_path / "nas.pth")
    data = write_scenes(tmp_path / "data", host_of("nas"), {"train": 6, "val": 6})
    artifact = tmp_path / "heads.safetensors"
    arguments = ["fit", data, "--base", tmp_path / "nas.pth", "-o", artifact, "--imgsz", 64, "--epochs", 2]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert Artifact.load(artifact).fits(host_of("nas"))
    [poses] = UncertainPose.load(tmp_path / "nas.pth", artifact).predict(photograph("bus.jpg"), imgsz=IMGSZ)
    expected = framework_on("nas", "bus.jpg", IMGSZ)
    assert np.array_equal(poses.keypoints, expected.keypoints.data[..., :2].numpy())
    assert (np.linalg.eigvalsh(poses.covariance) > 0).all()
