"""Division of work: the same feature cache from any number of processes or parts, also after kills."""

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from benchmarks.stub import StubHost
from hypothesis import given
from hypothesis import strategies as st

from halopose.data.dataset import Dataset
from halopose.errors import HaloposeError
from halopose.fitting import collecting
from halopose.fitting.collecting import collect, collect_shards
from halopose.fitting.feature_cache import CollectSettings, MatchStore, missing_shards
from halopose.fitting.workers import Tick, WorkerPool, batch_for, own_device, parse_part, share_out, torchrun_rank
from halopose.hosts.base import HostOutput
from tests.helpers.stub import noise_pictures

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes"),
]
SETTINGS = CollectSettings(imgsz=(64, 32), detections=4, batch=2)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return noise_pictures(tmp_path_factory.mktemp("pictures"), 25)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "VIEWS_PER_SHARD", 6)


@pytest.fixture
def whole(pictures: Dataset, tmp_path: Path) -> dict[str, bytes]:
    collect(StubHost(), pictures, tmp_path / "whole", SETTINGS)
    return files(tmp_path / "whole")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "workers", [WorkerPool(processes=2), WorkerPool(processes=3), WorkerPool(readers=2), WorkerPool(processes=50)]
)
def test_store_does_not_depend_on_the_worker(
    workers: WorkerPool, pictures: Dataset, whole: dict[str, bytes], tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    collect(StubHost(), pictures, tmp_path / "store", SETTINGS, lambda *step: seen.append(step), workers)
    assert len(whole) == 10  # nine shards and the manifest
    assert files(tmp_path / "store") == whole
    assert seen == sorted(seen)
    assert seen[-1][0] <= seen[-1][1] == 50


def test_parts_make_one_store_and_what_is_missing_is_named(
    pictures: Dataset, whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    for part in (2, 0):
        collect_shards(StubHost(), pictures, folder, SETTINGS, workers=WorkerPool(part=part, parts=3))
    assert missing_shards(folder) == "3 missing: shard-00001, shard-00004, shard-00007"
    with pytest.raises(HaloposeError, match="3 missing: shard-00001"):
        MatchStore(folder)
    (folder / ".shard-00002.safetensors.abc").write_bytes(b"another part is writing it")
    (folder / ".shard-00001.safetensors.abc").write_bytes(b"left by a kill")
    collect_shards(StubHost(), pictures, folder, SETTINGS, workers=WorkerPool(part=1, parts=3))
    assert (folder / ".shard-00002.safetensors.abc").exists()
    (folder / ".shard-00002.safetensors.abc").unlink()
    assert files(folder) == whole
    assert not missing_shards(folder)


class Counting(StubHost):
    """Notes how many images come at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, batch: torch.Tensor) -> HostOutput:
        self.sizes.append(len(batch))
        return super().forward(batch)


def test_batches_hold_all_that_is_laid_out_alike(pictures: Dataset, tmp_path: Path) -> None:
    """The stub makes squares of pictures of both shapes."""
    host = Counting()
    collect(host, pictures, tmp_path / "store", CollectSettings(imgsz=(64,), batch=4))
    assert host.sizes == [4, 2] * 4 + [1]


class Deadly(StubHost):
    """Kills every process but one."""

    def __init__(self, survivor: int) -> None:
        super().__init__()
        self.survivor, self.batches = survivor, 0

    def forward(self, batch: torch.Tensor) -> HostOutput:
        self.batches += 1
        if os.getpid() != self.survivor and self.batches == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(batch)


def test_the_work_of_killed_processes_is_collected(
    pictures: Dataset, whole: dict[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collect(Deadly(os.getpid()), pictures, tmp_path / "store", SETTINGS, workers=WorkerPool(processes=2))
    assert "2 of 2 processes" in caplog.text
    assert files(tmp_path / "store") == whole


def test_a_mistake_in_one_process_is_a_one_line_error(pictures: Dataset, tmp_path: Path) -> None:
    class Full(StubHost):
        def forward(self, batch: torch.Tensor) -> HostOutput:
            raise HaloposeError("no space left")

    with pytest.raises(HaloposeError, match=r"^no space left$"):
        collect(Full(), pictures, tmp_path / "store", SETTINGS, workers=WorkerPool(processes=2))


def test_a_full_disk_behind_the_model_is_a_one_line_error(
    pictures: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise HaloposeError("cannot write: no space left")

    monkeypatch.setattr(collecting, "write_tensors", full)
    with pytest.raises(HaloposeError, match="free disk space"):
        collect(StubHost(), pictures, tmp_path / "store", SETTINGS, workers=WorkerPool(readers=1))


@given(st.integers(0, 60), st.integers(1, 9))
def test_parts_share_all_shards_out(shards: int, parts: int) -> None:
    taken = Counter(number for part in range(parts) for number in WorkerPool(part=part, parts=parts).own_shards(shards))
    assert taken == Counter(range(shards))


def test_processes_share_the_work(tmp_path: Path) -> None:
    def work(number: int, tick: Tick) -> None:
        (tmp_path / f"{number}").write_text(str(os.getpid()))
        tick(2)

    seen: list[int] = []
    share_out(work, range(7), 3, seen.append)
    assert seen[-1] == 14
    assert len({path.read_text() for path in tmp_path.iterdir()} - {str(os.getpid())}) == 3


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "a/b", "1/0", "-1/2"])
def test_a_part_that_is_none_is_a_one_line_error(text: str) -> None:
    with pytest.raises(HaloposeError, match="such as 3/8"):
        parse_part(text)


def test_workers_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert torchrun_rank() is None
    assert own_device("cuda") == "cuda"
    assert WorkerPool.of_machine("cpu", 1) == WorkerPool()
    assert WorkerPool.of_machine("cuda", 5, (2, 8)) == WorkerPool(1, 5, 2, 8)
    assert (batch_for("cpu"), batch_for("cuda")) == (1, 16)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert torchrun_rank() == (1, 4)
    assert own_device("cuda") == "cuda:1"
    assert own_device("cpu") == "cpu"
    assert WorkerPool.of_machine("cpu", 1) == WorkerPool(part=1, parts=4)
