"""Write and rewrite model files: tracing, metadata, checksum."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from halopose.calibration.calibrators import Calibrations
from halopose.data.files import write_bytes
from halopose.deploy.graph import DenseHeads, Deployable, Form, TopkSettings
from halopose.deploy.novelty_graph import known_values
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts.base import Host
from halopose.hosts.traceable import Traceable
from halopose.install_advice import install_command
from halopose.runtime.predict import BLANK, EXTERNAL, OWN, SEAL, Facts, Problem, check_seal
from halopose.types import Family

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 17
IR_VERSION = 10  # supported by ONNX Runtime since 1.18
TEMPERATURE = "temperature"  # initializer with the Gaussian temperature
TRACED_SIZE = (320, 256)  # arbitrary; not square, so that swapped sides are noticed


@dataclass(frozen=True)
class DetectionSettings:
    """What the graph decides itself.

    Attributes:
        conf: Confidence threshold.
        iou: IoU threshold of non-maximum suppression.
        family: Output distribution.
    """

    conf: float = 0.25
    iou: float = 0.7
    family: Family = "gaussian"


@dataclass(frozen=True)
class ExportSettings:
    """Settings of an export.

    Attributes:
        form: ``topk`` for factors of the best cells, ``dense`` for factors of all cells by convolutions, ``end2end``
            for calibrated detections in pixels of the image.
        topk: Number of cells of the topk form.
        imgsz: Default input size; None for that of the artifact.
        detection: What an end-to-end graph decides itself.
    """

    form: Form = "topk"
    topk: TopkSettings = field(default_factory=TopkSettings)
    imgsz: int | None = None
    detection: DetectionSettings = field(default_factory=DetectionSettings)


def build(host: Host, artifact: Artifact, settings: ExportSettings | None = None) -> ModelProto:
    """Build the model with its metadata, and check it.

    Args:
        host: Base model.
        artifact: Artifact of the base model.
        settings: Settings of the export.
    """
    settings = settings or ExportSettings()
    artifact.check(host)
    if settings.form == "end2end":
        raise HaloposeError("the end2end form is made by `halopose.deploy.exporting.export_model`")
    traceable = host.traceable()
    model = trace(Deployable(traceable, artifact, settings.form, settings.topk).eval())
    write_facts(model, facts_of(host, traceable, artifact, settings))
    return checked(model)


def trace(graph: Deployable) -> ModelProto:
    """Trace a model with its heads."""
    height, width = TRACED_SIZE
    images, area = torch.zeros((2, 3, height, width)), torch.tensor([[0.0, 0.0, width, height]]).repeat(2, 1)
    given = {"images": images, "area": area} if graph.has_novelty else {"images": images}
    return trace_module(graph, given, graph.output_names, _dynamic_axes(graph))


def trace_module(
    module: nn.Module,
    given: Mapping[str, Tensor],
    names: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    opset: int = OPSET,
) -> ModelProto:
    """Trace with the TorchScript exporter: the dynamo exporter fails on parts of these models.

    Args:
        module: What to trace.
        given: Example inputs by name, in order.
        names: Names of the outputs.
        axes: Free axes of inputs and outputs by name; all others are constant.
        opset: Version of the operators.
    """
    onnx = require_onnx()
    buffer = io.BytesIO()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes read from tensors, and the deprecated exporter
        torch.onnx.export(
            module,
            tuple(given.values()),
            buffer,  # type: ignore[arg-type]
            opset_version=opset,
            dynamo=False,
            input_names=list(given),
            output_names=list(names),
            dynamic_axes={name: dict(free) for name, free in axes.items()},
        )
        outputs = module(*given.values())
    model = onnx.load_from_string(buffer.getvalue())
    for value, output in zip(model.graph.output, outputs, strict=True):
        free = axes[value.name]  # the exporter marks some constant sizes as free
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if axis not in free:
                size.dim_value = output.shape[axis]
    model.ir_version = min(model.ir_version, IR_VERSION)
    _state_equal_shapes(model)
    return model


def _state_equal_shapes(model: ModelProto) -> None:
    """State that branches of the first block of YOLO-NAS-Pose have one shape, which inference of free sizes misses.

    ONNX Runtime then adds them inside the convolution, as in the framework's export of a fixed size, and both round
    equally. Without it boxes differ by 0.001 px.
    """
    onnx = require_onnx()
    graph = model.graph
    first = [node for node in graph.node if node.op_type == "Conv" and node.input[0] == graph.input[0].name]
    if len(first) < 2:
        return
    names = {node.output[0] for node in first}
    names |= {node.output[0] for node in graph.node if node.op_type == "Mul" and names & set(node.input)}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    shape = ["batch", weights[first[0].input[1]].dims[0], "half_height", "half_width"]
    known = [value for value in graph.value_info if value.name not in names]
    del graph.value_info[:]
    graph.value_info.extend(known)
    graph.value_info.extend(onnx.helper.make_tensor_value_info(name, 1, shape) for name in sorted(names))


def _dynamic_axes(graph: Deployable) -> dict[str, dict[int, str]]:
    axes = {name: {0: "batch"} for name in graph.output_names}
    axes["images"] = {0: "batch", 2: "height", 3: "width"}
    if graph.has_novelty:
        axes["area"] = {0: "batch"}
    if graph.model.layout == "ultralytics":
        axes["output0"][2] = "anchors"
    elif graph.model.layout == "yolonas":
        for name in graph.model.output_names:
            axes[name][1] = "anchors"
    if isinstance(graph.heads, DenseHeads):
        axes["factors"][1] = "anchors"
    return axes


def facts_of(host: Host, traceable: Traceable, artifact: Artifact, settings: ExportSettings) -> Facts:
    """Metadata for the runtime."""
    blank = Facts(
        layout=traceable.layout,
        form=settings.form,
        precision="float",
        fingerprint=artifact.base[0],
        strides=list(artifact.heads.strides),
        imgsz=settings.imgsz or artifact.imgsz,
        fewest_cells=traceable.fewest_cells,
        visibility=traceable.visibility,
        class_names=list(host.class_names),
        keypoint_names=list(artifact.layout.names),
        sigmas=list(artifact.layout.sigmas),
        area_factor=artifact.layout.area_factor,
        threshold=None,
        visibility_threshold=None,
        temperature=[],
        student_dof=[],
        student_scale=[],
        student_moment=None,
        pruned_dof=None,
        pruned_scale=None,
        novelty=None if artifact.novelty is None or settings.form == "dense" else known_values(artifact.novelty),
    )
    return calibrated_facts(blank, artifact.calibrations)


def calibrated_facts(facts: Facts, fitted: Calibrations) -> Facts:
    """Metadata with other calibrations; Student-t scales are relative to the Gaussian temperature."""
    gaussian, student = fitted.gaussian, fitted.student if fitted.split_student is None else fitted.split_student.kept
    pruned = None if fitted.split_student is None else fitted.split_student.pruned
    tau = gaussian.tau_.double().numpy()
    moment = (student.moment_tau_.double().numpy() / tau).tolist() if student.covariance != "paper" else None
    return replace(
        facts,
        threshold=fitted.threshold if np.isfinite(fitted.threshold) else None,
        visibility_threshold=fitted.visibility_threshold,
        temperature=tau.tolist(),
        student_dof=student.nu_.tolist(),
        student_scale=(student.tau_.double().numpy() / tau).tolist(),
        student_moment=moment,
        regions=None if fitted.regions is None else fitted.regions.to_json(),
        correlation=None if fitted.correlation is None else fitted.correlation.to_json(),
        offset=None if fitted.offset is None else fitted.offset.tolist(),
        pruned_dof=None if pruned is None else pruned.nu_.tolist(),
        pruned_scale=None if pruned is None else (pruned.tau_.double().numpy() / tau).tolist(),
    )


def write_facts(model: ModelProto, facts: Facts) -> None:
    """Replace the metadata of a model in place; those of a file that heads were added to stay."""
    kept = [] if facts.file is None else [e for e in model.metadata_props if not is_own(e.key)]
    kept = [(entry.key, entry.value) for entry in kept]
    del model.metadata_props[:]
    for key, value in kept:
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    for key, value in facts.write().items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value


def is_own(key: str) -> bool:
    """Whether a metadata key of a file with added heads was written by halopose."""
    return key.startswith(OWN) or key in ("format", "checksum")


def read_facts(model: ModelProto, where: Path | str) -> Facts:
    """Read the metadata of a model; ``where`` names the file in errors."""
    try:
        return Facts.read({entry.key: entry.value for entry in model.metadata_props}, str(where))
    except Problem as problem:
        raise HaloposeError(str(problem)) from None


def read_model(path: Path | str) -> ModelProto:
    """Load a model file after checking its checksum."""
    onnx = require_onnx()
    try:
        check_seal(str(path))
    except Problem as problem:
        raise HaloposeError(str(problem)) from None
    return onnx.load(str(path))


def write_model(model: ModelProto, path: Path | str) -> None:
    """Write a model file with its checksum; an interrupted write leaves no partial file."""
    write_bytes(path, sealed(model))


def sealed(model: ModelProto) -> bytes:
    """Serialise a model with its checksum, which is computed with zeros in its place."""
    for entry in [entry for entry in model.metadata_props if entry.key == "checksum"]:
        model.metadata_props.remove(entry)  # checksum of the file that the model was read from
    entry = model.metadata_props.add()
    entry.key, entry.value = "checksum", BLANK.decode()
    data = model.SerializeToString()
    model.metadata_props.remove(entry)
    found = SEAL.search(data)
    if found is None:
        raise RuntimeError("the protobuf encoding of metadata entries has changed")
    if EXTERNAL in data:
        raise HaloposeError("the model stores tensors as external data: load it with its weights, then write it again")
    seal = hashlib.sha256(data).hexdigest().encode()
    return b"".join([data[: found.start(1)], seal, data[found.end(1) :]])


def checked(model: ModelProto) -> ModelProto:
    """Run ONNX's model checker and return the model."""
    require_onnx().checker.check_model(model, full_check=True)
    return model


def set_temperature(model: ModelProto, tau: Sequence[float]) -> None:
    """Replace the Gaussian temperature (K,) in the factors, in place."""
    from onnx import numpy_helper

    for tensor in model.graph.initializer:
        if tensor.name == TEMPERATURE:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(tau, np.float32)[:, None], TEMPERATURE))
            return
    raise HaloposeError("the model has no temperature: export it again with `halopose export`")


def require_onnx() -> Any:
    """Import the onnx package, or raise an error that names the extra."""
    try:
        import onnx
    except ImportError:
        raise HaloposeError(f"this needs the onnx extra: {install_command('onnx')}") from None
    return onnx
