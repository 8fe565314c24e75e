"""The examples run unchanged in an empty folder and print the documented results."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halopose import Artifact
from tests.helpers.models import ROOT
from tests.helpers.values import read_picture

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run an example in an empty folder; return its variables and its output."""
    monkeypatch.chdir(tmp_path)

    def run_example(name: str, *arguments: Any, run_name: str = "__main__") -> Any:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        names = runpy.run_path(str(EXAMPLES / name), run_name=run_name)
        return names, capsys.readouterr().out

    return run_example


@pytest.mark.usefixtures("published_base")
def test_quickstart_is_sure_of_the_face_and_not_of_hidden_knees(run: Callable[..., Any]) -> None:
    names, printed = run("quickstart.py")
    assert printed.count("person with score") == 1
    lines = {line.split()[0]: line for line in printed.splitlines() if " ± " in line}
    assert len(lines) == 17
    assert "pruned" not in lines["nose"]
    assert "pruned" in lines["left_knee"]
    picture, photo = read_picture("astronaut-poses.png"), read_picture(names["photo"])
    assert picture.shape == photo.shape
    assert (picture != photo).any()


def test_your_own_model_ends_in_an_artifact_that_predicts(run: Callable[..., Any], tmp_path: Path) -> None:
    names, printed = run("your_own_model.py")
    assert "near left corner at" in printed
    artifact = Artifact.load(tmp_path / "your-own-model" / "heads.safetensors")
    assert artifact.fits(names["model"].host)
    assert artifact.card.images.counts() == {"heads": 40, "calibration": 20, "evaluation": 20}


def test_a_file_is_scored_by_its_truth(run: Callable[..., Any]) -> None:
    """Overconfident with heavy tails: calibrating helps, and the Student-t helps most."""
    names, printed = run("score_a_file.py")
    table = {line.split()[0]: [float(value) for value in line.split()[1:]] for line in printed.splitlines()[2:5]}
    assert table["student_t"][0] < 0.01 < 0.05 < table["uncalibrated"][0]
    assert table["student_t"][2] < table["gaussian"][2] < table["uncalibrated"][2]
    _, again = run("score_a_file.py", names["predictions"], names["truth"])
    assert again == printed


@pytest.mark.usefixtures("published_base")
def test_a_filter_gains_by_predicted_covariances(run: Callable[..., Any]) -> None:
    names, _ = run("filter_keypoints.py")
    alone, fixed, predicted = names["errors"].values()
    assert predicted < 0.95 * fixed < 0.95 * alone


def test_tag_and_chessboard_positions_lie_within_their_covariance(run: Callable[..., Any]) -> None:
    names, printed = run("tag_pose.py")
    assert printed.count("predicted standard deviation") == 6
    for pose in names["main"]().values():
        error = (pose.tvec - names["TVEC"]) / np.sqrt(np.diag(pose.covariance)[:3])
        assert np.abs(error).max() < 4


def test_ros_node_publishes_the_camera_pose(run: Callable[..., Any]) -> None:
    """Without ROS: the message of a drawn frame, whose position is as far off as it says."""
    names, printed = run("ros2_node.py")
    assert printed.count("predicted standard deviation") == 3
    content = names["main"]()
    scene = names["sample_scene"](5)
    place = np.array([content["pose"]["pose"]["position"][axis] for axis in "xyz"])
    spread = np.reshape(content["pose"]["covariance"], (6, 6))[:3, :3]
    error = place - scene.camera_pose()[1]
    assert error @ np.linalg.solve(spread, error) < 16
    assert content["header"]["frame_id"] == "runway"


@pytest.mark.usefixtures("published_base")
def test_a_deployed_model_equals_its_original(run: Callable[..., Any]) -> None:
    names, _ = run("deploy_model.py")
    assert names["moved"] < 1e-2
    assert names["changed"] < 1e-3


def test_an_approach_is_flown_with_and_without_satellites(run: Callable[..., Any]) -> None:
    names, printed = run("land_by_camera.py")
    assert printed.count("mean square position error") == 2
    assert np.abs(names["error"]).max() < 10 < np.abs(names["alone"].fused - names["alone"].position).max()


def test_every_example_is_run_and_documented() -> None:
    here, told = Path(__file__).read_text(encoding="utf-8"), (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(scripts) == 8
    for name in scripts:
        assert f'"{name}"' in here
        assert f"[{name}]({name})" in told
