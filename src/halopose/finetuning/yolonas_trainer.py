"""Fine-tuning of a YOLO-NAS-Pose model with the LibreYOLO trainer and its own or the pOKS keypoint loss.

The result is a LibreYOLO checkpoint that differs from the original in the weights only.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from halopose.data.dataset import Dataset
from halopose.data.files import write_bytes
from halopose.data.yolo import write_yolo
from halopose.errors import HaloposeError
from halopose.finetuning.finetuning_settings import (
    FinetuneSettings,
    keep_statistics,
    trainer_in,
    tuning_key,
    write_checkpoint,
)
from halopose.finetuning.poks import PoksLoss
from halopose.hosts.torchvision_shim import ensure_torchvision
from halopose.hosts.yolonas.yolonas_host import YoloNASHost
from halopose.install_advice import install_command
from halopose.keypoints import Keypoints
from halopose.types import Progress

try:
    ensure_torchvision()
    from libreyolo.data.utils import IMG_FORMATS
    from libreyolo.models.yolonas.loss import YoloNASPoseLoss
    from libreyolo.models.yolonas.pose_trainer import YOLONASPoseTrainer
    from libreyolo.utils.serialization import wrap_libreyolo_checkpoint
except ImportError as error:
    raise HaloposeError(f"this needs the yolonas extra ({error.name or error}): {install_command('yolonas')}") from None

_WEIGHTS, _STATE = "tuned.safetensors", "state.pt"
_LARGE = {"dfl_loss_weight": 0.5, "pose_reg_loss_weight": 10.0}  # values of the framework for Medium and Large


class PoksYoloNASLoss(YoloNASPoseLoss):  # type: ignore[misc]
    """The criterion of the framework with pOKS as keypoint regression term; other terms are unchanged.

    The original term is a mean of 1 - OKS over assigned cells, weighted by the scores of the assigner. pOKS uses the
    same weights. An object has up to 13 cells, and distant cells with a score near zero would saturate an unweighted
    mean. The object area is 0.53 of the box area, as in the framework.
    """

    poks: PoksLoss

    @classmethod
    def from_plain(cls, criterion: YoloNASPoseLoss) -> PoksYoloNASLoss:
        """Convert in place the criterion that the trainer built from its settings on its device."""
        criterion.__class__ = cls
        criterion.poks = PoksLoss(criterion.oks_sigmas)
        return criterion

    def forward(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = super().forward(outputs, targets)
        self.poks.end_batch()  # the framework does not call the keypoint loss if no cell is assigned
        return result

    def _keypoint_loss(self, **terms: Any) -> tuple[Tensor, Tensor]:
        _, visibility = super()._keypoint_loss(**terms)
        labelled = terms["target_visibility"][..., 0] > 0
        points, weight = (terms["predicted_coords"], terms["target_coords"]), terms.get("assigned_scores")
        regression = self.poks(*points, labelled, terms["area"], weight)
        return regression, visibility


class YoloNASFineTuner(YOLONASPoseTrainer):  # type: ignore[misc]
    """The trainer of the framework, resumable after every epoch. The averaged weights of the last epoch are kept.

    Selecting the best epoch on the validation images would favour the fine-tuned model in the comparison.
    """

    def _build_dataset(self, img_files: list[Path], label_files: list[Path], preproc: Any) -> Any:
        # The framework would replace every folder called images in the path, also a parent folder.
        labels = [path.parent.parent / "labels" / f"{path.stem}.txt" for path in img_files]
        return super()._build_dataset(img_files, labels, preproc)

    def _train_epoch(self, epoch: int) -> Any:
        with _seeded(self.config.seed, epoch):
            return super()._train_epoch(epoch)

    def _save_checkpoint(self, epoch: int, *arguments: Any, **options: Any) -> None:
        """Save the state that the next epoch needs."""
        state = {
            "epoch": epoch,
            "model": self.model.state_dict(),
            "ema": self.ema_model.ema.state_dict(),
            "updates": self.ema_model.updates,
            "optimizer": self.optimizer.state_dict(),
        }
        write_checkpoint(self._state, state)

    def resume_and_train(self) -> None:
        """Train, from the last complete epoch if there is one."""
        if self._state.is_file():
            state = torch.load(self._state, map_location=self.device, weights_only=True)
            self.setup()
            self.model.load_state_dict(state["model"])
            self.ema_model.ema.load_state_dict(state["ema"])
            self.ema_model.updates = state["updates"]
            self.optimizer.load_state_dict(state["optimizer"])
            self.start_epoch = state["epoch"] + 1
        self.train()

    @property
    def _state(self) -> Path:
        return Path(self.config.project) / _STATE


class PoksYoloNASFineTuner(YoloNASFineTuner):
    """The trainer with pOKS."""

    loss_fn: Any

    def on_setup(self) -> None:
        super().on_setup()
        self.loss_fn = PoksYoloNASLoss.from_plain(self.loss_fn)


def tune(
    base: Path,
    dataset: Dataset,
    output: Path,
    work: Path,
    settings: FinetuneSettings,
    *,
    device: str | None = None,
    unsafe: bool = False,
    progress: Progress | None = None,
) -> None:
    """Fine-tune a base model. Resumable after every complete epoch.

    Args:
        base: Checkpoint of the base model.
        dataset: Annotated images.
        output: File for the fine-tuned checkpoint.
        work: Folder for data and states.
        settings: Settings of the fine-tuning; ``freeze`` 1 freezes the backbone, 2 also the neck.
        device: PyTorch device, such as ``cpu`` or ``cuda:0``.
        unsafe: Allow checkpoints that contain code.
        progress: Called after every epoch.

    Raises:
        HaloposeError: A setting or a file format is not supported, or the training diverged.
    """
    if settings.freeze not in range(3):
        raise HaloposeError(
            f"YOLO-NAS cannot freeze {settings.freeze} parts: give 0, 1 (backbone) or 2 (backbone and neck)"
        )
    if device and "," in device:
        raise HaloposeError(f"YOLO-NAS cannot be fine-tuned on several devices ({device}): give one")
    unread = {record.path.suffix.lower() for record in dataset.records} - IMG_FORMATS
    if unread:
        raise HaloposeError(f"the LibreYOLO trainer cannot read {', '.join(sorted(unread))} files: convert them")
    host = YoloNASHost.load(base, unsafe=unsafe)
    host.check_layout(dataset.layout)
    data = write_yolo(dataset, work / "data", host.class_names, dimensions=3)
    folder = work / f"tuning-{tuning_key(host, dataset, settings)}"
    finished = folder / _WEIGHTS
    if not finished.is_file():
        weights = _train(host, dataset.layout, data, folder, settings, device or "cpu", progress)
        write_bytes(finished, save(weights))
        (folder / _STATE).unlink()
    save_tuned(host, finished, settings.imgsz, output)


def _train(
    host: YoloNASHost,
    layout: Keypoints,
    data: Path,
    folder: Path,
    settings: FinetuneSettings,
    device: str,
    progress: Progress | None,
) -> dict[str, Tensor]:
    kind = PoksYoloNASFineTuner if settings.loss == "poks" else YoloNASFineTuner
    with contextlib.redirect_stderr(_NoTerminal(sys.stderr)), trainer_in(folder):
        trainer = kind(
            keep_statistics(copy.deepcopy(host.model).requires_grad_(True)),
            callbacks=progress and _reporter(progress),
            **_overrides(host, layout, data, folder, settings),
            device=device,
            workers=0 if device == "cpu" else settings.workers,  # on a CPU, loaders would slow the training
        )
        trainer.resume_and_train()
    return _tuned_weights(host, trainer)


def _overrides(
    host: YoloNASHost, layout: Keypoints, data: Path, folder: Path, settings: FinetuneSettings
) -> dict[str, Any]:
    """Settings of the trainer. All others are those of the framework, which has no mosaic for poses."""
    stride = host.strides[-1]
    return {
        "size": host.model.config,
        "num_classes": len(host.class_names),
        "num_keypoints": host.keypoint_count,
        "keypoint_dim": 3,
        "oks_sigmas": list(layout.sigmas),
        "assigner_multiply_by_pose_oks": host.oks_factor,
        "data": str(data.resolve()),
        "project": str(folder.resolve()),
        "name": "run",
        "exist_ok": True,
        "epochs": settings.epochs,
        "batch": settings.batch,
        "imgsz": -(-settings.imgsz // stride) * stride,
        "optimizer": "adamw",
        "lr0": settings.learning_rate,
        "warmup_epochs": settings.warmup_epochs,
        "freeze": settings.freeze or None,
        "flip_prob": 0.5 if settings.mirror else 0.0,  # only if the data define the mirrored keypoints
        "seed": settings.seed,
        "amp": settings.amp,
        "amp_dtype": "bfloat16",
        "val": False,
        **(_LARGE if host.model.config in ("m", "l") else {}),
    }


@contextlib.contextmanager
def _seeded(seed: int, epoch: int) -> Iterator[None]:
    """Seed the three generators of the trainer, so that an epoch is the same after resuming, and restore them after."""
    state = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    before, before_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        random.seed(state)
        np.random.seed(state)  # noqa: NPY002
        torch.manual_seed(state)
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(before_numpy)  # noqa: NPY002


def _reporter(progress: Progress) -> Callable[[Any], None]:
    def report(event: Any) -> None:
        losses = ", ".join(f"{name} {value:.3f}" for name, value in event.train_loss_items.items())
        progress(f"fine-tuning ({losses})", event.epoch, event.total_epochs)

    return report


class _NoTerminal(io.StringIO):
    """Standard error that is no terminal, so that the trainer draws no progress bars."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


