"""Shared parts of the trainers: settings, digests of inputs, frozen batch statistics and safe checkpoints."""

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
    """Settings of fine-tuning.

    Attributes:
        loss: pOKS, or OKS for the loss of the framework.
        sigma: Sigma of all keypoints in the loss, if the base model was trained with another sigma than that of the
            data. Scores use the sigmas of the data.
        epochs: Number of epochs.
        learning_rate: Learning rate.
        warmup_epochs: Epochs of learning-rate warm-up.
        imgsz: Input size in pixels.
        batch: Batch size.
        freeze: Number of first layers that are not trained.
        mirror: Mirror half of the images, if the keypoint names distinguish left and right.
        seed: Seed of the training.
        workers: Number of processes that load images.
        amp: Mixed precision (bfloat16).
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
    """Digest of base model, labelled images and settings, which determine the result.

    Args:
        host: The base model.
        dataset: Images to fine-tune on.
        settings: Settings of the fine-tuning; the number of workers has no effect.
    """
    return data_key(host, [dataset], asdict(replace(settings, workers=0)))


def data_key(host: Host, datasets: Sequence[Dataset], settings: Any) -> str:
    """Digest of base model, all labels of the data sets, and settings.

    Args:
        host: The base model.
        datasets: Annotated images.
        settings: Settings that the result depends on, as JSON content.
    """
    parts = [sorted(host.fingerprints), list(datasets[0].layout.sigmas), settings]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for record in (record for dataset in datasets for record in dataset.records):
        objects = record.objects
        digest.update(f"{local_image(record).resolve()} {record.image_id}".encode())
        for values in (objects.boxes, objects.class_ids, objects.keypoints, objects.labelled, objects.crowd):
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:12]


class KeptBatchNorm(nn.BatchNorm2d):
    """Batch normalisation that stays in evaluation mode during training."""

    def train(self, mode: bool = True) -> KeptBatchNorm:
        return super().train(False)


def keep_statistics(model: M) -> M:
    """Freeze the batch statistics. Those of a few batches would change the model more than the loss does."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = KeptBatchNorm  # differs in one method only
            module.eval()
    return model


def write_checkpoint(path: Path, content: Any) -> None:
    """Write a checkpoint atomically, from memory: for a full disk torch reports only "iostream error"."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(path, buffer.getbuffer())


@contextmanager
def trainer_in(folder: Path) -> Iterator[None]:
    """Report file errors of the trainer inside the context as a HaloposeError."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error} ({error.filename or folder})"
        raise HaloposeError(f"fine-tuning stopped: {reason}; fix this and run the command again to resume") from None
