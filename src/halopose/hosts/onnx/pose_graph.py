"""Find layout, pose layers and feature maps of a pose model in ONNX, by analysis backwards from its outputs."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from halopose.data.files import write_json
from halopose.errors import HaloposeError
from halopose.hosts.onnx.graph_view import FoldedConv, GraphView
from halopose.hosts.task_aligned import ASSIGNERS, AssignerName
from halopose.types import Array

OnnxLayout = Literal["ultralytics", "ultralytics-end2end", "yolonas"]
LAYOUTS: tuple[OnnxLayout, ...] = get_args(OnnxLayout)
Preparation = Literal["ultralytics", "yolonas"]


@dataclass(frozen=True)
class GivenByHand:
    """What a user states where the analysis fails; None is left to the analysis.

    Attributes:
        features: Names of the first convolutions of the pose layers, one per level.
        layout: Layout of the outputs.
        assigner: Label assignment of training.
        preparation: How images are laid into the input: ``ultralytics`` or ``yolonas``.
    """

    features: tuple[str, ...] | None = None
    layout: OnnxLayout | None = None
    assigner: AssignerName | None = None
    preparation: Preparation | None = None

    @classmethod
    def beside(cls, path: Path) -> GivenByHand:
        """Read the file that ``halopose inspect --save`` writes beside a model."""
        settings = settings_file(path)
        if not settings.is_file():
            return cls()
        try:
            content = json.loads(settings.read_text())
            features = content.get("features")
            return cls(**{**content, "features": None if features is None else tuple(features)}).checked(str(settings))
        except (OSError, ValueError, TypeError, AttributeError):
            raise HaloposeError(f"{settings} is damaged: write it again with `halopose inspect --save`") from None

    def checked(self, where: str) -> GivenByHand:
        """Refuse unknown values."""
        for name, value, known in (
            ("layout", self.layout, LAYOUTS),
            ("assigner", self.assigner, ASSIGNERS),
            ("preparation", self.preparation, get_args(Preparation)),
        ):
            if value is not None and value not in known:
                raise HaloposeError(f"{where}: unknown {name} {value!r}: give one of {', '.join(known)}")
        return self

    def to_json(self) -> dict[str, Any]:
        """The values that are given."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def save(self, path: Path) -> Path:
        """Write the values beside a model, where every command finds them; return the file."""
        target = settings_file(path)
        write_json(target, self.to_json())
        return target


def settings_file(path: Path) -> Path:
    """The file beside a model with what was given by hand."""
    return path.with_name(path.name + ".json")


@dataclass(frozen=True)
class PoseLayers:
    """Pose layers of one level: from the feature map to the raw keypoints.

    Attributes:
        feature: Tensor of the feature map.
        trunk: Convolutions before the last one, with their activations.
        last: The last convolution.
        raw: Tensor of the raw keypoints.
    """

    feature: str
    trunk: tuple[tuple[FoldedConv, str], ...]
    last: FoldedConv
    raw: str


@dataclass(frozen=True)
class InputTensor:
    """The image input: name, whether it is half precision, and what is fixed of its batch, height and width."""

    name: str
    half: bool
    batch: int | None
    size: tuple[int, int] | None


