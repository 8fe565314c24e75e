"""Collecting on a local Ray cluster of two workers: the same store, also when a worker is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.stub import StubHost

from halopose.data.dataset import Dataset
from halopose.errors import HaloposeError
from halopose.fitting import ray_collection
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings
from halopose.fitting.workers import WorkerPool
from halopose.hosts.base import HostOutput
from tests.helpers.models import ROOT
from tests.helpers.stub import noise_pictures

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # ray's own
SETTINGS = CollectSettings(imgsz=(64,), detections=4)
ON_RAY = WorkerPool(engine="ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return noise_pictures(tmp_path_factory.mktemp("pictures"), 70)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class KilledOnce(StubHost):
    """The first worker that runs it is killed half-way through a shard."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark, self.batches = mark, 0

    def forward(self, batch: torch.Tensor) -> HostOutput:
        self.batches += 1
        if self.batches == 10 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(batch)


def test_the_store_equals_that_of_one_process_after_kills(cluster: None, pictures: Dataset, tmp_path: Path) -> None:
    collect(StubHost(), pictures, tmp_path / "here", SETTINGS)
    expected = files(tmp_path / "here")
    assert len(expected) == 4  # three shards and the manifest
    seen: list[tuple[int, int]] = []
    collect(StubHost(), pictures, tmp_path / "ray", SETTINGS, lambda *step: seen.append(step), ON_RAY)
    assert files(tmp_path / "ray") == expected
    assert seen[-1] == (70, 70)
    mark = tmp_path / "killed"
    collect(KilledOnce(mark), pictures, tmp_path / "again", SETTINGS, workers=ON_RAY)
    assert mark.exists()
    assert files(tmp_path / "again") == expected


class Refusing(StubHost):
    def forward(self, batch: torch.Tensor) -> HostOutput:
        raise HaloposeError("the model cannot do that")


def test_a_mistake_on_the_cluster_is_a_one_line_error(cluster: None, pictures: Dataset, tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match=r"^the model cannot do that$"):
        collect(Refusing(), pictures, tmp_path / "store", SETTINGS, workers=ON_RAY)


def test_without_ray_it_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(HaloposeError, match="ray extra: pip install"):
        ray_collection.require_ray()
