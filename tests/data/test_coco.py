"""Files: what is written reads back the same, and nothing a user can put in a file causes a traceback."""

import copy
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.data.coco import (
    parse_ground_truth,
    parse_predictions,
    prediction_entries,
    read_ground_truth,
    read_predictions,
)
from halopose.data.files import make_folder, make_room, read_json, write_json
from halopose.data.synthetic import World, synthesize
from halopose.errors import HaloposeError
from halopose.keypoints import COCO_SIGMAS

TRUTH, RESULTS = synthesize(World(images=3, persons=5, detections_per_image=2))


def test_predictions_survive_a_round_trip(tmp_path):
    truth = parse_ground_truth("truth", TRUTH)
    first = parse_predictions("predictions", RESULTS, truth)
    write_json(tmp_path / "p.json", prediction_entries(first))
    again = read_predictions(tmp_path / "p.json", truth)
    for name in ("scores", "keypoints", "covariance", "scale", "visibility", "image_ids", "class_ids"):
        assert np.array_equal(getattr(first, name), getattr(again, name)), name
    assert np.allclose(first.boxes, again.boxes)
    assert again.dof is None


def test_student_predictions_survive_a_round_trip():
    entries = copy.deepcopy(RESULTS)
    for entry in entries:
        entry["scale"] = [[xx / 2, xy / 2, yy / 2] for xx, xy, yy in entry["covariance"]]
        entry["dof"] = [4.0 + k for k in range(17)]
    poses = parse_predictions("p", entries, None)
    assert np.array_equal(poses.dof, 4.0 + np.arange(17))
    assert np.allclose(poses.scale * 2, poses.covariance)
    assert prediction_entries(poses)[0]["dof"] == entries[0]["dof"]


def test_a_missing_box_is_the_extent_of_the_keypoints():
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
def test_sigmas_come_from_the_option_then_the_category_then_coco(category, option, expected):
    content = copy.deepcopy(TRUTH)
    if category:
        content["categories"][0]["sigmas"] = category
    assert np.array_equal(parse_ground_truth("t", content, option).sigmas, expected)


def test_other_keypoint_counts_default_to_one_over_k():
    content = {
        "images": [{"id": 7}],
        "categories": [{"id": 3, "keypoints": ["a", "b", "c", "d"]}],
        "annotations": [
            {"image_id": 7, "category_id": 3, "area": 9.0, "bbox": [0, 0, 3, 3], "keypoints": [1, 1, 2] * 4}
        ],
    }
    truth = parse_ground_truth("t", content)
    assert truth.keypoint_count == 4
    assert np.array_equal(truth.sigmas, np.full(4, 0.25))


def _bad(**changes):
    entries = copy.deepcopy(RESULTS)
    entries[1].update(changes)
    return entries


NAN, INF = float("nan"), float("inf")
BAD_PREDICTIONS = {
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
def test_bad_predictions_are_one_line(case):
    content, words = BAD_PREDICTIONS[case]
    with pytest.raises(HaloposeError, match=words) as error:
        parse_predictions("p.json", content, parse_ground_truth("t", TRUTH))
    assert "\n" not in str(error.value)
    assert "p.json" in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "empty"), (b"  \n", "empty"), (b'[{"image_id": 1', "not complete"), (b"\xff\xfe\x00", "UTF-8")],
)
def test_broken_files_are_one_line(tmp_path, content, words):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(HaloposeError, match=words):
        read_json(path)


def test_missing_file_and_folder_are_one_line(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(HaloposeError, match="cannot read"):
            read_ground_truth(path)


def test_writing_where_nothing_can_be_written_leaves_no_trace(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(HaloposeError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path):
    write_json(tmp_path / "x.json", "small")
    with pytest.raises(HaloposeError, match=r"cannot write .*x\.json"):
        write_json(tmp_path / "x.json", "large" * 100)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert read_json(tmp_path / "x.json") == "small"


def test_a_folder_is_made_or_refused_in_one_line(tmp_path):
    assert make_folder(tmp_path / "new" / "folder").is_dir()
    assert make_folder(tmp_path / "new" / "folder") == make_room(tmp_path / "new" / "folder" / "file").parent
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(HaloposeError, match="cannot write to"):
            make_folder(path)
    with pytest.raises(HaloposeError, match="cannot write to"):
        make_room(tmp_path / "file" / "x")
    with pytest.raises(HaloposeError, match="it is a folder, name a file"):
        make_room(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(HaloposeError, match=r"cannot write to .*: Permission denied"):
        make_folder(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mangled(draw, content):
    """The content with one to three values, anywhere in it, replaced, removed or repeated."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        node = content
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(node[key], (dict, list)) and node[key] and draw(st.integers(0, 3)):
                node = node[key]
                continue
            action = draw(st.sampled_from(["replace", "remove", "repeat"]))
            if action == "replace":
                node[key] = draw(JSON)
            elif action == "remove":
                del node[key]
            elif isinstance(node, list):
                node.append(copy.deepcopy(node[key]))
            break
    return content


def refusal(parse, *arguments):
    """What the parser made of its arguments, or the line with which it refused them."""
    try:
        return parse(*arguments), None
    except HaloposeError as error:
        return None, str(error)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(mangled(TRUTH))
def test_mangled_ground_truth_reads_or_is_refused(content):
    truth, line = refusal(parse_ground_truth, "t", content)
    assert np.isfinite(truth.keypoints).all() if line is None else "\n" not in line


@settings(max_examples=300, deadline=None, derandomize=True)
@given(mangled(RESULTS))
def test_mangled_predictions_read_or_are_refused(content):
    poses, line = refusal(parse_predictions, "p", content, parse_ground_truth("t", TRUTH))
    assert (np.linalg.eigvalsh(poses.covariance) > 0).all() if line is None else "\n" not in line


def test_a_file_cut_anywhere_is_refused(tmp_path):
    text = json.dumps(RESULTS)
    for cut in np.random.default_rng(0).integers(0, len(text), 60):
        (tmp_path / "p.json").write_text(text[:cut])
        assert "p.json" in refusal(read_predictions, tmp_path / "p.json")[1]
