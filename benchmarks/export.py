"""What uncertainty costs outside PyTorch: our exported model against the framework's own export.

python -m benchmarks.export --batch 8      the graphs alone, by time of the processor
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import torch
import ultralytics
from torch import nn

from benchmarks.interleave import Comparison, compare
from halopose.deploy import exporting, onnx_file
from halopose.fitting.artifact import Artifact
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.hosts.torchvision_shim import ensure_torchvision
from halopose.hosts.ultralytics.ultralytics_host import load_model
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.runtime import predict
from halopose.runtime.predict import Model

PHOTOGRAPH = Path(ultralytics.__file__).parent / "assets" / "bus.jpg"
SIZE = 640


def ultralytics_onnx(
    model: nn.Module, folder: Path, end2end: bool | None = None, size: int = SIZE, opset: int | None = None
) -> Path:
    """Export a model by Ultralytics itself, for any batch and image size."""
    from ultralytics import YOLO
    from ultralytics.utils import DEFAULT_CFG_DICT

    framework = YOLO("yolo11n-pose.yaml", task="pose", verbose=False)
    framework.model = copy.deepcopy(model)
    framework.model.task = "pose"
    framework.model.args, framework.model.pt_path = dict(DEFAULT_CFG_DICT), str(folder / "framework.pt")
    threads = torch.get_num_threads()
    try:
        path = framework.export(
            format="onnx",
            dynamic=True,
            simplify=False,
            imgsz=size,
            device="cpu",
            nms=False if end2end else None,
            opset=opset,
        )
    finally:
        torch.set_num_threads(threads)
    return Path(path)


def libreyolo_onnx(model: nn.Module, folder: Path, size: int = SIZE) -> Path:
    """Export a YOLO-NAS-Pose by LibreYOLO itself, for any batch."""
    ensure_torchvision()
    from libreyolo.export.exporter import _YOLONASExportWrapper
    from libreyolo.export.onnx import export_onnx

    path = folder / "framework.onnx"
    export_onnx(
        _YOLONASExportWrapper(copy.deepcopy(model)).eval(),
        torch.zeros(1, 3, size, size),
        output_path=str(path),
        opset=onnx_file.OPSET,
        simplify=False,
        dynamic=True,
        half=False,
        metadata={"model_family": "yolonas", "task": "pose"},
    )
    return path


def without_factors(path: Path, model: Model) -> Model:
    """Our runtime with the framework's own export; every detection gets a circle of one pixel."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    count = len(model.facts.keypoint_names)
    # The export has chosen its rows already, so factors are indexed by row instead of by cell.
    added = {"factors": np.ones((1, 30000, count, 3), np.float32), "rows": np.arange(300)[None]}

    def run(batch: Any) -> dict[str, Any]:
        return {**dict(zip(names, session.run(names, {"images": batch}), strict=True)), **added}

    return Model("", run, model.facts)


def without_context(artifact: Artifact) -> Artifact:
    """The same heads without context features, which have no dense form."""
    heads = copy.deepcopy(artifact.heads)
    heads.context_head, heads.settings = None, replace(heads.settings, overlaps=False, features=False)
    return replace(artifact, heads=heads)


def compare_export(rounds: int = 40) -> tuple[Comparison, Comparison, Comparison]:
    """The framework's export against ours with topk and with dense heads; PyTorch against ours with topk."""
    pose = UncertainPose.load_base(find_base(), shipped_artifact())
    image = cv2.imread(str(PHOTOGRAPH))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = []
        for form in ("topk", "dense"):
            path = folder / f"{form}.onnx"
            artifact = pose.artifact if form == "topk" else without_context(pose.artifact)
            onnx_file.write_model(onnx_file.build(pose.host, artifact, onnx_file.ExportSettings(form)), path)
            models.append(predict.Model(str(path)))
        bare = without_factors(ultralytics_onnx(load_model(str(find_base()), unsafe=False), folder), models[0])
    topk, dense = (compare(lambda: bare.detect(image), partial(m.predict, image), rounds) for m in models)
    return topk, dense, compare(lambda: pose.predict(image), lambda: models[0].predict(image), rounds)


def print_graphs(batch: int, rounds: int) -> None:
    """Print the median ratio of the processor's time for the graphs alone, on one thread, run in turns."""
    pose = UncertainPose.load_base(find_base(), shipped_artifact())
    with tempfile.TemporaryDirectory() as name:
        paths = {"framework": ultralytics_onnx(load_model(str(find_base()), unsafe=False), Path(name))}
        for settings in onnx_file.ExportSettings("topk"), onnx_file.ExportSettings("end2end"):
            paths[settings.form] = Path(name) / f"{settings.form}.onnx"
            onnx_file.write_model(exporting.export_model(pose.host, pose.artifact, settings), paths[settings.form])
        facts = predict.Model(str(paths["topk"])).facts
        pixels, box = predict.prepare(cv2.imread(str(PHOTOGRAPH)), facts, SIZE)
        letterbox = np.array([[*box.gain, *box.pad, box.shape[1], box.shape[0]]], np.float32)
        given = {"images": np.repeat(pixels[None], batch, 0), "letterbox": np.repeat(letterbox, batch, 0)}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        sessions = {
            form: onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            for form, path in paths.items()
        }
        times: dict[str, list[float]] = {form: [] for form in paths}
        for _ in range(rounds + 1):
            for form, session in sessions.items():
                began = time.process_time()
                session.run(None, {value.name: given[value.name] for value in session.get_inputs()})
                times[form].append(time.process_time() - began)
    measured = {form: np.array(values[1:]) for form, values in times.items()}
    for form, values in measured.items():
        ratio = np.median(values / measured["framework"])
        print(f"batch {batch}: {form:10} {1000 * np.median(values):7.1f} ms, {ratio:.3f} of the framework's export")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    chosen = parser.parse_args()
    print_graphs(chosen.batch, chosen.rounds)
