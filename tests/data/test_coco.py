"""COCO JSON: lossless round trip, and no file content causes a traceback."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from halopose.data.coco import (
    parse_ground_truth,
    parse_predictions,
    read_ground_truth,
    read_numbering,
    read_predictions,
)
from halopose.data.files import write_json
from halopose.data.synthetic_poses import World, synthesize
from halopose.errors import HaloposeError
from halopose.keypoints import COCO_LIMBS, COCO_NAMES, COCO_SIGMAS, Keypoints
from halopose.types import Array
from tests.helpers.mangling import mangled, refusal
from tests.helpers.values import present

TRUTH, RESULTS = synthesize(World(images=3, persons=5, detections_per_image=2))


def test_predictions_survive_a_round_trip(tmp_path: Path) -> None:
    truth = parse_ground_truth("truth", TRUTH)
    first = parse_predictions("predictions", RESULTS, truth)
    write_json(tmp_path / "p.json", first.to_json())
    again = read_predictions(tmp_path / "p.json", truth)
    for name in ("scores", "keypoints", "covariance", "scale", "visibility", "image_ids", "class_ids"):
        assert np.array_equal(getattr(first, name), getattr(again, name)), name
    assert np.allclose(first.boxes, again.boxes)
    assert again.dof is None


def test_student_predictions_survive_a_round_trip() -> None:
    entries = copy.deepcopy(RESULTS)
    for entry in entries:
        entry["scale"] = [[xx / 2, xy / 2, yy / 2] for xx, xy, yy in entry["covariance"]]
        entry["dof"] = [4.0 + k for k in range(17)]
    poses = parse_predictions("p", entries, None)
    assert poses.dof is not None
    assert np.array_equal(poses.dof, np.tile(4.0 + np.arange(17), (len(poses), 1)))
    assert np.allclose(poses.scale * 2, poses.covariance)
    assert poses.to_json()[0]["dof"] == entries[0]["dof"]


def test_a_missing_box_is_the_extent_of_the_keypoints() -> None:
    entries = [{key: value for key, value in entry.items() if key != "bbox"} for entry in RESULTS]
    poses = parse_predictions("p", entries, None)
    assert np.array_equal(poses.boxes[:, :2], poses.keypoints.min(1))
    assert np.array_equal(poses.boxes[:, 2:], poses.keypoints.max(1))


@pytest.mark.parametrize(
    ("category", "option", "expected"),
    [
        (None, None, COCO_SIGMAS),
        ([0.05] * 17, None, np.full(17, 0.05)),
        ([0.05] * 17, [0.1] * 17, np.full(17, 0.1)),
    ],
)
def test_sigmas_come_from_the_option_then_the_category_then_coco(
    category: list[float] | None, option: list[float] | None, expected: Array
) -> None:
    content = copy.deepcopy(TRUTH)
    if category:
        content["categories"][0]["sigmas"] = category
    assert np.array_equal(parse_ground_truth("t", content, option).layout.sigmas, expected)


def test_other_keypoint_counts_default_to_one_over_k() -> None:
    content = {
        "images": [{"id": 7}],
        "categories": [{"id": 3, "keypoints": ["a", "b", "c", "d"]}],
        "annotations": [
            {"image_id": 7, "category_id": 3, "area": 9.0, "bbox": [0, 0, 3, 3], "keypoints": [1, 1, 2] * 4}
        ],
    }
    truth = parse_ground_truth("t", content)
    assert truth.keypoint_count == 4
    assert truth.layout.sigmas == (0.25,) * 4
    assert truth.layout.names == ("a", "b", "c", "d")
    assert truth.layout.limbs == ()


def test_keypoints_equal_those_of_the_category_then_the_model_then_coco() -> None:
    assert parse_ground_truth("t", TRUTH).layout == Keypoints.of(17, names=COCO_NAMES)
    model = Keypoints.of(17, names=[f"m{k}" for k in range(17)], sigmas=[0.2] * 17, area_factor=0.8, limbs=[(0, 1)])
    layout = parse_ground_truth("t", TRUTH, otherwise=model).layout
    assert layout.names == COCO_NAMES  # stated
    assert (layout.sigmas, layout.area_factor, layout.limbs) == (model.sigmas, 0.8, ((0, 1),))
    content = copy.deepcopy(TRUTH)
    content["categories"][0] |= {"skeleton": [[a + 1, b + 1] for a, b in COCO_LIMBS[:3]], "sigmas": [0.3] * 17}
    layout = parse_ground_truth("t", content, otherwise=model).layout
    assert (layout.sigmas, layout.limbs) == ((0.3,) * 17, COCO_LIMBS[:3])


@pytest.mark.parametrize("skeleton", [[[1, 18]], [[0, 1]], [[1]], [["a", "b"]], "limbs", [[1, 2], [3]]])
def test_a_skeleton_that_cannot_be_drawn_is_left_out(skeleton: Any) -> None:
    content = copy.deepcopy(TRUTH)
    content["categories"][0]["skeleton"] = skeleton
    assert parse_ground_truth("t", content).layout.limbs == COCO_LIMBS


@pytest.mark.parametrize("sigmas", [[0.1] * 16, [0.0] * 17, [-0.1] * 17, ["a"] * 17, 0.1, [float("nan")] * 17])
def test_bad_sigmas_are_one_line_errors(sigmas: Any) -> None:
    content = copy.deepcopy(TRUTH)
    content["categories"][0]["sigmas"] = sigmas
    with pytest.raises(HaloposeError, match=r"t\.json: give 17"):
        parse_ground_truth("t.json", content)


@pytest.mark.parametrize(
    ("path", "value"), [(("categories", 0, "keypoints"), [None] * 17), (("annotations", 0, "category_id"), [1])]
)
def test_odd_names_and_categories_cause_no_traceback(path: tuple[Any, ...], value: Any) -> None:
    content = copy.deepcopy(TRUTH)
    content[path[0]][path[1]][path[2]] = value
    truth, line = refusal(parse_ground_truth, "t.json", content)
    assert truth is not None or line.startswith("t.json: ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"category_id": None}, "no number as category_id"),
        ({"category_id": "person"}, "no number as category_id"),
        ({"bbox": [1, 1, -3, 4]}, "a box without width or height"),
        ({"bbox": [1, 1, 3, 0]}, "a box without width or height"),
    ],
)
def test_invalid_annotations_are_counted_and_named(
    changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = copy.deepcopy(TRUTH)
    whole = [copy.deepcopy(content["annotations"][0]) for _ in range(20)]
    content["annotations"] = [*whole, content["annotations"][0] | changes]
    with caplog.at_level("WARNING", logger="halopose"):
        assert len(parse_ground_truth("t.json", content)) == 20
    assert f"t.json: 1 of 21 objects have {words} (first: annotation 20)" in caplog.text
    content["annotations"] = [annotation | changes for annotation in whole]
    with pytest.raises(HaloposeError, match=f"20 objects have {words}"):
        parse_ground_truth("t.json", content)


def test_ground_truth_without_annotations_is_one_line_or_nothing_to_find() -> None:
    content, _ = synthesize(World(images=2, persons=2))
    assert len(parse_ground_truth("truth", content | {"annotations": []}).image_ids) == 0
    wrongs: list[Any] = [{key: value for key, value in content.items() if key != "annotations"}, {}, [], None]
    for wrong in wrongs:
        with pytest.raises(HaloposeError, match="truth") as error:
            parse_ground_truth("truth", wrong)
        assert "\n" not in str(error.value)


def test_image_ids_are_found_by_file_name(tmp_path: Path) -> None:
    images = [{"id": 4, "file_name": "a/b.jpg"}, {"id": 9, "file_name": "c.jpg"}]
    write_json(tmp_path / "t.json", {"images": images})
    assert read_numbering(tmp_path / "t.json").images == {"b.jpg": 4, "c.jpg": 9}
    for changed, words in (
        ([], "lists no images"),
        ([*images, {"id": 5, "file_name": "z/c.jpg"}], "same file name"),
        ([{"id": 5}], "no file_name"),
    ):
        write_json(tmp_path / "t.json", {"images": changed})
        with pytest.raises(HaloposeError, match=words):
            read_numbering(tmp_path / "t.json")


def test_classes_of_a_model_are_categories_in_the_order_of_their_ids(tmp_path: Path) -> None:
    images = [{"id": 4, "file_name": "b.jpg"}]
    categories = [{"id": 7, "keypoints": ["tip"]}, {"id": 5}, {"id": 0, "keypoints": ["tip"]}]
    write_json(tmp_path / "t.json", {"images": images, "categories": categories})
    found = read_numbering(tmp_path / "t.json")
    assert [found.category(number) for number in (1, 2)] == [0, 7]
    with pytest.raises(HaloposeError, match="2 categories with keypoints"):
        found.category(3)
    write_json(tmp_path / "t.json", {"images": images, "categories": [{"id": 7}]})
    assert read_numbering(tmp_path / "t.json").category(3) == 3  # nothing is known


def test_a_class_that_is_listed_but_never_annotated_may_be_found() -> None:
    truth = parse_ground_truth("t", TRUTH)
    listed = np.array([1, 8])
    poses = parse_predictions("p.json", _bad(category_id=8), truth, listed)
    assert present(poses.class_ids).tolist().count(8) == 1
    with pytest.raises(HaloposeError, match="category 9"):
        parse_predictions("p.json", _bad(category_id=9), truth, listed)


def _bad(**changes: Any) -> list[dict[str, Any]]:
    entries = copy.deepcopy(RESULTS)
    entries[1].update(changes)
    return entries


NAN, INF = float("nan"), float("inf")
BAD_PREDICTIONS: dict[str, tuple[Any, str]] = {
    "nan covariance": (_bad(covariance=[[NAN, 0, 1]] * 17), "positive definite"),
    "infinite covariance": (_bad(covariance=[[INF, 0, 1]] * 17), "positive definite"),
    "indefinite covariance": (_bad(covariance=[[1, 2, 1]] * 17), "positive definite"),
    "negative variance": (_bad(covariance=[[-1, 0, -1]] * 17), "positive definite"),
    "too few covariances": (_bad(covariance=[[1, 0, 1]] * 16), "17 rows"),
    "flat covariance": (_bad(covariance=[1, 0, 1]), "17 rows"),
    "no covariance": (_bad(covariance=None), "17 rows"),
    "text covariance": (_bad(covariance=[["1", "0", "1"]] * 17), "17 rows"),
    "wrong K": (_bad(keypoints=[1.0] * 48), "51 numbers"),
    "nan keypoint": (_bad(keypoints=[NAN] * 51), "not finite"),
    "text keypoint": (_bad(keypoints=["a"] * 51), "51 numbers"),
    "unknown image": (_bad(image_id=99), "not in the ground truth"),
    "text image id": (_bad(image_id="1"), "needs a number"),
    "huge image id": (_bad(image_id=10**30), "image_id"),
    "no score": (_bad(score=None), "needs a number"),
    "unknown category": (_bad(category_id=8), "category"),
    "dof without scale": (_bad(dof=[4.0] * 17), "no dof"),
    "not a detection": ([*RESULTS, 3], "detection"),
    "not a list": ({"a": 1}, "list of detections"),
    "empty": ([], "no detections"),
}


@pytest.mark.parametrize("case", BAD_PREDICTIONS)
def test_bad_predictions_are_one_line_errors(case: str) -> None:
    content, words = BAD_PREDICTIONS[case]
    with pytest.raises(HaloposeError, match=words) as error:
        parse_predictions("p.json", content, parse_ground_truth("t", TRUTH))
    assert "\n" not in str(error.value)
    assert "p.json" in str(error.value)


def test_missing_file_and_folder_are_one_line_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(HaloposeError, match="cannot read"):
            read_ground_truth(path)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(mangled(TRUTH))
def test_mangled_ground_truth_reads_or_is_refused(content: Any) -> None:
    truth, line = refusal(parse_ground_truth, "t", content)
    assert "\n" not in line
    assert truth is None or np.isfinite(truth.keypoints).all()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(mangled(RESULTS))
def test_mangled_predictions_read_or_are_refused(content: Any) -> None:
    poses, line = refusal(parse_predictions, "p", content, parse_ground_truth("t", TRUTH))
    assert "\n" not in line
    assert poses is None or (np.linalg.eigvalsh(poses.covariance) > 0).all()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    text = json.dumps(RESULTS)
    for cut in np.random.default_rng(0).integers(0, len(text), 60):
        (tmp_path / "p.json").write_text(text[:cut])
        assert "p.json" in refusal(read_predictions, tmp_path / "p.json")[1]


def test_covariances_may_be_matrices() -> None:
    entries = copy.deepcopy(RESULTS)
    for entry in entries:
        entry["covariance"] = [[[xx, xy], [xy, yy]] for xx, xy, yy in entry["covariance"]]
    first, again = (parse_predictions("predictions", each, None) for each in (RESULTS, entries))
    assert np.array_equal(first.covariance, again.covariance)
    entries[1]["covariance"][2][0][1] += 0.5
    with pytest.raises(HaloposeError, match="keypoint 2 is not symmetric"):
        parse_predictions("predictions", entries, None)
