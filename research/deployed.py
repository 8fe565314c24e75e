"""Figures of docs/evidence/exported-models.md: parity of exported models, and calibration after quantisation.

python -m research.deployed parity FOLDER --weights WEIGHTS
python -m research.deployed int8 DATA.yaml --work WORK
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from benchmarks.export import libreyolo_onnx, ultralytics_onnx, without_factors
from safetensors.torch import load_file
from tests.helpers.models import pose_model
from ultralytics.nn.tasks import PoseModel

from halopose.calibration.calibrators import Calibrations
from halopose.data.dataset import Dataset
from halopose.data.dataset_loading import load_dataset
from halopose.data.images import NamedImage, read_source
from halopose.deploy import folder, onnx_file, quantise, recalibration
from halopose.deploy.deployed_model import Deployed
from halopose.deploy.graph import TopkSettings
from halopose.fitting.artifact import Artifact
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.hosts.ultralytics.ultralytics_host import load_model
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.protocol import Protocol
from halopose.runtime import predict
from halopose.uncertainty.heads import ProbabilisticHeads

Peer = Callable[[Path], Path]  # the framework's own export into a folder
MANY = onnx_file.ExportSettings(topk=TopkSettings(1000, 300))  # random weights detect objects everywhere
WEIGHTS = {
    "YOLOv8n": ("yolov8n-pose.yaml", "yolov8n-pose.fused.fp16.safetensors", None),
    "YOLO26n one-to-many": ("yolo26n-pose.yaml", "yolo26n-pose.one2many.fused.fp16.safetensors", False),
    "YOLO26n one-to-one": ("yolo26n-pose.yaml", "yolo26n-pose.one2one.fused.fp16.safetensors", True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["parity", "int8"])
    parser.add_argument("source", type=Path, help="folder of photographs, or data yaml")
    parser.add_argument("--weights", type=Path, help="folder of fused weights")
    parser.add_argument("--work", type=Path, default=Path("work"))
    parser.add_argument("--count", type=int, default=64, help="photographs")
    options = parser.parse_args()
    if options.what == "int8":
        print_int8(options.source, options.work)
    else:
        print_parity(options.source, options.weights, options.count)


# Parity -----------------------------------------------------------------------------------------------------


def print_parity(source: Path, weights: Path | None, count: int) -> None:
    """One row per base model: largest differences over all photographs, and detections kept by both."""
    paths = sorted(path for path in source.iterdir() if path.is_file())
    step = max(len(paths) // count, 1)
    images = [image for path in paths[::step][:count] for image in read_source(path)]
    print(f"{len(images)} photographs{'':15}box px  keypoint px    score  covariance  kept by both   others")
    for base in bases(weights):
        print(f"{base.name:24}{row(base, images)}", flush=True)


@dataclass(frozen=True)
class Base:
    """A host and the export of its framework. ``trained``: whether its weights are trained."""

    name: str
    host: Host
    peer: Peer
    trained: bool


def bases(weights: Path | None) -> Iterator[Base]:
    """Architectures with available weights, and YOLO-NAS with random weights; tests cover YOLO12.

    At this size the scores of random YOLO-NAS weights are nearly 1 and all boxes fill the image, so detections cannot
    be matched.
    """
    yield ultralytics_base("YOLO11n", load_model(str(find_base()), unsafe=False))
    for name, (content, file, end2end) in WEIGHTS.items() if weights else ():
        model = PoseModel(content, nc=1, verbose=False)
        if end2end:
            model.model[-1].end2end = True
        model = model.eval().fuse(verbose=False)
        tensors = load_file(weights / file) if weights else {}
        model.load_state_dict({key: value.float() for key, value in tensors.items()}, strict=False)
        yield ultralytics_base(name, model, end2end)
    model = pose_model("nas")
    yield Base("YOLO-NAS N by chance", load_host(model), partial(libreyolo_onnx, model), trained=False)


def ultralytics_base(name: str, model: PoseModel, end2end: bool | None = None) -> Base:
    peer = partial(ultralytics_onnx, model, end2end=end2end)
    return Base(name, load_host(model, end2end=end2end), peer, trained="by chance" not in name)


def row(base: Base, images: list[NamedImage]) -> str:
    """Boxes, keypoints and scores against the framework's own export, covariances against PyTorch."""
    artifact = artifact_for(base.host)
    pose = UncertainPose(base.host, artifact, uncalibrated=not artifact.calibrated)
    conf = 0.25 if base.trained else confidence_of_few(base.host, images[0])
    worst, both, others = np.zeros(4), 0, 0
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.onnx"
        onnx_file.write_model(onnx_file.build(base.host, artifact, None if base.trained else MANY), path)
        model = predict.Model(str(path))
        bare = without_factors(base.peer(Path(name)), model)
    for image in images:
        own, framework = model.detect(image.pixels, conf), bare.detect(image.pixels, conf)
        [torch_poses] = pose.predict(image.pixels, conf=conf)
        same = len(own.scores) == len(framework.scores) == len(torch_poses)
        both, others = both + same * len(torch_poses), others + (not same) * len(torch_poses)
        if not same or not len(torch_poses):
            continue
        # Matched by box: random weights give nearly equal scores, whose order differs between runtimes.
        order = np.abs(own.boxes[:, None] - torch_poses.boxes).sum(2).argmin(1)
        expected = torch_poses.covariance[order]
        gap = np.abs(predict.covariances(own.factors) - expected) / np.abs(expected).max((2, 3), keepdims=True)
        values = [np.abs(getattr(own, key) - getattr(framework, key)).max() for key in ("boxes", "keypoints", "scores")]
        worst = np.maximum(worst, [*values, gap.max()])
    box, keypoint, score, covariance = worst
    return f"{box:12.1e}{keypoint:13.1e}{score:9.1e}{covariance:12.1e}{both:14}{others:9}"


