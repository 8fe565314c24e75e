"""What uncertainty costs: predict with it against predict without it, and an epoch on the store."""

from __future__ import annotations

from pathlib import Path

import cv2
import torch
import ultralytics

from benchmarks.interleave import Comparison, compare
from halopose.calibration import GaussianCalibration, StudentTCalibration
from halopose.heads import ProbabilisticHeads
from halopose.hosts.ultralytics import UltralyticsHost
from halopose.hub import find_base
from halopose.pipeline import FitSettings, uncalibrated
from halopose.predictor import UncertainPose

PHOTOGRAPH = Path(ultralytics.__file__).parent / "assets" / "bus.jpg"


def make_model() -> UncertainPose:
    """YOLO11n-pose with untrained heads: what they cost does not depend on what they learned."""
    host = UltralyticsHost.load(find_base())
    heads = ProbabilisticHeads(host.pose_templates(), host.strides, host.keypoint_count).eval()
    artifact = uncalibrated(host, heads, FitSettings(), {})
    assert isinstance(artifact.gaussian, GaussianCalibration)
    assert isinstance(artifact.student, StudentTCalibration)
    return UncertainPose(host, artifact)


def compare_predict(rounds: int = 40) -> tuple[Comparison, Comparison]:
    """Base against sparse heads, and base against dense heads; end to end with NMS, 640, batch 1."""
    model = make_model()
    image = cv2.imread(str(PHOTOGRAPH))

    @torch.inference_mode()
    def base() -> None:
        batch, boxes = model.host.preprocess([image], 640, rectangular=True)
        selection = model.host.select(model.host.forward(batch), conf=0.25, iou=0.7)[0]
        model.host.to_original(selection, boxes[0], (batch.shape[2], batch.shape[3]))

    @torch.inference_mode()
    def dense() -> None:
        batch, boxes = model.host.preprocess([image], 640, rectangular=True)
        output = model.host.forward(batch)
        selection = model.host.select(output, conf=0.25, iou=0.7)[0]
        model.heads.dense(output.features)[0, selection.cell]
        model.host.to_original(selection, boxes[0], (batch.shape[2], batch.shape[3]))

    return compare(base, lambda: model.predict(image), rounds), compare(base, dense, rounds)
