"""A frozen pose model as an ONNX file: exports of Ultralytics v8, 11, 12 and 26, and of YOLO-NAS-Pose.

ONNX Runtime runs the file with its feature maps as further outputs. No training framework is imported: layout, pose
layers and feature maps come from ``pose_graph``, label assignment from ``task_aligned``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halopose.errors import HaloposeError
from halopose.hosts.base import (
    Assignment,
    Host,
    HostOutput,
    Letterbox,
    Placer,
    Selection,
    Targets,
    laid_in,
    sketch_of_head,
)
from halopose.hosts.decoded_cells import decoded_cells
from halopose.hosts.onnx.graph_view import FoldedConv, GraphView
from halopose.hosts.onnx.pose_graph import GivenByHand, PoseGraph, Preparation, analyse, check_decoding, literal
from halopose.hosts.task_aligned import SETTINGS, Cells, assign_matched, assign_task_aligned
from halopose.hosts.weight_sketch import ONNX_PREFIX, backbone_sketch
from halopose.keypoints import Keypoints
from halopose.runtime import predict
from halopose.types import Array
from halopose.uncertainty.context_features import CellBoxes
from halopose.uncertainty.heads import ConvTemplate

PROBE = 160  # side of the first input of a file without a fixed size
WRONG_DECODING = 0.05  # largest deviation of the keypoint decoding, in input pixels
WRONG_DECODING_HALF = 2.0  # the same in half precision and in 8 bits
MATCHED = (0.05, 0.7, 100)  # confidence, IoU and number of detections of the matched assignment


@dataclass(frozen=True)
class Decoded:
    """Predictions of all cells in input pixels, and rows that the file has chosen itself.

    Attributes:
        boxes: Boxes (B, A, 4) xyxy.
        scores: Class scores (B, A, classes).
        keypoints: Keypoints (B, A, K, 2).
        visibility: Visibilities (B, A, K), or None.
        rows: Rows (B, R, 6 + K * dimensions) that the file has chosen, or None.
    """

    boxes: Tensor
    scores: Tensor
    keypoints: Tensor
    visibility: Tensor | None
    rows: Array | None


class OnnxHost(Host):
    """A frozen ONNX file."""

    is_file = True

    def __init__(
        self,
        path: Path | str,
        *,
        device: torch.device | str | None = None,
        given: GivenByHand | None = None,
        sigmas: Sequence[float] | None = None,
    ) -> None:
        """Load and analyse a file.

        Args:
            path: The file.
            device: ``cpu``, or ``cuda`` where ONNX Runtime was built for it.
            given: What the analysis is to take as stated; default: the file that ``halopose inspect --save`` wrote.
            sigmas: OKS sigmas; default: those of COCO for 17 keypoints.
        """
        path = Path(path)
        self.path, self.model = path, read_onnx(path)
        open_session(self.model.SerializeToString(), path, device)  # refuses what the analysis could not follow
        self.view = GraphView(self.model, path.name)
        self.graph = _analysed(self.view, GivenByHand.beside(path) if given is None else given)
        self.description = path.name
        graph = self.graph
        self.layout = Keypoints.of(
            graph.keypoints, names=_keypoint_names(graph), sigmas=sigmas, coco=graph.dimensions == 3
        )
        self.class_names = graph.class_names
        self._templates = [[_template(layer, act) for layer, act in level.trunk] for level in graph.levels]
        self.features = tuple(level.feature for level in graph.levels)
        extra = [name for name in (*graph.decoded, *self.features) if name not in graph.outputs]
        self._names = list(dict.fromkeys([*graph.outputs, *extra]))
        extra += [level.raw for level in graph.levels if level.raw not in self._names]
        self._extra, self._onnx_device = extra, device
        self._session, self._process = open_session(with_outputs(self.model, extra), path, device), os.getpid()
        half = any(tensor.data_type == 10 for tensor in self.model.graph.initializer)
        self.half_weights = half
        self._probe(path)
        sketch = sketch_of_head(self._templates, [_as_module(level.last) for level in graph.levels], half)
        rounded = any(node.op_type == "QuantizeLinear" for node in self.view.nodes)
        backbone = backbone_sketch(
            self.view.convolutions_before(self.features), "int8" if rounded else "half" if half else "float"
        )
        self.fingerprints = (_digest(self.model), sketch, backbone)

    def _probe(self, path: Path) -> None:
        """Run the file once: strides, form of the boxes, and whether raw and decoded keypoints fit together."""
        graph = self.graph
        size = graph.input.size or (PROBE, PROBE)
        images = np.random.RandomState(0).uniform(size=(graph.input.batch or 1, 3, *size)).astype(np.float32)
        names = list(dict.fromkeys([*self._names, *(level.raw for level in graph.levels)]))
        outputs = self._run(self._session, names, images)
        maps = [outputs[name] for name in self.features]
        if any(each.ndim != 4 or size[0] % each.shape[2] or size[1] % each.shape[3] for each in maps):
            raise HaloposeError(f"{path}: {self.features[0]} is no feature map of the input {size[1]} x {size[0]}")
        self.strides = tuple(size[0] // int(each.shape[2]) for each in maps)
        if list(self.strides) != sorted(set(self.strides)):
            raise HaloposeError(f"{path}: levels have strides {self.strides}, not finest first: it cannot be used")
        cells = sum(int(each.shape[2]) * int(each.shape[3]) for each in maps)
        if graph.layout != "yolonas" and outputs[graph.decoded[0]].shape[1 if graph.cells_first else 2] != cells:
            raise HaloposeError(
                f"{path}: {graph.decoded[0]} has not one cell for each of the {cells} cells of its maps"
            )
        self.corners = graph.layout == "yolonas" or self._are_corners(outputs, size)
        decoded = self._decoded(outputs, None)
        raw = [outputs[level.raw][0].astype(np.float32) for level in graph.levels]
        dimensions = 2 if graph.layout == "yolonas" else graph.dimensions
        apart = check_decoding(raw, decoded.keypoints[0].numpy(), self.strides, dimensions)
        self.decoding_error = apart
        rounded = self.half_weights or any(node.op_type == "QuantizeLinear" for node in self.view.nodes)
        if apart > (WRONG_DECODING_HALF if rounded else WRONG_DECODING):
            raise HaloposeError(
                f"{path}: node {graph.levels[0].last.name} does not give the keypoints of the output (they differ by "
                f"{apart:.2g} px): name the pose layers with `halopose inspect --features`"
            )

    def _are_corners(self, outputs: dict[str, Array], size: tuple[int, int]) -> bool:
        """Whether boxes are x1, y1, x2, y2 rather than centre and size: by which of them hold their cell's centre."""
        boxes = self._channels(outputs[self.graph.decoded[0]])[0, :4].T.astype(np.float64)
        centres = cell_centres([(size[0] // s, size[1] // s) for s in self.strides], self.strides)[0].numpy()
        as_corners = (boxes[:, :2] <= centres) & (centres <= boxes[:, 2:])
        half = boxes[:, 2:] / 2
        as_centre = (boxes[:, :2] - half <= centres) & (centres <= boxes[:, :2] + half)
        return bool(as_corners.mean() > as_centre.mean())

    def _channels(self, values: Array) -> Array:
        """The decoded tensor as (B, channels, A)."""
        return values.transpose(0, 2, 1) if self.graph.cells_first else values

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def use_half(self) -> None:
        raise HaloposeError(f"{self.description} runs in the precision of the file: leave half precision off")

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        return self.graph.input.size

    def preprocess(self, images: Sequence[Array], imgsz: int, rectangular: bool) -> tuple[Tensor, list[Letterbox]]:
        self.check_size(imgsz)
        return super().preprocess(images, imgsz, rectangular)

    def placer(self) -> Placer:
        graph = self.graph
        return OnnxPlacer(graph.preparation, max(self.strides[-1], 32), graph.input.size)

    def to_batch(self, placed: Sequence[Array]) -> Tensor:
        bgr = self.graph.preparation == "yolonas"
        batch = np.stack([pixels if bgr else pixels[..., ::-1] for pixels in placed]).transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(batch, dtype=np.float32) / np.float32(255))

    @torch.inference_mode()
    def forward(self, batch: Tensor) -> HostOutput:
        outputs = self._in_parts(batch.numpy())
        rows = None if self.graph.rows is None else outputs[self.graph.rows].astype(np.float32)
        decoded = self._decoded(outputs, rows)
        features = tuple(torch.from_numpy(outputs[name].astype(np.float32, copy=False)) for name in self.features)
        return HostOutput(features, decoded.scores.amax(2), decoded.keypoints, decoded)

    def _in_parts(self, images: Array) -> dict[str, Array]:
        """Run a batch, as many images at a time as the file takes."""
        fixed = self.graph.input.batch
        if fixed is None or len(images) == fixed:
            return self._run(self._own_session(), self._names, images)
        parts = []
        for start in range(0, len(images), fixed):
            part = images[start : start + fixed]
            full = np.zeros((fixed, *images.shape[1:]), images.dtype)
            full[: len(part)] = part
            found = self._run(self._own_session(), self._names, full)
            parts.append({name: values[: len(part)] for name, values in found.items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in self._names}

    def _own_session(self) -> Any:
        """The session of this process: the threads of another one do not survive a fork."""
        if self._process != os.getpid():
            content = with_outputs(self.model, self._extra)
            self._session, self._process = open_session(content, self.path, self._onnx_device), os.getpid()
        return self._session

    def _run(self, session: Any, names: list[str], images: Array) -> dict[str, Array]:
        kind = np.float16 if self.graph.input.half else np.float32
        given = {self.graph.input.name: np.ascontiguousarray(images, dtype=kind)}
        try:
            return dict(zip(names, session.run(names, given), strict=True))
        except Exception as error:  # noqa: BLE001  ONNX Runtime's errors have no common base class
            reason, (height, width) = reason_of(error), images.shape[2:]
            raise HaloposeError(
                f"{self.description} cannot run on an input of {width} x {height} ({reason}): give another --imgsz"
            ) from None

    def _decoded(self, outputs: dict[str, Array], rows: Array | None) -> Decoded:
        graph = self.graph
        if graph.layout == "yolonas":
            found = [torch.from_numpy(outputs[name].astype(np.float32, copy=False)) for name in graph.decoded]
            return Decoded(found[0], found[1], found[2], found[3], None)
        whole = self._channels(outputs[graph.decoded[0]]).astype(np.float32, copy=False)
        values = torch.from_numpy(whole).transpose(1, 2)
        boxes, scores, points = values.split([4, graph.classes, graph.keypoints * graph.dimensions], dim=2)
        if not self.corners:
            half = boxes[..., 2:] / 2
            boxes = torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], dim=2)
        located = points.unflatten(2, (graph.keypoints, graph.dimensions))
        visibility = located[..., 2] if graph.dimensions == 3 else None
        return Decoded(boxes, scores, located[..., :2], visibility, rows)

    @torch.inference_mode()
    def assign(self, output: HostOutput, targets: Sequence[Targets], sigmas: tuple[float, ...]) -> Assignment:
        if not sum(len(target.boxes) for target in targets):
            empty = torch.zeros(0, dtype=torch.long)
            return Assignment(empty, empty, empty)
        if self.graph.assigner == "matched":
            conf, iou, most = MATCHED
            found = self.select(output, conf=conf, iou=iou, max_detections=most)
            return assign_matched([(each.cell, each.boxes, each.class_ids) for each in found], targets)
        raw: Decoded = output.raw
        sizes = [(int(maps.shape[2]), int(maps.shape[3])) for maps in output.features]
        centres, strides = cell_centres(sizes, self.strides)
        images = [
            Cells(raw.boxes[number], raw.scores[number], raw.keypoints[number], centres, strides)
            for number in range(len(raw.boxes))
        ]
        return assign_task_aligned(images, targets, sigmas, SETTINGS[self.graph.assigner])

    @torch.inference_mode()
    def select(
        self,
        output: HostOutput,
        *,
        conf: float,
        iou: float,
        max_detections: int = 300,
        letterboxes: Sequence[Letterbox] | None = None,
    ) -> list[Selection]:
        raw: Decoded = output.raw
        if raw.rows is not None:
            return [self._rows(raw, number, conf, max_detections) for number in range(len(raw.boxes))]
        selections = []
        for number in range(len(raw.boxes)):
            kept = self._kept(raw, number, conf, iou, letterboxes[number] if letterboxes else None)[:max_detections]
            cell = torch.from_numpy(kept)
            selections.append(
                Selection(
                    cell=cell,
                    boxes=raw.boxes[number, cell],
                    scores=output.scores[number, cell],
                    class_ids=raw.scores[number, cell].argmax(1),
                    keypoints=raw.keypoints[number, cell],
                    visibility=None if raw.visibility is None else raw.visibility[number, cell],
                )
            )
        return selections

    def _kept(self, raw: Decoded, number: int, conf: float, iou: float, letterbox: Letterbox | None) -> Array:
        """Cells (n,) that survive non-maximum suppression, best first."""
        every = raw.scores[number].numpy()
        best, classes, boxes = every.max(1), every.argmax(1), raw.boxes[number].numpy()
        if self.graph.preparation == "ultralytics":
            cell = np.flatnonzero(best > conf)
            boxes = boxes[cell]
        else:  # clipped to the image before suppression, as LibreYOLO does
            cell = np.flatnonzero(best >= conf)
            cell = cell[np.argsort(-best[cell], kind="stable")[:1000]]
            boxes = boxes[cell]
            if letterbox is not None:
                (height, width), gain = letterbox.shape, np.float32(letterbox.gain[0])
                boxes = np.clip(boxes / gain, 0, np.array([width, height] * 2, np.float32))
            sound = (boxes[:, 2:] > boxes[:, :2]).all(1)
            cell, boxes = cell[sound], boxes[sound]
        return np.asarray(cell[predict.suppress(boxes, best[cell], classes[cell], iou)])

    def _rows(self, raw: Decoded, number: int, conf: float, most: int) -> Selection:
        """Rows that the file has chosen, and their cells: rows are copies of the predictions of a cell."""
        assert raw.rows is not None
        graph = self.graph
        rows = raw.rows[number]
        rows = rows[rows[:, 4] > conf][:most]
        points = rows[:, 6:].reshape(len(rows), graph.keypoints, graph.dimensions)
        places = raw.keypoints[number].numpy()
        cells = []
        for row in points:
            same = np.flatnonzero((places[:, 0] == row[0, :2]).all(1))
            same = same[(places[same] == row[:, :2]).all((1, 2))]
            if not len(same):
                raise HaloposeError(
                    f"{self.description}: a row of output {graph.rows} is none of the cells of {graph.decoded[0]}"
                )
            cells.append(int(same[0]))
        return Selection(
            cell=torch.tensor(cells, dtype=torch.long),
            boxes=torch.from_numpy(rows[:, :4].copy()),
            scores=torch.from_numpy(rows[:, 4].copy()),
            class_ids=torch.from_numpy(rows[:, 5].astype(np.int64)),
            keypoints=torch.from_numpy(points[..., :2].copy()),
            visibility=torch.from_numpy(points[..., 2].copy()) if graph.dimensions == 3 else None,
        )

    def cells(self, output: HostOutput) -> CellBoxes | None:
        raw: Decoded = output.raw
        if raw.rows is not None and not self.graph.suppressed:  # one-to-one: no overlapping boxes
            return None
        return decoded_cells(raw.boxes, raw.keypoints, raw.visibility)

    def to_original(self, selection: Selection, letterbox: Letterbox, size: tuple[int, int]) -> Selection:
        (height, width), pad, gain = letterbox.shape, letterbox.pad, letterbox.gain
        limit = torch.tensor([width, height], dtype=torch.float32)
        corners = ((selection.boxes.reshape(-1, 2, 2) - torch.tensor(pad)) / torch.tensor(gain)).clamp_min(0)
        points = (selection.keypoints - torch.tensor(pad)) / torch.tensor(gain)
        if self.graph.preparation == "ultralytics":
            points = torch.minimum(points.clamp_min(0), limit)
        return Selection(
            cell=selection.cell,
            boxes=torch.minimum(corners, limit).reshape(-1, 4),
            scores=selection.scores,
            class_ids=selection.class_ids,
            keypoints=points,
            visibility=selection.visibility,
        )

    def pose_templates(self) -> list[list[ConvTemplate]]:
        return self._templates


@dataclass(frozen=True)
class OnnxPlacer:
    """Letterbox of the tool that wrote the file; a file with a fixed size takes that size only.

    Attributes:
        preparation: Letterbox of Ultralytics or of YOLO-NAS.
        stride: Sides of the input are multiples of it.
        fixed: Height and width that the file takes, or None.
    """

    preparation: Preparation
    stride: int
    fixed: tuple[int, int] | None

    def __call__(
        self, image: Array, imgsz: int, rectangular: bool, room: Array | None = None
    ) -> tuple[Array, Letterbox]:
        size = -(-imgsz // self.stride) * self.stride
        shape = int(image.shape[0]), int(image.shape[1])
        trimmed = rectangular and self.fixed is None
        try:
            placed = predict.place(
                self.preparation, shape, self.fixed or (size, size), self.stride if trimmed else None
            )
        except predict.Problem as problem:
            raise HaloposeError(str(problem)) from None
        box, inner, sides = placed
        pixels = predict.lay(self.preparation, image, box, inner, laid_in(room, (*sides, 3)))
        return pixels, Letterbox(shape, box.gain, (float(box.pad[0]), float(box.pad[1])))


def describe(host: OnnxHost) -> str:
    """What the analysis of a file has found, line by line."""
    graph, fixed = host.graph, host.graph.input
    size = f"{fixed.size[1]} x {fixed.size[0]}" if fixed.size else "any multiple of the coarsest stride"
    chosen = "the file" if graph.rows is not None else "halopose"
    names = ", ".join(host.class_names[:8])
    kind = "float16" if fixed.half else "float32"
    opset = next((entry.version for entry in host.model.opset_import if entry.domain in ("", "ai.onnx")), "?")
    lines = [
        f"layout       {graph.layout}{', cells before channels' if graph.transposed else ''}",
        f"opset        {opset}, {len(host.view.nodes)} nodes",
        f"input        {fixed.name}, batch {fixed.batch or 'any'}, size {size}, {kind}",
        f"outputs      {', '.join(graph.outputs)}",
        f"all cells    {', '.join(graph.decoded)} ({'corners' if host.corners else 'centre and size'} of boxes)",
        f"detections   chosen by {chosen}{' (non-maximum suppression in the graph)' if graph.suppressed else ''}",
        f"classes      {graph.classes}: {names}",
        f"keypoints    {graph.keypoints}, {'with' if graph.dimensions == 3 else 'without'} visibility",
        f"letterbox    {graph.preparation}",
        f"assigner     {graph.assigner}",
        f"decoding     raw and decoded keypoints agree within {host.decoding_error:.2g} px",
    ]
    for level, stride in zip(graph.levels, host.strides, strict=True):
        shapes = " -> ".join("x".join(map(str, layer.weight.shape)) for layer, _ in level.trunk)
        lines += [
            f"stride {stride:<6}feature map {level.feature}",
            f"{'':13}starts at {level.trunk[0][0].name}: {shapes}",
        ]
    return "\n".join(lines)


def read_onnx(path: Path | str) -> Any:
    """Read an ONNX file with its external data."""
    try:
        import onnx
    except ImportError:
        raise HaloposeError("an ONNX model needs the onnx extra: pip install 'halopose[onnx]'") from None
    path = Path(path)
    if not path.is_file():
        raise HaloposeError(f"no file {path}: give the path of an ONNX model")
    try:
        model = onnx.load(str(path))
    except Exception as error:  # noqa: BLE001  protobuf, onnx and the file system raise errors of many classes
        raise HaloposeError(
            f"{path} is damaged or no ONNX model ({' '.join(str(error).split())[:160]}): export it again"
        ) from None
    if any(entry.key == "format" and entry.value.startswith(predict.FORMAT) for entry in model.metadata_props):
        raise HaloposeError(
            f"{path} already has heads: give its folder to commands that take --deployed, or the model it was made from"
        )
    return model


def with_outputs(model: Any, names: Sequence[str]) -> bytes:
    """The model with further tensors as outputs, serialised."""
    import onnx

    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return bytes(changed.SerializeToString())


def open_session(content: bytes, path: Path, device: torch.device | str | None) -> Any:
    """A session of ONNX Runtime on a device."""
    try:
        import onnxruntime
    except ImportError:
        raise HaloposeError("an ONNX model needs the onnx extra: pip install 'halopose[onnx]'") from None
    wanted = "CUDAExecutionProvider" if torch.device(device or "cpu").type == "cuda" else "CPUExecutionProvider"
    if wanted not in onnxruntime.get_available_providers():
        raise HaloposeError(
            f"this build of ONNX Runtime has no {wanted}: install onnxruntime-gpu, or give --device cpu"
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return onnxruntime.InferenceSession(content, options, providers=[wanted])
    except Exception as error:  # noqa: BLE001  ONNX Runtime's errors have no common base class
        raise HaloposeError(f"ONNX Runtime cannot load {path} ({reason_of(error)})") from None


def reason_of(error: Exception) -> str:
    """The message of an error of ONNX Runtime, without its source code."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(str(error).split()))
    return re.sub(r"\S*/onnxruntime/core/\S+:\d+ .*?\)( const)? (?=\S+ \S)", "", text)[:200]


def cell_centres(sizes: Sequence[tuple[int, int]], strides: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Centres (A, 2) in input pixels and strides (A,) of the cells of levels of (height, width)."""
    centres, each = [], []
    for (height, width), stride in zip(sizes, strides, strict=True):
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres.append((torch.stack([column, row], dim=-1).reshape(-1, 2) + 0.5) * stride)
        each.append(torch.full((height * width,), float(stride)))
    return torch.cat(centres), torch.cat(each)


def _analysed(view: GraphView, given: GivenByHand) -> PoseGraph:
    """Analysis of a graph; whatever a strange graph breaks becomes one line."""
    try:
        return analyse(view, given)
    except HaloposeError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise HaloposeError(
            f"{view.where} has a graph that cannot be analysed ({type(error).__name__}: {str(error)[:80]})"
        ) from None


def _template(layer: FoldedConv, activation: str) -> ConvTemplate:
    return ConvTemplate(torch.tensor(layer.weight), torch.tensor(layer.bias), activation)  # type: ignore[arg-type]


def _as_module(layer: FoldedConv) -> nn.Conv2d:
    """The last convolution of a level, as frameworks hold theirs."""
    out, into, kernel, _ = layer.weight.shape
    module = nn.Conv2d(into, out, kernel)
    module.weight.data, module.bias.data = torch.tensor(layer.weight), torch.tensor(layer.bias)  # type: ignore[union-attr]
    return module


def _keypoint_names(graph: PoseGraph) -> tuple[str, ...] | None:
    found = literal(graph.metadata.get("kpt_names", ""))
    names = next(iter(found.values()), None) if isinstance(found, dict) else found
    if isinstance(names, (list, tuple)) and len(names) == graph.keypoints:
        return tuple(str(name) for name in names)
    return None


def _digest(model: Any) -> str:
    """SHA-256 of the graph: nodes, initialisers and outputs, without metadata."""
    return ONNX_PREFIX + hashlib.sha256(model.graph.SerializeToString(deterministic=True)).hexdigest()
