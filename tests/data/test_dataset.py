"""YOLO and COCO data sets: the same data in both forms, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from halopose.data.dataset import Dataset
from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from tests.helpers.models import write_yolo
from tests.helpers.values import present

SHAPES = [(40, 60), (33, 21), (50, 50)]
IMAGES = [np.full((*shape, 3), 90, np.uint8) for shape in SHAPES]


def row(generator: np.random.Generator, count: int = 3, dimensions: int = 3, class_id: int = 0) -> list[float]:
    """A label line: class, box, keypoints, the second one unlabelled."""
    points = generator.uniform(0.1, 0.9, (count, dimensions))
    if dimensions == 3:
        points[:, 2] = generator.integers(1, 3, count)
    points[1] = 0
    return [class_id, *generator.uniform(0.4, 0.6, 4), *points.ravel()]


def yolo_set(root: Path, dimensions: int = 3, **extra: Any) -> Path:
    generator = np.random.default_rng(0)
    rows = [[row(generator, dimensions=dimensions) for _ in range(n)] for n in (2, 0, 1)]
    items = [(f"{n + 7}.png", image, lines) for n, (image, lines) in enumerate(zip(IMAGES, rows, strict=True))]
    return write_yolo(root, {"train": items[:1], "val": items[1:]}, kpt_shape=[3, dimensions], **extra)


def as_coco(dataset: Dataset, path: Path) -> None:
    """Write the same data as COCO json."""
    annotations: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    for record in dataset.records:
        image, objects = record.read()
        images.append({"id": record.image_id, "file_name": record.path.name, "height": image.shape[0]})
        for n in range(len(objects)):
            x1, y1, x2, y2 = objects.boxes[n].tolist()
            flags = np.where(present(objects.occluded)[n], 1.0, 2.0) * objects.labelled[n]
            triples = np.concatenate([objects.keypoints[n], flags[:, None]], axis=1)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": record.image_id,
                    "category_id": int(objects.class_ids[n]) + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": float(objects.area[n]),
                    "keypoints": triples.ravel().tolist(),
                }
            )
    categories = [{"id": 1, "name": "thing", "keypoints": list(dataset.layout.names)}]
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))


@pytest.mark.parametrize("dimensions", [2, 3])
def test_yolo_labels_become_pixels(tmp_path: Path, dimensions: int) -> None:
    path = yolo_set(tmp_path, dimensions)
    dataset = load_dataset(path, "train")
    [record] = dataset.records
    image, objects = record.read()
    assert (record.image_id, image.shape[:2], len(objects)) == (7, SHAPES[0], 2)
    lines = (tmp_path / "labels" / "train" / "7.txt").read_text().splitlines()
    for number, line in enumerate(lines):
        values = [float(value) for value in line.split()]
        x, y, w, h = np.array(values[1:5]) * [60, 40, 60, 40]
        assert np.allclose(objects.boxes[number], [x - w / 2, y - h / 2, x + w / 2, y + h / 2])
        points = np.array(values[5:]).reshape(3, dimensions)
        assert np.allclose(objects.keypoints[number], points[:, :2] * [60, 40])
        assert objects.labelled[number].tolist() == [True, False, True]
        assert np.isclose(objects.area[number], w * h)
    assert dataset.layout == Keypoints.of(3)
    assert dataset.area == "1 x box"


def test_layout_of_the_data_overrides_that_of_the_model(tmp_path: Path) -> None:
    model = Keypoints.of(3, names=("x", "y", "z"), sigmas=(0.5, 0.6, 0.7), area_factor=0.5)
    silent = load_dataset(yolo_set(tmp_path / "silent"), "train", otherwise=model)
    assert silent.layout == model
    path = yolo_set(tmp_path / "loud", kpt_names={0: ["a", "b", "c"]}, kpt_oks_sigmas=[0.1, 0.2, 0.3])
    loud = load_dataset(path, "train", otherwise=model)
    assert (loud.layout.names, loud.layout.sigmas) == (("a", "b", "c"), (0.1, 0.2, 0.3))
    assert load_dataset(path, "train").layout == Keypoints.of(3, names="abc", sigmas=(0.1, 0.2, 0.3))
    whole = load_dataset(path, "train").records[0].read()[1].area
    assert np.allclose(loud.records[0].read()[1].area, whole / 2)
    other = Keypoints.of(4, sigmas=(0.5, 0.6, 0.7, 0.8))  # of a model that does not fit, which is refused elsewhere
    assert load_dataset(path, "train", otherwise=other).layout == load_dataset(path, "train").layout


def test_the_mirror_of_the_yaml(tmp_path: Path) -> None:
    for index, (given, expected) in enumerate([([1, 0, 2], (1, 0, 2)), ([0, 1, 2], None), ([1, 1, 2], None)]):
        path = yolo_set(tmp_path / str(index), flip_idx=given)
        assert load_dataset(path, "train").layout.mirror == expected


def test_missing_and_empty_labels_mean_no_objects(tmp_path: Path) -> None:
    path = yolo_set(tmp_path)
    (tmp_path / "labels" / "val" / "9.txt").unlink()
    dataset = load_dataset(path, "val")
    assert [len(record.objects) for record in dataset.records] == [0, 0]
    _, objects = dataset.records[0].read()
    assert objects.boxes.shape == (0, 4)
    assert objects.keypoints.shape == (0, 3, 2)
    assert objects.labelled.shape == (0, 3)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("0 .5 .5 .2 .2 .1 .1 2", "line 1: 8 numbers"),
        ("0 .5 .5 .2 .2 .1 .1 2 .1 .1 2 nan .1 2", "not finite"),
        ("0 .5 .5 .2 .2 .1 .1 2 .1 .1 2 inf .1 2", "not finite"),
        ("0 .5 .5 .2 .2 .1 .1 2 .1 .1 2 abc .1 2", "not a number"),
        ("\xb2 .5 .5 .2 .2 .1 .1 2 .1 .1 2 .1 .1 2", "labels"),  # a digit in other alphabets, and no utf-8
        ("\xc2\xb2 .5 .5 .2 .2 .1 .1 2 .1 .1 2 .1 .1 2", "not a number"),  # a digit that int does not know
        ("\xff\xfe", "labels"),
    ],
)
def test_wrong_labels_are_one_line_errors(tmp_path: Path, line: str, says: str) -> None:
    path = yolo_set(tmp_path)
    (tmp_path / "labels" / "train" / "7.txt").write_bytes(line.encode("latin-1"))
    with pytest.raises(HaloposeError, match=says) as error:
        load_dataset(path, "train")
    assert "7.txt" in str(error.value)
    assert "\n" not in str(error.value)


def test_list_and_text_splits(tmp_path: Path) -> None:
    path = yolo_set(tmp_path)
    content = yaml.safe_load(path.read_text())
    (tmp_path / "some.txt").write_text("./images/val/9.png\n\nimages/train/7.png\n")
    content |= {"both": ["images/train", "images/val"], "text": "some.txt"}
    path.write_text(yaml.safe_dump(content))
    assert load_dataset(path, "both").image_ids.tolist() == [7, 8, 9]
    assert sorted(load_dataset(path, "text").image_ids.tolist()) == [7, 9]
    joined = load_dataset(path, "train, val")
    assert joined.image_ids.tolist() == [7, 8, 9]
    assert joined.subset(np.array([9, 7, 1])).image_ids.tolist() == [7, 9]
    with pytest.raises(HaloposeError, match="two of the splits"):
        load_dataset(path, "train,both")


def test_different_keypoints_are_refused(tmp_path: Path) -> None:
    path = yolo_set(tmp_path)
    other = write_yolo(tmp_path / "other", {"train": [("1.png", IMAGES[0], [])]}, kpt_shape=[5, 3])
    with pytest.raises(HaloposeError, match="keypoints"):
        Dataset.join([load_dataset(path, "train"), load_dataset(other, "train")])


def test_ids_of_names_that_are_no_numbers_are_stable(tmp_path: Path) -> None:
    path = write_yolo(tmp_path, {"a": [("cat.png", IMAGES[0], []), ("dog.png", IMAGES[0], [])]})
    first = load_dataset(path, "a").image_ids
    assert len(set(first.tolist())) == 2
    assert np.array_equal(first, load_dataset(path, "a").image_ids)
    assert first.min() >= 0
    assert first.max() < 2**53  # survives json


def test_yaml_and_json_agree(tmp_path: Path) -> None:
    path = yolo_set(tmp_path)
    yolo = load_dataset(path, "val,train")
    as_coco(yolo, tmp_path / "truth.json")
    (tmp_path / "flat").mkdir()
    for record in yolo.records:
        (tmp_path / "flat" / record.path.name).write_bytes(record.path.read_bytes())
    coco = load_dataset(tmp_path / "truth.json", "", images=tmp_path / "flat")
    assert coco.layout.names == yolo.layout.names
    assert coco.image_ids.tolist() == [7, 8, 9]
    by_id = {record.image_id: record for record in yolo.records}
    for record in coco.records:
        image, found = record.read()
        expected_image, expected = by_id[record.image_id].read()
        assert np.array_equal(image, expected_image)
        for name in ("boxes", "class_ids", "keypoints", "labelled", "area", "crowd"):
            assert np.allclose(getattr(found, name), getattr(expected, name)), name


def test_coco_classes_follow_the_categories(tmp_path: Path) -> None:
    """A split in which the first category never occurs still calls the second one class 1."""
    annotation = {
        "id": 1,
        "image_id": 1,
        "category_id": 2,
        "bbox": [1, 1, 5, 5],
        "area": 25,
        "keypoints": [2, 2, 2],
    }
    content = {
        "images": [{"id": 1, "file_name": "1.png"}],
        "annotations": [annotation],
        "categories": [{"id": n, "name": str(n), "keypoints": ["tip"]} for n in (1, 2)],
    }
    (tmp_path / "truth.json").write_text(json.dumps(content))
    [record] = load_dataset(tmp_path / "truth.json", "", images=tmp_path).records
    assert record.objects.class_ids.tolist() == [1]


def test_coco_mistakes_are_one_line_errors(tmp_path: Path) -> None:
    path = tmp_path / "truth.json"
    content = {"images": [{"id": 1}], "annotations": [], "categories": [{"id": 1, "keypoints": ["tip"]}]}
    path.write_text(json.dumps(content))
    for images, says in ((None, "--images"), (tmp_path, "file_name")):
        with pytest.raises(HaloposeError, match=says) as error:
            load_dataset(path, "", images=images)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kpt_shape": None}, "kpt_shape"),
        ({"kpt_shape": [3]}, "kpt_shape"),
        ({"kpt_shape": [3, 4]}, "kpt_shape"),
        ({"kpt_shape": ["three", 3]}, "kpt_shape"),
        ({"kpt_oks_sigmas": "small"}, "sigmas"),
        ({"kpt_oks_sigmas": [0.1]}, "sigmas"),
        ({"train": "images/nowhere"}, "nowhere"),
        ({"train": "labels"}, "no images"),
        ({"train": None}, "no folder"),
    ],
)
def test_wrong_yaml_is_a_one_line_error(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = yolo_set(tmp_path)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(HaloposeError, match=says) as error:
        load_dataset(path, "train")
    assert "\n" not in str(error.value)


def test_yaml_that_is_none(tmp_path: Path) -> None:
    for name, content in (("list.yaml", "[1, 2]"), ("broken.yaml", "a: [1"), ("binary.yaml", "\x00\x01")):
        (tmp_path / name).write_text(content)
        with pytest.raises(HaloposeError, match=name):
            load_dataset(tmp_path / name, "train")
    with pytest.raises(HaloposeError, match=r"missing\.yaml"):
        load_dataset(tmp_path / "missing.yaml", "train")
    with pytest.raises(HaloposeError, match="it has train, val"):
        load_dataset(yolo_set(tmp_path), "test")
