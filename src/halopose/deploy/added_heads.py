"""Add heads to an existing ONNX file: nodes, initialisers and outputs are added, and nothing in the file changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from halopose.deploy.graph import DenseHeads, TopkHeads, best_cells
from halopose.deploy.onnx_file import (
    OPSET,
    TEMPERATURE,
    TRACED_SIZE,
    ExportSettings,
    facts_of,
    require_onnx,
    trace_module,
    write_facts,
)
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.hosts.decoded_cells import column_cells, decoded_cells
from halopose.hosts.onnx.onnx_host import OnnxHost, open_session
from halopose.hosts.traceable import Traceable, Traced

if TYPE_CHECKING:
    from onnx import ModelProto

PREFIX = "halopose/"  # of the names of all nodes and tensors that are added
OLDEST, NEWEST = 11, 20  # opsets that the heads can be traced for; newer versions still run what 20 defines
ROW_CANDIDATES = 1000  # best cells among which the rows that a file has chosen are looked for


class TracedTensors(Traceable):
    """Converts a host's tensors to inputs of the heads: decoded predictions, feature maps and selected rows."""

    def __init__(self, host: OnnxHost) -> None:
        super().__init__()
        graph = host.graph
        self.layout, self.output_names = graph.layout, graph.outputs
        self.visibility = graph.dimensions == 3
        self.fewest_cells = 300 if graph.rows is not None and graph.input.size is None else 1
        self.classes, self.shape = graph.classes, (graph.keypoints, graph.dimensions)
        self.corners, self.cells_first = host.corners, graph.cells_first
        self.one_to_one = graph.rows is not None and not graph.suppressed
        self.count = len(graph.decoded)

    def forward(self, *tensors: Tensor) -> Traced:
        """The tensors of ``TracedTensors.names``, in that order."""
        decoded, rest = tensors[: self.count], tensors[self.count :]
        levels = rest[: len(rest) - (self.layout == "ultralytics-end2end")]
        if self.layout == "yolonas":
            boxes, scores, keypoints, visibility = decoded
            return Traced(decoded, levels, scores, decoded_cells(boxes, keypoints, visibility))
        (whole,) = decoded
        if self.cells_first:
            whole = whole.transpose(1, 2)
        scores = whole[:, 4 : 4 + self.classes].transpose(1, 2)
        cell_boxes = column_cells(whole, self.classes, self.shape, self.corners)
        native, rows = decoded, None
        if self.layout == "ultralytics-end2end":
            native = rest[-1:]
            rows = cells_of_rows(rest[-1], scores.amax(dim=2), cell_boxes.points, self.shape)
        return Traced(native, levels, scores, None if self.one_to_one else cell_boxes, rows)


