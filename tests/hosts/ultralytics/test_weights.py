"""Models as safetensors: equal outputs after a round trip, and errors for damaged files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from halopose.errors import HaloposeError
from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost
from halopose.hosts.ultralytics.weights import read_model, save_model
from tests.helpers.models import pose_model


def rounded(model: Any) -> Any:
    """The model with weights that half precision holds exactly."""
    state = {k: v.half().float() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("kind", ["11", "26"])
def test_a_model_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    model = rounded(pose_model(kind, (4, 3)))
    model.kpt_oks_sigmas = [0.1, 0.2, 0.3, 0.4]
    model.names = {0: "runway"}
    save_model(model, tmp_path / "model.safetensors", "AGPL-3.0")
    again = UltralyticsHost.load(tmp_path / "model.safetensors")
    first = UltralyticsHost(model)
    batch = torch.rand(1, 3, 64, 96)
    assert torch.equal(first.forward(batch).keypoints, again.forward(batch).keypoints)
    assert first.fingerprints == again.fingerprints
    assert again.layout.sigmas == (0.1, 0.2, 0.3, 0.4)
    assert again.class_names == ("runway",)


def test_a_fused_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match="fused"):
        save_model(UltralyticsHost(pose_model("11")).model, tmp_path / "model.safetensors", "AGPL-3.0")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("activation", "open('{0}', 'w')"),
        ("activation", "nn.SiLU().register_buffer(str(open('{0}', 'w')), None)"),
        ("head", [[-1, 1, "check_requirements", ["x"]]]),
        ("head", [[-1, 1, "nn.init.zeros_", []]]),
        ("head", [[-1, 1, "torch_safe_load", ["{0}"]]]),
        ("backbone", [[-1, 10**9, "Conv", [64, 3, 2]]]),
        ("backbone", [[-1, 1, "Conv", [2**31, 3, 2]]]),
        ("backbone", None),
        ("head", "Conv"),
    ],
)
def test_an_architecture_that_would_run_code_or_never_end_is_refused(part: str, value: Any, tmp_path: Path) -> None:
    """The framework evaluates an activation and calls what a layer's name stands for: neither is reached."""
    save_model(pose_model("11"), tmp_path / "model.safetensors", "AGPL-3.0")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        content = json.loads(file.metadata()["halopose"])
    evidence = tmp_path / "evidence"
    content["yaml"][part] = json.loads(json.dumps(value).replace("{0}", str(evidence)))
    save_file({"a": torch.zeros(2)}, tmp_path / "evil.safetensors", metadata={"halopose": json.dumps(content)})
    with pytest.raises(HaloposeError, match="none of the framework's"):
        read_model(tmp_path / "evil.safetensors")
    assert not evidence.exists()


def test_foreign_and_damaged_files_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(HaloposeError, match="which model"):
        read_model(tmp_path / "foreign.safetensors")
    save_model(pose_model("11"), tmp_path / "model.safetensors", "AGPL-3.0")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(HaloposeError, match="damaged"):
        read_model(tmp_path / "cut.safetensors")
