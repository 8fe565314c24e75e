"""Runways of LARD and BARS, in tiny files of their formats: corners in our order, mistakes in one line."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.landing.runway_datasets import CORNER_NAMES, LAYOUT, corners_in_order, is_runways
from halopose.types import Array

CORNERS = np.array(
    [[20.0, 80.0], [60.0, 82.0], [44.0, 30.0], [38.0, 30.5]]
)  # near left, near right, far right, far left
HEADER = "image;height;width;type;airport;runway;" + ";".join(f"{a}_{c}" for c in "ABCD" for a in "xy")


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.zeros((100, 120, 3), np.uint8))
    return path


def lard(folder: Path, *rows: str, header: str = HEADER) -> Path:
    picture(folder / "images" / "one.png")
    picture(folder / "images" / "two.png")
    path = folder / "LARD_test.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def row(name: str, corners: Any) -> str:
    return f"{name};100;120;real;LFPO;24;" + ";".join(str(value) for value in np.asarray(corners).ravel())


def read_lines(corners: Array) -> Array:
    """As LARD names them: by ascending y, then x."""
    return corners[np.lexsort((corners[:, 0], corners[:, 1]))]


@given(st.permutations(range(4)))
def test_corners_of_any_order_are_reordered(order: list[int]) -> None:
    np.testing.assert_array_equal(corners_in_order(CORNERS[order]), CORNERS)


def test_lard(tmp_path: Path) -> None:
    path = lard(
        tmp_path,
        row("images/one.png", read_lines(CORNERS)),
        row("images\\two.png", read_lines(CORNERS + np.array([300.0, 0.0]))),
    )
    assert is_runways(path)
    data = load_dataset(path, "")
    assert data.layout == LAYOUT
    assert data.layout.names == CORNER_NAMES
    assert {record.path.name for record in data.records} == {"one.png", "two.png"}
    found = {record.path.name: record.read() for record in data.records}
    image, objects = found["one.png"]
    assert image.shape == (100, 120, 3)
    np.testing.assert_array_equal(objects.keypoints, [CORNERS])
    np.testing.assert_array_equal(objects.boxes, [[20, 30, 60, 82]])
    assert len(found["two.png"][1]) == 0  # cut off by the border


def shape(label: str, points: Any) -> dict[str, Any]:
    return {"label": label, "points": np.asarray(points).tolist(), "shape_type": "polygon"}


def labelme(folder: Path, name: str, *shapes: dict[str, Any], **more: Any) -> Path:
    picture(folder / f"{name}.jpg")
    content = {"shapes": list(shapes), "imageWidth": 120, "imageHeight": 100, "imageData": "aGk=", **more}
    (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_bars(tmp_path: Path) -> None:
    labelme(tmp_path, "a", shape("runway", CORNERS[[2, 0, 3, 1]]), shape("threshold", CORNERS))
    folder = labelme(tmp_path, "b", shape("runway", np.concatenate([CORNERS, [[1, 1]]])), shape("runway", CORNERS))
    assert is_runways(folder)
    data = load_dataset(folder, "")
    counts = {record.path.stem: len(record.objects) for record in data.records}
    assert counts == {"a": 1, "b": 1}
    np.testing.assert_array_equal(data.records[0].objects.keypoints[0], CORNERS)


def test_coco_instances(tmp_path: Path) -> None:
    """BARS' other form: polygons of runways, thresholds beside them, one that is cut into five corners."""
    picture(tmp_path / "images" / "a.png")
    five = [*CORNERS.ravel().tolist(), 1.0, 1.0]
    polygons = [(1, CORNERS[[1, 0, 3, 2]].ravel().tolist()), (2, CORNERS.ravel().tolist()), (1, five)]
    annotations = [
        {"id": n, "image_id": 7, "category_id": kind, "segmentation": [flat], "bbox": [20, 30, 40, 52],
         "area": 9.0, "iscrowd": 0}
        for n, (kind, flat) in enumerate(polygons)
    ]  # fmt: skip
    categories = [{"id": 1, "name": "runway"}, {"id": 2, "name": "threshold"}]
    images = [{"id": 7, "file_name": "a.png", "width": 120, "height": 100}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "instances.json").write_text(json.dumps(content))
    data = load_dataset(tmp_path / "instances.json", "", images=tmp_path / "images")
    assert data.layout.names == CORNER_NAMES
    objects = data.records[0].objects
    np.testing.assert_array_equal(objects.crowd, [False, True])
    np.testing.assert_array_equal(objects.keypoints[0], CORNERS)


@pytest.mark.parametrize(
    ("rows", "header", "words"),
    [
        ([], HEADER, "no rows"),
        (["a;b"], HEADER, "rows of different lengths"),
        ([row("images/one.png", CORNERS)], HEADER.replace("x_B", "x_Q"), "no column x_B"),
        ([row("images/one.png", CORNERS).replace("82.0", "low")], HEADER, "line 2: a size or corner"),
        ([row("images/one.png", CORNERS)] * 2, HEADER, "twice"),
        ([row("images/one.png", CORNERS - 500)], HEADER, "no complete runway"),
    ],
)
def test_wrong_csv_is_a_one_line_error(tmp_path: Path, rows: list[str], header: str, words: str) -> None:
    with pytest.raises(HaloposeError, match=words) as caught:
        load_dataset(lard(tmp_path, *rows, header=header), "")
    assert "\n" not in str(caught.value)


def test_wrong_labelme_is_a_one_line_error(tmp_path: Path) -> None:
    folder = labelme(tmp_path, "a", shape("runway", CORNERS))
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(HaloposeError, match="LabelMe"):
        load_dataset(folder, "")
    (tmp_path / "b.json").write_text(json.dumps({"shapes": [], "imageWidth": 3, "imageHeight": 3}))
    with pytest.raises(HaloposeError, match="no image beside"):
        load_dataset(folder, "")
    (tmp_path / "b.json").unlink()
    labelme(tmp_path, "a", {"label": "runway"})
    with pytest.raises(HaloposeError, match="no points"):
        load_dataset(folder, "")


def test_sizes_and_shapes_that_are_no_numbers_are_one_line_errors(tmp_path: Path) -> None:
    path = lard(tmp_path, row("images/one.png", read_lines(CORNERS)).replace("120", "inf"))
    with pytest.raises(HaloposeError, match="finite"):
        load_dataset(path, "")
    path = lard(tmp_path, row("images/one.png" + "x" * 200_000, read_lines(CORNERS)))
    with pytest.raises(HaloposeError, match="csv"):
        load_dataset(path, "")
    folder = picture(tmp_path / "bars" / "a.png").parent
    odd: list[dict[str, Any]] = [
        {"shapes": [], "imageWidth": size, "imageHeight": 1} for size in (float("inf"), 10**400)
    ]
    for content in ({"shapes": [None]}, *odd):
        (folder / "a.json").write_text(json.dumps(content))
        with pytest.raises(HaloposeError, match=r"a\.json"):
            load_dataset(folder, "")
