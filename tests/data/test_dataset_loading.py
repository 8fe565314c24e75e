"""The same data set from folders, tar archives and addresses, as yaml and as COCO json."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from halopose.data import coco
from halopose.data.coco import parse_ground_truth, read_ground_truth
from halopose.data.dataset import Dataset
from halopose.data.dataset_loading import exclude_images, load_dataset, load_train_val
from halopose.data.storage.address import Address
from halopose.data.synthetic_poses import World, synthesize
from halopose.errors import HaloposeError
from tests.data.test_dataset import as_coco, yolo_set

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Address]:
    yield Address(f"memory://{tmp_path.name}")
    fsspec.filesystem("memory").store.clear()


def same(one: Dataset, other: Dataset) -> bool:
    """Whether both have the same images and labels, wherever they are."""
    for mine, theirs in zip(one.records, other.records, strict=True):
        image, objects = mine.read()
        assert np.array_equal(image, theirs.read()[0])
        for name, column in vars(theirs.read()[1]).items():
            assert np.allclose(getattr(objects, name), column)
        assert mine.state()[0] == theirs.state()[0]
        assert mine.state()[4] == theirs.state()[4] != ""
        assert mine.is_as_it_was(mine.state())
    return one.layout == other.layout


def tarred(files: dict[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as opened:
        for name, path in files.items():
            opened.add(path, name)
    return buffer.getvalue()


def samples(root: Path, split: str) -> dict[str, Path]:
    """Images and labels of a split by their names in an archive."""
    images = sorted((root / "images" / split).iterdir())
    labels = sorted((root / "labels" / split).glob("*.txt"))
    return {path.name: path for path in [*images, *labels]}


def test_archives_hold_what_folders_do(tmp_path: Path, memory: Address) -> None:
    data = yolo_set(tmp_path / "data")
    content = yaml.safe_load(data.read_text())
    both = {**samples(tmp_path / "data", "train"), **samples(tmp_path / "data", "val")}
    for number, part in enumerate(({"7", "8"}, {"9"})):
        chosen = {name: path for name, path in both.items() if path.stem in part}
        (tmp_path / f"train-{number}.tar").write_bytes(tarred(chosen))
        (memory / f"train-{number}.tar").write_bytes(tarred(chosen))
    expected = load_dataset(data, "train,val")
    (tmp_path / "tar.yaml").write_text(yaml.safe_dump({**content, "path": ".", "train": "train-{0..1}.tar"}))
    (memory / "tar.yaml").write_bytes(yaml.safe_dump({**content, "path": ".", "train": "train-*.tar"}).encode())
    assert same(load_dataset(tmp_path / "tar.yaml", "train"), expected)
    assert same(load_dataset(str(memory / "tar.yaml"), "train"), expected)
    as_coco(expected, tmp_path / "truth.json")
    inside = load_dataset(tmp_path / "truth.json", "", images=tmp_path / "train-{0..1}.tar")
    assert same(inside, expected)
    assert same(load_dataset(tmp_path / "truth.json", "", images=str(memory / "train-*.tar")), expected)
    with pytest.raises(HaloposeError, match=r"has no image 9\.png"):
        load_dataset(tmp_path / "truth.json", "", images=tmp_path / "train-0.tar")


def test_addresses_hold_what_folders_do(tmp_path: Path, memory: Address) -> None:
    data = yolo_set(tmp_path / "data")
    data.write_text(yaml.safe_dump({**yaml.safe_load(data.read_text()), "path": "."}))
    for file in (tmp_path / "data").rglob("*"):
        if file.is_file():
            (memory / file.relative_to(tmp_path / "data").as_posix()).write_bytes(file.read_bytes())
    for split in ("train", "val", "train,val"):
        expected = load_dataset(data, split)
        assert same(load_dataset(str(memory / data.name), split), expected)
        assert same(load_dataset(data.as_uri(), split), expected)
    content = {**yaml.safe_load(data.read_text()), "path": str(memory)}
    (tmp_path / "remote.yaml").write_text(yaml.safe_dump(content))
    assert same(load_dataset(tmp_path / "remote.yaml", "val"), load_dataset(data, "val"))


def test_an_image_twice_in_the_archives_is_a_one_line_error(tmp_path: Path) -> None:
    data = yolo_set(tmp_path / "data")
    for number in range(2):
        (tmp_path / f"{number}.tar").write_bytes(tarred(samples(tmp_path / "data", "train")))
    content = {**yaml.safe_load(data.read_text()), "path": ".", "train": ["0.tar", "1.tar"]}
    (tmp_path / "tar.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(HaloposeError, match="splits or archives"):
        load_dataset(tmp_path / "tar.yaml", "train")


@pytest.mark.parametrize("order", [("images", "categories", "annotations"), ("annotations", "images", "categories")])
@pytest.mark.parametrize("chunk", [7, 4096])
def test_long_json_is_read_as_short_json_is(
    order: tuple[str, ...], chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coco, "CHUNK", chunk)
    objects, _ = synthesize(World(images=20, persons=50))
    expected = parse_ground_truth("truth", objects)
    path = tmp_path / "truth.json"
    path.write_text(json.dumps({"info": {"year": 2017}, **{key: objects[key] for key in order}, "licenses": []}))
    found = read_ground_truth(path)
    for name, column in vars(expected).items():
        assert np.array_equal(column, getattr(found, name)) if name != "layout" else found.layout == column


def test_a_bad_entry_keeps_its_number_in_long_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coco, "CHUNK", 7)
    objects, _ = synthesize(World(images=20, persons=50))
    objects["annotations"][33]["area"] = "large"
    (tmp_path / "truth.json").write_text(json.dumps(objects))
    with pytest.raises(HaloposeError, match=r"truth\.json: annotation 33 .* area$"):
        read_ground_truth(tmp_path / "truth.json")


def test_names_that_no_file_can_have_are_one_line_errors() -> None:
    for name in ("x" * 5000, "\0"):
        with pytest.raises(HaloposeError) as error:
            load_dataset(Path(name), "train")
        assert "\n" not in str(error.value)


def test_training_and_validation_data_of_a_yaml_and_of_two_json_files(tmp_path: Path) -> None:
    data = yolo_set(tmp_path / "data")
    train, val = load_train_val(data, "train", "val")
    assert (len(train), len(val)) == (1, 2)
    assert same(train, load_dataset(data, "train"))
    for name, one in (("train", train), ("val", val)):
        as_coco(one, tmp_path / f"{name}.json")
    folders = {name: tmp_path / "data" / "images" / name for name in ("train", "val")}
    found = load_train_val(
        tmp_path / "train.json", "", str(tmp_path / "val.json"), images=folders["train"], val_images=folders["val"]
    )
    assert same(found[0], train)
    assert same(found[1], val)
    with pytest.raises(HaloposeError, match="--val"):
        load_train_val(tmp_path / "train.json", "train", "val", images=folders["train"])


def test_images_that_made_a_model_are_excluded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    val = load_dataset(yolo_set(tmp_path / "data"), "val")
    first, second = np.sort(val.image_ids)
    with caplog.at_level("INFO", "halopose"):
        assert exclude_images(val, np.array([first, -1]), "the artifact").image_ids.tolist() == [second]
    assert "1 of 2" in caplog.text
    with pytest.raises(HaloposeError, match="the artifact: give more"):
        exclude_images(val, val.image_ids, "the artifact", "give more")
