"""Ablations of the paper (section 5): one collection of features, one row of results per variant.

Each row is trained with several seeds. All rows share seeds and bootstrap draws over images, so differences between
rows are paired. Their intervals cover the choice of images and the variation of training. ``findings`` tests the
findings of the paper on them, ``reports.ablation_report`` renders them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halopose.calibration.calibrate import apply_calibrations, fit_calibrations
from halopose.data.dataset import Dataset
from halopose.data.files import read_json, write_json
from halopose.data.splits import split_validation
from halopose.errors import HaloposeError
from halopose.evaluation.bootstrap import Difference, repeated_difference
from halopose.evaluation.resampling import ResampledMetrics
from halopose.fitting import pipeline
from halopose.fitting.feature_cache import MatchStore, read_table, shard_path
from halopose.fitting.head_training import TrainingHistory
from halopose.fitting.settings import CalibrationSource, FitSettings
from halopose.hosts.base import Host
from halopose.matching.matched_poses import match_poses
from halopose.protocol import Protocol
from halopose.types import Array, Progress
from halopose.uncertainty.pruning import Scalarisation, ThresholdRule

FORMAT = "halopose-ablation-1"
ALPHAS = (0.0, 0.5, 1.0, 2.0, 4.0)
DOF = 12.0  # degrees of freedom of the Student-t loss, between the Gaussian loss and the calibrated values
SCALES = 5  # object scales with equal numbers of instances
DEFAULT = "default"
SEEDS = 5


@dataclass(frozen=True)
class AblationVariant:
    """One variant: settings of training, calibration and pruning.

    Attributes:
        name: Name in file names.
        title: Name in reports.
        fit: Settings of training and calibration.
        scalarisation: Scalar of the covariance that keypoints are ranked by.
        rule: Rule of the pruning threshold.
    """

    name: str
    title: str
    fit: FitSettings
    scalarisation: Scalarisation = "trace"
    rule: ThresholdRule = "youden"

    @property
    def variant(self) -> tuple[Any, ...]:
        """Settings that determine the results of the row."""
        return self.fit, self.scalarisation, self.rule

    @property
    def training(self) -> tuple[Any, ...]:
        """Settings that determine its trained heads."""
        return self.fit.train, self.fit.head

    @property
    def protocol(self) -> Protocol:
        return Protocol(
            area="box",
            gamma_ks=self.fit.gamma_ks,
            scalarisation=self.scalarisation,
            threshold_rule=self.rule,
            covariance=self.fit.covariance,
        )

    def repeated(self, number: int) -> AblationVariant:
        """The variant with another seed; 0 is the variant itself."""
        if not number:
            return self
        train = replace(self.fit.train, seed=self.fit.train.seed + number)
        return replace(self, name=f"{self.name}-seed-{number}", fit=replace(self.fit, train=train))


def ablation_variants(fit: FitSettings, alphas: Sequence[float] = ALPHAS) -> list[AblationVariant]:
    """The default and variants that differ from it in one setting, without duplicates."""

    def trained(**changes: Any) -> FitSettings:
        return replace(fit, train=replace(fit.train, **changes))

    def headed(**changes: Any) -> FitSettings:
        return replace(fit, head=replace(fit.head, **changes))

    sources: dict[CalibrationSource, str] = {"matched": "matched detections", "assigned": "assigned cells"}
    sizes: dict[Scalarisation, str] = {
        "trace": "trace",
        "determinant": "determinant",
        "eigenvalue": "largest eigenvalue",
    }
    rules: dict[ThresholdRule, str] = {"youden": "Youden", "distance": "distance to the corner", "f1": "F1"}
    rows = [
        AblationVariant(DEFAULT, "Default", fit),
        AblationVariant("no-scale-weights", "No scale weights", trained(scale_weight=False)),
        AblationVariant("no-importance-weights", "No importance weights", trained(alpha=0.0, scale_weight=False)),
        AblationVariant("diagonal", "Diagonal dispersion", headed(parameterisation="diagonal")),
        AblationVariant("isotropic", "Isotropic dispersion", headed(parameterisation="isotropic")),
        AblationVariant("last-layer", "Last-layer heads", headed(trunk="last-layer")),
        AblationVariant("no-claims", "No box disagreement", headed(overlaps=False)),
        AblationVariant("no-features", "No neck features at the keypoints", headed(features=False)),
        AblationVariant("window", "Window features only", headed(overlaps=False, features=False, bounded=False)),
        AblationVariant("cold-start", "No warm start", headed(warm_start=False)),
        AblationVariant("tails", f"Student-t loss, nu {DOF:g}", trained(dof=DOF)),
        *(
            AblationVariant(f"alpha-{alpha:g}", f"Retention exponent {alpha:g}", trained(alpha=alpha))
            for alpha in alphas
        ),
        *(
            AblationVariant(name, f"Calibrated on {text}", replace(fit, calibration=name))
            for name, text in sources.items()
        ),
        *(AblationVariant(name, f"Ranked by {text}", fit, scalarisation=name) for name, text in sizes.items()),
        *(AblationVariant(name, f"Threshold by {text}", fit, rule=name) for name, text in rules.items()),
    ]
    first = {row.variant: row for row in reversed(rows)}
    return [row for row in rows if first[row.variant] is row]


@dataclass(frozen=True)
class AblationResult:
    """Results of one row with S seeds. All rows share seeds and the same B resamplings of images.

    Attributes:
        name: Name of the variant.
        title: Title of the variant.
        values: Each metric (S,) by seed: ``gaussian.ace`` as in metrics.json, ``pruned.gaussian.ace`` after pruning,
            ``scale.0.ace`` by object scale.
        draws: Each metric (S, B) by seed under the resamplings.
        variance: Predicted and empirical variance in bins, by axis, after Gaussian calibration, with the first seed.
        scales: Names of the object scales.
        counts: Numbers of images and keypoints.
    """

    name: str
    title: str
    values: dict[str, Array]
    draws: dict[str, Array]
    variance: dict[str, dict[str, Array]]
    scales: list[str]
    counts: dict[str, int]

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return max((len(values) for values in self.values.values()), default=0)

    @property
    def estimate(self) -> dict[str, float]:
        """Mean of each metric over seeds."""
        return {name: float(np.mean(values)) for name, values in self.values.items()}

    def margin(self, metric: str) -> float:
        """Half the width of the 95 % interval of a metric, over images and seeds."""
        return repeated_difference(self.values[metric], self.draws[metric]).margin

    def minus(self, other: AblationResult, metric: str, of_other: str | None = None) -> Difference:
        """Difference to a metric of another row, paired by seed and by resampled images.

        Args:
            other: The other row.
            metric: Name of the metric.
            of_other: Its name in the other row, if it differs.
        """
        second = of_other or metric
        return repeated_difference(self.values[metric] - other.values[second], self.draws[metric] - other.draws[second])

    @classmethod
    def join(cls, row: AblationVariant, parts: Sequence[AblationResult]) -> AblationResult:
        """Join the results of one row with several seeds."""
        first = parts[0]
        return replace(
            first,
            name=row.name,
            title=row.title,
            values={name: np.concatenate([part.values[name] for part in parts]) for name in first.values},
            draws={name: np.concatenate([part.draws[name] for part in parts]) for name in first.draws},
        )

    @classmethod
    def read(cls, path: Path, row: AblationVariant, key: str) -> AblationResult | None:
        """Read a computed row.

        Args:
            path: File of the row.
            row: The variant.
            key: Digest of data and settings.

        Returns:
            The row; None if the file is missing, damaged, or belongs to other settings or data.
        """
        try:
            content = read_json(path)
            if content["format"] != FORMAT or content["key"] != key:
                return None
            return cls(
                name=row.name,
                title=row.title,
                values={name: _array([value]) for name, value in content["estimate"].items()},
                draws={name: _array([values]) for name, values in content["draws"].items()},
                variance={
                    axis: {name: _array(values) for name, values in curve.items()}
                    for axis, curve in content["variance"].items()
                },
                scales=list(content["scales"]),
                counts=dict(content["counts"]),
            )
        except (HaloposeError, KeyError, TypeError, ValueError, AttributeError):
            return None


def _array(value: Any) -> Array:
    """Numbers from json, where null stands for NaN."""
    return np.array(value, dtype=float)


def ablate(
    host: Host,
    training: Dataset,
    validation: Dataset,
    folder: Path | str,
    settings: FitSettings | None = None,
    *,
    alphas: Sequence[float] = ALPHAS,
    seeds: int = SEEDS,
    names: Collection[str] | None = None,
    bootstrap: int = 200,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[AblationResult]:
    """Collect features once, then compute all missing rows in parallel, with all seeds. Resumable.

    Args:
        host: The frozen base model.
        training: Images to train heads on.
        validation: Images to calibrate and to score on.
        folder: Folder for features, checkpoints and rows.
        settings: Settings of the default row.
        alphas: Retention exponents to compare.
        seeds: Number of trainings of each row.
        names: Names of the rows; default: all.
        bootstrap: Number of resamplings of images.
        workers: Number of processes; by default one per core on a CPU, else one.
        progress: Called with the number of computed rows.

    Raises:
        HaloposeError: A setting is invalid, or the training and validation images overlap.
    """
    fit, folder = settings or FitSettings(), Path(folder)
    if any(alpha < 0 for alpha in alphas) or bootstrap < 2 or seeds < 1:
        raise HaloposeError(
            "retention exponents must not be negative, rows need a seed, and intervals at least two resamplings"
        )
    if len(shared := np.intersect1d(training.image_ids, validation.image_ids)):
        raise HaloposeError(f"{len(shared)} images are in both the training and the validation split")
    stores = (
        pipeline.collect_training(host, training, folder / "work" / "train", fit, progress),
        pipeline.collect_validation(host, validation, folder / "work" / "val", fit, progress),
    )
    study = AblationStudy(folder, validation.image_ids, bootstrap, _digest(host, stores))
    rows = [row for row in ablation_variants(fit, alphas) if names is None or row.name in names]
    jobs: dict[tuple[Any, ...], list[AblationVariant]] = {}
    for row in (one.repeated(number) for number in range(seeds) for one in rows):
        if study.read(row) is None:
            jobs.setdefault(row.training, []).append(row)
    _run(study, host, list(jobs.values()), workers, progress)
    results = []
    for row in rows:
        parts = [part for number in range(seeds) if (part := study.read(row.repeated(number))) is not None]
        if len(parts) < seeds:
            raise HaloposeError(f"a row in {folder} was changed during the run: run the same command again")
        results.append(AblationResult.join(row, parts))
    return results


def _digest(host: Host, stores: Sequence[MatchStore]) -> str:
    """Digest of the base model, the settings of the collection and all annotations."""
    digest = hashlib.sha256(json.dumps(sorted(host.fingerprints)).encode())
    for store in stores:
        digest.update(json.dumps(store.manifest, sort_keys=True).encode())
        for number in range(store.manifest["shards"]):
            for name, column in sorted(read_table(shard_path(store.folder, number), "truth").items()):
                digest.update(name.encode() + column.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class AblationStudy:
    """Input and output of the rows.

    Attributes:
        folder: Folder for features, checkpoints and rows.
        images: (I,) image ids of the validation split.
        bootstrap: Number of resamplings of images.
        data: Digest of base model and data.
    """

    folder: Path
    images: Array
    bootstrap: int
    data: str

    def key(self, *parts: Any) -> str:
        """Digest of the data and the given settings."""
        text = json.dumps([FORMAT, self.data, *parts], default=asdict, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, row: AblationVariant) -> AblationResult | None:
        return AblationResult.read(self._path(row), row, self._key(row))

    def _path(self, row: AblationVariant) -> Path:
        return self.folder / "rows" / f"{row.name}.json"

    def _key(self, row: AblationVariant) -> str:
        return self.key(self.bootstrap, *row.variant)

    def compute(self, host: Host, rows: Sequence[AblationVariant]) -> None:
        """Train the heads that the rows share, and write each row when it is computed."""
        train, val = (MatchStore(self.folder / "work" / name) for name in ("train", "val"))
        checkpoint = self.folder / "work" / f"training-{self.key(*rows[0].training)[:16]}.safetensors"
        heads, trained = pipeline.train_heads(host, [train], rows[0].fit, checkpoint)
        images = split_validation(self.images, rows[0].fit.calibration_share)
        if heads.settings.bounded:
            heads = pipeline.bound_heads(heads, val, images[0], rows[0].protocol)
        held_out, scored = (
            match_poses(
                pipeline.predictions_of(heads, val, part),
                val.ground_truth(part),
                rows[0].protocol,
            )
            for part in images
        )
        fits = {fit: pipeline.calibrate_heads(heads, val, images[0], fit) for fit in {row.fit for row in rows}}
        edges = np.quantile(scored.area, np.arange(1, SCALES) / SCALES)
        for row in rows:
            gaussian, student = fits[row.fit].gaussian, fits[row.fit].student
            fitted = fit_calibrations(held_out, row.protocol, gaussian=gaussian, student=student)
            applied = apply_calibrations(scored, fitted, row.protocol)
            calibrated = {name: applied.distributions[name] for name in ("gaussian", "student_t")}
            measured = ResampledMetrics.of(scored, replace(applied, distributions=calibrated), row.protocol, edges)
            self._write(row, trained, measured, fitted.threshold, scale_names(np.sqrt(edges)))

    def _write(
        self,
        row: AblationVariant,
        trained: TrainingHistory,
        measured: ResampledMetrics,
        threshold: float,
        scales: list[str],
    ) -> None:
        draws = list(measured.draws(self.bootstrap, scales=True))
        estimate = measured.scores(scales=True)
        content = {
            "format": FORMAT,
            "key": self._key(row),
            "row": asdict(row),
            "training": asdict(trained),
            "threshold": threshold,
            "estimate": estimate,
            "draws": {name: [draw[name] for draw in draws] for name in estimate},
            "variance": measured.variance,
            "scales": scales,
            "counts": {"images": measured.image_count, "keypoints": len(measured.kept)},
        }
        write_json(self._path(row), content)


def scale_names(sides: Array) -> list[str]:
    """Names of the object scales, by the side of the object in pixels."""
    inner = [f"{low:.0f} to {high:.0f}" for low, high in pairwise(sides)]
    return [f"under {sides[0]:.0f}", *inner, f"over {sides[-1]:.0f}"]


def _run(
    study: AblationStudy,
    host: Host,
    jobs: list[list[AblationVariant]],
    workers: int | None,
    progress: Progress | None,
) -> None:
    """Compute the rows of all jobs; a job runs in one process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = workers or (cores if host.device.type == "cpu" else 1)
    count, total = min(wanted, len(jobs)), sum(len(rows) for rows in jobs)
    done = 0

    def step(rows: list[AblationVariant]) -> None:
        nonlocal done
        done += len(rows)
        if progress:
            progress("computing rows", done, total)

    if progress and jobs:
        progress("computing rows", 0, total)
    if count <= 1:
        for rows in jobs:
            study.compute(host, rows)
            step(rows)
    else:
        _run_in_processes(study, host, jobs, count, max(1, cores // count), step)


def _run_in_processes(
    study: AblationStudy,
    host: Host,
    jobs: list[list[AblationVariant]],
    workers: int,
    threads: int,
    step: Callable[[list[AblationVariant]], None],
) -> None:
    # Waiting threads must not spin: they would slow down the other processes.
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    packed = pickle.dumps(host)
    with (
        _environment({**limits, "OMP_WAIT_POLICY": "PASSIVE"}),
        ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(threads,)
        ) as pool,
    ):
        pending = {pool.submit(_compute, study, packed, rows): rows for rows in jobs}
        try:
            for future in as_completed(pending):
                future.result()
                step(pending[future])
        except BrokenProcessPool:
            raise HaloposeError(
                "a worker process died, possibly out of memory: run the same command again with fewer --workers "
                "(finished rows are kept)"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _compute(study: AblationStudy, packed: bytes, rows: list[AblationVariant]) -> None:
    study.compute(pickle.loads(packed), rows)


def _start_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent dies; otherwise the worker would wait forever and write to the files of the next run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started inside the context."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
