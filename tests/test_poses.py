"""PoseDistributions: shape checks, selections, and conversion to and from supervision."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
import supervision
import torch

from halopose import display
from halopose.calibration.conformal import fit_regions
from halopose.data.coco import read_predictions
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.origin import Origin
from halopose.poses import PoseDistributions
from halopose.types import Array
from tests.helpers.values import present


def poses(count: int = 3, keypoints: int = 4, seed: int = 0, **changes: Any) -> PoseDistributions:
    rng = np.random.default_rng(seed)
    factors = np.tril(rng.normal(size=(count, keypoints, 2, 2))) + 2 * np.eye(2)
    values = {
        "boxes": rng.uniform(0, 100, (count, 4)),
        "scores": rng.random(count),
        "keypoints": rng.uniform(0, 100, (count, keypoints, 2)),
        "covariance": factors @ factors.swapaxes(-1, -2),
        "scale": factors @ factors.swapaxes(-1, -2) / 2,
        "dof": np.linspace(3, 6, keypoints),
        "visibility": rng.random((count, keypoints)),
        "keep": rng.random((count, keypoints)) < 0.5,
        "class_ids": np.ones(count, dtype=int),
        "image_ids": np.arange(count),
    }
    return PoseDistributions(**{**values, **changes})


@pytest.mark.parametrize("name", ["boxes", "scores", "covariance", "scale", "dof", "visibility", "keep"])
def test_wrong_shapes_name_what_was_expected_and_received(name: str) -> None:
    wrong = np.zeros((2, 9))
    with pytest.raises(HaloposeError, match=rf"{name} should have shape .*got \(2, 9\)"):
        poses(**cast(Any, {name: wrong}))


def test_keep_defaults_to_everything() -> None:
    assert present(poses(keep=None).keep).all()


@pytest.mark.parametrize("keep", [None, np.ones((3, 4), dtype=int), np.ones((3, 4))])
def test_json_keep_is_boolean_for_every_mask_type(keep: Array | None) -> None:
    text = json.dumps([entry["keep"] for entry in poses(keep=keep).to_json()])
    assert text == json.dumps([[True] * 4] * 3)


@pytest.mark.parametrize(("count", "keypoints"), [(0, 4), (2, 0), (0, 0)])
def test_json_of_nothing(count: int, keypoints: int) -> None:
    entries = poses(count, keypoints).to_json()
    assert [entry["keep"] for entry in entries] == [[True] * keypoints] * count


def test_selection_and_concatenation_are_inverse() -> None:
    whole = poses(5)
    again = PoseDistributions.concatenate([whole[:2], whole[2], whole[np.array([False] * 3 + [True] * 2)]])
    assert np.array_equal(again.keypoints, whole.keypoints)
    assert np.array_equal(present(again.dof), present(whole.dof))
    assert len(whole[:0]) == 0


def test_detections_share_their_tails_or_have_their_own() -> None:
    shared = poses(3, dof=np.linspace(3, 6, 4))
    assert np.array_equal(present(shared.dof), np.tile(np.linspace(3, 6, 4), (3, 1)))
    own = np.random.default_rng(1).uniform(2, 9, (3, 4))
    joined = PoseDistributions.concatenate([shared, poses(3, dof=own)])
    assert np.array_equal(present(joined.dof)[3:], own)
    assert np.array_equal(present(joined[4].dof), own[1:2])
    assert [entry["dof"] for entry in joined.to_json()[3:]] == own.tolist()
    assert np.array_equal(present(poses(4, dof=np.arange(4) + 3.0).dof)[:, 1], np.full(4, 4.0))  # N equals K


def test_unlike_parts_do_not_join() -> None:
    with pytest.raises(HaloposeError, match="dof is given"):
        PoseDistributions.concatenate([poses(), poses(dof=None)])
    with pytest.raises(HaloposeError, match="nothing to concatenate"):
        PoseDistributions.concatenate([])


@pytest.mark.parametrize("dof", [None, np.linspace(3, 6, 4)])
@pytest.mark.parametrize("count", [0, 3])
def test_supervision_round_trip_is_exact(dof: Array | None, count: int) -> None:
    first = poses(count, dof=dof)
    key_points = first.to_supervision()
    assert key_points.data["covariance"].shape == (count, 4, 2, 2)
    again = PoseDistributions.from_supervision(key_points)
    for name in ("boxes", "scores", "keypoints", "covariance", "scale", "keep", "image_ids", "class_ids"):
        assert np.array_equal(getattr(first, name), getattr(again, name)), name
    if count:
        assert (again.dof is None) == (dof is None)


def test_an_offset_is_handed_over() -> None:
    moved = poses(offset=np.arange(24.0).reshape(3, 4, 2))
    assert np.array_equal(
        present(PoseDistributions.from_supervision(moved.to_supervision()).offset), present(moved.offset)
    )
    table = moved.to_pandas()[["offset_x", "offset_y"]].to_numpy()
    assert np.array_equal(table, present(moved.offset).reshape(-1, 2))


def test_foreign_key_points_need_only_a_covariance() -> None:
    """What RF-DETR returns: locations, confidences and data["covariance"]."""
    key_points = supervision.KeyPoints(
        xy=np.array([[[1, 2], [5, 4]]], dtype=np.float32),
        data={"covariance": np.ones((1, 2, 1, 1)) * np.eye(2)},
    )
    pose = PoseDistributions.from_supervision(key_points)
    assert np.array_equal(pose.boxes, [[1, 2, 5, 4]])
    assert np.array_equal(pose.scale, pose.covariance)
    with pytest.raises(HaloposeError, match="no data"):
        PoseDistributions.from_supervision(supervision.KeyPoints(xy=np.zeros((1, 2, 2), dtype=np.float32)))


def test_iteration_comparison_and_repr() -> None:
    some = poses()
    assert [len(one) for one in some] == [1, 1, 1]
    assert PoseDistributions.concatenate(list(some)) == some
    assert some[1:] == some[np.array([False, True, True])]
    assert some != poses(seed=1)
    assert some != poses(visibility=None)
    assert some != "poses"
    kept = int(present(some.keep).sum())
    assert repr(some) == f"PoseDistributions(3 detections of 4 keypoints in 3 images, Student-t, {kept} of 12 kept)"
    assert "Gaussian" in repr(poses(dof=None, image_ids=None))


def test_a_table_has_a_row_per_keypoint() -> None:
    some, names = poses(), ("a", "b", "c", "d")
    table = some.to_pandas(names)
    assert len(table) == 12
    row = table.iloc[6]
    assert (row.detection, row.keypoint, row.keep, row.image_id) == (1, "c", present(some.keep)[1, 2], 1)
    assert (row.x, row.y, row.xy) == (*some.keypoints[1, 2], some.covariance[1, 2, 0, 1])
    assert "visibility" not in poses(visibility=None).to_pandas().columns


def test_saved_poses_read_back(tmp_path: Path) -> None:
    some = poses()
    some.save(tmp_path / "deep" / "poses.json")
    found = read_predictions(tmp_path / "deep" / "poses.json")
    for name in ("scores", "keypoints", "covariance", "scale", "dof", "keep", "image_ids"):
        assert np.allclose(getattr(found, name), getattr(some, name)), name
    with pytest.raises(HaloposeError, match="cannot write"):
        some.save(tmp_path / "deep" / "poses.json" / "poses.json")


def joined_poses(family: str = "gaussian", count: int = 2) -> PoseDistributions:
    """Detections with regions and a correlation, as a calibration would describe them."""
    rng = np.random.default_rng(0)
    own = np.array([[4.0, 1.0], [1.0, 2.0]]) * rng.uniform(1, 9, (count, 3, 1, 1))
    tau = np.array([0.5, 1.0, 2.0])[:, None, None] ** (1 if family == "gaussian" else 2)
    correlation = 0.5 * np.eye(6) + 0.5 * np.tile(np.eye(2), (3, 3))
    return PoseDistributions(
        boxes=np.tile([0.0, 0.0, 10.0, 20.0], (count, 1)),
        scores=np.ones(count),
        keypoints=rng.normal(size=(count, 3, 2)),
        covariance=own * tau,
        scale=own * tau,
        dof=None if family == "gaussian" else np.array([4.0, 5.0, 6.0]),
        dispersion=own,
        regions=fit_regions(rng.chisquare(2, (200, 3)), np.ones((200, 3), dtype=bool), np.arange(200)),
        correlation=np.broadcast_to(correlation, (count, 6, 6)),
        joint_dof=5.0,
    )


def test_every_distribution_of_a_keypoint_has_the_same_region() -> None:
    gaussian, student = joined_poses("gaussian"), joined_poses("student-t")
    assert not np.allclose(gaussian.covariance, student.covariance)
    assert np.array_equal(gaussian.region(0.9), student.region(0.9))
    radius = np.asarray(gaussian.regions.radius(0.9))[0] if gaussian.regions else None
    assert np.allclose(gaussian.region(0.9), gaussian.dispersion * np.asarray(radius)[:, None, None])
    assert (np.linalg.det(gaussian.whole_region(0.9)) > np.linalg.det(gaussian.region(0.9))).all()


def test_regions_and_correlation_go_where_the_detections_go() -> None:
    poses = joined_poses(count=3)
    assert np.array_equal(poses[1:].region(0.8), poses.region(0.8)[1:])
    assert PoseDistributions.concatenate([poses[:1], poses[1:]]) == poses
    other = replace(poses, joint_dof=6.0)
    with pytest.raises(HaloposeError, match="different degrees of freedom"):
        PoseDistributions.concatenate([poses, other])
    with pytest.raises(HaloposeError, match="come without regions"):
        replace(poses, regions=None).region(0.9)


@pytest.mark.parametrize("family", ["gaussian", "student-t"])
def test_samples_have_the_joint_covariance(family: str) -> None:
    poses = joined_poses(family, count=1)
    drawn = poses.sample(40_000)[:, 0].reshape(-1, 6) - poses.keypoints.reshape(6)
    white = np.linalg.solve(np.linalg.cholesky(poses.joint_covariance[0]), drawn.T)
    spread = np.cov(white) if family == "gaussian" else np.corrcoef(white)
    assert np.abs(spread - np.eye(6)).max() < (0.06 if family == "gaussian" else 0.15)


def test_known_keypoints_move_the_others() -> None:
    poses = joined_poses(count=1)
    known = np.full((1, 3, 2), np.nan)
    known[0, 0] = poses.keypoints[0, 0] + 3
    left = poses.given(known)
    assert np.array_equal(left.keypoints[0, 0], known[0, 0])
    assert (left.keypoints[0, 1:] > poses.keypoints[0, 1:]).all()
    assert (np.linalg.det(left.covariance[0, 1:]) < np.linalg.det(poses.covariance[0, 1:])).all()
    assert left.correlation is None
    assert left.regions is None
    with pytest.raises(HaloposeError, match="known should have shape"):
        poses.given(known[0])


@pytest.mark.parametrize("family", ["gaussian", "student-t"])
def test_conditioned_poses_can_be_used_like_any_poses(family: str) -> None:
    poses = joined_poses(family)
    known = np.full((2, 3, 2), np.nan)
    known[:, 0] = poses.keypoints[:, 0] + 3
    left = poses.given(known)
    drawn = left.sample(5)
    assert np.array_equal(drawn[:, :, 0], np.tile(known[:, 0], (5, 1, 1)))
    assert (np.ptp(drawn[:, :, 1:], axis=0) > 0).all()
    joint = left.joint_covariance
    assert not joint[:, :2].any()
    assert np.allclose(joint[:, 2:4, 2:4], left.covariance[:, 1])
    known[:, 1] = left.keypoints[:, 1] + 1
    again = left.given(known)  # the first one once more, and the second
    assert np.array_equal(again.keypoints[:, :2], known[:, :2])
    assert np.allclose(again.covariance[:, 2], left.covariance[:, 2])  # without a correlation they tell nothing
    picture = np.full((64, 64, 3), 90, dtype=np.uint8)
    inside = replace(left, keypoints=np.full((2, 3, 2), 30.0))[:1]
    assert (inside.plot(picture) != picture).any()
    with pytest.raises(HaloposeError, match="positive definite, or zero"):
        _ = replace(left, scale=-poses.scale).joint


def test_without_a_correlation_keypoints_are_independent() -> None:
    poses = replace(joined_poses(count=1), correlation=None)
    assert np.array_equal(poses.joint_covariance[0, :2, 2:], np.zeros((2, 4)))


def test_novelty_flags_selects_joins_and_is_written(tmp_path: Path) -> None:
    whole = poses(novelty=np.array([0.5, 0.04, 0.05]), image_novelty=np.array([0.3]))
    assert whole.in_distribution(0.05).tolist() == [True, False, False]
    assert whole.in_distribution(0.0).all()
    assert not whole.in_distribution(1.0).any()
    some = whole[[2, 0]]
    assert present(some.novelty).tolist() == [0.05, 0.5]
    assert present(some.image_novelty).tolist() == [0.3]
    joined = PoseDistributions.concatenate([whole, some])
    assert present(joined.image_novelty).tolist() == [0.3, 0.3]
    assert [entry["novelty"] for entry in joined.to_json()] == [0.5, 0.04, 0.05, 0.05, 0.5]
    whole.save(tmp_path / "poses.json")
    assert present(read_predictions(tmp_path / "poses.json").novelty).tolist() == [0.5, 0.04, 0.05]
    again = PoseDistributions.from_supervision(whole.to_supervision())
    assert present(again.novelty).tolist() == [0.5, 0.04, 0.05]
    assert whole.to_pandas()["novelty"].tolist() == [0.5] * 4 + [0.04] * 4 + [0.05] * 4
    with pytest.raises(HaloposeError, match="halopose novelty"):
        poses().in_distribution()
    with pytest.raises(HaloposeError, match="between 0 and 1"):
        whole.in_distribution(2.0)


def with_image(**changes: Any) -> PoseDistributions:
    some = poses(3, 17, dof=np.linspace(3, 6, 17), **changes)
    pixels = np.full((90, 120, 3), 200, dtype=np.uint8)
    return replace(some, origin=Origin("bus", Path("photos/bus.jpg"), read=lambda: pixels, layout=Keypoints.of(17)))


def test_origin_is_no_part_of_equality_and_survives_selection() -> None:
    some = with_image()
    bare = replace(some, origin=None)
    assert some == bare
    assert (some.path, some.names[9], some.image.shape) == (Path("photos/bus.jpg"), "left_wrist", (90, 120, 3))
    assert some[1].path == some.path
    joined = PoseDistributions.concatenate([some[:1], some[1:]])
    assert joined == some
    assert joined.names == some.names
    assert joined.path is None
    assert PoseDistributions.concatenate([some]).path == some.path
    assert PoseDistributions.concatenate([some, bare]).origin is None
    with pytest.raises(HaloposeError, match="no image"):
        _ = bare.image


def test_keypoints_are_selected_by_name() -> None:
    some = replace(with_image(), correlation=np.tile(np.eye(34), (3, 1, 1)))
    wrist = some["left_wrist"]
    assert np.array_equal(wrist.keypoints, some.keypoints[:, [9]])
    assert np.array_equal(present(wrist.dof), present(some.dof)[:, [9]])
    assert wrist.names == ("left_wrist",)
    arm = some[["left_wrist", "left_elbow"]]
    assert arm.layout.limbs == ((1, 0),)
    assert present(arm.correlation).shape == (3, 4, 4)
    assert np.array_equal(arm[1]["left_elbow"].std, some.std[[1]][:, [7]])
    with pytest.raises(HaloposeError, match="left_wrist"):
        _ = some["left_wirst"]


def test_regions_follow_the_selected_keypoints() -> None:
    rng = np.random.default_rng(0)
    regions = fit_regions(rng.chisquare(2, (400, 17)), np.ones((400, 17), dtype=bool), np.arange(400) // 2)
    some = with_image(regions=regions, dispersion=poses(3, 17, dof=None).covariance)
    assert np.array_equal(some["left_wrist"].region(0.9), some.region(0.9)[:, [9]])


def test_ellipses_hold_their_probability() -> None:
    some = poses()
    axes, angle = some.ellipse(0.5)
    along = axes[..., :1] * np.stack([np.cos(angle), np.sin(angle)], -1)
    distance = some.distribution.mahalanobis(torch.from_numpy(along))
    assert np.allclose(some.distribution.mahalanobis_cdf(distance).numpy(), 0.5)
    certain = replace(some, scale=np.zeros_like(some.scale))
    assert not certain.ellipse(0.5)[0].any()
    assert np.allclose(some.std**2, np.einsum("nkii->nki", some.covariance))
    with pytest.raises(HaloposeError, match="between 0 and 1"):
        some.ellipse(1.0)


def test_the_suffix_chooses_the_format(tmp_path: Path) -> None:
    some = with_image()
    for name in ("a.jpg", "b.PNG"):
        some.save(tmp_path / name)
        assert present(cv2.imread(str(tmp_path / name))).shape == (90, 120, 3)
    assert np.array_equal(present(cv2.imread(str(tmp_path / "b.PNG"))), some.plot())
    some.save(tmp_path / "c.csv")
    assert len((tmp_path / "c.csv").read_text().splitlines()) == 1 + 3 * 17
    some.save(tmp_path / "d.txt")
    labels = np.loadtxt(tmp_path / "d.txt")
    assert labels.shape == (3, 5 + 3 * 17)
    assert np.allclose(labels[:, 5:7] * [120, 90], some.keypoints[:, 0], atol=1e-3)
    for name in ("e.jpgg", "f"):
        with pytest.raises(HaloposeError, match="suffix"):
            some.save(tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(HaloposeError, match="no image"):
        replace(some, origin=None).save(tmp_path / "g.jpg")


def test_notebooks_show_a_picture_and_a_table() -> None:
    some = with_image()
    picture = cv2.imdecode(np.frombuffer(present(some._repr_png_()), np.uint8), cv2.IMREAD_COLOR)
    assert np.array_equal(present(picture), some.plot())
    assert "data:image/png;base64" in some._repr_html_()
    bare = replace(some, origin=None)
    assert bare._repr_png_() is None
    assert bare._repr_html_().count("<tr>") == 4
    hostile = replace(some, origin=replace(present(some.origin), name="<script>"))
    assert "<script>" not in hostile._repr_html_()


def test_a_summary_is_plain_json() -> None:
    some = with_image()
    [first, *_] = json.loads(json.dumps(some.summary()))
    assert first["keypoints"]["left_wrist"]["x"] == some.keypoints[0, 9, 0]
    assert first["keypoints"]["left_wrist"]["std_y"] == some.std[0, 9, 1]


def test_tables_have_names_image_and_class() -> None:
    table = with_image().to_pandas()
    row = table.iloc[17 + 9]
    assert (row["image"], row["class"], row["keypoint"]) == ("bus", 1, "left_wrist")


def test_without_a_screen_show_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(display, "has_windows", lambda: True)
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(HaloposeError, match="no screen"):
        with_image().show()
    monkeypatch.setattr(display, "has_windows", lambda: False)
    with pytest.raises(HaloposeError, match="opencv-python"):
        with_image().show()
