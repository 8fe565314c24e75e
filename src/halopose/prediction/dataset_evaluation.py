"""Evaluation of a predictor on an annotated dataset, in one process or in the processes of torchrun."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halopose.data.dataset import Dataset
from halopose.data.lock import locked
from halopose.evaluation.scores import Scores
from halopose.fitting import pipeline
from halopose.fitting.collecting import collect_shards, finished
from halopose.fitting.presets import Preset
from halopose.fitting.workers import ProcessGroup, WorkerPool, batch_for
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.protocol import Protocol
from halopose.types import Progress, named


@dataclass(frozen=True)
class InferenceSettings:
    """How images are run through the model.

    Attributes:
        imgsz: Input size in pixels; None for that of the artifact.
        conf: Lowest score of a detection.
        iou: IoU of boxes above which the detection of lower score is removed.
        batch: Images per batch; None for a size that suits the device.
    """

    imgsz: int | None = None
    conf: float = 0.01
    iou: float = 0.7
    batch: int | None = None


@dataclass(frozen=True)
class DatasetEvaluation:
    """Result of ``evaluate_dataset``.

    Attributes:
        scores: The scores.
        skipped: One line for each file that could not be read.
    """

    scores: Scores
    skipped: tuple[str, ...]


def evaluate_dataset(
    model: UncertainPose,
    dataset: Dataset,
    output: Path | str,
    protocol: Protocol,
    settings: InferenceSettings | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    preset: Preset | None = None,
) -> DatasetEvaluation | None:
    """Run a model on annotated images and evaluate its distributions. Resumable.

    Under torchrun each process runs the model on its part of the images, and the first process scores them all.

    Args:
        model: The predictor.
        dataset: Annotated images that neither heads nor calibration have seen (``exclude_images``).
        output: Folder; the detections are cached in its subfolder ``store``.
        protocol: Settings of the evaluation.
        settings: How images are run through the model.
        workers: Number of worker processes; None for a number that suits the machine.
        progress: Called with the name of the step, the number of images done and their total.
        preset: As for ``fitting.pipeline.evaluate_artifact``.

    Returns:
        The scores; None in all processes of torchrun but the first.
    """
    settings, folder = settings or InferenceSettings(), Path(output)
    host = model.host
    group, pool = ProcessGroup.joined(host.device), WorkerPool.of_machine(host.device, workers)
    batch = settings.batch or batch_for(host.device)
    fitting = pipeline.settings_for(
        model.artifact, imgsz=settings.imgsz, conf=settings.conf, iou=settings.iou, batch=batch
    )
    collecting = pipeline.validation_settings(fitting)
    with locked(folder, (pool.part, pool.parts)):
        counter = named(progress, "collecting validation images")
        collect_shards(host, dataset, folder / "store", collecting, counter, pool)
        group.meet()
        if not group.first:
            return None
        store = finished(folder / "store")
        scores = pipeline.evaluate_artifact(model.artifact, host, store, None, protocol, progress, preset)
    return DatasetEvaluation(scores, tuple(store.skipped()))
