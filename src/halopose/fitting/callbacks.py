"""Callbacks of a fit, called with the settings, the losses of each epoch and the final scores."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halopose.errors import HaloposeError

log = logging.getLogger(__name__)

LOGGERS = ("csv", "tensorboard", "mlflow", "wandb")


@dataclass(frozen=True)
class Epoch:
    """A finished epoch of training.

    Attributes:
        number: Number of finished epochs.
        epochs: Upper limit of epochs.
        train_loss: Mean loss on training images, in nats per keypoint.
        holdout_loss: Loss on held-out training images.
        best: Whether it is the lowest held-out loss so far.
        seconds: Duration of the epoch.
    """

    number: int
    epochs: int
    train_loss: float
    holdout_loss: float
    best: bool
    seconds: float

    @property
    def left(self) -> float:
        """Seconds until the last epoch at this pace; training may stop earlier."""
        return self.seconds * (self.epochs - self.number)

    def __str__(self) -> str:
        best = " (best)" if self.best else ""
        text = (
            f"epoch {self.number} of {self.epochs}: loss {self.train_loss:.4f}, held-out {self.holdout_loss:.4f}{best}"
        )
        return f"{text}, at most {duration(self.left)} left" if self.left else text


class Callback:
    """Base class of callbacks. Override what you need.

    Example:
        >>> class Losses(Callback):
        ...     def on_epoch(self, epoch: Epoch) -> None:
        ...         print(epoch.holdout_loss)
        >>> Losses().on_epoch(Epoch(1, 12, 3.5, 3.25, True, 60.0))
        3.25
    """

    def on_start(self, settings: Mapping[str, Any]) -> None:
        """Called before training, with the settings as flat JSON values."""

    def on_epoch(self, epoch: Epoch) -> None:
        """Called after every epoch."""

    def on_scores(self, scores: Mapping[str, float]) -> None:
        """Called with the metrics on evaluation images, such as ``student_t/ace``."""

    def on_end(self) -> None:
        """Called at the end, also after an error."""


class CsvLogger(Callback):
    """Writes one row for each epoch to ``training.csv``.

    Args:
        folder: Folder of the file.
    """

    def __init__(self, folder: Path | str) -> None:
        self._path = Path(folder) / "training.csv"
        self._started = False

    def on_epoch(self, epoch: Epoch) -> None:
        """Append the row of an epoch; the first epoch starts the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a" if self._started else "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if not self._started:
                writer.writerow(["epoch", "train_loss", "holdout_loss", "seconds"])
            writer.writerow([epoch.number, epoch.train_loss, epoch.holdout_loss, epoch.seconds])
        self._started = True


class TensorBoardLogger(Callback):
    """Writes losses and scores for TensorBoard; ``tensorboard --logdir FOLDER`` shows them.

    Args:
        folder: Folder of the event files.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self._writer: Any = SummaryWriter(str(folder))

    def on_start(self, settings: Mapping[str, Any]) -> None:
        """Write the settings as text."""
        self._writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def on_epoch(self, epoch: Epoch) -> None:
        """Write both losses."""
        self._writer.add_scalar("loss/train", epoch.train_loss, epoch.number)
        self._writer.add_scalar("loss/held-out", epoch.holdout_loss, epoch.number)

    def on_scores(self, scores: Mapping[str, float]) -> None:
        """Write the scores."""
        for name, value in scores.items():
            self._writer.add_scalar(name, value)

    def on_end(self) -> None:
        """Close the file."""
        self._writer.close()


class MlflowLogger(Callback):
    """Logs to the MLflow server of ``MLFLOW_TRACKING_URI``; an active run is used and left open."""

    def __init__(self) -> None:
        try:
            import mlflow
        except ImportError:
            raise _missing("mlflow") from None
        self._mlflow: Any = mlflow
        self._own = mlflow.active_run() is None

    def on_start(self, settings: Mapping[str, Any]) -> None:
        """Begin a run and log the settings."""
        if self._own:
            self._mlflow.start_run()
        self._mlflow.log_params(dict(settings))

    def on_epoch(self, epoch: Epoch) -> None:
        """Log both losses."""
        values = {"train_loss": epoch.train_loss, "holdout_loss": epoch.holdout_loss}
        self._mlflow.log_metrics(values, step=epoch.number)

    def on_scores(self, scores: Mapping[str, float]) -> None:
        """Log the scores."""
        self._mlflow.log_metrics(dict(scores))

    def on_end(self) -> None:
        """End the run, unless it was active before."""
        if self._own:
            self._mlflow.end_run()


class WandbLogger(Callback):
    """Logs to Weights & Biases; an active run is used and left open."""

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb") from None
        self._wandb: Any = wandb
        self._own = wandb.run is None

    def on_start(self, settings: Mapping[str, Any]) -> None:
        """Begin a run with the settings."""
        if self._own:
            self._wandb.init(project="halopose", config=dict(settings))
        else:
            self._wandb.config.update(dict(settings), allow_val_change=True)

    def on_epoch(self, epoch: Epoch) -> None:
        """Log both losses."""
        self._wandb.log({"epoch": epoch.number, "loss/train": epoch.train_loss, "loss/held-out": epoch.holdout_loss})

    def on_scores(self, scores: Mapping[str, float]) -> None:
        """Write the scores into the summary of the run."""
        self._wandb.run.summary.update(dict(scores))

    def on_end(self) -> None:
        """End the run, unless it was active before."""
        if self._own:
            self._wandb.finish()


def loggers(names: Sequence[str], folder: Path) -> tuple[Callback, ...]:
    """Return the loggers of these names.

    Args:
        names: Of ``LOGGERS``.
        folder: Folder of the loggers that write files.

    Raises:
        HaloposeError: A name is unknown, or its package is not installed.
    """
    made: list[Callback] = []
    for name in names:
        if name == "csv":
            made.append(CsvLogger(folder))
        elif name == "tensorboard":
            made.append(TensorBoardLogger(folder))
        elif name == "mlflow":
            made.append(MlflowLogger())
        elif name == "wandb":
            made.append(WandbLogger())
        else:
            raise HaloposeError(f"unknown logger {name!r}: choose from {', '.join(LOGGERS)}")
    return tuple(made)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to names with dots."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        whole = f"{prefix}{name}"
        if isinstance(value, Mapping):
            result |= flat(value, f"{whole}.")
        else:
            result[whole] = list(value) if isinstance(value, tuple) else value
    return result


def duration(seconds: float) -> str:
    """Format a duration, such as 40 s, 3 min or 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _missing(package: str) -> HaloposeError:
    return HaloposeError(f"logging to {package} needs the package {package}: pip install {package}")
