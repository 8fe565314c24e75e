"""Files of other tools: round trips, real layouts, and one-line errors for damaged files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from research.fuzz import formats as fuzzed

from halopose.data.formats.pose_table import PoseTable, number_images
from halopose.data.formats.reading import (
    FORMATS,
    parse_size,
    read_labels,
    read_results,
    read_table,
    results_as,
    write_table,
)
from halopose.errors import HaloposeError

LABELS = """scorer,,,S,S,S,S,S,S,S,S
individuals,,,a,a,a,a,b,b,b,b
bodyparts,,,nose,nose,tail,tail,nose,nose,tail,tail
coords,,,x,y,x,y,x,y,x,y
labeled-data,film,img007.png,1,2,3,4,5,6,,
labeled-data,film,img012.png,,,,
labeled-data,film,img020.png,9,8,7,6,5,4,3,2
"""


def assert_same(read: PoseTable, written: PoseTable) -> None:
    """The same poses, in any order within a frame."""
    orders = [np.lexsort((table.tracks, table.frames)) for table in (read, written)]
    for name in ("keypoints", "scores", "frames", "covariance"):
        if name == "covariance" and written.covariance is None:
            continue
        values = [getattr(table, name)[order] for table, order in zip((read, written), orders, strict=True)]
        gone = written.missing[orders[1]]
        if name == "covariance":
            values = [np.where(gone[..., None, None], 0.0, value) for value in values]
        assert np.allclose(values[0], values[1], equal_nan=True, atol=1e-9), name


@pytest.mark.parametrize("kind", [name for name in FORMATS if name not in ("auto", "coco")])
@pytest.mark.parametrize("covariance", [True, False])
def test_every_format_reads_what_it_writes(tmp_path: Path, kind: Any, covariance: bool) -> None:
    table = fuzzed.poses()
    if not covariance:
        table = replace(table, covariance=None)
    path = tmp_path / {"openpose": "op"}.get(kind, "p.csv" if kind in FORMATS[2:6] else "p.json")
    write_table(table, path, kind)
    read = read_table(path)
    assert (read.covariance is None) == (table.covariance is None)
    assert_same(read, table)
    if kind not in ("openpose", "mediapipe"):
        assert read.names == table.names


def test_coco_results_go_through_every_format(tmp_path: Path) -> None:
    table = fuzzed.poses()
    write_table(table, tmp_path / "a.json")
    entries = read_results(tmp_path / "a.json")
    again = results_as(entries, table)
    assert_same(again, table)
    write_table(again, tmp_path / "b.csv", "sleap")
    back = read_results(tmp_path / "b.csv")
    assert np.allclose([e["keypoints"] for e in back], [e["keypoints"] for e in entries])
    assert np.allclose([e["score"] for e in back], [e["score"] for e in entries])


def test_labels_of_several_animals_become_ground_truth(tmp_path: Path) -> None:
    (tmp_path / "CollectedData.csv").write_text(LABELS)
    table = read_table(tmp_path / "CollectedData.csv")
    assert table.individuals == ("a", "b")
    assert table.frames.tolist() == [7, 7, 20, 20]
    truth = read_labels(tmp_path / "CollectedData.csv").truth
    assert truth.layout.names == ("nose", "tail")
    assert truth.labelled.tolist() == [[True, True], [True, False], [True, True], [True, True]]


def test_hdf5_files(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    fuzzed.hdf5_files(tmp_path)
    table = fuzzed.poses(covariance=False)
    for name in ("good-dlc.h5", "good-poses.slp"):
        read = read_table(tmp_path / name)
        assert read.names == table.names
        assert np.allclose(read.keypoints, table.keypoints, equal_nan=True)
        assert np.allclose(read.scores, table.scores)
    assert read.limbs == ((0, 1),)
    assert read.tracks.tolist() == table.tracks.tolist()


def test_the_table_layout_of_pandas_is_read_without_running_its_pickle(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    import pickle

    names = [("s", "nose", coord) for coord in ("x", "y", "likelihood")]
    for number, kept in enumerate((names, [print])):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            rows = np.zeros(3, dtype=[("index", np.int64), ("values_block_0", float, (3,))])
            rows["index"], rows["values_block_0"] = [0, 1, 2], np.arange(9).reshape(3, 3)
            file["df/table"] = rows
            file["df/table"].attrs["values_block_0_kind"] = np.bytes_(pickle.dumps(kept, 0))
    assert read_table(tmp_path / "0.h5").keypoints[1, 0].tolist() == [3, 4]
    with pytest.raises(HaloposeError, match="column names"):
        read_table(tmp_path / "1.h5")


def test_landmarks_need_the_size_of_the_image(tmp_path: Path) -> None:
    marks = [{"x": 0.5, "y": 0.25, "z": 0.0, "visibility": 0.9}] * 33
    (tmp_path / "m.json").write_text(json.dumps({"landmarks": [marks]}))
    with pytest.raises(HaloposeError, match="--size"):
        read_table(tmp_path / "m.json")
    table = read_table(tmp_path / "m.json", size=parse_size("640x480"))
    assert table.keypoints[0, 0].tolist() == [320, 120]
    assert table.names[-1] == "right_foot_index"
    for wrong in ("640", "0x4", "x"):
        with pytest.raises(HaloposeError, match="WIDTHxHEIGHT"):
            parse_size(wrong)


def test_landmarks_as_protobuf_writes_them_in_python(tmp_path: Path) -> None:
    marks = [{"x": 0.5, "y": 0.25, "z": -0.6, "visibility": 0.99}] * 33
    (tmp_path / "m.json").write_text(json.dumps({"landmark": marks}, indent=2))
    table = read_table(tmp_path / "m.json", size=(640, 480))
    assert table.keypoints.shape == (1, 33, 2)
    assert read_results(tmp_path / "m.json", size=(640, 480))[0]["keypoints"][:3] == [320, 120, 0.99]


def test_a_person_of_openpose_without_a_body_is_left_out(tmp_path: Path) -> None:
    people: list[dict[str, Any]] = [{"pose_keypoints_2d": [1, 2, 0.5] * 25}, {"pose_keypoints_2d": []}]
    (tmp_path / "cam_0.json").write_text(json.dumps({"version": 1.3, "people": people}))
    assert read_table(tmp_path).keypoints.shape == (1, 25, 2)


def test_a_project_of_sleap_without_instances_holds_no_poses(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "e.slp", "w") as file:
        file.create_group("metadata").attrs["json"] = json.dumps({"skeletons": [], "nodes": []})
        for name in ("frames", "instances", "points", "pred_points"):
            file[name] = np.zeros(0)
    with pytest.raises(HaloposeError, match="no poses"):
        read_table(tmp_path / "e.slp")


def test_names_with_a_comma_survive_sleaps_csv(tmp_path: Path) -> None:
    table = replace(fuzzed.poses(), names=("(0, 0)", "(0, 1)", "left", "right"))
    write_table(table, tmp_path / "p.csv", "sleap")
    assert read_table(tmp_path / "p.csv").names == table.names


def test_an_image_of_mmpose_is_a_list_of_instances(tmp_path: Path) -> None:
    person = {"keypoints": [[1, 2]] * 17, "keypoint_scores": [0.5] * 17, "bbox": [[0, 0, 9, 9]], "bbox_score": 0.8}
    (tmp_path / "i.json").write_text(json.dumps([person, person]))
    entries = read_results(tmp_path / "i.json")
    assert [entry["bbox"] for entry in entries] == [[0, 0, 9, 9]] * 2
    assert entries[0]["score"] == 0.8


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.csv", "scorer,S\nbodyparts,a\ncoords,x\n0,1\n", "x and y"),
        ("b.csv", "scorer,S,S\nbodyparts,a,a\ncoords,x,y\n0,1,2,3\n", "line 4"),
        ("c.csv", "scorer,S,S\nbodyparts,a,a\ncoords,x,y\n0,one,2\n", "not a number"),
        ("d.csv", "frame,x,y\n0,1,2\n", "known tool"),
        ("e.csv", "", "empty"),
        ("f.json", '{"people": [{"pose_keypoints_2d": [1, 2]}]}', "x, y, score"),
        ("g.json", '{"people": []}', "no poses"),
        ("h.slp", "text", "HDF5"),
    ],
)
def test_damaged_files_are_one_line_errors(tmp_path: Path, name: str, text: str, word: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(HaloposeError, match=word) as error:
        read_table(tmp_path / name)
    assert "\n" not in str(error.value)


def test_images_are_numbered_by_their_names() -> None:
    assert number_images(["a/img2.png", "a/img10.png"])[0].tolist() == [2, 10]
    assert number_images(["left1.png", "right1.png"])[0].tolist() == [0, 1]


def test_formats_that_cannot_be_chosen_are_named(tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match="--to"):
        write_table(fuzzed.poses(), tmp_path / "a.xyz")
    with pytest.raises(HaloposeError, match=r"\.csv"):
        write_table(fuzzed.poses(), tmp_path / "a.json", "sleap")
    with pytest.raises(HaloposeError, match="--size"):
        write_table(replace(fuzzed.poses(), size=None), tmp_path / "a.json", "mediapipe")
