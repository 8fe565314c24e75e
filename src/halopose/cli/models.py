"""Commands that need a base model: fit and its steps, evaluate, predict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halopose.cli.export import calibrate_deployed, evaluate_deployed, folder_of
from halopose.cli.terminal import between, finite, numbers, progress, say, several, write_scores
from halopose.errors import HaloposeError

if TYPE_CHECKING:
    from halopose.data.dataset import Dataset
    from halopose.fitting.artifact import Artifact
    from halopose.fitting.pipeline import FitSettings
    from halopose.hosts.base import Host
    from halopose.poses import Array

DeployedIn = Annotated[Path | None, typer.Option("--deployed", help="Folder of `halopose export`, not --base.")]
SMALLEST = 32  # input size, the stride of the coarsest level

Data = Annotated[Path, typer.Argument(help="YOLO data yaml, or COCO keypoint json.")]
Base = Annotated[Path, typer.Option(help="Trained pose model, a .pt checkpoint.")]
ArtifactIn = Annotated[Path, typer.Option("--artifact", help="Artifact made for this base.")]
MaybeBase = Annotated[Path | None, typer.Option("--base", help="Trained pose model, a .pt checkpoint.")]
MaybeArtifact = Annotated[Path | None, typer.Option("--artifact", help="Artifact made for this base.")]
Images = Annotated[Path | None, typer.Option(help="Folder of the images of COCO json.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Unsafe = Annotated[bool, typer.Option("--unsafe", help="Load a checkpoint that may run code; trusted files only.")]
End2End = Annotated[bool | None, typer.Option(help="Head of a YOLO26 that has both; else as in the checkpoint.")]
Alpha = Annotated[
    float, typer.Option(min=0.0, callback=finite, help="Exponent of the retention weight; 0 switches it off.")
]
ScaleWeight = Annotated[bool, typer.Option(help="Weigh objects by 1 / area.")]
Epochs = Annotated[int, typer.Option(min=1, help="At most so many epochs.")]
Dispersion = Annotated[Literal["full", "diagonal", "isotropic"], typer.Option(help="Form of the dispersion.")]
Trunk = Annotated[Literal["mirrored", "last-layer"], typer.Option(help="Kind of head.")]
WarmStart = Annotated[bool, typer.Option(help="Start from the pose head's own convolutions.")]
Source = Annotated[Literal["matched", "assigned"], typer.Option(help="What to calibrate on.")]
ImageSize = Annotated[int, typer.Option(min=SMALLEST, help="Input size.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")]
Confidence = Annotated[float, typer.Option(min=0.0, max=1.0, callback=finite, help="Confidence threshold.")]
Iou = Annotated[float, typer.Option(min=0.0, max=1.0, callback=finite, help="IoU threshold of NMS.")]
OtherSize = Annotated[int | None, typer.Option(min=SMALLEST, help="Input size; else the artifact's.")]


def fit(
    data: Annotated[
        Path | None, typer.Argument(help="YOLO data yaml, or COCO json; else a world of runways.")
    ] = None,
    base: Annotated[Path | None, typer.Option(help="Trained pose model; else the runway detector.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Artifact to write, .safetensors.")] = Path(
        "heads.safetensors"
    ),
    train: Annotated[str, typer.Option(help="Training split; several with commas.")] = "train",
    val: Annotated[str, typer.Option(help="Validation split, or a second COCO json.")] = "val",
    images: Images = None,
    val_images: Annotated[Path | None, typer.Option(help="Folder of the images of a second json.")] = None,
    work: Annotated[Path | None, typer.Option(help="Work folder; else beside the artifact.")] = None,
    report: Annotated[Path | None, typer.Option(help="Report folder; else beside the artifact.")] = None,
    imgsz: ImageSize = 640,
    train_sizes: Annotated[str | None, typer.Option(help="Input sizes to train at; else --imgsz.")] = None,
    calibration: Source = "matched",
    calibration_share: Annotated[
        float, typer.Option(callback=between, help="Part of the validation images, between 0 and 1.")
    ] = 0.2,
    epochs: Epochs = 12,
    alpha: Alpha = 1.0,
    scale_weight: ScaleWeight = True,
    dispersion: Dispersion = "full",
    trunk: Trunk = "mirrored",
    warm_start: WarmStart = True,
    seed: Seed = 0,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Collect, train, calibrate, choose the pruning threshold and report: one command, one artifact.

    Without arguments it makes its own world of runways and fits the runway detector that ships.
    """
    from dataclasses import replace

    from halopose.data.coco import make_folder, make_room
    from halopose.fitting import pipeline

    settings = _settings(
        imgsz, train_sizes, calibration, calibration_share, epochs, alpha, scale_weight, dispersion, trunk,
        warm_start, seed,
    )  # fmt: skip
    make_room(output)
    work = work or output.with_suffix("")
    if work == output:
        raise HaloposeError(f"{output} is the work folder too: name the artifact {output}.safetensors")
    report = report or output.with_name(f"{output.stem}-report")
    make_folder(report)
    if data is None and base is None:
        data, base = _runways(work)
    if data is None or base is None:
        raise HaloposeError("give both the data and --base, or neither, to fit the runway detector that ships")
    training, validation = two_datasets(data, train, val, images, val_images)
    settings = replace(settings, area_factor=validation.box_area_factor)
    host = host_for(validation, base, device, unsafe, end2end)
    with progress() as step:
        artifact, metrics = pipeline.fit(host, training, validation, work, settings, step)
    artifact.save(output)
    for line in artifact.card["skipped"]:
        say(f"skipped: {line}")
    write_scores(metrics, report, host.description)
    say(f"-> {output}")


