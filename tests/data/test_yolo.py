"""YOLO folders: equal labels from every data set format, and mirroring in trainers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halopose.data.dataset import Objects, image_ids
from halopose.data.dataset_loading import load_dataset
from halopose.data.images import write_image
from halopose.data.yolo import label_rows, write_yolo
from halopose.errors import HaloposeError
from tests.helpers.models import host_of, write_scenes


def test_data_in_pixels_become_the_same_labels(tmp_path: Path) -> None:
    """COCO json is in pixels, YOLO labels are not; crowds are left out."""
    host = host_of("11")
    dataset = load_dataset(write_scenes(tmp_path / "data", host, {"train": 5}), "train")
    pixels = [replace(record, objects=record.read()[1], relative=False) for record in dataset.records]
    first = pixels[0].objects
    doubled = {name: np.concatenate([value, value]) for name, value in vars(first).items()}
    doubled["crowd"] = np.repeat([False, True], len(first))
    pixels[0] = replace(pixels[0], objects=Objects(**doubled))
    paths = [
        write_yolo(given, tmp_path / name, host.class_names, 3)
        for name, given in (("a", dataset), ("b", replace(dataset, records=tuple(pixels))))
    ]
    labels = [{file.name: file.read_text() for file in (p.parent / "labels").iterdir()} for p in paths]
    assert len(labels[0]) == len(dataset)
    for name, text in labels[0].items():
        np.testing.assert_allclose(np.fromstring(text, sep=" "), np.fromstring(labels[1][name], sep=" "), atol=1e-8)


def test_a_folder_is_used_again(tmp_path: Path) -> None:
    """Links to images of the data set before are gone, and a file of the user's is not."""
    host = host_of("11")
    dataset = load_dataset(write_scenes(tmp_path / "data", host, {"train": 3}), "train")
    images = write_yolo(dataset, tmp_path / "work", host.class_names, 3).parent / "images"
    (images / "mine.txt").write_text("kept")
    second = replace(dataset.records[1], image_id=dataset.records[0].image_id)
    write_yolo(replace(dataset, records=(second,)), tmp_path / "work", host.class_names, 3)
    links = [path for path in images.iterdir() if path.is_symlink()]
    assert [link.resolve() for link in links] == [Path(str(second.path)).resolve()]
    assert (images / "mine.txt").read_text() == "kept"


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    host = host_of("11")
    dataset = load_dataset(write_scenes(tmp_path / "data", host, {"train": 1}), "train")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(HaloposeError, match=r"cannot write to .*file"):
        write_yolo(dataset, tmp_path / "file", host.class_names, 3)
    images = write_yolo(dataset, tmp_path / "work", host.class_names, 3).parent / "images"
    [link] = images.iterdir()
    link.unlink()
    link.write_text("kept")
    with pytest.raises(HaloposeError, match=f"cannot link .*{link.name} .*File exists"):
        write_yolo(dataset, tmp_path / "work", host.class_names, 3)
    assert link.read_text() == (tmp_path / "file").read_text() == "kept"


