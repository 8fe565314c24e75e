"""Commands that make an artifact: fit, its steps collect, train and calibrate, and novelty."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from halopose.cli.export_commands import calibrate_deployed
from halopose.cli.options import (
    Alpha,
    ArtifactElseShipped,
    Base,
    BaseElseShipped,
    Batch,
    CalibrationShare,
    ContextOption,
    Data,
    Deployed,
    Device,
    Dispersion,
    Dof,
    End2End,
    Epochs,
    FitMatch,
    Half,
    Images,
    ImageSize,
    MatchAsMade,
    MaybeArtifact,
    MaybeBase,
    MaybeRegionScales,
    NoveltyImages,
    Preset,
    RegionScales,
    Rule,
    RuleAsMade,
    ScaleWeight,
    Seed,
    Source,
    Train,
    TrainSizes,
    Trunk,
    Unsafe,
    Val,
    ValImages,
    WarmStart,
    Workers,
    given_options,
    refuse_with_deployed,
    required_files,
    sizes,
)
from halopose.cli.options import share as checked_share
from halopose.cli.terminal import progress, say, say_skipped, write_scores
from halopose.errors import HaloposeError

if TYPE_CHECKING:
    from halopose.fitting.artifact import Artifact
    from halopose.fitting.feature_cache import MatchStore
    from halopose.fitting.settings import FitSettings
    from halopose.hosts.base import Host
    from halopose.uncertainty.heads import HeadSettings


def fit(
    command: typer.Context,
    data: Annotated[Path | None, typer.Argument(help="YOLO data yaml, or COCO keypoint json.")] = None,
    base: Annotated[
        Path | None, typer.Option(help="Trained pose model: a checkpoint, or a name of `halopose models`.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Artifact to write, .safetensors.")] = Path(
        "heads.safetensors"
    ),
    train: Train = "train",
    val: Val = "val",
    images: Images = None,
    val_images: ValImages = None,
    work: Annotated[Path | None, typer.Option(help="Work folder; default: beside the artifact.")] = None,
    report: Annotated[Path | None, typer.Option(help="Report folder; default: beside the artifact.")] = None,
    log: Annotated[
        str | None, typer.Option(help="Log losses and scores: csv, tensorboard, mlflow, wandb; several with commas.")
    ] = None,
    imgsz: ImageSize = 640,
    train_sizes: TrainSizes = None,
    calibration: Source = "matched",
    calibration_share: CalibrationShare = 0.2,
    match: FitMatch = "both",
    rule: Rule = "youden",
    region_scales: RegionScales = False,
    epochs: Epochs = 12,
    alpha: Alpha = 1.0,
    scale_weight: ScaleWeight = True,
    dof: Dof = None,
    dispersion: Dispersion = "full",
    trunk: Trunk = "mirrored",
    warm_start: WarmStart = True,
    context: ContextOption = False,
    preset: Preset = None,
    novelty_images: NoveltyImages = 300,
    seed: Seed = 0,
    workers: Workers = None,
    batch: Batch = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Where to collect: this machine, or a Ray cluster.")
    ] = "local",
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Collect, train, calibrate, choose the pruning thresholds and evaluate, in one command.

    Example: halopose fit coco-pose.yaml --base yolo11s-pose.pt -o heads.safetensors
    """
    from dataclasses import replace

    from halopose.data.dataset_loading import load_train_val
    from halopose.data.files import make_folder, make_room
    from halopose.data.lock import locked
    from halopose.fitting import pipeline
    from halopose.fitting.callbacks import loggers
    from halopose.fitting.presets import PRESETS, with_options
    from halopose.fitting.work_folder import work_folder
    from halopose.fitting.workers import WorkerPool, batch_for, torchrun_rank
    from halopose.hosts import model_zoo
    from halopose.hosts.loading import load_host
    from halopose.uncertainty.heads import head_settings

    if data is None or base is None:
        raise HaloposeError(
            "fit needs annotated images and a trained pose model: halopose fit DATA.yaml --base MODEL.pt. DATA is "
            "a YOLO data yaml with train and val splits, or COCO keypoint json with --images and --val"
        )
    base = Path(model_zoo.resolve(base, None)[0] or base)
    if torchrun_rank():
        raise HaloposeError("fit is for one process: under torchrun run collect, train and evaluate one by one")
    settings = replace(
        _settings(
            epochs, alpha, scale_weight, dof, seed, head_settings(dispersion, trunk, warm_start, context=context)
        ),
        train_sizes=(imgsz,) if train_sizes is None else sizes(train_sizes),
        imgsz=imgsz,
        calibration=calibration,
        calibration_share=calibration_share,
        match=match,
        rule=rule,
        region_scales=region_scales,
        novelty_images=novelty_images,
    )
    if preset is not None:
        settings = with_options(PRESETS[preset], settings, given_options(command))
    make_room(output)
    work = work_folder(output, work)
    say(f"work folder: {work}")
    report = report or output.with_name(f"{output.stem}-report")
    make_folder(report)
    callbacks = loggers([word.strip() for word in log.split(",")], report) if log else ()
    with locked(work):
        host = load_host(base, device=device, unsafe=unsafe, end2end=end2end)
        training, validation = load_train_val(
            data, train, val, images=images, val_images=val_images, otherwise=host.layout
        )
        settings = replace(settings, batch=batch or batch_for(host.device))
        pool = replace(WorkerPool.of_machine(host.device, workers), engine=engine)
        with progress() as step:
            artifact, scores = pipeline.fit(host, training, validation, work, settings, step, pool, callbacks)
    artifact.save(output)
    for line in artifact.card.skipped or ():
        say(f"skipped: {line}")
    following = f"halopose predict photo.jpg --base {base} --artifact {output}"
    write_scores(scores, report, host.description, following)
    say(f"-> {output}")


