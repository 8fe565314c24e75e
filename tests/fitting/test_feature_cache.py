"""Feature cache: returned content and refused files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halopose.data.dataset_loading import load_dataset
from halopose.data.storage.address import Address
from halopose.errors import HaloposeError
from halopose.fitting import collecting, pipeline
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import MatchStore, among, shard_path
from halopose.matching.matched_poses import match_poses
from halopose.protocol import Protocol
from halopose.uncertainty.heads import ProbabilisticHeads
from tests.fitting.conftest import KIND, SETTINGS
from tests.helpers.mangling import mangled, refusal
from tests.helpers.models import host_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_ground_truth_is_the_data_set(data: Path, folder: Path) -> None:
    dataset = load_dataset(data, "train")
    store = collect(host_of(KIND), dataset, folder, SETTINGS)
    truth = store.ground_truth()
    assert truth.images.tolist() == sorted(dataset.image_ids.tolist())
    for record in dataset.records:
        _, objects = record.read()
        mine = truth.image_ids == record.image_id
        assert np.allclose(truth.keypoints[mine], objects.keypoints)
        assert np.array_equal(truth.labelled[mine], objects.labelled)
        assert np.allclose(truth.boxes[mine][:, :2] + truth.boxes[mine][:, 2:], objects.boxes[:, 2:])
        assert np.allclose(truth.area[mine], objects.area)
    assert len(store.ground_truth(dataset.image_ids[:1]).images) == 1


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_store_at_an_address_is_that_in_a_folder(
    kind: str, data: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole or resumed: what was there is not collected again, and what is missing is named."""
    pytest.importorskip("fsspec")
    monkeypatch.setattr(collecting, "VIEWS_PER_SHARD", 2)
    host, dataset = host_of(KIND), load_dataset(data, "train")
    collect(host, dataset, folder, SETTINGS)
    there = Address(f"memory://{tmp_path.name}" if kind == "memory" else (tmp_path / "there").as_uri())
    store = collect(host, dataset, there, SETTINGS)
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in there.files()) == names
    assert all((there / name).read_bytes() == (folder / name).read_bytes() for name in names)
    mine, theirs = list(store.cells("assigned")), list(MatchStore(folder).cells("assigned"))
    assert all(bool((a.windows == b.windows).all()) for a, b in zip(mine, theirs, strict=True))
    assert store.digest() == MatchStore(folder).digest()
    shard_path(there, 1).unlink()
    with pytest.raises(HaloposeError, match=r"3 shards 1 missing: shard-00001\)"):
        MatchStore(there)
    first = there / shard_path(there, 0).name
    kept = first.stamp()
    collect(host, dataset, there, SETTINGS)
    assert first.stamp() == kept
    shard_path(there, 1).write_bytes(shard_path(folder, 1).read_bytes()[:-1] + b"x")
    with pytest.raises(HaloposeError, match=r"shard-00001.* checksum"):
        list(MatchStore(there).cells("assigned"))


def test_true_positives_part_by_part_equal_those_of_the_whole(
    data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "VIEWS_PER_SHARD", 1)
    host = host_of(KIND)
    store = collect(host, load_dataset(data, "train"), folder, SETTINGS)
    heads = ProbabilisticHeads(host.pose_templates(), host.strides, host.keypoint_count).eval()
    protocol = Protocol(oks_threshold=0.01)
    whole = match_poses(pipeline.predictions_of(heads, store), store.ground_truth(), protocol)
    assert len(whole) > 2
    for shards in (1, 4):
        monkeypatch.setattr(pipeline, "SHARDS_AT_ONCE", shards)
        parts = pipeline.true_positives(heads, store, None, protocol)
        for name, column in vars(whole).items():
            assert np.array_equal(getattr(parts, name), column) if isinstance(column, np.ndarray) else True
    with pytest.raises(HaloposeError, match="no detection"):
        pipeline.true_positives(heads, store, np.array([10**9]), protocol)


def test_incomplete_and_foreign_stores_are_refused(
    data: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "VIEWS_PER_SHARD", 2)
    collect(host_of(KIND), load_dataset(data, "train"), folder, SETTINGS)
    shard_path(folder, 1).unlink()
    with pytest.raises(HaloposeError, match="3 shards 1 missing: shard-0000"):
        MatchStore(folder)
    (folder / "manifest.json").write_text("")
    for place in (folder, tmp_path / "nowhere"):
        with pytest.raises(HaloposeError) as error:
            MatchStore(place)
        assert "\n" not in str(error.value)
    (folder / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(HaloposeError, match="not a feature cache"):
        MatchStore(folder)


def test_a_damaged_shard_is_a_one_line_error(data: Path, folder: Path) -> None:
    store = collect(host_of(KIND), load_dataset(data, "train"), folder, SETTINGS)
    path = shard_path(folder, 0)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(HaloposeError, match="shard-00000") as error:
        list(store.cells("assigned"))
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    collect(host_of(KIND), load_dataset(data, "val"), folder, SETTINGS)
    shutil.copy(folder / "manifest.json", folder / "kept.json")
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": 10**12}, {"shards": -1}, {"shards": "1"}, {"shards": True}, {"levels": 10**9}, {"levels": 2},
        {"images": ["a"]}, {"images": [10**30]}, {"images": 3}, {"base": "x"}, {"base": [1]}, {"settings": None},
        {"settings": {"imgsz": [64], "unknown": 1}}, {"settings": {"imgsz": ["64"]}}, {"layout": {}},
        {"settings": {"imgsz": [64], "conf": "high"}}, {"strides": []},
    ],
)  # fmt: skip
def test_invalid_manifest_is_refused(changes: dict[str, Any], whole: Path) -> None:
    content = json.loads((whole / "kept.json").read_text())
    (whole / "manifest.json").write_text(json.dumps(content | changes))
    with pytest.raises(HaloposeError, match="damaged manifest") as error:
        MatchStore(whole)
    assert "\n" not in str(error.value)


@given(data=st.data())
def test_mangled_manifests_read_or_are_refused(whole: Path, data: st.DataObject) -> None:
    content = data.draw(mangled(json.loads((whole / "kept.json").read_text())))
    (whole / "manifest.json").write_text(json.dumps(content))
    store, line = refusal(MatchStore, whole)
    assert "\n" not in line
    if store is not None:
        assert len(store.digest()) == 64
        store.skipped()


@given(st.lists(st.integers(-20, 20)), st.lists(st.integers(-20, 20)))
def test_among_is_isin(ids: list[int], chosen: list[int]) -> None:
    found = among(torch.tensor(ids, dtype=torch.long), torch.tensor(sorted(chosen), dtype=torch.long))
    assert found.tolist() == [one in chosen for one in ids]