def collect(
    data: Data,
    base: Base,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the match store.")],
    split: Annotated[str, typer.Option(help="Split of the data yaml; several with commas.")] = "train",
    images: Images = None,
    sizes: Annotated[str, typer.Option(help="Input sizes, with commas.")] = "640",
    detections: Annotated[int, typer.Option(min=0, help="Retained detections an image; for calibration.")] = 0,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Run the frozen base once and store what heads will ever see; a rerun resumes."""
    from halopose.data.dataset import load_dataset
    from halopose.fitting import store as matches

    settings = matches.CollectSettings(imgsz=parse_sizes(sizes, "sizes"), detections=detections)
    dataset = load_dataset(data, split, images=images)
    host = host_for(dataset, base, device, unsafe, end2end)
    with progress() as step:
        store = matches.collect(
            host,
            dataset,
            output,
            settings,
            lambda done, total: step("collecting", done, total),
        )
    for line in store.skipped():
        say(f"skipped: {line}")
    say(f"{sum(len(cells) for cells in store.cells('assigned'))} assigned cells -> {output}")


def train(
    store: Annotated[Path, typer.Argument(help="Match store of the training images.")],
    base: Base,
    output: Annotated[Path, typer.Option("--output", "-o", help="Uncalibrated artifact to write.")],
    epochs: Epochs = 12,
    alpha: Alpha = 1.0,
    scale_weight: ScaleWeight = True,
    dispersion: Dispersion = "full",
    trunk: Trunk = "mirrored",
    warm_start: WarmStart = True,
    seed: Seed = 0,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Train heads on a match store; a rerun resumes after the last whole epoch."""
    from halopose.data.coco import make_room
    from halopose.fitting import pipeline
    from halopose.fitting.store import MatchStore
    from halopose.predictor import load_host

    host = load_host(base, device=device, unsafe=unsafe, end2end=end2end)
    collected = MatchStore(store)
    size = max(collected.manifest["settings"]["imgsz"])
    settings = _settings(
        size, None, "matched", 0.2, epochs, alpha, scale_weight, dispersion, trunk, warm_start, seed
    )
    make_room(output)
    with progress() as step:
        checkpoint = output.with_suffix(".training.safetensors")
        heads, trained = pipeline.train_heads(host, [collected], settings, checkpoint, step)
    images = {"heads": collected.manifest["images"]}
    pipeline.uncalibrated(host, heads, settings, {"images": images, "training": vars(trained)}).save(output)
    say(f"held-out loss {min(trained.holdout_loss):.4f} after epoch {trained.best_epoch + 1} -> {output}")


def calibrate(
    store: Annotated[
        Path, typer.Argument(help="Match store of calibration images; with --deployed, annotated images.")
    ],
    base: MaybeBase = None,
    artifact: MaybeArtifact = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Calibrated artifact to write.")] = None,
    deployed: DeployedIn = None,
    split: Annotated[str, typer.Option(help="With --deployed, split of the data yaml.")] = "val",
    images: Images = None,
    source: Source = "matched",
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Calibrate trained heads and choose the pruning threshold on images they have not seen."""
    from halopose.data.coco import make_room
    from halopose.fitting import pipeline
    from halopose.fitting.artifact import Artifact
    from halopose.fitting.store import MatchStore
    from halopose.predictor import load_host

    if deployed is not None:
        return calibrate_deployed(store, deployed, split, images)
    base, artifact, output = _given(base, "base"), _given(artifact, "artifact"), _given(output, "output")
    host = load_host(base, device=device, unsafe=unsafe, end2end=end2end)
    make_room(output)
    done = pipeline.calibrate_artifact(Artifact.load(artifact), host, MatchStore(store), source)
    done.save(output)
    say(f"calibrated on {len(done.card['images']['calibration'])} images -> {output}")


def evaluate(
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for metrics, report and pictures.")],
    base: MaybeBase = None,
    artifact: MaybeArtifact = None,
    deployed: DeployedIn = None,
    split: Annotated[str, typer.Option(help="Split of the data yaml.")] = "val",
    images: Images = None,
    imgsz: OtherSize = None,
    conf: Confidence = 0.01,
    iou: Iou = 0.7,
    bootstrap: Annotated[
        int, typer.Option(min=0, callback=several, help="Resamplings of images for intervals.")
    ] = 200,
    area: Annotated[Literal["annotation", "box"], typer.Option(help="Area in the confidence.")] = "box",
    overlap: Annotated[
        Literal["exclude", "allow"], typer.Option(help="Images the artifact has seen: leave out, or not.")
    ] = "exclude",
    pictures: Annotated[int, typer.Option(min=0, help="Example pictures with residuals and NLL.")] = 8,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """The whole protocol on images that neither heads nor calibration have seen."""
    from dataclasses import replace

    from halopose.data.coco import make_folder
    from halopose.data.dataset import load_dataset
    from halopose.evaluation.true_positives import Protocol
    from halopose.fitting import pipeline
    from halopose.fitting.artifact import Artifact
    from halopose.predictor import load_host

    if deployed is not None:
        return evaluate_deployed(
            data, deployed, output, split, images, imgsz, conf, iou, bootstrap, area, overlap
        )  # fmt: skip
    base, artifact = _given(base, "base"), _given(artifact, "artifact")
    host = load_host(base, device=device, unsafe=unsafe, end2end=end2end)
    loaded = Artifact.load(artifact)
    loaded.check(host)
    dataset = load_dataset(data, split, images=images)
    if overlap == "exclude":
        dataset = _unseen(dataset, loaded)
    settings = pipeline.FitSettings(imgsz=imgsz or loaded.imgsz, conf=conf, iou=iou)
    protocol = Protocol(bootstrap=bootstrap, area=area, box_area_factor=loaded.area_factor)
    make_folder(output)
    with progress() as step:
        store = pipeline.collect_validation(host, dataset, output / "store", settings, step)
        metrics = pipeline.evaluate_artifact(loaded, host, store, None, protocol, step)
    for line in store.skipped():
        say(f"skipped: {line}")
    if pictures:
        _example_pictures(loaded, host, replace(dataset, records=dataset.records[:pictures]), output / "pictures")
    write_scores(metrics, output, host.description)


def predict(
    source: Annotated[str, typer.Argument(help="Image, folder, glob, video or stream.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for pictures and json.")] = Path("poses"),
    base: Annotated[Path | None, typer.Option(help="A .pt checkpoint; else YOLO11n-pose.")] = None,
    artifact: Annotated[
        Path | None, typer.Option(help="Artifact made for the base; else the shipped one.")
    ] = None,
    deployed: DeployedIn = None,
    family: Annotated[Literal["gaussian", "student-t"], typer.Option(help="Law.")] = "gaussian",
    conf: Confidence = 0.25,
    iou: Iou = 0.7,
    imgsz: OtherSize = None,
    probability: Annotated[
        float, typer.Option(callback=between, help="Probability that an ellipse holds, between 0 and 1.")
    ] = 0.95,
    hide_pruned: Annotated[bool, typer.Option("--hide-pruned", help="Do not draw pruned keypoints.")] = False,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Predict poses with their distributions: annotated pictures and one json."""
    from halopose.data.coco import make_folder, write_json
    from halopose.data.images import write_image
    from halopose.hosts import shipped as hub
    from halopose.predictor import UncertainPose, load_host

    if deployed is not None and (base or artifact):
        raise HaloposeError("a deployed folder has its base and heads in it: leave --base and --artifact out")
    if base is not None and artifact is None:
        raise HaloposeError("the shipped heads are for the default base: give --artifact for yours")
    if deployed is not None:
        model = UncertainPose.load(folder_of(deployed), family=family)
    else:
        host = load_host(base or hub.find_base(), device=device, unsafe=unsafe, end2end=end2end)
        model = UncertainPose.load(host, artifact, family=family)
    make_folder(output)
    results = []
    number = int(source) if source.isdigit() else source
    for image, poses in model.stream(number, conf=conf, iou=iou, imgsz=imgsz):
        picture = poses.plot(
            image.pixels, probability=probability, show_pruned=not hide_pruned, names=model.keypoint_names
        )
        target = output / f"{image.name}.jpg"
        if image.path is not None and target.resolve() == image.path.resolve():
            raise HaloposeError(f"the picture of {image.path} would take its place: choose another --output")
        write_image(target, picture)
        results.append({"image": image.name, "detections": poses.to_json()})
        kept = 0 if poses.keep is None else int(poses.keep.sum())
        total = len(poses) * poses.keypoint_count
        say(f"{image.name}: {len(poses)} detections, {kept} of {total} keypoints kept")
    write_json(output / "predictions.json", results)
    say(f"{len(results)} images -> {output}")


def _given(path: Path | None, option: str) -> Path:
    if path is None:
        raise HaloposeError(f"give --{option}, or --deployed with a folder that `halopose export` wrote")
    return path


def _runways(work: Path) -> tuple[Path, Path]:
    """A world of runways in the work folder, and the detector that ships, which has seen other scenes."""
    from halopose.hosts import shipped as hub
    from halopose.landing.world.dataset import write_dataset

    say("drawing runways ...")
    return write_dataset(work / "world", hub.RUNWAY_IMAGES, hub.RUNWAY_SEED, processes=2), hub.runway_detector()


def host_for(dataset: Dataset, base: Path, device: str | None, unsafe: bool, end2end: bool | None) -> Host:
    """The base, with names and sigmas of the data set's keypoints."""
    from halopose.predictor import load_host

    host = load_host(base, device=device, unsafe=unsafe, end2end=end2end, sigmas=dataset.sigmas)
    if len(dataset.names) != host.keypoint_count:
        raise HaloposeError(
            f"the data have {len(dataset.names)} keypoints, the model {host.keypoint_count}: they do not fit"
        )
    host.keypoint_names = dataset.names
    return host


def _settings(
    imgsz: int,
    train_sizes: str | None,
    calibration: Any,
    calibration_share: float,
    epochs: int,
    alpha: float,
    scale_weight: bool,
    dispersion: Any,
    trunk: Any,
    warm_start: bool,
    seed: int,
) -> FitSettings:
    from halopose.fitting.pipeline import FitSettings
    from halopose.fitting.training import TrainSettings
    from halopose.uncertainty.heads import HeadSettings

    return FitSettings(
        train=TrainSettings(epochs=epochs, alpha=alpha, scale_weight=scale_weight, seed=seed),
        head=HeadSettings(dispersion, trunk, warm_start),
        train_sizes=(imgsz,) if train_sizes is None else parse_sizes(train_sizes),
        imgsz=imgsz,
        calibration=calibration,
        calibration_share=calibration_share,
    )


def parse_sizes(text: str, option: str = "train-sizes") -> tuple[int, ...]:
    """Input sizes separated by commas."""
    values = numbers(text, option)
    if any(value < SMALLEST or value % 1 for value in values):
        raise HaloposeError(f"--{option} takes whole numbers of pixels from {SMALLEST} on, got {text!r}")
    return tuple(map(int, values))


def two_datasets(
    data: Path, train: str, val: str, images: Path | None, val_images: Path | None
) -> tuple[Dataset, Dataset]:
    from halopose.data.dataset import load_dataset

    if data.suffix == ".json":
        if not val.endswith(".json"):
            raise HaloposeError("with COCO json give the validation annotations too: --val other.json")
        return load_dataset(data, "", images=images), load_dataset(val, "", images=val_images or images)
    return load_dataset(data, train), load_dataset(data, val)


def _unseen(dataset: Dataset, artifact: Artifact) -> Dataset:
    """The data set without images that the artifact was trained or calibrated on."""
    import numpy as np

    known: Array = np.array(
        [
            identity
            for part in ("heads", "calibration")
            for identity in artifact.card.get("images", {}).get(part, [])
        ],
        dtype=np.int64,
    )
    left = np.setdiff1d(dataset.image_ids, known)
    if len(left) < len(dataset):
        say(f"{len(dataset) - len(left)} of {len(dataset)} images were used to make the artifact: left out")
    if not len(left):
        raise HaloposeError("every image was used to make the artifact: give others, or say --overlap allow")
    return dataset.subset(left)


def _example_pictures(artifact: Artifact, host: Any, dataset: Dataset, folder: Path) -> None:
    """Detections with residuals and NLL, all keypoints beside those kept."""
    from halopose.data.images import distinct_names, write_image
    from halopose.reports.pictures import draw_example

    names = distinct_names([record.path for record in dataset.records])
    for record, name in zip(dataset.records, names, strict=True):
        picture = draw_example(artifact, host, record)
        if picture is not None:
            write_image(folder / f"{name}.jpg", picture)