@dataclass(frozen=True)
class PoseGraph:
    """Result of the analysis.

    Attributes:
        layout: Layout of the outputs.
        input: The image input.
        outputs: Names of the file's outputs, in order.
        decoded: Tensors with the decoded predictions of all cells: one, or boxes, scores, keypoints and visibility.
        cells_first: Whether the decoded tensor is (B, A, channels) rather than (B, channels, A).
        transposed: Whether the output is the decoded tensor with its last two axes swapped.
        rows: Output with rows that the file has chosen itself, or None.
        suppressed: Whether the file contains non-maximum suppression.
        classes: Number of classes.
        keypoints: Number of keypoints.
        dimensions: 3 with visibility, otherwise 2.
        levels: Pose layers, in the order of the cells.
        assigner: Label assignment of training.
        preparation: How images are laid into the input.
        metadata: Metadata of the file.
    """

    layout: OnnxLayout
    input: InputTensor
    outputs: tuple[str, ...]
    decoded: tuple[str, ...]
    cells_first: bool
    transposed: bool
    rows: str | None
    suppressed: bool
    classes: int
    keypoints: int
    dimensions: int
    levels: tuple[PoseLayers, ...]
    assigner: AssignerName
    preparation: Preparation
    metadata: Mapping[str, str]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes from the metadata, else numbers."""
        found = literal(self.metadata.get("names", ""))
        names = list(found.values()) if isinstance(found, dict) else found
        if isinstance(names, list) and len(names) == self.classes:
            return tuple(str(name) for name in names)
        return ("object",) if self.classes == 1 else tuple(map(str, range(self.classes)))


def analyse(view: GraphView, given: GivenByHand) -> PoseGraph:
    """Analyse a graph.

    Args:
        view: The graph.
        given: What the user states.

    Raises:
        HaloposeError: The graph is no pose model that can be used; the message names the node or the output.
    """
    metadata = {entry.key: entry.value for entry in view.model.metadata_props}
    input_tensor = _input(view)
    suppressed = any(node.op_type == "NonMaxSuppression" for node in view.nodes)
    if given.layout == "yolonas" or (given.layout is None and len(view.outputs) == 4):
        return _separate(view, given, metadata, input_tensor, suppressed)
    name, transposed, whole = _decoded_tensor(view)
    keypoints = whole.input[2]
    boxes, scores = _boxes_and_scores(view, whole)
    rows = None if view.passed(view.outputs[0]) == name or transposed else view.outputs[0]
    if given.layout is not None and (given.layout == "ultralytics-end2end") != (rows is not None):
        raise HaloposeError(
            f"{view.where}: output {view.outputs[0]} does not fit --layout {given.layout}: leave the option off"
        )
    levels = _levels(view, keypoints, boxes | scores, given)
    visible = _has_sigmoid(view, keypoints)
    count, dimensions = _keypoint_shape(view, levels, visible, metadata)
    classes, box_channels = (
        {len(view.convolution(view.producers[each]).bias) for each in part} for part in (scores, boxes)
    )
    if len(classes) != 1:
        raise HaloposeError(f"{view.where}: {whole.input[1]} comes from convolutions of {sorted(classes)} classes")
    family: AssignerName = "yolo"
    if box_channels == {4}:  # distances without a distribution: YOLO26
        family = "yolo26" if rows is None or suppressed else "yolo26-one-to-one"
    return PoseGraph(
        layout="ultralytics" if rows is None else "ultralytics-end2end",
        input=input_tensor,
        outputs=tuple(view.outputs),
        decoded=(name,),
        cells_first=view.attribute(whole, "axis", 1) in (2, -1),
        transposed=transposed,
        rows=rows,
        suppressed=suppressed,
        classes=classes.pop(),
        keypoints=count,
        dimensions=dimensions,
        levels=levels,
        assigner=given.assigner or family,
        preparation=given.preparation or "ultralytics",
        metadata=metadata,
    )


def _input(view: GraphView) -> InputTensor:
    """The image input; the file may have no other."""
    if len(view.inputs) != 1:
        names = ", ".join(value.name for value in view.inputs) or "none"
        raise HaloposeError(f"{view.where} has the inputs {names}: a pose model has one, the image")
    (value,) = view.inputs
    kind, sides = value.type.tensor_type.elem_type, value.type.tensor_type.shape.dim
    if len(sides) != 4 or (sides[1].dim_value and sides[1].dim_value != 3):
        shape = " x ".join(str(side.dim_param or side.dim_value) for side in sides)
        raise HaloposeError(f"{view.where}: input {value.name} is {shape}, not batch x 3 x height x width")
    if kind not in (1, 10):
        raise HaloposeError(f"{view.where}: input {value.name} is neither float32 nor float16")
    batch, _, height, width = (side.dim_value or None for side in sides)
    size = (height, width) if height and width else None
    return InputTensor(value.name, kind == 10, batch, size)


def _decoded_tensor(view: GraphView) -> tuple[str, bool, Any]:
    """The tensor of boxes, scores and keypoints of all cells, whether it is transposed, and its Concat."""
    pending, seen = list(view.outputs[:1]), set(view.outputs[:1])
    while pending:
        name = pending.pop(0)
        node = view.producers.get(name)
        if node is None or node.op_type in ("Conv", "Shape"):
            continue
        if node.op_type == "Concat" and len(node.input) == 3 and _are_kinds(view, node):
            return name, _is_transposed(view, name), node
        for source in node.input:
            if source and source not in seen:
                seen.add(source)
                pending.append(source)
    raise HaloposeError(
        f"{view.where}: output {view.outputs[0] if view.outputs else '(none)'} is not computed from boxes, scores and "
        "keypoints of all cells: it is no pose model of a known layout, or a raw export without decoding"
    )


def _are_kinds(view: GraphView, node: Any) -> bool:
    """Whether a Concat joins boxes, scores and keypoints, which have convolutions of their own for every level.

    Boxes and scores may come from one tensor that is split.
    """
    boxes, scores, keypoints = (view.behind(name) for name in node.input)
    if not keypoints or keypoints & (boxes | scores) or (boxes & scores and boxes != scores):
        return False
    whole = boxes | scores | keypoints == view.behind(view.outputs[0])
    return whole and len(boxes | scores) == 2 * len(keypoints)


def _boxes_and_scores(view: GraphView, whole: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Outputs of the last convolutions of the boxes, and of the scores."""
    boxes, scores = (view.behind(name) for name in whole.input[:2])
    if boxes != scores:
        return boxes, scores
    first = set()
    for name in boxes:  # they are joined level by level, boxes first, and split later
        for node in view.consumers.get(name, []):
            if node.op_type == "Concat" and len(node.input) == 2 and node.input[0] == name:
                first.add(name)
    if 2 * len(first) != len(boxes):
        raise HaloposeError(f"{view.where}: node {view.names(whole)} joins boxes and scores that cannot be told apart")
    return frozenset(first), boxes - first


