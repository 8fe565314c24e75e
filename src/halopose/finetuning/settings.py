"""What the frameworks' trainers share when they fine-tune a base: settings, names of results, safe checkpoints.

In: a base, a data set, settings. Out: a name for the result, and files that are whole or not there.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import nn

from halopose.data.dataset import Dataset
from halopose.data.files import write_bytes
from halopose.data.yolo import local_image
from halopose.errors import HaloposeError
from halopose.hosts.base import Host

M = TypeVar("M", bound=nn.Module)
Loss = Literal["poks", "oks"]


@dataclass(frozen=True)
class FinetuneSettings:
    """How to fine-tune: ``loss`` is pOKS or the framework's own. freeze: so many first layers stay as they are.

    sigma: of all keypoints in the loss, where the base was trained with another than the data state; the scores
    take the data's. mirror: mirror half of the images, where names tell left from right. workers: processes that
    load images.
    """

    loss: Loss = "poks"
    sigma: float | None = None
    epochs: int = 10
    learning_rate: float = 1e-4
    warmup_epochs: float = 1.0
    imgsz: int = 640
    batch: int = 16
    freeze: int = 0
    mirror: bool = True
    seed: int = 0
    workers: int = 4
    amp: bool = False


def tuning_key(host: Host, dataset: Dataset, settings: FinetuneSettings) -> str:
    """A name for what fine-tuning yields, which depends on the base, the labelled images and the settings."""
    return data_key(host, [dataset], asdict(replace(settings, workers=0)))


def data_key(host: Host, datasets: Sequence[Dataset], settings: Any) -> str:
    """A name for what depends on the base, all labels of some data sets, and settings."""
    parts = [sorted(host.fingerprints), list(datasets[0].layout.sigmas), settings]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for record in (record for dataset in datasets for record in dataset.records):
        objects = record.objects
        digest.update(f"{local_image(record).resolve()} {record.image_id}".encode())
        for values in (objects.boxes, objects.class_ids, objects.keypoints, objects.labelled, objects.crowd):
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:12]


class KeptBatchNorm(nn.BatchNorm2d):
    """Normalisation that keeps its statistics while the model trains."""

    def train(self, mode: bool = True) -> KeptBatchNorm:
        return super().train(False)


def keep_statistics(model: M) -> M:
    """The model, to be fine-tuned: statistics of a few batches would change it more than the loss does."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = KeptBatchNorm  # differs in a method alone
            module.eval()
    return model


def write_checkpoint(path: Path, content: Any) -> None:
    """Whole or not at all. From memory: of a full disk torch itself says no more than "iostream error"."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(path, buffer.getbuffer())


@contextmanager
def trainer_in(folder: Path) -> Iterator[None]:
    """While a framework's trainer runs, which writes files of its own: what the disk refuses it is one line."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error} ({error.filename or folder})"
        raise HaloposeError(f"fine-tuning stopped, {reason}: mend that and run it again, it goes on") from None
