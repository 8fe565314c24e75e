"""Prefetching: the same views in the same order for any readers, bounded memory, and no loss by kills."""

import os
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from benchmarks.stub import place

from halopose.data.dataset import Dataset
from halopose.fitting.prefetch import Reader, Reading, SentReading, Task, read_ahead
from research import shipped_data
from tests.helpers.stub import noise_pictures

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
READER = Reader(place, True)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    dataset = noise_pictures(tmp_path_factory.mktemp("pictures"), 12)
    Path(str(dataset.records[5].path)).write_bytes(b"broken")
    return dataset


def tasks(pictures: Dataset) -> list[Task]:
    return [(record, size) for size in (32, 64) for record in pictures.records]


def same(found: list[Reading], expected: list[Reading]) -> None:
    assert [reading.state for reading in found] == [reading.state for reading in expected]
    assert [reading.skipped for reading in found] == [reading.skipped for reading in expected]
    for own, theirs in zip(found, expected, strict=True):
        assert (own.view is None) == (theirs.view is None)
        if own.view is not None and theirs.view is not None:
            assert np.array_equal(own.view.pixels, theirs.view.pixels)
            assert (own.view.box, own.view.shape, own.view.imgsz) == (
                theirs.view.box,
                theirs.view.shape,
                theirs.view.imgsz,
            )


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("largest", [64, 32, 1])  # those of 64 pixels do not fit the second, none the third
def test_other_processes_read_the_same_in_the_same_order(pictures: Dataset, processes: int, largest: int) -> None:
    expected = list(read_ahead(READER, tasks(pictures), 0, 1))
    assert "0005.png" in expected[5].skipped
    assert expected[5].view is None
    found = read_ahead(READER, tasks(pictures), processes, 4, largest, held=len(expected))
    same(list(found), expected)


@pytest.mark.parametrize("processes", [0, 2])
def test_images_and_labels_are_mirrored_together(
    pictures: Dataset, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped_data, "MIRROR", [0, 2, 1])
    plain = [reading.view for reading in read_ahead(READER, tasks(pictures)[:3], 0, 1)]
    mirrored = [(shipped_data.Mirrored.of(record), size) for record, size in tasks(pictures)[:3]]
    for reading, theirs in zip(read_ahead(READER, mirrored, processes, 4, 64, held=3), plain, strict=True):
        own = reading.view
        assert own is not None
        assert theirs is not None
        assert np.array_equal(own.pixels, theirs.pixels[:, ::-1])
        left, top, right, bottom = theirs.objects.boxes.T
        width = theirs.shape[1]
        assert np.array_equal(own.objects.boxes, np.stack([width - right, top, width - left, bottom], 1))
        assert np.array_equal(own.objects.labelled, theirs.objects.labelled[:, [0, 2, 1]])


@pytest.mark.parametrize("depth", [4, 9, 17])
def test_those_still_looked_at_are_not_written_over(pictures: Dataset, depth: int) -> None:
    expected = list(read_ahead(READER, tasks(pictures), 0, 1))
    found = read_ahead(READER, tasks(pictures), 2, depth, held=3)
    for begin in range(0, len(expected), 3):
        some = list(islice(found, 3))
        time.sleep(0.05)  # others read on as far as they may
        same(some, expected[begin : begin + 3])


def test_only_so_many_wait(pictures: Dataset) -> None:
    asked = 0

    def counted() -> Iterator[Task]:
        nonlocal asked
        for task in tasks(pictures):
            asked += 1
            yield task

    readings = read_ahead(READER, counted(), 2, 5)
    next(readings)
    assert asked == 5
    next(readings)
    assert asked == 6
    readings.close()


class Murderer(Reader):
    """Kills the process that reads a certain picture, if that is not the one that waits for it."""

    def read(self, task: Task, room: np.ndarray | None = None) -> SentReading:
        if os.getpid() != int(os.environ["HALOPOSE_TEST_PARENT"]) and task[0].image_id == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(task, room)


def test_a_killed_process_loses_nothing(
    pictures: Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HALOPOSE_TEST_PARENT", str(os.getpid()))
    expected = list(read_ahead(READER, tasks(pictures), 0, 1))
    found = read_ahead(Murderer(place, True), tasks(pictures), 2, 6, held=len(expected))
    same(list(found), expected)
    assert "was killed" in caplog.text


def test_a_picture_that_cannot_be_placed_is_skipped(pictures: Dataset, tmp_path: Path) -> None:
    from halopose.errors import HaloposeError

    def refusing(*_: object) -> tuple[np.ndarray, object]:
        raise HaloposeError("it vanishes")

    [reading] = read_ahead(Reader(refusing, True), tasks(pictures)[:1], 0, 1)  # type: ignore[arg-type]
    assert (reading.view, reading.skipped) == (None, "it vanishes")
