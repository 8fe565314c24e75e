"""Data sets: read back by halopose, consistent with the poses they state, the same for any number of processes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.geometry.camera import Camera, project_points
from halopose.landing.runway import runway_corners
from halopose.landing.runway_datasets import CORNER_NAMES, box_of
from halopose.landing.world.dataset_writer import FLIP_INDEX, split_seeds, write_dataset, yolo_labels
from halopose.landing.world.scenes import SceneSettings, corners_in_image, sample_scene
from halopose.types import Array

SMALL = SceneSettings(camera=Camera.from_fov(160, 96, np.radians(30)))
COUNTS = {"train": 4, "fog": 1}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    return write_dataset(folder, COUNTS, seed=3, settings=SMALL)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_halopose_reads_it(written: Path) -> None:
    for split, count in COUNTS.items():
        labels = load_dataset(written, split)
        coco = load_dataset(
            written.parent / "annotations" / f"{split}.json", split, images=written.parent / "images" / split
        )
        assert len(labels) == len(coco) == count
        assert labels.layout == coco.layout
        assert labels.layout.names == CORNER_NAMES
        np.testing.assert_array_equal(labels.image_ids, coco.image_ids)
        for own, theirs in zip(labels.records, coco.records, strict=True):
            image, objects = own.read()
            assert image.shape == (96, 160, 3)
            assert objects.labelled.all()
            np.testing.assert_allclose(objects.keypoints, theirs.objects.keypoints, atol=1e-4)
            np.testing.assert_allclose(objects.boxes, theirs.objects.boxes, atol=1e-4)


def test_stated_poses_project_to_the_labels(written: Path) -> None:
    content = json.loads((written.parent / "annotations" / "train.json").read_text())
    for image in content["images"]:
        camera = Camera(**{**image["camera"], "distortion": tuple(image["camera"]["distortion"])}, width=160, height=96)
        runway = image["runways"][0]
        pixels = project_points(
            camera,
            np.array(image["camera_rotation"]),
            np.array(image["camera_position"]),
            runway_corners(runway["length"], runway["width"]),
        )
        first = next(a for a in content["annotations"] if a["image_id"] == image["id"])
        np.testing.assert_allclose(np.reshape(first["keypoints"], (4, 3))[:, :2], pixels, atol=1e-9)
        scene = sample_scene(image["seed"], image["weather"], SMALL)
        np.testing.assert_array_equal(scene.position, image["position"])


def test_result_does_not_depend_on_processes_and_interrupted_run_resumes(written: Path, tmp_path: Path) -> None:
    whole = contents(written.parent)
    partial = tmp_path / "again"
    write_dataset(partial, {"train": 2}, seed=3, settings=SMALL)
    kept = {path: path.stat().st_mtime_ns for path in partial.rglob("*.jpg")}
    write_dataset(partial, COUNTS, seed=3, settings=SMALL, processes=2)
    assert contents(partial) == whole
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seed": 4}, "seed"),
        ({"weather": {"train": ("dusk",)}}, "weather"),
        ({"settings": replace(SMALL, bare=True)}, "settings"),
        ({"quality": 0}, "quality"),
    ],
)
def test_images_drawn_with_other_settings_are_not_mixed(
    written: Path, tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    """Images of one run under the labels of another would be wrong and look right."""
    folder = shutil.copytree(written.parent, tmp_path / "world")
    before = contents(folder)
    with pytest.raises(HaloposeError, match=f"another {word}"):
        write_dataset(folder, **{"counts": COUNTS, "seed": 3, "settings": SMALL, **change})
    assert contents(folder) == before
    write_dataset(folder, {"other": 1}, seed=4, settings=SMALL)  # another split is allowed
    shutil.rmtree(folder / "images" / "train")
    write_dataset(folder, **{"counts": {"train": 1}, "seed": 3, "settings": SMALL, **change})


def test_unknown_images_are_not_labelled(written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written.parent, tmp_path / "world")
    shutil.rmtree(folder / "drawn")
    with pytest.raises(HaloposeError, match="does not describe"):
        write_dataset(folder, COUNTS, seed=3, settings=SMALL)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_place_that_cannot_be_written_is_a_one_line_error(tmp_path: Path, processes: int) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(HaloposeError, match="cannot write to"):
        write_dataset(tmp_path / "file", COUNTS, seed=3, settings=SMALL, processes=processes)


def test_a_full_disk_is_a_one_line_error(tmp_path: Path, full_disk: Callable[[int | None], None]) -> None:
    full_disk(1000)
    with pytest.raises(HaloposeError, match=r"cannot write .*\.jpg"):
        write_dataset(tmp_path, COUNTS, seed=3, settings=SMALL)


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_splits_share_no_scene(seed: int, count: int) -> None:
    seeds = [set(split_seeds(seed, name, count)) for name in ("train", "val", "test", "fog", "calibration")]
    assert len(set.union(*seeds)) == 5 * count
    assert split_seeds(seed, "train", count + 3)[:count] == split_seeds(seed, "train", count)


def test_fog_is_for_testing_only(written: Path, tmp_path: Path) -> None:
    def weathers(split: str) -> set[str]:
        images = json.loads((written.parent / "annotations" / f"{split}.json").read_text())["images"]
        return {image["weather"] for image in images}

    assert weathers("train") == {"clear", "haze", "dusk", "night"}
    assert weathers("fog") == {"fog"}
    with pytest.raises(HaloposeError, match="fog"):
        write_dataset(tmp_path, {"train": 1}, weather={"train": ["fog"]})
    with pytest.raises(HaloposeError, match="unknown weather"):
        write_dataset(tmp_path, {"val": 1}, weather={"val": [cast(Any, "hail")]})
    with pytest.raises(HaloposeError, match="has no weather"):
        write_dataset(tmp_path, {"val": 1}, weather={"val": []})
    with pytest.raises(HaloposeError, match="holds 1 to"):
        write_dataset(tmp_path, {"val": 0})


def test_the_flip_swaps_left_and_right() -> None:
    swapped = [CORNER_NAMES[k] for k in FLIP_INDEX]
    assert swapped == [n.replace("left", "x").replace("right", "left").replace("x", "right") for n in CORNER_NAMES]


@given(st.lists(st.tuples(st.floats(0, 640), st.floats(0, 384)), min_size=4, max_size=4))
def test_a_box_holds_its_corners_and_is_never_too_small(points: Array) -> None:
    corners = np.array(points)
    left, top, right, bottom = box_of(corners, 640, 384)
    assert left <= corners[:, 0].min() <= corners[:, 0].max() <= right
    assert top <= corners[:, 1].min() <= corners[:, 1].max() <= bottom
    assert 0 <= left < right <= 640
    assert 0 <= top < bottom <= 384
    assert min(right - left, bottom - top) >= 3  # half of the smallest box, at the image's border


def test_labels_list_the_runway_landed_on_first() -> None:
    scene = next(
        s for s in (sample_scene(n, "clear", SceneSettings(parallel_share=1.0)) for n in range(200)) if s.parallel
    )
    first = np.array(yolo_labels(scene).splitlines()[0].split(), float)[5:].reshape(4, 3)
    np.testing.assert_allclose(first[:, :2] * (640, 384), corners_in_image(scene)[0], atol=1e-4)


@pytest.mark.parametrize("quality", [95, 0])
def test_a_truncated_image_is_drawn_again(tmp_path: Path, quality: int) -> None:
    write_dataset(tmp_path, {"clear": 1}, seed=3, settings=SMALL, quality=quality)
    before = contents(tmp_path)
    [image] = (tmp_path / "images" / "clear").iterdir()
    image.write_bytes(image.read_bytes()[:300])
    write_dataset(tmp_path, {"clear": 1}, seed=3, settings=SMALL, quality=quality)
    assert contents(tmp_path) == before