def test_a_full_disk_leaves_whole_labels(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    host = host_of("11")
    dataset = load_dataset(write_scenes(tmp_path / "data", host, {"train": 1}), "train")
    path = write_yolo(dataset, tmp_path / "work", host.class_names, 3)
    files = {file: file.read_text() for file in (path, *path.parent.glob("labels/*"))}
    request.getfixturevalue("full_disk")
    with pytest.raises(HaloposeError, match=r"cannot write .*txt: File too large"):
        write_yolo(dataset, tmp_path / "work", host.class_names, 3)
    assert {file: file.read_text() for file in (path, *path.parent.glob("labels/*"))} == files


def test_label_rows() -> None:
    objects = Objects(
        boxes=np.array([[-0.1, 0.2, 0.5, 1.2], [0.3, 0.3, 0.3, 0.6]]),
        class_ids=np.array([1, 0]),
        keypoints=np.array([[[0.1, 0.2], [1.3, 0.5], [0.4, 0.4]], [[0.3, 0.3]] * 3]),
        labelled=np.array([[True, True, False], [True, True, True]]),
        area=np.ones(2),
        crowd=np.zeros(2, dtype=bool),
    )
    expected = [1, 0.25, 0.6, 0.5, 0.8, 0.1, 0.2, 2, 0, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(label_rows(objects, 3), [expected])  # clipped; an empty box is no object
    np.testing.assert_allclose(label_rows(objects, 2)[0, 5:], [0.1, 0.2, *[-0.005] * 4])
    assert label_rows(objects.select(np.zeros(2, dtype=bool)), 3).shape == (0, 14)


def label(*, box: str = "0.5 0.5 0.2 0.2", kind: str = "0", point: str = "0.5 0.5 2") -> str:
    return f"{kind} {box} {point}"


def write_labels(root: Path, rows: list[str]) -> Path:
    """Twenty images with one keypoint an object; the first have the given rows, the others good ones."""
    for folder in ("images/train", "labels/train"):
        (root / folder).mkdir(parents=True)
    for number in range(20):
        write_image(root / f"images/train/{number}.png", np.zeros((8, 8, 3), np.uint8))
        text = rows[number] if number < len(rows) else label()
        (root / f"labels/train/{number}.txt").write_text(text)
    (root / "data.yaml").write_text("train: images/train\nkpt_shape: [1, 3]\nnames: {0: thing}\n")
    return root / "data.yaml"


FAULTS = {
    "in pixels": (label(box="320 240 64 64", point="320 240 2"), "coordinates far beyond the image"),
    "keypoint in pixels": (label(point="320 240 2"), "coordinates far beyond the image"),
    "negative box": (label(box="0.5 0.5 -0.2 0.2"), "a box without width or height"),
    "empty box": (label(box="0.5 0.5 0 0.2"), "a box without width or height"),
    "fractional class": (label(kind="0.5"), "a class that is not a whole number"),
    "negative class": (label(kind="-1"), "a class that is not a whole number"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_labels_are_counted_and_named(fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row, words = FAULTS[fault]
    with caplog.at_level("WARNING", logger="halopose"):
        dataset = load_dataset(write_labels(tmp_path / "few", [row]), "train")
    assert sum(len(record.objects) for record in dataset.records) == 19
    assert f"1 of 20 objects have {words}" in caplog.text
    assert "0.txt, line 1" in caplog.text
    with pytest.raises(HaloposeError, match=f"3 of 20 objects have {words}") as error:
        load_dataset(write_labels(tmp_path / "many", [row] * 3), "train")
    assert "\n" not in str(error.value)


def test_files_of_one_name_are_distinguished_by_folder(tmp_path: Path) -> None:
    """Sequences and cameras number their frames alike, in one split and across splits."""
    for folder in ("train/left", "train/right", "val/left"):
        for kind in ("images", "labels"):
            (tmp_path / kind / folder).mkdir(parents=True)
        for name in ("1", "2"):
            write_image(tmp_path / f"images/{folder}/{name}.png", np.zeros((8, 8, 3), np.uint8))
            (tmp_path / f"labels/{folder}/{name}.txt").write_text(label())
    write_image(tmp_path / "images/val/left/77.png", np.zeros((8, 8, 3), np.uint8))
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/val\nkpt_shape: [1, 3]\n")
    train, val = (load_dataset(tmp_path / "data.yaml", split) for split in ("train", "val"))
    both = load_dataset(tmp_path / "data.yaml", "train,val")
    assert len(set(both.image_ids.tolist())) == len(both) == 7
    assert set(both.image_ids) == set(train.image_ids) | set(val.image_ids)
    assert 77 in val.image_ids  # a unique name keeps its number as id
    with pytest.raises(HaloposeError, match="two of the splits"):
        load_dataset(tmp_path / "data.yaml", "val,val")


def test_yaml_as_deep_as_a_well_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("[" * 100_000)
    with pytest.raises(HaloposeError, match="too deeply"):
        load_dataset(tmp_path / "data.yaml", "train")


def test_files_with_one_number_have_distinct_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("images", "labels"):
        (tmp_path / kind).mkdir()
    for name in ("1.png", "01.png", "1.bmp", "2.png"):
        write_image(tmp_path / "images" / name, np.zeros((8, 8, 3), np.uint8))
    (tmp_path / "data.yaml").write_text("train: images\nkpt_shape: [1, 3]\n")
    found = {record.path.name: record.image_id for record in load_dataset(tmp_path / "data.yaml", "train").records}
    assert len(set(found.values())) == 4
    assert found["2.png"] == 2
    with caplog.at_level("WARNING", logger="halopose"):
        ids = image_ids(["1.jpg", "01.jpg", "1.png", "2.jpg", "a/1.jpg"])
    assert len(set(ids)) == 5
    assert ids[3] == 2
    assert "3 file names" in caplog.text


@pytest.mark.parametrize("address", ["/", "file:///"])
def test_the_root_of_the_file_system_is_not_searched(address: str, tmp_path: Path) -> None:
    content = {"path": ".", "train": address, "val": address, "kpt_shape": [2, 3], "names": {0: "thing"}}
    (tmp_path / "data.yaml").write_text(json.dumps(content))
    with pytest.raises(HaloposeError, match="root"):
        load_dataset(tmp_path / "data.yaml", "train")
