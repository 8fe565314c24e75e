"""Fine-tuning of an Ultralytics pose model with the Ultralytics trainer and its own or the pOKS keypoint loss.

The result is a checkpoint that differs from the original in the weights only. No network access is needed.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from halopose.data.bounded_text import read_yaml
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
from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost, load_model
from halopose.install_advice import install_command
from halopose.types import Progress

try:
    ensure_torchvision()
    from ultralytics.models.yolo.pose import PoseTrainer
    from ultralytics.nn.modules.head import Pose26
    from ultralytics.nn.tasks import PoseModel
    from ultralytics.utils import LOGGER
    from ultralytics.utils.loss import E2ELoss, PoseLoss26, v8PoseLoss
    from ultralytics.utils.torch_utils import unwrap_model
except ImportError as error:
    raise HaloposeError(
        f"this needs the ultralytics extra ({error.name or error}): {install_command('ultralytics')}"
    ) from None

_WEIGHTS = "tuned.safetensors"  # averaged weights of the last epoch
_STATE = "state.pt"  # state that the next epoch needs


class _Poks:
    """A pose criterion with pOKS as keypoint regression term; assignment and other terms are unchanged."""

    keypoint_loss: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.keypoint_loss = PoksLoss(self.keypoint_loss.sigmas)

    def loss(self, preds: Any, batch: Any) -> Any:
        result = super().loss(preds, batch)  # type: ignore[misc]
        self.keypoint_loss.end_batch()  # the framework does not call the keypoint loss for a batch without objects
        return result


class PoksPoseLoss(_Poks, v8PoseLoss):  # type: ignore[misc]
    """pOKS criterion of YOLOv8, 11 and 12."""


class PoksPoseLoss26(_Poks, PoseLoss26):  # type: ignore[misc]
    """pOKS criterion of YOLO26, with its flow-based term (RLE)."""


class PoksModel(PoseModel):  # type: ignore[misc]
    """A pose model trained with pOKS."""

    def init_criterion(self) -> Any:
        kind = PoksPoseLoss26 if isinstance(self.model[-1], Pose26) else PoksPoseLoss
        both = getattr(self.model[-1], "one2one_cv2", None) is not None
        return E2ELoss(self, kind) if both else kind(self)


class OfflineTrainer(PoseTrainer):  # type: ignore[misc]
    """The trainer of the framework without downloads and validation. It keeps the averaged weights of the last epoch.

    Selecting the best epoch on the validation images would favour the fine-tuned model in the comparison.
    """

    def get_dataset(self) -> dict[str, Any]:
        return read_yaml(Path(self.args.data))

    def validate(self) -> tuple[dict[str, Any], None]:
        return {}, None

    def save_model(self) -> bool:
        write_bytes(self.wdir / _WEIGHTS, save(self._averaged()))
        return True

    def _averaged(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().contiguous() for name, value in self.ema.ema.state_dict().items()}

    def final_eval(self) -> None:
        pass


class FineTuner(OfflineTrainer):
    """A trainer that resumes after the last complete epoch."""

    def save_model(self) -> bool:
        """Save the state that the next epoch needs, in a form that loads without unpickling code."""
        state = {
            "epoch": self.epoch,
            "model": unwrap_model(self.model).state_dict(),
            "ema": self._averaged(),
            "updates": self.ema.updates,
            "optimizer": self.optimizer.state_dict(),
        }
        write_checkpoint(self._state, state)
        return True

    def resume_training(self, ckpt: dict[str, Any] | None) -> None:
        if self._state.is_file():
            state = _load(self._state)
            unwrap_model(self.model).load_state_dict(state["model"])
            averaged = copy.deepcopy(self.ema.ema)
            averaged.load_state_dict(state["ema"])
            self.resume, ckpt = True, {**state, "ema": averaged}
        super().resume_training(ckpt)

    @property
    def _state(self) -> Path:
        return Path(self.save_dir).parent / _STATE  # with several processes the framework clears its own folder


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
        settings: Settings of the fine-tuning.
        device: Device, as the framework names it.
        unsafe: Allow checkpoints that contain code.
        progress: Called after every epoch.

    Raises:
        HaloposeError: The base model is fused, does not fit the data, or the training diverged.
    """
    model = load_model(str(base), unsafe)
    host = UltralyticsHost(model, description=base.name)
    host.check_layout(dataset.layout)
    if model.is_fused():
        raise HaloposeError(f"{base} is fused for inference and cannot be trained: give the original checkpoint")
    data = write_yolo(dataset, work / "data", host.class_names, host.dimensions)
    folder = work / f"tuning-{tuning_key(host, dataset, settings)}"
    finished = folder / _WEIGHTS
    if not finished.is_file():
        state = folder / _STATE
        if not state.is_file() or _load(state)["epoch"] + 1 < settings.epochs:
            _train(model, data, dataset, folder, settings, device, progress)
        write_bytes(finished, save(_load(state)["ema"]))
        state.unlink()
    save_tuned(model, finished, output)


