"""Commands that use an artifact: evaluate and predict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halopose.cli.options import (
    ArtifactIn,
    Base,
    Bootstrap,
    Confidence,
    Data,
    Device,
    End2End,
    Family,
    Images,
    Iou,
    OtherSize,
    Uncalibrated,
    Unsafe,
    Visibility,
    between,
)
from halopose.cli.terminal import progress, say, say_skipped, write_scores
from halopose.errors import HaloposeError

if TYPE_CHECKING:
    from halopose.data.dataset import Dataset
    from halopose.data.images import NamedImage
    from halopose.fitting.artifact import Artifact
    from halopose.predictor import UncertainPose
    from halopose.types import Array


def evaluate(
    data: Data,
    base: Base,
    artifact: ArtifactIn,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for metrics, report and pictures.")],
    split: Annotated[str, typer.Option(help="Split of the data yaml.")] = "val",
    images: Images = None,
    imgsz: OtherSize = None,
    conf: Confidence = 0.01,
    iou: Iou = 0.7,
    bootstrap: Bootstrap = 200,
    area: Annotated[Literal["annotation", "box"], typer.Option(help="Area in the confidence.")] = "box",
    visibility: Visibility = None,
    overlap: Annotated[
        Literal["exclude", "allow"], typer.Option(help="Images the artifact has seen: leave out, or not.")
    ] = "exclude",
    pictures: Annotated[int, typer.Option(min=0, help="Example pictures with residuals and NLL.")] = 8,
    uncalibrated: Uncalibrated = False,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """The whole protocol on images that neither heads nor calibration have seen."""
    from dataclasses import replace

    from halopose.data.loading import load_dataset
    from halopose.data.lock import locked
    from halopose.evaluation.protocol import Protocol
    from halopose.fitting import pipeline
    from halopose.fitting.artifact import Artifact
    from halopose.predictor import UncertainPose

    model = UncertainPose.load(
        base,
        _pruning_at(Artifact.load(artifact), visibility),
        device=device,
        unsafe=unsafe,
        end2end=end2end,
        uncalibrated=uncalibrated,
    )
    dataset = load_dataset(data, split, images=images, otherwise=model.artifact.layout)
    if overlap == "exclude":
        dataset = _unseen(dataset, model.artifact)
    settings = pipeline.FitSettings(imgsz=imgsz or model.artifact.imgsz, conf=conf, iou=iou)
    protocol = Protocol(bootstrap=bootstrap, area=area)
    with locked(output):
        with progress() as step:
            store = pipeline.collect_validation(model.host, dataset, output / "store", settings, step)
            scores = pipeline.evaluate_artifact(model.artifact, model.host, store, None, protocol, step)
        say_skipped(store)
        if pictures:
            shown = replace(dataset, records=dataset.records[:pictures])
            _example_pictures(model, shown, output / "pictures", imgsz=imgsz, conf=conf, iou=iou)
        write_scores(scores, output, model.host.description)


def predict(
    source: Annotated[str, typer.Argument(help="Image, folder, glob, video or stream.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for pictures and json.")] = Path("poses"),
    base: Annotated[Path | None, typer.Option(help="A .pt checkpoint; else YOLO11n-pose.")] = None,
    artifact: Annotated[
        Path | None, typer.Option(help="Artifact made for the base; else the shipped one.")
    ] = None,
    truth: Annotated[
        Path | None, typer.Option(help="COCO json whose file names say the images' ids; else the names do.")
    ] = None,
    family: Family = "gaussian",
    conf: Confidence = 0.25,
    iou: Iou = 0.7,
    imgsz: OtherSize = None,
    visibility: Visibility = None,
    probability: Annotated[
        float, typer.Option(callback=between, help="Probability that an ellipse holds, between 0 and 1.")
    ] = 0.95,
    hide_pruned: Annotated[bool, typer.Option("--hide-pruned", help="Do not draw pruned keypoints.")] = False,
    uncalibrated: Uncalibrated = False,
    end2end: End2End = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Predict poses with their distributions: annotated pictures, and a json that `score` reads."""
    from halopose.data.coco import image_ids_by_name
    from halopose.data.dataset import image_id
    from halopose.data.files import make_folder, write_json
    from halopose.data.images import check_source, write_image
    from halopose.fitting.artifact import Artifact
    from halopose.hosts import shipped
    from halopose.predictor import UncertainPose

    if base is not None and artifact is None:
        raise HaloposeError("the shipped heads are for the default base: give --artifact for yours")
    number = int(source) if source.isdigit() else source
    check_source(number)
    ids = None if truth is None else image_ids_by_name(truth)
    loaded = _pruning_at(Artifact.load(artifact or shipped.shipped_artifact()), visibility)
    model = UncertainPose.load(
        base,
        loaded,
        family=family,
        device=device,
        unsafe=unsafe,
        end2end=end2end,
        uncalibrated=uncalibrated,
    )
    make_folder(output)
    layout = loaded.layout
    entries: list[dict[str, Any]] = []
    images = 0
    for image, poses in model.stream(number, conf=conf, iou=iou, imgsz=imgsz):
        picture = poses.plot(
            image.pixels,
            probability=probability,
            show_pruned=not hide_pruned,
            names=layout.names,
            limbs=layout.limbs,
        )
        target = output / f"{image.name}.jpg"
        if image.path is not None and target.resolve() == image.path.resolve():
            raise HaloposeError(f"the picture of {image.path} would take its place: choose another --output")
        write_image(target, picture)
        name = _file_name(image)
        if ids is not None and name not in ids:
            raise HaloposeError(f"{truth} knows no image called {name}: leave --truth off, or give the right one")
        identity = image_id(name) if ids is None else ids[name]
        entries += [{**entry, "image_id": identity, "file_name": name} for entry in poses.to_json()]
        images += 1
        say(f"{image.name}: {_counts(poses.keep)}")
    write_json(output / "predictions.json", entries)
    say(f"{images} images -> {output}")