def cells_of_rows(chosen: Tensor, scores: Tensor, points: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> Tensor:
    """Return the cell (B, R) of every row (B, R, 6 + K * dimensions) that a file selects; rows copy a cell's values.

    Args:
        chosen: The rows.
        scores: Best class scores (B, A).
        points: Reads x of all keypoints, then y, then visibilities, at cells (B, n).
        shape: Number of keypoints and of values per keypoint.
    """
    count, dimensions = shape
    _, cell = best_cells(scores, ROW_CANDIDATES)
    values = points(cell)
    same = None
    for number in sorted({0, count // 2, count - 1}):
        for part in (0, 1):
            own, theirs = chosen[:, :, 6 + number * dimensions + part], values[:, :, part * count + number]
            equal = own[:, :, None] == theirs[:, None]
            same = equal if same is None else same & equal
    assert same is not None
    return cell.gather(1, same.to(torch.float32).argmax(dim=2))


class AddedHeads(nn.Module):
    """Heads on given tensors."""

    temperature: Tensor

    def __init__(self, tensors: TracedTensors, artifact: Artifact, settings: ExportSettings) -> None:
        super().__init__()
        if settings.form == "dense" and artifact.heads.settings.context_features:
            raise HaloposeError("heads with context features have no dense form: export them as topk")
        self.tensors = tensors
        self.heads = TopkHeads(artifact, settings.topk) if settings.form == "topk" else DenseHeads(artifact.heads)
        self.register_buffer("temperature", artifact.calibrations.gaussian.tau_.float()[:, None])

    @property
    def has_novelty(self) -> bool:
        """Whether an input with the image's edges is needed."""
        return isinstance(self.heads, TopkHeads) and self.heads.novelty is not None

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, in order."""
        cells = ["cells"] if isinstance(self.heads, TopkHeads) else []
        novelty = ["novelty", "image_novelty"] if self.has_novelty else []
        rows = ["rows"] if self.tensors.layout == "ultralytics-end2end" else []
        return ["factors", *cells, *novelty, *rows]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        tensors, area = (given[:-1], given[-1]) if self.has_novelty else (given, None)
        traced = self.tensors(*tensors)
        factors, *others = self.heads(traced, area)
        rows = () if traced.rows is None else (traced.rows,)
        return (factors * self.temperature, *others, *rows)


def add_heads(host: OnnxHost, artifact: Artifact, settings: ExportSettings | None = None) -> ModelProto:
    """Add heads to the host's file; all nodes, initialisers and outputs of the file stay unchanged.

    Args:
        host: The file.
        artifact: Artifact of its model.
        settings: Settings of the export.
    """
    settings = settings or ExportSettings()
    artifact.check(host)
    tensors = TracedTensors(host)
    module = AddedHeads(tensors, artifact, settings).eval()
    added = trace_module(module, *_example(host, module), opset=opset_of(host))
    model = joined(host, added, tensors_of(host))
    facts = facts_of(host, tensors, artifact, replace(settings, imgsz=_imgsz(host, artifact, settings)))
    write_facts(model, replace(facts, file=file_facts(host)))
    open_session(model.SerializeToString(), host.path, None)  # onnx's checker rejects the output of some tools
    return model


def file_facts(host: OnnxHost) -> dict[str, Any]:
    """Properties of a file that the runtime needs."""
    graph = host.graph
    return {
        "names": dict(zip(_names_of_layout(host), graph.outputs, strict=True)),
        "size": None if graph.input.size is None else list(graph.input.size),
        "batch": graph.input.batch,
        "half": graph.input.half,
        "transposed": graph.transposed or (graph.cells_first and graph.rows is None),
        "corners": host.corners and graph.layout == "ultralytics",
        "preparation": graph.preparation,
    }


def _imgsz(host: OnnxHost, artifact: Artifact, settings: ExportSettings) -> int:
    imgsz = settings.imgsz or artifact.imgsz
    host.check_size(imgsz)
    return imgsz


def _names_of_layout(host: OnnxHost) -> tuple[str, ...]:
    """Names of the outputs in the runtime, in the order of the file's outputs."""
    graph = host.graph
    if graph.layout != "yolonas":
        return ("output0", *(f"other{number}" for number in range(1, len(graph.outputs))))
    known = dict(zip(graph.decoded, ("boxes", "scores", "keypoints_xy", "keypoints_conf"), strict=True))
    return tuple(known[name] for name in graph.outputs)


def tensors_of(host: OnnxHost) -> list[str]:
    """Tensors of the file that heads read, in the order of ``TracedTensors.forward``."""
    graph = host.graph
    return [*graph.decoded, *host.features, *([] if graph.rows is None else [graph.rows])]


def opset_of(host: OnnxHost) -> int:
    """Version of the operators to trace heads for."""
    version = next((entry.version for entry in host.model.opset_import if entry.domain in ("", "ai.onnx")), OPSET)
    if version < OLDEST:
        raise HaloposeError(
            f"{host.description} has opset {version}: heads can be added from opset {OLDEST} on; convert the file with "
            "onnx.version_converter"
        )
    return min(int(version), NEWEST)


def _example(host: OnnxHost, module: AddedHeads) -> tuple[dict[str, Tensor], list[str], dict[str, dict[int, str]]]:
    """Example inputs, names of the outputs, and free axes."""
    given, axes = example_tensors(host)
    axes |= {name: {0: "batch"} for name in module.output_names}
    if host.graph.rows is not None:
        axes["rows"] = {0: "batch", 1: "rows"}
    if module.has_novelty:
        height, width = TRACED_SIZE
        given["area"] = torch.tensor([[0.0, 0.0, width, height]]).repeat(2, 1)
        axes["area"] = {0: "batch"}
    if isinstance(module.heads, DenseHeads):
        axes["factors"] = {0: "batch", 1: "anchors"}
    return given, module.output_names, axes


def example_tensors(host: OnnxHost) -> tuple[dict[str, Tensor], dict[str, dict[int, str]]]:
    """Examples of the tensors that heads read, and their free axes."""
    graph, (height, width) = host.graph, TRACED_SIZE
    sides = [(height // stride, width // stride) for stride in host.strides]
    cells = sum(tall * wide for tall, wide in sides)
    given: dict[str, Tensor] = {}
    axes: dict[str, dict[int, str]] = {}
    if graph.layout == "yolonas":
        shapes = [(4,), (graph.classes,), (graph.keypoints, 2), (graph.keypoints,)]
        for name, shape in zip(("own boxes", "own scores", "own keypoints", "own visibility"), shapes, strict=True):
            given[name], axes[name] = torch.rand(2, cells, *shape), {0: "batch", 1: "anchors"}
    else:
        channels = 4 + graph.classes + graph.keypoints * graph.dimensions
        whole = (cells, channels) if graph.cells_first else (channels, cells)
        given["decoded"] = torch.rand(2, *whole)
        axes["decoded"] = {0: "batch", 1 if graph.cells_first else 2: "anchors"}
    for number, ((tall, wide), level) in enumerate(zip(sides, host.pose_templates(), strict=True)):
        given[f"level{number}"] = torch.rand(2, level[0].weight.shape[1], tall, wide)
        axes[f"level{number}"] = {0: "batch", 2: f"height{number}", 3: f"width{number}"}
    if graph.rows is not None:
        given["chosen"] = torch.rand(2, 300, 6 + graph.keypoints * graph.dimensions)
        axes["chosen"] = {0: "batch", 1: "rows"}
    return given, axes


def joined(host: OnnxHost, added: ModelProto, sources: list[str]) -> ModelProto:
    """Append nodes that read tensors of the host's model.

    Args:
        host: The file.
        added: A graph whose first inputs stand for ``sources``; further inputs become inputs of the model.
        sources: Tensors of the file.
    """
    onnx = require_onnx()
    model = onnx.ModelProto()
    model.CopyFrom(host.model)
    graph = model.graph
    taken = {name for node in graph.node for name in (*node.output, *node.input)}
    taken |= {value.name for value in (*graph.input, *graph.output)}
    own = {value.name for value in (*added.graph.output, *added.graph.input[len(sources) :])} | {TEMPERATURE}
    clash = sorted(own & taken)
    if clash:
        raise HaloposeError(f"{host.description} has a tensor {clash[0]!r}, which the heads would add: rename it first")

    def name_of(name: str) -> str:
        return name if not name or name in own else PREFIX + name

    for value, source in zip(added.graph.input, sources, strict=False):
        # Heads compute in single precision, also for a file in half precision.
        target = name_of(value.name)
        graph.node.append(onnx.helper.make_node("Cast", [source], [target], name=f"{PREFIX}from/{value.name}", to=1))
    graph.input.extend(added.graph.input[len(sources) :])
    for node in added.graph.node:
        copied = graph.node.add()
        copied.CopyFrom(node)
        copied.name = PREFIX + node.name
        for names in (copied.input, copied.output):
            names[:] = [name_of(name) for name in names]
    for tensor in added.graph.initializer:
        copied_tensor = graph.initializer.add()
        copied_tensor.CopyFrom(tensor)
        copied_tensor.name = name_of(tensor.name)
        if model.ir_version < 4:  # older versions list initialisers among the inputs
            shape = list(np.shape(onnx.numpy_helper.to_array(tensor)))
            graph.input.append(onnx.helper.make_tensor_value_info(copied_tensor.name, tensor.data_type, shape))
    fixed = host.graph.input.batch
    for value in added.graph.output:
        output = graph.output.add()
        output.CopyFrom(value)
        sides = output.type.tensor_type.shape.dim
        if fixed is not None and sides and sides[0].dim_param == "batch":
            sides[0].dim_value = fixed
    return model
