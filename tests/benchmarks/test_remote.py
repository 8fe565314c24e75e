"""The double of a GPU, and what prediction, collecting and training would make a GPU wait for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.gpu import FRAMEWORK
from benchmarks.remote import REMOTE, RemoteDevice, to_remote
from torch import Tensor

from halopose.data.dataset_loading import load_dataset
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings
from halopose.fitting.head_training import train
from halopose.fitting.settings import TrainSettings
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.transfer import to_host
from halopose.uncertainty.heads import HeadSettings
from tests.helpers.models import artifact_for, make_host, pose_model, scenes, write_scenes

CONTEXT = HeadSettings(overlaps=True, features=True)


def model() -> UncertainPose:
    host = make_host("11", pose_model("11"))
    return UncertainPose(host, artifact_for(host, CONTEXT))


@pytest.fixture
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def remote() -> UncertainPose:
    found: Any = model()
    for module in (found.host.model, found.heads):
        to_remote(module)
    found.host._device = REMOTE
    return found


def own(device: RemoteDevice) -> list[str]:
    """Places in halopose where the device waits."""
    waits = [one for one in device.events if one.kind in ("download", "wait")]
    return [one.place for one in waits if not one.place.startswith(FRAMEWORK)]


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (lambda values: values.sum().item(), "wait"),
        (lambda values: values[values > 0], "wait"),
        (lambda values: values.cpu(), "download"),
        (lambda values: values.to("cpu"), "download"),
        (lambda values: torch.ones(3).to(values.device), "upload"),
        (lambda values: values + torch.ones(3), "mismatch"),
        (lambda values: values.numpy(), "mismatch"),
        (lambda values: values[torch.tensor([0])], "upload"),
        (lambda values: (values * 2 + torch.tensor(1.0)).to(torch.float16), None),
    ],
)
def test_each_kind_of_event_is_recorded_once(action: Callable[[Tensor], Any], kind: str | None) -> None:
    with RemoteDevice() as device:
        values = torch.ones(3, device=REMOTE)
        device.clear()
        action(values)
    assert [event.kind for event in device.events] == ([] if kind is None else [kind])


def test_a_batch_makes_the_device_wait_three_times() -> None:
    count = 3
    images, known = scenes(count, side=64), model()
    with RemoteDevice() as device:
        found = remote().predict(images, batch=count)
    assert not device.count("mismatch")
    assert len(own(device)) == 3  # cells, Cholesky factors and detections
    for one, other in zip(found, known.predict(images, batch=count), strict=True):
        assert len(one) > 0
        for name in ("boxes", "keypoints", "covariance", "scores"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


def test_collecting_and_training_have_no_tensors_of_two_devices(tmp_path: Path, one_thread: None) -> None:
    data = write_scenes(tmp_path / "data", model().host, {"train": 4, "val": 2})
    dataset = load_dataset(data, "train")
    settings = CollectSettings(imgsz=(64,), batch=2, context_features=True)
    store = collect(model().host, dataset, tmp_path / "host", settings)
    with RemoteDevice() as device:
        same = collect(remote().host, dataset, tmp_path / "remote", settings)
        assert not device.count("mismatch")
        for one, other in zip(store.cells("assigned"), same.cells("assigned"), strict=True):
            assert torch.equal(one.windows, other.windows)
            assert all(torch.equal(value, other.columns[name]) for name, value in one.columns.items())
        device.clear()
        train(remote().heads, store, TrainSettings(epochs=1, batch=10_000), device=REMOTE)
    assert not device.count("mismatch")
    assert len([place for place in own(device) if "head_training" in place]) < 12


def test_one_transfer_keeps_values_and_types() -> None:
    columns = {"a": torch.arange(6).reshape(3, 2), "b": torch.rand(3).half(), "c": torch.rand(3, 2, 2)}
    with RemoteDevice() as device:
        found = to_host({name: value.to(REMOTE) for name, value in columns.items()})
    assert device.count("download") == 1
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in columns.items())
