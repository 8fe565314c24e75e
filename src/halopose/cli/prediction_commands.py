"""Commands that use an artifact: evaluate and predict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from halopose.cli.export_commands import evaluate_deployed, folder_of
from halopose.cli.options import (
    Alarm,
    Area,
    ArtifactElseShipped,
    BaseElseShipped,
    Batch,
    Bootstrap,
    Classes,
    Confidence,
    Data,
    Deployed,
    Device,
    End2End,
    Family,
    Half,
    Images,
    Iou,
    MaxDet,
    MaybeArtifact,
    MaybeBase,
    Monitor,
    OtherSize,
    Preset,
    RuntimeOption,
    Uncalibrated,
    Unsafe,
    VidStride,
    Visibility,
    Workers,
    between,
    class_numbers,
    finite,
    given_options,
    refuse_with_deployed,
    required_files,
)
from halopose.cli.terminal import progress, say, write_scores
from halopose.errors import HaloposeError
from halopose.family import DEFAULT_FAMILY

if TYPE_CHECKING:
    from halopose.data.dataset import Dataset
    from halopose.prediction.uncertain_pose import UncertainPose

_OF_EVALUATION = "pictures", "shift", "against", "kinds", "alarm", "preset", "workers", "batch"
OF_TORCH = "uncalibrated", "end2end", "device", "unsafe"  # options without effect for an exported folder


def evaluate(
    context: typer.Context,
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for metrics, report and pictures.")],
    base: MaybeBase = None,
    artifact: MaybeArtifact = None,
    deployed: Deployed = None,
    split: Annotated[str, typer.Option(help="Split of the data yaml.")] = "val",
    images: Images = None,
    imgsz: OtherSize = None,
    conf: Confidence = 0.01,
    iou: Iou = 0.7,
    bootstrap: Bootstrap = 200,
    preset: Preset = None,
    area: Area = "box",
    visibility: Visibility = None,
    overlap: Annotated[
        Literal["exclude", "allow"], typer.Option(help="Whether to exclude images that the artifact has seen.")
    ] = "exclude",
    pictures: Annotated[int, typer.Option(min=0, help="Number of example pictures with residuals and NLL.")] = 8,
    shift: Annotated[
        bool,
        typer.Option("--shift", help="Also evaluate corrupted images: coverage and alarms at each severity."),
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="With --shift, data of another kind: a data yaml of the same keypoints.")
    ] = None,
    kinds: Annotated[
        str | None, typer.Option(help="With --shift, corruptions separated by commas; default: all.")
    ] = None,
    alarm: Annotated[
        float, typer.Option(min=0.0, max=1.0, callback=finite, help="With --shift, false-alarm rate.")
    ] = 0.05,
    uncalibrated: Uncalibrated = False,
    workers: Workers = None,
    batch: Batch = None,
    end2end: End2End = None,
    runtime: RuntimeOption = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Run the evaluation protocol on images unseen by heads and calibration.

    Under torchrun each process runs the model on its part of the images, and the first process scores them all.

    Example: halopose evaluate data.yaml --base mine.pt --artifact mine.safetensors -o report
    """
    from halopose.data.dataset_loading import exclude_images, load_dataset
    from halopose.deploy.runtimes import EVALUATED_WINDOWS, open_exported, resolve_exported, resolve_runtime
    from halopose.fitting.presets import evaluation_protocol
    from halopose.fitting.workers import own_device
    from halopose.prediction.dataset_evaluation import InferenceSettings, evaluate_dataset
    from halopose.prediction.uncertain_pose import UncertainPose
    from halopose.reports.example_pictures import write_examples
    from halopose.reports.verdict import is_miscalibrated

    if deployed is not None:
        refuse_with_deployed(context, *_OF_EVALUATION, *OF_TORCH)
        runs_in: str = resolve_exported(runtime)
    else:
        base, artifact = required_files(base, artifact)
        of_torch = given_options(context) & {*_OF_EVALUATION, "device", "uncalibrated"}
        runs_in = resolve_runtime(runtime, sorted(of_torch))
        if runs_in != "torch":
            deployed = UncertainPose.exported(base, artifact, unsafe=unsafe, end2end=end2end, windows=EVALUATED_WINDOWS)
    if deployed is not None:
        model_file = open_exported(folder_of(deployed), runs_in, visibility)
        evaluate_deployed(data, model_file, output, split, images, imgsz, conf, iou, bootstrap, area, overlap)
        return
    model = UncertainPose.load_base(
        base,
        artifact,
        visibility_threshold=visibility,
        device=own_device(device),
        unsafe=unsafe,
        end2end=end2end,
        uncalibrated=uncalibrated,
    )
    if shift and not model.has_novelty:
        raise HaloposeError(
            f"{artifact} has no out-of-distribution model, which --shift needs: add one with `halopose novelty`"
        )
    dataset = load_dataset(data, split, images=images, otherwise=model.artifact.layout)
    if overlap == "exclude":
        used = model.artifact.card.images.of("heads", "calibration")
        dataset = exclude_images(dataset, used, "the artifact", "give other images, or --overlap allow")
    chosen = area if preset is None or "area" in given_options(context) else None
    protocol = evaluation_protocol(preset, bootstrap=bootstrap, area=chosen)
    detection = InferenceSettings(imgsz, conf, iou, batch)
    with progress() as step:
        measured = evaluate_dataset(model, dataset, output, protocol, detection, workers, step, preset)
    if measured is None:  # the first process of torchrun reports
        return
    for line in measured.skipped:
        say(f"skipped: {line}")
    write_examples(model, dataset, output / "pictures", pictures, imgsz=imgsz, conf=conf, iou=iou)
    files = f"--base {base} --artifact {artifact}"
    following = f"halopose export {files} -o deployed"
    if is_miscalibrated(measured.scores):
        following = f"halopose calibrate {data} {files} -o calibrated.safetensors"
    write_scores(measured.scores, output, model.host.description, following)
    if shift:
        _shift(model, dataset, output, split, against, kinds, alarm)


