"""Collecting features: stored content, resuming after kills, and refused inputs."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.fitting import collecting
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings, MatchStore
from halopose.hosts.base import Targets
from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost
from halopose.uncertainty.heads import HeadSettings
from tests.fitting.conftest import KIND, SETTINGS
from tests.helpers.models import artifact_for, host_of, pose_model, run_script, scenes, write_scenes, write_yolo
from tests.helpers.values import read_picture

pytestmark = pytest.mark.usefixtures("one_thread")


def with_broken_image(data: Path, root: Path) -> Path:
    """A copy of the data in which the second training image cannot be read."""
    shutil.copytree(data.parent, root)
    path = root / "data.yaml"
    path.write_text(path.read_text().replace(str(data.parent), str(root)))
    (root / "images" / "train" / "train_001.png").write_bytes(b"broken")
    return path


def columns(store: MatchStore, kind: str, name: str, image_id: int) -> torch.Tensor:
    """A column of one image's rows, in the order of their cells."""
    parts = [cells.columns[name][cells.columns["image_id"] == image_id] for cells in store.cells(kind)]
    return torch.cat(parts)


def one_line(error: pytest.ExceptionInfo[HaloposeError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# What is stored --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KIND, "26-one-to-one"])
def test_residual_plus_prediction_is_the_truth(kind: str, data: Path, folder: Path) -> None:
    host, dataset = host_of(kind), load_dataset(data, "train")
    store = collect(host, dataset, folder, SETTINGS)
    for record in dataset.records:
        image, objects = record.read()
        batch, [box] = host.preprocess([image], 64, True)
        output = host.forward(batch)
        keypoints = torch.from_numpy(box.to_input(objects.keypoints)).float()
        corners = torch.from_numpy(box.to_input(objects.boxes.reshape(-1, 2, 2)).reshape(-1, 4)).float()
        labelled = torch.from_numpy(objects.labelled)
        targets = Targets(corners, torch.zeros(len(objects)).long(), keypoints, labelled)
        found = host.assign(output, [targets], dataset.layout.sigmas)
        assert len(found.cell) > 0
        residual, mask, number, confidence, area = (
            columns(store, "assigned", name, record.image_id)
            for name in ("residual", "labelled", "object", "confidence", "area")
        )
        assert torch.equal(number, found.object)
        assert torch.equal(mask.bool(), labelled[number])
        assert mask.any()
        assert not mask.all()
        there = output.keypoints[0, found.cell] + residual
        torch.testing.assert_close(there[mask.bool()], keypoints[number][mask.bool()], rtol=0, atol=1e-4)
        assert not residual[~mask.bool()].any()
        assert torch.equal(confidence, output.scores[0, found.cell])
        gain = box.gain[0] * box.gain[1]
        torch.testing.assert_close(area, torch.from_numpy(objects.area).float()[number] * gain)


@pytest.mark.parametrize("batch", [1, 4])
def test_stored_windows_give_the_live_heads_result(data: Path, folder: Path, batch: int) -> None:
    host, dataset = host_of(KIND), load_dataset(data, "train")
    heads = artifact_for(host).heads
    store = collect(host, dataset, folder, CollectSettings(imgsz=(64,), detections=5, conf=0.05, batch=batch))
    for record in dataset.records:
        tensors, [box] = host.preprocess([record.read()[0]], 64, True)
        output = host.forward(tensors)
        [selection] = host.select(output, conf=0.05, iou=0.7, max_detections=5)
        original = host.to_original(selection, box, (tensors.shape[2], tensors.shape[3]))
        live = heads.sparse(output.features, torch.zeros_like(selection.cell), selection.cell)
        order = selection.cell.argsort()  # rows are stored level by level; within one image scores differ
        stored = []
        for cells in store.cells("detected"):
            mine = cells.columns["image_id"] == record.image_id
            assert cells.windows.dtype == torch.float16
            factors = heads.at_windows(cells.level, cells.windows[mine].float(), cells.inside[mine])
            stored += list(zip(cells.columns["score"][mine].tolist(), factors, strict=True))
        assert len(stored) == len(order) > 0
        stored.sort(key=lambda row: -row[0])
        for (score, factor), expected, place in zip(stored, live, range(len(live)), strict=True):
            assert score == pytest.approx(float(selection.scores[place]), abs=1e-4)
            error = (factor - expected).abs().amax((-1, -2)) / expected.abs().amax((-1, -2))
            assert error.max() < 0.02  # half precision
        for name, value in (("box", original.boxes), ("keypoints", original.keypoints)):
            found = columns(store, "detected", name, record.image_id)
            scores = columns(store, "detected", "score", record.image_id)
            torch.testing.assert_close(found[scores.argsort(descending=True)], value, rtol=1e-3, atol=1e-2)


def test_stored_context_features_equal_those_of_the_live_host(data: Path, folder: Path) -> None:
    host, dataset = host_of(KIND), load_dataset(data, "train")
    heads = artifact_for(host, HeadSettings(overlaps=True, features=True)).heads
    store = collect(host, dataset, folder, replace(SETTINGS, context_features=True, batch=3))
    for record in dataset.records:
        tensors, _ = host.preprocess([record.read()[0]], 64, True)
        output = host.forward(tensors)
        [selection] = host.select(output, conf=0.05, iou=0.7, max_detections=5)
        zero = torch.zeros_like(selection.cell)
        with torch.inference_mode():
            live = heads.sparse(
                output.features, zero, selection.cell, host.context_features(output, zero, selection.cell)
            )
        found = []
        for cells in store.cells("detected"):
            mine = cells.of_images(np.array([record.image_id]))
            found += list(zip(mine.columns["score"].tolist(), mine.factors(heads), strict=True))
        found.sort(key=lambda row: -row[0])
        assert len(found) == len(live) > 0
        for (_, factor), expected in zip(found, live, strict=True):
            error = (factor.detach() - expected).abs().amax((-1, -2)) / expected.abs().amax((-1, -2))
            assert error.max() < 0.05  # half precision
    plain = collect(host, dataset, folder.with_name("plain"), SETTINGS)
    with pytest.raises(HaloposeError, match="--context"):
        next(plain.cells("assigned")).factors(heads)


def test_an_objects_best_cells_are_kept(data: Path, folder: Path, tmp_path: Path) -> None:
    dataset = load_dataset(data, "train")
    whole = collect(host_of(KIND), dataset, folder, CollectSettings(imgsz=(64,)))
    few = collect(host_of(KIND), dataset, tmp_path / "few", CollectSettings(imgsz=(64,), cells_per_object=2))
    for image_id in dataset.image_ids.tolist():
        number, confidence = (columns(whole, "assigned", name, image_id) for name in ("object", "confidence"))
        kept_number, kept = (columns(few, "assigned", name, image_id) for name in ("object", "confidence"))
        for n in number.unique().tolist():
            best = confidence[number == n].sort(descending=True).values[:2]
            assert torch.equal(kept[kept_number == n].sort(descending=True).values, best)


def test_images_without_objects_or_detections(tmp_path: Path) -> None:
    path = write_yolo(tmp_path, {"val": [(f"{n}.png", image, []) for n, image in enumerate(scenes(3))]})
    dataset = load_dataset(path, "val")
    store = collect(host_of(KIND), dataset, tmp_path / "store", CollectSettings(imgsz=(64,), detections=5, conf=1.0))
    assert list(store.cells("assigned")) == list(store.cells("detected")) == []
    truth = store.ground_truth()
    assert (len(truth), truth.images.tolist()) == (0, [0, 1, 2])


def test_several_sizes(data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "VIEWS_PER_SHARD", 2)
    dataset = load_dataset(data, "val")
    store = collect(host_of(KIND), dataset, folder, CollectSettings(imgsz=(64, 96), detections=3, conf=0.05))
    gains = torch.cat([cells.columns["gain"] for cells in store.cells("detected")])
    assert len(gains[:, 0].unique()) == 2  # every image at both sizes
    assert store.settings.imgsz == (64, 96)
    objects = sum(len(record.objects) for record in dataset.records)
    assert len(store.ground_truth()) == objects


@pytest.mark.parametrize("views", [32, 1])
def test_unreadable_images_are_skipped_and_listed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: int
) -> None:
    monkeypatch.setattr(collecting, "VIEWS_PER_SHARD", views)
    dataset = load_dataset(with_broken_image(data, tmp_path / "data"), "train")
    store = collect(host_of(KIND), dataset, tmp_path / "store", SETTINGS)
    [line] = store.skipped()
    assert "train_001.png" in line
    broken = next(record.image_id for record in dataset.records if record.path.name == "train_001.png")
    truth = store.ground_truth()
    assert broken not in truth.images
    assert len(truth.images) == 5


def test_a_data_set_without_a_readable_image_is_refused(tmp_path: Path) -> None:
    data = write_scenes(tmp_path, host_of(KIND), {"train": 2})
    for path in (tmp_path / "images" / "train").iterdir():
        path.write_bytes(b"no picture")
    with pytest.raises(HaloposeError, match="none of the 2 images"):
        collect(host_of(KIND), load_dataset(data, "train"), tmp_path / "store", SETTINGS)


# Resuming --------------------------------------------------------------------------------------------------

KILLED = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from halopose.fitting import collecting
from halopose.fitting.feature_cache import CollectSettings
from halopose.data.dataset_loading import load_dataset
from tests.helpers.models import host_of, survive_kills
collecting.VIEWS_PER_SHARD = 4
root = Path(sys.argv[1])
host, dataset = host_of(sys.argv[2]), load_dataset(root / "data.yaml", "train")
settings = CollectSettings(imgsz=(64,), detections=5)
collecting.collect(host, dataset, root / "whole", settings)
shards = lambda: len(list((root / "killed").glob("shard-*.safetensors")))
survive_kills(lambda: collecting.collect(host, dataset, root / "killed", settings), shards, [0, 1, 4, 8, 12, 17])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_kills_leave_no_trace(tmp_path: Path) -> None:
    write_scenes(tmp_path, host_of(KIND), {"train": 100})
    reached = json.loads(run_script(KILLED, tmp_path, KIND))
    assert len(reached) == 6
    assert max(reached) < 25  # the last kill came before the end
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(names) == 26  # 25 shards and the manifest
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == names
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_progress_and_a_second_run_that_has_nothing_to_do(
    data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "VIEWS_PER_SHARD", 4)
    dataset, seen = load_dataset(data, "train"), []
    collect(host_of(KIND), dataset, folder, SETTINGS, lambda done, total: seen.append((done, total)))
    assert sorted(set(seen)) == [(done, 6) for done in range(1, 7)]  # from the first image on
    assert seen == sorted(seen)
    monkeypatch.setattr(collecting, "_collect_views", None)  # would fail if called
    collect(host_of(KIND), dataset, folder, SETTINGS)


# Refusals --------------------------------------------------------------------------------------------------


def test_other_settings_data_or_base_are_refused(data: Path, folder: Path) -> None:
    dataset = load_dataset(data, "train")
    collect(host_of(KIND), dataset, folder, SETTINGS)
    for host, records, settings in (
        (host_of(KIND), dataset, CollectSettings(imgsz=(96,), detections=5)),
        (host_of(KIND), load_dataset(data, "val"), SETTINGS),
        (host_of("11"), dataset, SETTINGS),
    ):
        with pytest.raises(HaloposeError, match="other data or settings") as error:
            collect(host, records, folder, settings)
        one_line(error)


def test_a_small_disk_is_refused_before_the_start(data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage(1, 1, 1000))
    with pytest.raises(HaloposeError, match="has 1000 bytes free") as error:
        collect(host_of(KIND), load_dataset(data, "train"), folder, SETTINGS)
    one_line(error)
    assert not list(folder.glob("shard*"))


def test_predicted_size_is_an_upper_bound(data: Path, folder: Path) -> None:
    dataset = load_dataset(data, "train")
    collect(host_of(KIND), dataset, folder, SETTINGS)
    size = sum(path.stat().st_size for path in folder.glob("shard*"))
    bound = collecting.predicted_bytes(host_of(KIND), dataset, SETTINGS)
    assert size < bound + 20_000  # headers and the table of objects


def test_other_keypoints_are_refused(data: Path, folder: Path) -> None:
    host = UltralyticsHost(pose_model(KIND, (5, 3)))
    with pytest.raises(HaloposeError, match="the model 5"):
        collect(host, load_dataset(data, "train"), folder, SETTINGS)


def test_a_class_that_the_model_lacks_is_a_one_line_error(tmp_path: Path) -> None:
    line = [3, 0.5, 0.5, 0.6, 0.6, *[0.5, 0.5, 2] * 17]
    path = write_yolo(tmp_path, {"train": [("1.png", scenes(1)[0], [line])]})
    with pytest.raises(HaloposeError) as error:
        collect(host_of(KIND), load_dataset(path, "train"), tmp_path / "store", SETTINGS)
    one_line(error)


def failing_replace(source: str, target: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_line_and_leaves_nothing(data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = load_dataset(data, "train")
    collect(host_of(KIND), dataset, folder, SETTINGS)
    next(folder.glob("shard*")).unlink()
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", failing_replace)
        with pytest.raises(HaloposeError, match="No space left") as error:
            collect(host_of(KIND), dataset, folder, SETTINGS)
    one_line(error)
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    assert len(collect(host_of(KIND), dataset, folder, SETTINGS).manifest["images"]) == 6


def test_a_write_that_really_fails(data: Path, folder: Path, full_disk: Callable[[int | None], None]) -> None:
    dataset = load_dataset(data, "train")
    full_disk(20_000)
    with pytest.raises(HaloposeError) as error:
        collect(host_of(KIND), dataset, folder, SETTINGS)
    one_line(error)
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]


# Data that change ------------------------------------------------------------------------------------------


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("shard*")}


@pytest.fixture
def own(data: Path, tmp_path: Path) -> Path:
    """A data set of the test's own, in parts of two images."""
    shutil.copytree(data.parent, tmp_path / "own")
    text = data.read_text().replace(str(data.parent), str(tmp_path / "own"))
    (tmp_path / "own" / "data.yaml").write_text(text)
    return tmp_path / "own" / "data.yaml"


@pytest.mark.parametrize("what", ["labels", "pixels", "time", "nothing"])
def test_only_changed_images_are_collected_again(
    own: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collecting, "VIEWS_PER_SHARD", 2)
    caplog.set_level("INFO", "halopose")
    collect(host_of(KIND), load_dataset(own, "train"), tmp_path / "store", SETTINGS)
    before, path = stamps(tmp_path / "store"), Path(str(load_dataset(own, "train").records[3].path))
    if what == "labels":
        label = own.parent / "labels" / "train" / path.with_suffix(".txt").name
        rows = [line.split() for line in label.read_text().splitlines()]
        label.write_text("\n".join(" ".join([*row[:5], "0.5", *row[6:]]) for row in rows))
    elif what == "pixels":
        cv2.imwrite(str(path), 255 - read_picture(path))
    elif what == "time":
        os.utime(path, (1, 1))  # as after a copy: the same bytes
    store = collect(host_of(KIND), load_dataset(own, "train"), tmp_path / "store", SETTINGS)
    changed = {name for name, stamp in stamps(tmp_path / "store").items() if stamp != before[name]}
    assert changed == ({"shard-00001.safetensors"} if what in ("labels", "pixels") else set())
    assert (str(path) in caplog.text) is bool(changed)
    fresh = collect(host_of(KIND), load_dataset(own, "train"), tmp_path / "fresh", SETTINGS)
    for mine, theirs in zip(store.cells("assigned"), fresh.cells("assigned"), strict=True):
        assert torch.equal(mine.windows, theirs.windows)
        assert all(torch.equal(mine.columns[name], theirs.columns[name]) for name in theirs.columns)
    assert (store.digest() == fresh.digest()) is (what != "time")


def test_a_flipped_bit_in_a_shard_is_refused(own: Path, tmp_path: Path) -> None:
    store = collect(host_of(KIND), load_dataset(own, "train"), tmp_path / "store", SETTINGS)
    path = tmp_path / "store" / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)
    for read in (store.ground_truth, lambda: list(store.cells("assigned"))):
        with pytest.raises(HaloposeError, match=r"checksum .* again") as error:
            read()
        one_line(error)