def collect(
    data: Data,
    base: Base,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the feature cache.")],
    split: Annotated[str, typer.Option(help="Split of the data yaml; several separated by commas.")] = "train",
    images: Images = None,
    imgsz: Annotated[str, typer.Option("--sizes", help="Input sizes, separated by commas.")] = "640",
    detections: Annotated[int, typer.Option(min=0, max=300, help="Detections stored per image, for calibration.")] = 0,
    context: ContextOption = False,
    workers: Workers = None,
    batch: Batch = None,
    part: Annotated[
        str | None, typer.Option(help="Write only this part of the cache, such as 3/8; other processes write the rest.")
    ] = None,
    half: Half = False,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Run the frozen model once and cache the training features. Resumable.

    Under torchrun, or with --part in a job array, each process writes its part of one cache.

    Example: halopose collect data.yaml --base mine.pt -o train-cells
    """
    from halopose.data.dataset_loading import load_dataset
    from halopose.data.files import check_target
    from halopose.data.lock import locked
    from halopose.fitting.collecting import collect_shards, finished
    from halopose.fitting.feature_cache import CollectSettings, missing_shards
    from halopose.fitting.workers import WorkerPool, batch_for, own_device, parse_part
    from halopose.hosts.loading import load_host
    from halopose.types import named

    chosen, views = parse_part(part) if part is not None else None, sizes(imgsz, "sizes")
    check_target(output / "manifest.json")
    host = load_host(base, device=own_device(device), unsafe=unsafe, end2end=end2end)
    if half:
        host.use_half()
    settings = CollectSettings(
        imgsz=views, detections=detections, batch=batch or batch_for(host.device), context_features=context
    )
    dataset = load_dataset(data, split, images=images, otherwise=host.layout)
    pool = WorkerPool.of_machine(host.device, workers, chosen)
    with locked(output, (pool.part, pool.parts)), progress() as step:
        collect_shards(host, dataset, output, settings, named(step, "collecting"), pool)
    if missing := missing_shards(output):
        say(f"part {pool.part + 1} of {pool.parts} is done; of all shards {missing}")
        return
    collected = finished(output)
    say_skipped(collected)
    if isinstance(collected.folder, Path):
        say(f"{sum(len(cells) for cells in collected.cells('assigned'))} assigned cells -> {output}")
    else:  # counting would download the cache
        say(f"{collected.manifest['shards']} shards -> {collected.folder}")


def train(
    store: Annotated[Path, typer.Argument(help="Feature cache of the training images.")],
    base: Base,
    output: Annotated[Path, typer.Option("--output", "-o", help="Uncalibrated artifact to write.")],
    epochs: Epochs = 12,
    alpha: Alpha = 1.0,
    scale_weight: ScaleWeight = True,
    dof: Dof = None,
    dispersion: Dispersion = "full",
    trunk: Trunk = "mirrored",
    warm_start: WarmStart = True,
    context: ContextOption = False,
    seed: Seed = 0,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Train heads on a feature cache. Resumes after the last complete epoch.

    Under torchrun the processes share the cache and train the same heads.

    Example: halopose train train-cells --base mine.pt -o uncalibrated.safetensors
    """
    from dataclasses import replace

    from halopose.data.files import make_room
    from halopose.fitting import pipeline
    from halopose.fitting.feature_cache import MatchStore
    from halopose.fitting.workers import ProcessGroup, own_device
    from halopose.hosts.loading import load_host
    from halopose.uncertainty.heads import head_settings

    host = load_host(base, device=own_device(device), unsafe=unsafe, end2end=end2end)
    group = ProcessGroup.joined(host.device)
    collected = MatchStore(store)
    settings = replace(
        _settings(
            epochs, alpha, scale_weight, dof, seed, head_settings(dispersion, trunk, warm_start, context=context)
        ),
        train_sizes=collected.settings.imgsz,
        imgsz=max(collected.settings.imgsz),
        cells_per_object=collected.settings.cells_per_object,
    )
    make_room(output)
    with progress() as step:
        checkpoint = output.with_suffix(".training.safetensors")
        heads, trained = pipeline.train_heads(host, [collected], settings, checkpoint, step, group=group)
    if not group.first:
        return
    pipeline.uncalibrated(host, heads, [collected], settings, trained).save(output)
    say(f"held-out loss {min(trained.holdout_loss):.4f} after epoch {trained.best_epoch + 1} -> {output}")


def calibrate(
    context: typer.Context,
    store: Annotated[
        Path,
        typer.Argument(help="Annotated images (data yaml, or COCO json with --images), or a feature cache of them."),
    ],
    base: MaybeBase = None,
    artifact: MaybeArtifact = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Calibrated artifact to write.")] = None,
    deployed: Deployed = None,
    split: Annotated[str, typer.Option(help="Split of the data yaml.")] = "val",
    images: Images = None,
    source: Source = "matched",
    share: Annotated[
        float,
        typer.Option(callback=checked_share, help="Share of the images to calibrate on, as in fit; default: all."),
    ] = 1.0,
    match: MatchAsMade = None,
    rule: RuleAsMade = None,
    region_scales: MaybeRegionScales = None,
    offset: Annotated[
        bool, typer.Option("--offset", help="Add a mean to the distribution where residuals are biased.")
    ] = False,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Calibrate trained heads and choose the pruning thresholds, on images that training has not seen.

    A few dozen annotated frames of your own camera adapt heads to it; keypoints do not change. For shipped heads give
    the name of the model, which `halopose models` lists.

    Example: halopose calibrate camera.yaml --base mine.pt --artifact mine.safetensors -o camera.safetensors
    """

    from halopose.data.files import make_room
    from halopose.fitting import pipeline
    from halopose.fitting.artifact import Artifact, host_for
    from halopose.fitting.novelty_fitting import calibrate_novelty

    chosen = {"match": match, "rule": rule, "region_scales": region_scales}
    changes = {name: value for name, value in chosen.items() if value is not None}
    if deployed is not None:
        if output is not None:
            raise HaloposeError("an exported folder is calibrated in place: copy it first, and remove --output")
        if source != "matched":
            raise HaloposeError("an exported folder gives detections only: remove --source assigned")
        refuse_with_deployed(context, "share", "match", "end2end", "device", "unsafe")
        calibrate_deployed(store, deployed, split, images, offset=offset, **changes)
        return
    base, artifact = required_files(base, artifact)
    if output is None:
        raise HaloposeError("give --output, the calibrated artifact to write")
    trained = Artifact.load(artifact)
    host = host_for(trained, base, device=device, unsafe=unsafe, end2end=end2end)
    make_room(output)
    found = _store_of(store, split, images, trained, host, output)
    done = pipeline.calibrate_artifact(trained, host, found, source, share, offset=offset, **changes)
    if done.novelty is not None:
        done = calibrate_novelty(done, found, done.card.images.of("calibration"))
    done.save(output)
    for line in _changes(trained, done):
        say(line)
    if done.card.novelty is not None:
        say(f"out-of-distribution p-values now refer to {done.card.novelty.detections} detections in these images")
    say(f"calibrated on {len(done.card.images.of('calibration'))} images -> {output}")


def _store_of(given: Path, split: str, images: Path | None, trained: Artifact, host: Host, output: Path) -> MatchStore:
    """Return the feature cache of a folder, or collect one from annotated images beside the output."""
    from dataclasses import replace

    from halopose.data.dataset_loading import load_dataset
    from halopose.fitting import pipeline
    from halopose.fitting.feature_cache import MatchStore
    from halopose.fitting.work_folder import work_folder
    from halopose.plugins import dataset_reader

    if dataset_reader(given) is None and (given.is_dir() or not given.exists()):
        return MatchStore(given)
    dataset = load_dataset(given, split, images=images, otherwise=trained.layout)
    stated = dataset.layout
    if (stated.names, stated.sigmas) == (trained.layout.names, trained.layout.sigmas):
        dataset = replace(dataset, layout=trained.layout)  # limbs only affect drawing
    made = trained.card.fit_settings
    settings = pipeline.settings_for(
        trained, conf=made.conf, iou=made.iou, batch=made.batch, cells_per_object=made.cells_per_object
    )
    with progress() as step:
        return pipeline.collect_validation(host, dataset, work_folder(output) / "store", settings, step)


def _changes(before: Artifact, after: Artifact) -> list[str]:
    """Return lines about each keypoint's change of temperature, and its mean if requested."""
    old, new = before.calibrations.gaussian.tau_, after.calibrations.gaussian.tau_
    offset = after.calibrations.offset
    lines = []
    for k, name in enumerate(after.layout.names):
        line = f"{name:16} temperature {float(old[k]):.2f} -> {float(new[k]):.2f}"
        if offset is not None:
            x, y = (100 * offset[k]).tolist()
            line += f", mean {x:+.1f} {y:+.1f} % of the object's size" if x or y else ", no bias found"
        lines.append(line)
    if offset is not None:
        lines.append("keypoints do not change; calibrate without --offset to remove the means")
    return lines


def novelty(
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="Artifact to write.")],
    base: BaseElseShipped = None,
    artifact: ArtifactElseShipped = None,
    train: Train = "train",
    val: Val = "val",
    images: Images = None,
    val_images: ValImages = None,
    work: Annotated[Path | None, typer.Option(help="Work folder; default: beside the artifact.")] = None,
    novelty_images: NoveltyImages = 300,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Add an out-of-distribution model to a calibrated artifact; heads and calibration do not change.

    It is fitted on training images and corrupted copies of them. P-values come from validation images, except those
    that the artifact reserves for evaluation.

    Example: halopose novelty data.yaml --base mine.pt --artifact mine.safetensors -o new.safetensors
    """
    from halopose.data.dataset_loading import load_train_val
    from halopose.data.files import make_room
    from halopose.fitting import pipeline
    from halopose.fitting.artifact import Artifact, host_for
    from halopose.fitting.settings import NoveltySettings
    from halopose.fitting.work_folder import work_folder
    from halopose.hosts import model_zoo

    base, artifact = model_zoo.model_files(base, artifact)
    known = Artifact.load(artifact)
    host = host_for(known, base, device=device, unsafe=unsafe, end2end=end2end)
    make_room(output)
    training, validation = load_train_val(
        data, train, val, images=images, val_images=val_images, otherwise=known.layout
    )
    with progress() as step:
        settings = NoveltySettings(novelty_images)
        done = pipeline.add_novelty(known, host, training, validation, work_folder(output, work), settings, step)
    done.save(output)
    record = done.card.novelty
    if record is not None:
        say(f"fitted on {len(record.images)} images, calibrated on {len(record.calibration)} -> {output}")


def _settings(
    epochs: int, alpha: float, scale_weight: bool, dof: float | None, seed: int, head: HeadSettings
) -> FitSettings:
    """Return the settings of training."""
    from halopose.fitting.settings import FitSettings, TrainSettings

    return FitSettings(
        train=TrainSettings(epochs=epochs, alpha=alpha, scale_weight=scale_weight, dof=dof, seed=seed),
        head=head,
    )
