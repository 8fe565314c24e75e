"""ONNX files of small random models, as the frameworks export them and as tools change them afterwards."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from benchmarks.export import libreyolo_onnx, ultralytics_onnx

from tests.helpers.models import pose_model, wants_end2end


def framework_onnx(kind: str, folder: Path, size: int, opset: int | None = None) -> Path:
    """Export of ``pose_model(kind)`` by its framework, for any batch and any input size (YOLO-NAS: one size)."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "nas":
        return libreyolo_onnx(pose_model(kind), folder, size)
    return ultralytics_onnx(pose_model(kind), folder, wants_end2end(kind), size, opset)


def with_nms(kind: str, folder: Path, size: int = 96) -> Path:
    """Ultralytics' own export with non-maximum suppression in the graph."""
    from ultralytics import YOLO
    from ultralytics.utils import DEFAULT_CFG_DICT

    from halopose.hosts.torchvision_shim import ensure_torchvision

    ensure_torchvision()
    import torchvision  # noqa: F401  the framework uses it if it has been imported

    folder.mkdir(parents=True, exist_ok=True)
    framework = YOLO("yolo11n-pose.yaml", task="pose", verbose=False)
    framework.model = copy.deepcopy(pose_model(kind))
    framework.model.task = "pose"
    framework.model.args, framework.model.pt_path = dict(DEFAULT_CFG_DICT), str(folder / "nms.pt")
    threads = torch.get_num_threads()
    try:
        return Path(framework.export(format="onnx", nms=True, simplify=False, imgsz=size, device="cpu"))
    finally:
        torch.set_num_threads(threads)


def with_fixed_input(path: Path, target: Path, batch: int, size: int) -> Path:
    """The same file for one batch and one size only."""
    model = onnx.load(path)
    for side, value in zip(model.graph.input[0].type.tensor_type.shape.dim, (batch, 3, size, size), strict=True):
        side.ClearField("dim_param")
        side.dim_value = value
    for output in model.graph.output:
        for side in output.type.tensor_type.shape.dim:
            side.ClearField("dim_value")
            side.dim_param = side.dim_param or "free"
    onnx.save(model, target)
    return target


def with_external_data(path: Path, target: Path) -> Path:
    """The same file with its weights in another file."""
    onnx.save(onnx.load(path), target, save_as_external_data=True, size_threshold=0, location=f"{target.name}.data")
    return target


def in_half_precision(path: Path, target: Path) -> Path:
    """The same file with weights and arithmetic in half precision."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = convert_float_to_float16(onnx.load(path), keep_io_types=True)
    onnx.save(model, target)
    return target


def in_eight_bits(path: Path, target: Path, images: np.ndarray) -> Path:
    """The same file with all convolutions but the last ones quantised in the QDQ format."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = list(images)

        def get_next(self) -> Any:
            return {"images": self.left.pop()[None]} if self.left else None

    last = [node.name for node in onnx.load(path).graph.node if "model.23" in node.name]
    quantize_static(
        str(path),
        str(target),
        Reader(),
        quant_format=QuantFormat.QDQ,
        nodes_to_exclude=last,
        op_types_to_quantize=["Conv"],
    )
    return target


def transposed(path: Path, target: Path) -> Path:
    """The same file with the last two axes of the output swapped."""
    model = onnx.load(path)
    output = model.graph.output[0]
    for node in model.graph.node:
        node.output[:] = ["before" if name == output.name else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node("Transpose", ["before"], [output.name], name="swap", perm=[0, 2, 1]))
    sides = output.type.tensor_type.shape.dim
    for side in sides:
        side.ClearField("dim_value")
        side.dim_param = "free"
    onnx.save(model, target)
    return target