def _is_transposed(view: GraphView, name: str) -> bool:
    """Whether the output is the tensor with its last axes swapped, and nothing else."""
    node = view.producers.get(view.passed(view.outputs[0]))
    if node is None or node.op_type != "Transpose" or list(view.attribute(node, "perm", [])) != [0, 2, 1]:
        return False
    return view.passed(node.input[0]) == name


def _has_sigmoid(view: GraphView, name: str) -> bool:
    """Whether a Sigmoid lies between a tensor and the convolutions behind it: the visibilities."""
    stack, seen, ends = [name], {name}, view.behind(name)
    while stack:
        current = stack.pop()
        node = view.producers.get(current)
        if node is None or current in ends or node.op_type == "Shape":
            continue
        if node.op_type == "Sigmoid":
            return True
        for source in node.input:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def _levels(view: GraphView, keypoints: str, others: frozenset[str], given: GivenByHand) -> tuple[PoseLayers, ...]:
    """Pose layers of every level, in the order in which the graph concatenates them.

    Args:
        view: The graph.
        keypoints: Tensor of the decoded keypoints.
        others: Outputs of the last convolutions of boxes and scores.
        given: What the user states.
    """
    inputs: set[str] = set()
    for end in others:
        for node, _ in view.chain(view.producers[end]):
            inputs |= view.read_tensors(node.input[0])
    raws = _in_order(view, keypoints)
    if given.features is not None:
        chains = [[view.names(node) for node, _ in view.chain(view.producers[raw])] for raw in raws]
        unknown = [name for name in given.features if not any(name in chain for chain in chains)]
        if unknown or len(given.features) != len(raws):
            raise HaloposeError(
                f"{view.where}: --features must name one convolution of each of the {len(raws)} levels"
                + (f", and {unknown[0]} is none of the pose layers {', '.join(chains[0])} ..." if unknown else "")
            )
    return tuple(_layers(view, raw, inputs, given) for raw in raws)


def _in_order(view: GraphView, name: str) -> list[str]:
    """Raw keypoints of every level in the order of the cells: that of the Concat which joins the levels."""
    ends = view.behind(name)
    pending, seen = [name], {name}
    while pending:
        node = view.producers.get(pending.pop(0))
        if node is None:
            continue
        parts = [view.behind(source) for source in node.input]
        one_each = len(node.input) == len(ends) and all(len(part) == 1 for part in parts)
        if node.op_type == "Concat" and one_each and frozenset().union(*parts) == ends:
            return [next(iter(part)) for part in parts]
        for source in node.input:
            if source and source not in seen and source not in ends:
                seen.add(source)
                pending.append(source)
    if len(ends) == 1:
        return list(ends)
    raise HaloposeError(f"{view.where}: no Concat joins the levels of {name}: {', '.join(sorted(ends))}")


def _layers(view: GraphView, raw: str, inputs: set[str], given: GivenByHand) -> PoseLayers:
    """Pose layers behind raw keypoints, back to the tensor that the box and class layers also read."""
    found: list[tuple[FoldedConv, str]] = []
    stops = set(given.features or ())
    for node, activation in view.chain(view.producers[raw]):
        convolution = view.convolution(node)
        found.append((convolution, activation))
        shared = view.read_tensors(convolution.source) & inputs
        end = convolution.name in stops if stops else bool(shared)
        if end and len(found) > 1:
            feature = next(name for name in _reads(view, convolution.source) if stops or name in inputs)
            trunk = tuple(reversed(found[1:]))
            return PoseLayers(feature, trunk, found[0][0], raw)
    names = ", ".join(convolution.name for convolution, _ in found)
    raise HaloposeError(
        f"{view.where}: the pose layers that end at node {view.names(view.producers[raw])} share no feature map with "
        f"the box layers (followed: {names}): name the first convolution of every level with --features"
    )


def _reads(view: GraphView, name: str) -> list[str]:
    """Floating-point tensors that a convolution reads: its input, then what that is a copy of."""
    found = [name]
    node = view.producers.get(name)
    while node is not None and node.op_type in ("Cast", "Identity", "DequantizeLinear", "QuantizeLinear"):
        name = node.input[0]
        if node.op_type != "DequantizeLinear":  # the input of that is in 8 bits
            found.append(name)
        node = view.producers.get(name)
    return found