def _file_name(image: NamedImage) -> str:
    """The image's file; with folders where two files of the source have one name."""
    if image.path is None or image.name == image.path.stem:
        return image.name if image.path is None else image.path.name
    return str(Path(image.name).with_suffix(image.path.suffix))


def _counts(keep: Array | None) -> str:
    assert keep is not None
    return f"{len(keep)} detections, {int(keep.sum())} of {keep.size} keypoints kept"


def _pruning_at(artifact: Artifact, visibility: float | None) -> Artifact:
    """The artifact with another visibility threshold, if one is given; 0 switches it off."""
    from dataclasses import replace

    if visibility is None:
        return artifact
    calibrations = replace(artifact.calibrations, visibility_threshold=visibility or None)
    return replace(artifact, calibrations=calibrations)


def _unseen(dataset: Dataset, artifact: Artifact) -> Dataset:
    """The data set without images that the artifact was trained or calibrated on."""
    import numpy as np

    images = artifact.card.get("images", {})
    known: Array = np.array([*images.get("heads", []), *images.get("calibration", [])], dtype=np.int64)
    left = np.setdiff1d(dataset.image_ids, known)
    if len(left) < len(dataset):
        say(f"{len(dataset) - len(left)} of {len(dataset)} images were used to make the artifact: left out")
    if not len(left):
        raise HaloposeError("every image was used to make the artifact: give others, or say --overlap allow")
    return dataset.subset(left)


def _example_pictures(model: UncertainPose, dataset: Dataset, folder: Path, **options: Any) -> None:
    """Detections with residuals and NLL, all keypoints beside those kept."""
    from halopose.data.images import distinct_names, write_image
    from halopose.reports.pictures import draw_example

    names = distinct_names([record.path for record in dataset.records])
    for record, name in zip(dataset.records, names, strict=True):
        picture = draw_example(model, record, **options)
        if picture is not None:
            write_image(folder / f"{name}.jpg", picture)
