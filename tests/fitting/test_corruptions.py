"""Corruptions: deterministic, stronger with severity, and without geometric changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.fitting.corruptions import COPY, FITTED, HELD_OUT, SEVERITIES, corrupt, corrupted, with_copies
from tests.helpers.models import photograph, scenes, write_yolo

ROW = [0, 0.5, 0.5, 0.4, 0.4, *[0.5, 0.5, 2] * 17]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    items = [(f"{number}.png", image, [ROW]) for number, image in enumerate(scenes(3, side=256), 1)]
    return write_yolo(tmp_path, {"train": items})


@pytest.mark.parametrize("kind", [*FITTED, *HELD_OUT])
def test_severity_is_what_it_says(kind: str) -> None:
    image = photograph("bus.jpg")[200:600, 100:500]
    copies = [corrupt(image, kind, severity, seed=4) for severity in SEVERITIES]
    away = [np.sqrt(np.mean((copy.astype(float) - image) ** 2)) for copy in copies]
    assert away[0] > 1
    assert away[-1] > 1.5 * away[0]
    if kind not in ("gamma", "motion"):  # their direction is random
        assert (np.diff(away) > 0).all(), away
    assert all(copy.shape == image.shape and copy.dtype == np.uint8 for copy in copies)
    np.testing.assert_array_equal(copies[2], corrupt(image, kind, 3, seed=4))


def test_an_edge_stays_where_it_is() -> None:
    image = np.zeros((128, 128, 3), dtype=np.uint8)
    image[:, 64:] = 200
    for kind in ("contrast", "blur", "gamma", "resolution", "compression"):
        step = np.diff(corrupt(image, kind, 4).astype(float).mean((0, 2)))
        assert abs(np.average(np.arange(127), weights=np.abs(step) + 1e-9) - 63) < 0.6, kind


def test_copies_keep_objects_and_have_ids_of_their_own(data: Path) -> None:
    dataset = load_dataset(data, "train")
    whole = with_copies(dataset)
    assert len(whole) == 6 * len(dataset)
    assert len(set(whole.image_ids.tolist())) == len(whole)
    np.testing.assert_array_equal(np.unique(whole.image_ids % COPY), np.sort(dataset.image_ids))
    clean, objects = dataset.records[1].read()
    for record in whole.records:
        image, same = record.read()
        if record.image_id % COPY == dataset.records[1].image_id:
            np.testing.assert_array_equal(same.keypoints, objects.keypoints)
            assert np.array_equal(image, clean) == (record.image_id < COPY)


def test_a_store_labels_its_corruptions(data: Path) -> None:
    dataset = load_dataset(data, "train")
    one, other = (corrupted(dataset, kind, 2).records[0] for kind in ("blur", "noise"))
    assert one.image_id == other.image_id
    assert one.is_as_it_was(one.state())
    assert not one.is_as_it_was(other.state())
    assert not dataset.records[0].is_as_it_was(one.state())


def test_unknown_ones_are_refused() -> None:
    for kind, severity in (("fog", 1), ("blur", 6)):
        with pytest.raises(HaloposeError, match="unknown corruption"):
            corrupt(np.zeros((4, 4, 3), dtype=np.uint8), kind, severity)