def _keypoint_shape(
    view: GraphView, levels: Sequence[PoseLayers], visible: bool, metadata: Mapping[str, str]
) -> tuple[int, int]:
    """Number of keypoints, and values per keypoint."""
    channels = {len(level.last.bias) for level in levels}
    dimensions = 3 if visible else 2
    if len(channels) != 1 or next(iter(channels)) % dimensions:
        raise HaloposeError(
            f"{view.where}: node {levels[0].last.name} has {sorted(channels)} channels, which are no keypoints of "
            f"{dimensions} values"
        )
    count = channels.pop() // dimensions
    stated = literal(metadata.get("kpt_shape", ""))
    if isinstance(stated, list) and stated not in ([count, dimensions], []):
        raise HaloposeError(f"{view.where}: the metadata say kpt_shape {stated}, the graph has [{count}, {dimensions}]")
    return count, dimensions


def _separate(
    view: GraphView, given: GivenByHand, metadata: Mapping[str, str], input_tensor: InputTensor, suppressed: bool
) -> PoseGraph:
    """Analysis of outputs for boxes, scores, keypoints and visibilities each, as YOLO-NAS-Pose has them."""
    if suppressed or len(view.outputs) != 4:
        raise HaloposeError(
            f"{view.where}: the outputs {', '.join(view.outputs)} are not boxes, scores, keypoints and visibilities of "
            "all cells: export the model without non-maximum suppression"
        )
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in view.model.graph.output}
    keypoints = [name for name in view.outputs if ranks[name] == 4]
    if len(keypoints) != 1:
        raise HaloposeError(f"{view.where}: none of the outputs {', '.join(view.outputs)} holds keypoints (B, A, K, 2)")
    rest = [name for name in view.outputs if name != keypoints[0]]
    with_distances = [name for name in rest if _widest(view, name) % 4 == 0 and not _has_sigmoid(view, name)]
    if len(with_distances) != 1:
        raise HaloposeError(f"{view.where}: which of the outputs {', '.join(rest)} are boxes cannot be told")
    boxes = with_distances[0]
    scores, visibility = (name for name in rest if name != boxes)  # in the order of the file, as LibreYOLO writes them
    levels = _levels(view, keypoints[0], view.behind(boxes) | view.behind(scores), given)
    count = len(levels[0].last.bias) // 2
    total = _widest(view, scores)
    return PoseGraph(
        layout="yolonas",
        input=input_tensor,
        outputs=tuple(view.outputs),
        decoded=(boxes, scores, keypoints[0], visibility),
        cells_first=False,
        transposed=False,
        rows=None,
        suppressed=False,
        classes=total - count if view.behind(scores) == view.behind(visibility) else total,
        keypoints=count,
        dimensions=3,
        levels=levels,
        assigner=given.assigner or "yolonas",
        preparation=given.preparation or "yolonas",
        metadata=metadata,
    )


def _widest(view: GraphView, name: str) -> int:
    """Channels of the convolutions behind a tensor."""
    ends = view.behind(name)
    return max((len(view.convolution(view.producers[end]).bias) for end in ends), default=0)


def literal(text: str) -> Any:
    """A Python or JSON literal, or None."""
    try:
        return ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def check_decoding(raw: Sequence[Array], decoded: Array, strides: Sequence[int], dimensions: int) -> float:
    """Largest distance, in pixels, of decoded keypoints from the best linear decoding of the raw ones.

    A small value shows that the pose layers are those of the output, and that the order of levels and cells is known.

    Args:
        raw: Raw keypoints (K * dimensions, H, W) of every level.
        decoded: Keypoints (A, K, 2) in input pixels.
        strides: Stride of every level.
        dimensions: Values per keypoint.
    """
    start, worst = 0, 0.0
    for values, stride in zip(raw, strides, strict=True):
        channels, height, width = values.shape
        points = values.reshape(channels // dimensions, dimensions, height * width)[:, :2].transpose(2, 0, 1)
        row, column = np.divmod(np.arange(height * width), width)
        cells = np.stack([column, row], axis=1)[:, None].astype(np.float64)
        wanted = decoded[start : start + height * width].astype(np.float64) / stride - cells
        design = np.stack([points.ravel().astype(np.float64), np.ones(points.size)], axis=1)
        factors, *_ = np.linalg.lstsq(design, wanted.ravel(), rcond=None)
        worst = max(worst, float(np.abs(design @ factors - wanted.ravel()).max()) * stride)
        start += height * width
    return worst if start == len(decoded) else float("inf")