def _tuned_weights(host: YoloNASHost, trainer: YoloNASFineTuner) -> dict[str, Tensor]:
    """The averaged weights. Frozen weights are returned unchanged, because averaging would round them."""
    last, averaged = trainer.model.state_dict(), trainer.ema_model.ema.state_dict()
    return {
        name: before if torch.equal(last[name].cpu(), before) else averaged[name].cpu().contiguous()
        for name, before in host.model.state_dict().items()
    }


def save_tuned(host: YoloNASHost, weights: Path, imgsz: int, output: Path) -> None:
    """Write the base model with new weights as a LibreYOLO checkpoint that loads safely.

    Args:
        host: The base model.
        weights: Safetensors file with the new weights.
        imgsz: Input size in pixels that the checkpoint states.
        output: Checkpoint to write.
    """
    state = load_file(weights)
    if not all(bool(torch.isfinite(value).all()) for value in state.values()):
        raise HaloposeError("fine-tuning diverged (weights are not finite): lower the learning rate")
    checkpoint = wrap_libreyolo_checkpoint(
        state,
        model_family="yolonas",
        size=host.model.config,
        task="pose",
        nc=len(host.class_names),
        names=dict(enumerate(host.class_names)),
        imgsz=imgsz,
        num_keypoints=host.keypoint_count,
        keypoint_dim=3,
        oks_sigmas=list(host.layout.sigmas),
        config={"assigner_multiply_by_pose_oks": host.oks_factor},
    )
    write_checkpoint(output, checkpoint)