def artifact_for(host: Host) -> Artifact:
    """The shipped heads where they fit, else heads with random dispersions."""
    shipped = Artifact.load(shipped_artifact())
    if shipped.fits(host):
        return shipped
    torch.manual_seed(1)
    heads = ProbabilisticHeads(host.pose_templates(), host.strides, host.keypoint_count).eval()
    for name, parameter in heads.named_parameters():
        if name.endswith("last.weight"):
            torch.nn.init.normal_(parameter, 0.0, 0.05)
    return Artifact(heads, Calibrations.none(host.keypoint_count), host.fingerprints, host.layout, imgsz=640)


def confidence_of_few(host: Host, image: NamedImage) -> float:
    """A confidence that about 20 cells pass, for a base model with random weights."""
    batch, _ = host.preprocess([image.pixels], 640, rectangular=True)
    return float(host.forward(batch).scores.flatten().topk(20).values[-1])


# Eight bits -------------------------------------------------------------------------------------------------


def print_int8(data: Path, work: Path) -> None:
    """ACE and ENCE of the shipped heads in float, half, and 8 bits before and after calibration.

    All calibrations use the selection images, because the shipped one was fitted on the evaluation images.
    """
    artifact, host = Artifact.load(shipped_artifact()), load_host(find_base())
    known = {part: artifact.card.images.of(part) for part in artifact.card.images.counts()}
    everything = load_dataset(data, "val")
    calibration, evaluation = (everything.subset(known[part]) for part in ("choosing", "evaluation"))
    print(f"calibrated on {len(calibration)} images, scored on {len(evaluation)} others")
    print(f"{'':34}{'Gaussian ACE':>16}{'ENCE':>9}{'Student-t ACE':>17}{'NLL':>9}{'objects':>9}")
    model = onnx_file.build(host, artifact)
    folder.write_folder(work / "float", model, artifact)
    recalibration.calibrate(work / "float", recalibration.collect(Deployed(work / "float"), calibration))
    artifact = replace(artifact, calibrations=recalibration.calibrations_of(Deployed(work / "float").facts))
    model = onnx_file.build(host, artifact)
    print(f"{'float':34}{scores(work / 'float', evaluation)}", flush=True)
    folder.write_folder(work / "half", quantise.to_half(model), artifact)
    print(f"{'half, calibration of the float':34}{scores(work / 'half', evaluation)}", flush=True)
    ranges = ranges_from(load_dataset(data, "train"))
    folder.write_folder(work / "int8", quantise.to_int8(model, ranges), artifact)
    print(f"{'int8, calibration of the float':34}{scores(work / 'int8', evaluation)}", flush=True)
    recalibration.calibrate(work / "int8", recalibration.collect(Deployed(work / "int8"), calibration))
    print(f"{'int8, calibrated in the runtime':34}{scores(work / 'int8', evaluation)}", flush=True)


def ranges_from(dataset: Dataset) -> Iterator[NamedImage]:
    """Images that determine the ranges of activations."""
    return (NamedImage("", record.pixels()) for record in dataset.records)


def scores(place: Path, dataset: Dataset) -> str:
    deployed = Deployed(place)
    protocol = Protocol(bootstrap=100, area="box")
    metrics = recalibration.score(deployed, recalibration.collect(deployed, dataset), protocol)
    gaussian, student = metrics.gaussian, metrics.student_t
    low, high = student.interval["ace"]
    return (
        f"{gaussian.ace:16.4f}{gaussian.ence:9.4f}{student.ace:9.4f} ({low:.4f}-{high:.4f})"
        f"{student.nll:9.3f}{metrics.matched_instances:9}"
    )


if __name__ == "__main__":
    main()
