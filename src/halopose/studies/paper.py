"""The paper's experiments on any model and data: core metrics, pruning, ablations and fine-tuned residuals.

``reports.paper_page`` renders the result with the numbers of the paper's tables and figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from halopose.data.dataset import Dataset
from halopose.errors import HaloposeError
from halopose.evaluation.scores import Scores
from halopose.fitting import pipeline
from halopose.fitting.artifact import Artifact
from halopose.fitting.presets import PRESETS, departures
from halopose.fitting.settings import FitSettings
from halopose.hosts.base import Host
from halopose.studies.ablation import SEEDS, AblationResult, ablate
from halopose.studies.paper_values import ABLATION, SCALARISATION, THRESHOLD
from halopose.types import Progress, prefixed

ROWS = {*ABLATION, *SCALARISATION, *THRESHOLD}  # rows of ``ablate`` that the paper's tables need


@dataclass(frozen=True)
class PaperStudy:
    """Results of the paper's experiments.

    Attributes:
        model: Description of the base model.
        departures: Differences of the settings from the paper.
        heads: The calibrated artifact that was trained here.
        fitted: Scores of its heads on validation images that calibration did not use.
        given: Scores of the given artifact on images that it has not seen; None without one.
        ablation: Rows of tables 3 to 5.
        tuned: Scores with heads for the fine-tuned base model (appendix B); None without one.
        images: Number of training images.
    """

    model: str
    departures: tuple[str, ...]
    heads: Artifact
    fitted: Scores
    given: Scores | None
    ablation: Sequence[AblationResult]
    tuned: Scores | None
    images: int


def run_paper(
    host: Host,
    training: Dataset,
    validation: Dataset,
    folder: Path | str,
    settings: FitSettings | None = None,
    *,
    artifact: Artifact | None = None,
    tuned: Host | None = None,
    seeds: int = SEEDS,
    bootstrap: int = 200,
    workers: int | None = None,
    progress: Progress | None = None,
) -> PaperStudy:
    """Train, calibrate, evaluate and ablate as the paper does. Resumable.

    Args:
        host: The frozen base model.
        training: Images to train heads on.
        validation: Images to calibrate and to score on.
        folder: Folder for feature caches, checkpoints and rows.
        settings: Settings of the default row; by default those of the paper.
        artifact: Heads made before, which are scored beside those trained here.
        tuned: The base model after fine-tuning of its residuals, as ``halopose finetune`` writes it.
        seeds: Number of trainings of each row of the ablations.
        bootstrap: Number of resamplings of images.
        workers: Number of processes of the ablations.
        progress: Called with the progress.

    Raises:
        HaloposeError: The artifact has seen all validation images, or training and validation images overlap.
    """
    settings, folder = replace(settings or PRESETS["paper"], novelty_images=0), Path(folder)  # no table needs it
    unseen = None if artifact is None else _unseen(artifact, validation)
    heads, fitted = pipeline.fit(host, training, validation, folder / "work", settings, progress)
    rows = ablate(
        host,
        training,
        validation,
        folder,
        settings,
        alphas=(),
        seeds=seeds,
        names=ROWS,
        bootstrap=bootstrap,
        workers=workers,
        progress=progress,
    )
    given = after = None
    if artifact is not None and unseen is not None:
        step = prefixed(progress, "given artifact")
        made = pipeline.settings_for(artifact)
        store = pipeline.collect_validation(host, unseen, folder / "given", made, step)
        given = pipeline.evaluate_artifact(artifact, host, store, progress=step, preset=settings.preset)
    if tuned is not None:
        step = prefixed(progress, "fine-tuned")
        _, after = pipeline.fit(tuned, training, validation, folder / "tuned", settings, step)
    return PaperStudy(host.description, departures(settings), heads, fitted, given, rows, after, len(training))


def _unseen(artifact: Artifact, validation: Dataset) -> Dataset:
    """Validation images that neither heads nor calibration of an artifact have used."""
    used = artifact.card.images.of("heads", "calibration")
    left = np.setdiff1d(validation.image_ids, used)
    if not len(left):
        raise HaloposeError(
            "the artifact was calibrated on all validation images: calibrate it on a share of them with `halopose "
            "calibrate --share 0.4`, or leave out --artifact"
        )
    return validation.subset(left)
