"""What uncertainty costs: predicting with heads against predicting without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import ultralytics

from benchmarks.interleave import Comparison, compare
from halopose.calibration.calibrators import Calibrations
from halopose.data.images import read_image
from halopose.fitting.artifact import Artifact
from halopose.hosts.base import Host, HostOutput, Selection
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.hosts.torchvision_shim import ensure_torchvision
from halopose.hosts.ultralytics.ultralytics_host import load_model
from halopose.landing.shipped_detectors import runway_artifact, runway_detector
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import sample_scene
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.types import Array
from halopose.uncertainty.heads import ProbabilisticHeads

PHOTOGRAPH = Path(ultralytics.__file__).parent / "assets" / "bus.jpg"


def make_model() -> UncertainPose:
    """YOLO11n-pose with untrained heads, which take the same time as trained heads."""
    return _with_heads(load_host(find_base()))


def make_yolonas() -> tuple[UncertainPose, float]:
    """YOLO-NAS-Pose Nano with random weights and untrained heads, and a confidence that about 30 cells pass."""
    ensure_torchvision()
    from libreyolo.models.yolonas.nn import LibreYOLONASPoseModel

    torch.manual_seed(0)
    model = _with_heads(load_host(LibreYOLONASPoseModel("n")))
    batch, _ = model.host.preprocess([read_image(PHOTOGRAPH)], 640, rectangular=True)
    scores = model.host.forward(batch).scores.flatten()
    return model, float(scores.topk(30).values[-1])


def _with_heads(host: Host) -> UncertainPose:
    heads = ProbabilisticHeads(host.pose_templates(), host.strides, host.keypoint_count).eval()
    calibrations = Calibrations.none(host.keypoint_count)
    artifact = Artifact(heads, calibrations, host.fingerprints, host.layout, imgsz=640)
    return UncertainPose(host, artifact, uncalibrated=True)


def compare_sparse(model: UncertainPose, conf: float, rounds: int) -> Comparison:
    """The base model against prediction with sparse heads: end to end with NMS, 640, batch 1."""
    image = read_image(PHOTOGRAPH)
    return compare(lambda: _detect(model.host, image, conf), lambda: model.predict(image, conf=conf), rounds)


def compare_dense(model: UncertainPose, conf: float, rounds: int) -> Comparison:
    """The base model against the same with dense heads: end to end with NMS, 640, batch 1."""
    image = read_image(PHOTOGRAPH)

    @torch.inference_mode()
    def dense() -> None:
        output, selection = _detect(model.host, image, conf)
        model.heads.dense(output.features)[0, selection.cell]

    return compare(lambda: _detect(model.host, image, conf), dense, rounds)


def compare_novelty(rounds: int = 40) -> Comparison:
    """Predicting runways without and with the out-of-distribution model, on an image that has a detection."""
    artifact = Artifact.load(runway_artifact())
    host = load_host(runway_detector())
    plain, novel = (UncertainPose(host, one) for one in (replace(artifact, novelty=None), artifact))
    image = render_scene(sample_scene(4))
    return compare(lambda: plain.predict(image), lambda: novel.predict(image), rounds)


def compare_shipped(rounds: int = 40) -> Comparison:
    """YOLO11n-pose without and with the shipped heads, which use context features."""
    model, image = UncertainPose.load_base(find_base(), shipped_artifact()), read_image(PHOTOGRAPH)
    return compare(lambda: _detect(model.host, image, 0.25), lambda: model.predict(image), rounds)


def compare_framework(rounds: int = 40) -> Comparison:
    """``YOLO.predict`` of Ultralytics against prediction with the shipped heads."""
    ensure_torchvision()
    from ultralytics import YOLO

    framework = YOLO("yolo11n-pose.yaml", task="pose", verbose=False)
    framework.model = load_model(str(find_base()), unsafe=False).float()
    model, image = UncertainPose.load_base(find_base(), shipped_artifact()), read_image(PHOTOGRAPH)
    options = {"imgsz": 640, "conf": 0.25, "iou": 0.7, "verbose": False, "device": "cpu"}
    return compare(lambda: framework.predict(image, **options), lambda: model.predict(image), rounds)


@torch.inference_mode()
def _detect(host: Host, image: Array, conf: float) -> tuple[HostOutput, Selection]:
    batch, boxes = host.preprocess([image], 640, rectangular=True)
    output = host.forward(batch)
    selection = host.select(output, conf=conf, iou=0.7, letterboxes=boxes)[0]
    return output, host.to_original(selection, boxes[0], (batch.shape[2], batch.shape[3]))