def _load(state: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(state, map_location="cpu", weights_only=True)
    return content


def _train(
    model: PoseModel,
    data: Path,
    dataset: Dataset,
    folder: Path,
    settings: FinetuneSettings,
    device: str | None,
    progress: Progress | None,
) -> None:
    """Run the trainer, which writes its state to the folder."""
    overrides = {
        "model": "base",  # only a name; the model is set below
        "data": str(data),
        "project": str(folder.resolve()),
        "name": "run",
        "exist_ok": True,
        "epochs": settings.epochs,
        "batch": settings.batch,
        "nbs": settings.batch,  # by default gradients of 64 images are accumulated, too few steps for a short run
        "imgsz": settings.imgsz,
        "optimizer": "AdamW",  # "auto" would override the learning rate
        "lr0": settings.learning_rate,
        "warmup_epochs": settings.warmup_epochs,
        "warmup_bias_lr": 0.0,  # the default 0.1 is for training from scratch
        "freeze": settings.freeze,
        "seed": settings.seed,
        "workers": settings.workers,
        "amp": "bf16" if settings.amp else False,  # the check for float16 would download a model
        "device": device or "cpu",
        "mosaic": 0.0,  # as in the last epochs of a full training
        "fliplr": 0.5 if settings.mirror and dataset.layout.mirror else 0.0,
        "val": False,
        "save": True,
        "plots": False,
        "verbose": False,
    }
    threads = torch.get_num_threads()  # the framework would leave one core idle
    with _quiet(), trainer_in(folder):
        trainer = FineTuner(overrides=overrides)
        trainer.add_callback("on_train_start", lambda _: torch.set_num_threads(threads))
        trainer.model = _trainable(model, settings)
        if progress is not None and not trainer.ddp:  # several processes are new and have no callback
            trainer.add_callback(
                "on_train_epoch_end",
                lambda t: progress(f"fine-tuning ({_losses(t.tloss)})", t.epoch + 1, settings.epochs),
            )
        try:
            trainer.train()
        finally:
            torch.set_num_threads(threads)


def _trainable(model: PoseModel, settings: FinetuneSettings) -> PoseModel:
    tuned = keep_statistics(copy.deepcopy(model).float().requires_grad_(True))
    tuned.criterion = None
    if settings.loss == "poks":
        tuned.__class__ = PoksModel  # differs in one method only
    return tuned


def _losses(items: Any) -> str:
    return ", ".join(f"{name} {float(value):.3f}" for name, value in items.items())


class _quiet:
    """Suppress log messages of the framework below warnings."""

    def __enter__(self) -> None:
        self.level = LOGGER.level
        LOGGER.setLevel(logging.WARNING)

    def __exit__(self, *_: object) -> None:
        LOGGER.setLevel(self.level)


def save_tuned(model: PoseModel, weights: Path, output: Path) -> None:
    """Write the base model with new weights in float32, as a checkpoint that loads safely.

    Args:
        model: The base model.
        weights: Safetensors file with the new weights.
        output: Checkpoint to write.
    """
    tuned = copy.deepcopy(model).float().eval()
    state = load_file(weights)
    if not all(bool(torch.isfinite(value).all()) for value in state.values()):
        raise HaloposeError("fine-tuning diverged (weights are not finite): lower the learning rate")
    tuned.load_state_dict(state)
    tuned.requires_grad_(False)
    write_checkpoint(output, {"model": tuned})
