"""The YOLO folder: labels are the same whatever the data set's format, and trainers can mirror."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halopose.data.dataset import Objects
from halopose.data.loading import load_dataset
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
        np.testing.assert_allclose(
            np.fromstring(text, sep=" "), np.fromstring(labels[1][name], sep=" "), atol=1e-8
        )


def test_a_folder_is_used_again(tmp_path: Path) -> None:
    """Links to images of the data set before are gone, and a file of the user's is not."""
    host = host_of("11")
    dataset = load_dataset(write_scenes(tmp_path / "data", host, {"train": 3}), "train")
    images = write_yolo(dataset, tmp_path / "work", host.class_names, 3).parent / "images"
    (images / "mine.txt").write_text("kept")
    second = replace(dataset.records[1], image_id=dataset.records[0].image_id)
    write_yolo(replace(dataset, records=(second,)), tmp_path / "work", host.class_names, 3)
    links = [path for path in images.iterdir() if path.is_symlink()]
    assert [link.resolve() for link in links] == [second.path.resolve()]
    assert (images / "mine.txt").read_text() == "kept"


def test_what_stands_in_the_way_is_one_line(tmp_path: Path) -> None:
    host = host_of("11")
    dataset = load_dataset(write_scenes(tmp_path / "data", host, {"train": 1}), "train")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(HaloposeError, match=r"cannot write to .*file"):
        write_yolo(dataset, tmp_path / "file", host.class_names, 3)
    images = write_yolo(dataset, tmp_path / "work", host.class_names, 3).parent / "images"
    [link] = images.iterdir()
    link.unlink()
    link.write_text("kept")
    with pytest.raises(HaloposeError, match=f"cannot link .*{link.name} to an image: File exists"):
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
