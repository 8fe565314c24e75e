"""Commands for exported models: export, inspect, and the ``--deployed`` branches of calibrate and evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halopose.cli.options import ArtifactElseShipped, BaseElseShipped
from halopose.cli.terminal import progress, say, write_scores
from halopose.errors import HaloposeError

if TYPE_CHECKING:
    from halopose.data.dataset import Dataset
    from halopose.deploy.deployed_model import Deployed

SMALLEST = 32


def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path("deployed"),
    base: BaseElseShipped = None,
    artifact: ArtifactElseShipped = None,
    form: Annotated[
        Literal["topk", "dense", "end2end"],
        typer.Option(
            help="topk: heads at the best cells; dense: convolutions only; end2end: calibrated detections after NMS."
        ),
    ] = "topk",
    windows: Annotated[
        int, typer.Option(min=1, max=1000, help="Largest number of cells per level with covariances.")
    ] = 16,
    imgsz: Annotated[int | None, typer.Option(min=SMALLEST, help="Input size; default: the artifact's.")] = None,
    half: Annotated[bool, typer.Option("--half", help="Run convolutions in half precision.")] = False,
    int8: Annotated[
        str | None, typer.Option(help="Quantise convolutions to 8 bits; images (folder, glob) for the value ranges.")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="Also write a page that runs the model in a browser.")] = False,
    conf: Annotated[float, typer.Option(min=0, max=1, help="Confidence threshold of the end2end form.")] = 0.25,
    iou: Annotated[float, typer.Option(min=0, max=1, help="IoU threshold of the end2end form.")] = 0.7,
    family: Annotated[
        Literal["gaussian", "student-t"], typer.Option(help="Distribution of the end2end form.")
    ] = "gaussian",
    end2end: Annotated[
        bool | None, typer.Option(help="Head of a YOLO26 checkpoint that has both; default: the checkpoint's.")
    ] = None,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="Allow a checkpoint to run code; for trusted files only.")
    ] = False,
) -> None:
    """Export an ONNX model with calibrated covariances, and a runtime of one file that needs no PyTorch.

    Example: halopose export --base mine.pt --artifact mine.safetensors -o deployed
    """
    from halopose.data.files import make_folder
    from halopose.data.images import read_source
    from halopose.deploy import exporting, folder, onnx_file, quantise, web_page
    from halopose.deploy.graph import TopkSettings
    from halopose.prediction.uncertain_pose import UncertainPose

    if half and int8:
        raise HaloposeError("give --half or --int8, not both")
    onnx_file.require_onnx()
    make_folder(output)
    pose = UncertainPose.load_base(base, artifact, unsafe=unsafe, end2end=end2end)
    if pose.host.is_file and (half or int8):
        raise HaloposeError(f"{base} keeps its precision: quantise it before heads are added, or export the checkpoint")
    if form == "end2end" and (half or int8 or web):
        raise HaloposeError("--half, --int8 and --web take the form topk or dense: leave them off with end2end")
    if pose.host.is_file and web:
        raise HaloposeError(f"{base}: no page is written for an ONNX file: export the checkpoint for that")
    topk = TopkSettings(candidates=max(TopkSettings().candidates, 4 * windows), windows=windows)
    settings = onnx_file.ExportSettings(form, topk, imgsz, onnx_file.DetectionSettings(conf, iou, family))
    model = exporting.export_model(pose.host, pose.artifact, settings)
    if half:
        model = quantise.to_half(model)
    if int8:
        model = quantise.to_int8(model, read_source(int8))
        say("in 8 bits residuals differ: calibrate again with `halopose calibrate DATA --deployed`")
    folder.write_folder(output, model, pose.artifact)
    if web:
        web_page.write_page(output / "web", model)
        say(f"-> {output / 'web'}: `python {output / 'web' / 'serve.py'}`, then open http://localhost:8000")
    say(f"-> {output}: model.onnx ({model.ByteSize() / 2**20:.1f} MB), predict.py, README.md, card.json")


def inspect(
    model: Annotated[Path, typer.Argument(help="ONNX file of a pose model.")],
    features: Annotated[
        str | None, typer.Option(help="First convolution of the pose layers of every level: node,node,node.")
    ] = None,
    layout: Annotated[
        Literal["ultralytics", "ultralytics-end2end", "yolonas"] | None, typer.Option(help="Layout of the outputs.")
    ] = None,
    assigner: Annotated[
        Literal["yolo", "yolo26", "yolo26-one-to-one", "yolonas", "matched"] | None,
        typer.Option(help="Label assignment of training; matched uses retained detections instead."),
    ] = None,
    letterbox: Annotated[
        Literal["ultralytics", "yolonas"] | None, typer.Option(help="How images are fitted into the input.")
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="Save the options beside the model, for all commands.")] = False,
) -> None:
    """Print layout, pose layers and feature maps of an ONNX file. Options state what is not found.

    Example: halopose inspect model.onnx
    """
    from halopose.hosts.onnx.onnx_host import OnnxHost, describe
    from halopose.hosts.onnx.pose_graph import GivenByHand

    names = None if features is None else tuple(name.strip() for name in features.split(","))
    stated = GivenByHand(names, layout, assigner, letterbox)
    host = OnnxHost(model, given=stated if stated != GivenByHand() else None)
    say(describe(host), always=True)
    if save:
        say(f"-> {stated.save(model)}")


def folder_of(path: Path) -> Path:
    """Open an exported folder; raise an error if it is missing."""
    if not path.is_dir():
        raise HaloposeError(f"no folder {path}: write one with `halopose export -o {path}`")
    return path


def calibrate_deployed(
    data: Path, folder: Path, split: str, images: Path | None, *, offset: bool, **changes: Any
) -> None:
    """Fit the calibrations of an exported folder again, in its own runtime.

    ``changes`` are ``rule`` and ``region_scales`` if they differ from the export.
    """
    from halopose.deploy import recalibration
    from halopose.deploy.deployed_model import Deployed
    from halopose.types import named

    deployed = Deployed(folder_of(folder))
    dataset = _unseen(data, deployed, split, images, ("heads",))
    with progress() as step:
        seen = recalibration.collect(deployed, dataset, step=named(step, "running the deployed model"))
    for line in seen.skipped:
        say(f"skipped: {line}")
    count = recalibration.calibrate(folder, seen, offset=offset, **changes)
    say(f"calibrated on {count} objects of {len(seen.truth.images)} images -> {deployed.path}")


def evaluate_deployed(
    data: Path,
    deployed: Deployed,
    output: Path,
    split: str,
    images: Path | None,
    imgsz: int | None,
    conf: float,
    iou: float,
    bootstrap: int,
    area: Literal["annotation", "box"],
    overlap: str,
) -> None:
    """Run the evaluation protocol in the exported runtime, on images unseen by heads and calibration."""
    from halopose.data.files import make_folder
    from halopose.deploy import recalibration
    from halopose.deploy.deployed_model import Detecting
    from halopose.protocol import Protocol
    from halopose.types import named

    parts = ("heads", "calibration") if overlap == "exclude" else ()
    dataset = _unseen(data, deployed, split, images, parts)
    protocol = Protocol(bootstrap=bootstrap, area=area)
    make_folder(output)
    with progress() as step:
        seen = recalibration.collect(
            deployed,
            dataset,
            Detecting(conf, iou, imgsz, recalibration.SCORING.detections),
            named(step, "running the deployed model"),
        )
        scores = recalibration.score(deployed, seen, protocol, named(step, "resampling images"))
    for line in seen.skipped:
        say(f"skipped: {line}")
    write_scores(scores, output, str(deployed.path))


def _unseen(data: Path, deployed: Deployed, split: str, images: Path | None, parts: tuple[str, ...]) -> Dataset:
    """Load the data without the images that the given steps have used."""
    from halopose.data.dataset_loading import exclude_images, load_dataset
    from halopose.deploy.recalibration import images_seen

    dataset = load_dataset(data, split, images=images, otherwise=deployed.layout)
    return exclude_images(dataset, images_seen(deployed, parts), "the model")