def _shift(
    model: UncertainPose,
    dataset: Dataset,
    output: Path,
    split: str,
    against: Path | None,
    kinds: str | None,
    alarm: float,
) -> None:
    """Run the study of distribution shift and print its table."""
    from halopose.data.dataset_loading import load_dataset
    from halopose.reports.shift_report import to_text, write_shift
    from halopose.studies.shift_study import ShiftSettings, run_shift

    chosen = ShiftSettings().kinds if kinds is None else tuple(kind.strip() for kind in kinds.split(","))
    others = {} if against is None else {against.stem: load_dataset(against, split, otherwise=model.artifact.layout)}
    with progress() as step:
        settings = ShiftSettings(kinds=chosen, alarm=alarm)
        study = run_shift(model.host, model.artifact, dataset, output / "shift", settings, others, step)
    write_shift(study, output, f"{model.host.description}: distribution shift")
    say(to_text(study))
    say(f"-> {output / 'shift.html'}, {output / 'shift.json'}")


def predict(
    context: typer.Context,
    sources: Annotated[
        list[str], typer.Argument(help="Images, folders, patterns, films, streams; - for standard input.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for pictures and json.")] = Path("poses"),
    base: BaseElseShipped = None,
    artifact: ArtifactElseShipped = None,
    deployed: Deployed = None,
    truth: Annotated[
        Path | None, typer.Option(help="COCO json with the ids of images (by file name) and classes.")
    ] = None,
    family: Family = DEFAULT_FAMILY,
    conf: Confidence = 0.25,
    iou: Iou = 0.7,
    imgsz: OtherSize = None,
    visibility: Visibility = None,
    probability: Annotated[
        float, typer.Option(callback=between, help="Probability of the drawn ellipses, between 0 and 1.")
    ] = 0.95,
    hide_pruned: Annotated[bool, typer.Option("--hide-pruned", help="Do not draw pruned keypoints.")] = False,
    boxes: Annotated[bool, typer.Option("--boxes", help="Draw boxes and scores.")] = False,
    legend: Annotated[bool, typer.Option("--legend", help="Draw a legend of the colours.")] = False,
    pictures: Annotated[bool, typer.Option(help="Write annotated pictures and films.")] = True,
    joint: Annotated[bool, typer.Option("--joint", help="Also write the correlation of keypoints.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Show annotated images in a window, with frames/s; q or Escape ends.")
    ] = False,
    save_txt: Annotated[bool, typer.Option("--save-txt", help="Write labels/NAME.txt in YOLO format.")] = False,
    save_csv: Annotated[
        bool, typer.Option("--save-csv", help="Write keypoints.csv, one row for each keypoint.")
    ] = False,
    classes: Classes = None,
    max_det: MaxDet = None,
    vid_stride: VidStride = 1,
    exist_ok: Annotated[
        bool,
        typer.Option("--exist-ok", help="Replace an earlier run in the output folder; default: number the folders."),
    ] = False,
    alarm: Alarm = None,
    monitor: Monitor = None,
    widen: Annotated[
        bool, typer.Option("--widen", help="Enlarge the covariances of out-of-distribution detections.")
    ] = False,
    uncalibrated: Uncalibrated = False,
    half: Half = False,
    end2end: End2End = None,
    runtime: RuntimeOption = None,
    device: Device = None,
    unsafe: Unsafe = False,
) -> None:
    """Predict poses with covariances: annotated pictures and films, and a json that `score` reads.

    Example: halopose predict photos/ film.mp4 -o poses
    """
    from halopose.data.sources import find_sources
    from halopose.prediction.predict_files import PictureSettings, PredictSettings, predict_files
    from halopose.prediction.uncertain_pose import UncertainPose

    find_sources(sources)  # refuse a missing file before loading a model
    if deployed is not None:
        if half:
            raise HaloposeError("an exported folder has a fixed precision: export it with --half, or leave --half out")
        refuse_with_deployed(context, "widen", *OF_TORCH)
        base = folder_of(deployed)
    elif half:
        if runtime in ("onnx", "openvino"):
            raise HaloposeError(f"runtime {runtime} does not support half: leave --half off, or use --runtime torch")
        runtime = "torch"
    model = UncertainPose.load(
        base,
        artifact,
        family=family,
        visibility_threshold=visibility,
        device=device,
        unsafe=unsafe,
        end2end=end2end,
        uncalibrated=uncalibrated,
        widen=widen,
        runtime=runtime,
    )
    if half and isinstance(model, UncertainPose):
        model.host.use_half()
    shown = PictureSettings(probability, not hide_pruned, boxes, legend) if pictures else None
    settings = PredictSettings(
        conf=conf,
        iou=iou,
        imgsz=imgsz,
        pictures=shown,
        joint=joint,
        alarm=alarm,
        monitor=monitor,
        exist_ok=exist_ok,
        classes=class_numbers(classes),
        max_det=max_det,
        vid_stride=vid_stride,
        save_txt=save_txt,
        save_csv=save_csv,
        show=show,
    )
    written = predict_files(model, sources, output, settings, truth=truth, progress=progress)
    if written.speed is not None:
        say(f"{written.images} images, per image: {written.speed}")
    say(f"{written.done} of {written.sources} -> {written.folder}")
    if written.monitor is not None:
        say(f"monitor: {written.monitor}")
    if written.skipped:
        say(f"{len(written.skipped)} could not be read")
        raise typer.Exit(1)


def models() -> None:
    """List the models that load by name: licence, base model, published figures, and figures of their cards.

    Example: halopose models
    """
    from halopose.fitting.artifact import Artifact
    from halopose.hosts.model_zoo import named_models

    for model in named_models():
        try:
            artifact = Artifact.load(model.artifact())
        except HaloposeError as error:
            say(f"{model.name:16}{model.about}: {error}", always=True)
            continue
        images = artifact.card.images.counts()
        figures = artifact.card.figures
        say(f"{model.name:16}{model.about}", always=True)
        say(f"{'':16}licence {model.licence}; base {model.network}, input {artifact.imgsz}", always=True)
        if model.figures is not None:
            say(f"{'':16}published: {model.figures} ({', '.join(model.figures.pages)})", always=True)
        say(f"{'':16}images: " + ", ".join(f"{count} {name}" for name, count in images.items()), always=True)
        if figures is not None:
            for name, measured in (("gaussian", figures.gaussian), ("student-t", figures.student_t)):
                values = ", ".join(f"{metric.upper()} {value:.4f}" for metric, value in vars(measured).items())
                say(f"{'':16}{name}: {values}", always=True)
