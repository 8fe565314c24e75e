"""What a GPU would wait for, counted on a double of it, and times on a real one if there is one."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.interleave import compare
from benchmarks.overhead import PHOTOGRAPH
from benchmarks.remote import REMOTE, Event, RemoteDevice, to_remote
from benchmarks.rows import Row, cost, count
from halopose.data.dataset import Dataset, Objects, Record
from halopose.data.images import read_image
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings
from halopose.fitting.head_training import train
from halopose.fitting.settings import TrainSettings
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.types import Array

BATCHES = (1, 8, 32)
FRAMEWORK = ("utils/nms.py", "utils/ops.py", "utils/tal.py", "utils/loss.py")  # of Ultralytics


@dataclass(frozen=True)
class Traffic:
    """What one run asked of the device.

    Attributes:
        operations: number of PyTorch operations on its tensors.
        events: transfers, waits and mismatches.
    """

    operations: int
    events: tuple[Event, ...]

    @property
    def own(self) -> list[Event]:
        """Downloads and waits in halopose, not in the framework: each lets the device idle."""
        return [one for one in self.events if one.kind in ("download", "wait") and not one.place.startswith(FRAMEWORK)]

    @property
    def mismatches(self) -> list[Event]:
        """Operations that fail on a GPU."""
        return [one for one in self.events if one.kind == "mismatch"]

    def places(self) -> str:
        """The places of ``own``, with their number."""
        return ", ".join(f"{number} {place}" for place, number in Counter(one.place for one in self.own).items())


def remote_model() -> UncertainPose:
    """YOLO11n-pose with the shipped heads, on the double."""
    model = UncertainPose.load_base(find_base(), shipped_artifact())
    assert isinstance(model.host, UltralyticsHost)
    for module in (model.host.model, model.heads):
        to_remote(module)
    model.host._device = REMOTE
    return model


def predict_traffic(images: int, heads: bool = True) -> Traffic:
    """Prediction of one batch, with the shipped heads or of the base model alone."""
    model, photographs = remote_model(), [read_image(PHOTOGRAPH)] * images

    def base() -> None:
        batch, boxes = model.host.preprocess(photographs, 640, rectangular=True)
        model.host.select(model.host.forward(batch), conf=0.25, iou=0.7, letterboxes=boxes)

    return _traffic((lambda: model.predict(photographs, batch=images)) if heads else base)


def fit_traffic(folder: Path, images: int = 4) -> tuple[Traffic, Traffic]:
    """Collecting images in batches of two, and two epochs of training of one batch each."""
    found = UncertainPose.load_base(find_base(), shipped_artifact()).predict(PHOTOGRAPH)[0]
    objects = Objects(
        boxes=found.boxes.astype(float),
        class_ids=np.zeros(len(found), dtype=np.int64),
        keypoints=found.keypoints.astype(float),
        labelled=np.ones(found.keypoints.shape[:2], dtype=bool),
        area=np.full(len(found), 1e4),
        crowd=np.zeros(len(found), dtype=bool),
    )
    model, settings = remote_model(), CollectSettings(batch=2, context_features=True)
    records = tuple(Record(PHOTOGRAPH, number, objects, False, 1.0) for number in range(images))
    dataset = Dataset(records, model.layout, "annotation")
    collecting = _traffic(lambda: collect(model.host, dataset, folder / "cache", settings))
    store = collect(model.host, dataset, folder / "again", settings)
    training = TrainSettings(epochs=2, batch=10_000)
    return collecting, _traffic(lambda: train(model.heads, store, training, device=REMOTE))


def _traffic(action: Callable[[], object]) -> Traffic:
    """Run an action on the double, on one thread: a mode of PyTorch applies to one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with RemoteDevice() as device:
            action()
    finally:
        torch.set_num_threads(threads)
    return Traffic(sum(device.operations.values()), tuple(device.events))


def gpu_rows(rounds: int) -> Iterator[Row]:
    """Counts on the double, then times on the GPU of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {f"predict-{images}": predict_traffic(images) for images in BATCHES}
        runs["collect"], runs["train"] = fit_traffic(Path(folder))
    for name, run in runs.items():
        what = f"predicting a batch of {name[8:]}" if name.startswith("predict-") else f"{name}ing"
        text = f"waits of the device in halopose's code, {what}"
        yield count(f"gpu.{name}-waits", text, len(run.own), run.places())
        yield count(f"gpu.{name}-mismatches", f"operations on tensors of both devices, {what}", len(run.mismatches))
    for images in BATCHES:
        bare = predict_traffic(images, heads=False)
        added = runs[f"predict-{images}"].operations - bare.operations
        text = f"operations that heads add to a batch of {images}"
        yield count(f"gpu.operations-{images}", text, added, f"{bare.operations} of the base model and NMS")
    for images in BATCHES:
        yield from _timed(images, rounds)


def _timed(images: int, rounds: int) -> Iterator[Row]:
    """Cost of the shipped heads on a real GPU; a skipped row without one."""
    name, what = f"gpu.shipped-{images}", f"predicting a batch of {images} with the shipped heads"
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else None
    if device is None:
        yield Row(name, what, skipped="no GPU")
        return
    model = UncertainPose.load_base(find_base(), shipped_artifact(), device=device)
    photographs = [read_image(PHOTOGRAPH)] * images
    title = torch.cuda.get_device_name() if device == "cuda" else "Apple GPU"
    found = compare(lambda: _base(model, photographs), lambda: model.predict(photographs, batch=images), rounds)
    yield cost(name, what, found, f"without, {title}")


@torch.inference_mode()
def _base(model: UncertainPose, photographs: list[Array]) -> None:
    """Non-maximum suppression waits for the device, so the time is complete."""
    batch, boxes = model.host.preprocess(photographs, 640, rectangular=True)
    size = (int(batch.shape[2]), int(batch.shape[3]))
    selections = model.host.select(model.host.forward(batch), conf=0.25, iou=0.7, letterboxes=boxes)
    for selection, box in zip(selections, boxes, strict=True):
        model.host.to_original(selection, box, size).boxes.cpu()
