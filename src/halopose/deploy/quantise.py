"""Quantise the base model to half precision or 8 bits; decoding and heads stay in single precision."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halopose.data.images import NamedImage
from halopose.deploy.onnx_file import checked, read_facts, require_onnx, write_facts, write_model
from halopose.errors import HaloposeError
from halopose.runtime import predict
from halopose.runtime.predict import Facts
from halopose.types import Array

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

HEADS = "/heads/"  # prefix of the node names of the heads
MOST_IMAGES = 128  # images for the activation ranges


def to_half(model: ModelProto) -> ModelProto:
    """Convert the model to half precision up to the last convolutions.

    The decoding stays in single precision: half precision would round coordinates near 640 to 0.5 pixels.
    """
    onnx = require_onnx()
    from onnxruntime.transformers.float16 import convert_float_to_float16

    facts = read_facts(model, "the model")
    front, back = _parted(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one per weight that is too small for half precision
        front = convert_float_to_float16(front, keep_io_types=True)
    half = onnx.ModelProto()
    half.CopyFrom(model)
    del half.graph.node[:], half.graph.initializer[:], half.graph.value_info[:]
    half.graph.node.extend(_sorted([*front.graph.node, *back.node]))
    half.graph.initializer.extend([*front.graph.initializer, *back.initializer])
    write_facts(half, replace(facts, precision="half"))
    return checked(half)


def _take_unrounded(model: ModelProto, names: set[str]) -> None:
    """Connect the nodes of these names to the unquantised values, in place."""
    made = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            rounded = made.get(name)
            if node.name in names and rounded is not None and rounded.op_type == "DequantizeLinear":
                node.input[place] = made[rounded.input[0]].input[0]


def _parted(model: ModelProto) -> tuple[ModelProto, GraphProto]:
    """Split the model after its last convolutions into a model and the remaining graph."""
    onnx = require_onnx()
    early = before_decoding(model)
    nodes: dict[bool, list[Any]] = {True: [], False: []}
    for node in model.graph.node:
        nodes[node.name not in early].append(node)
    typed = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value for value in (*typed.value_info, *typed.output)}
    wanted = {name for node in nodes[True] for name in node.input} | {value.name for value in model.graph.output}
    crossing = [types[name] for node in nodes[False] for name in node.output if name in wanted]
    graphs = []
    for part, (given, made) in ((False, (model.graph.input, crossing)), (True, (crossing, model.graph.output))):
        used = {name for node in nodes[part] for name in node.input}
        weights = [tensor for tensor in model.graph.initializer if tensor.name in used]
        graphs.append(onnx.helper.make_graph(nodes[part], "part", given, made, weights))
    front = onnx.helper.make_model(graphs[0], opset_imports=model.opset_import, ir_version=model.ir_version)
    return front, graphs[1]


def to_int8(model: ModelProto, images: Iterable[NamedImage]) -> ModelProto:
    """Quantise backbone and neck to 8 bits with ONNX Runtime.

    The head of the framework stays in single precision: its outputs are pixels, which lose most in 8 bits.

    Args:
        model: Float model of ``onnx_file.build``.
        images: Images for the activation ranges; the first 128 are used.
    """
    onnx = require_onnx()
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    facts = read_facts(model, "the model")
    spared = {node.name for node in model.graph.node} - before_features(model)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        write_model(model, source)
        quantize_static(
            str(source),
            str(target),
            _Reader(facts, images),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=sorted(spared),
            calibrate_method=CalibrationMethod.MinMax,
            extra_options={"CalibMovingAverage": True},
        )
        small = onnx.load(str(target))
    _take_unrounded(small, spared)
    write_facts(small, replace(facts, precision="int8"))
    return checked(small)


def _sorted(nodes: list[Any]) -> list[Any]:
    """Sort nodes topologically, because the converter appends its casts at the end."""
    made = {name for node in nodes for name in node.output}
    ordered: list[Any] = []
    while nodes:
        left = []
        for node in nodes:
            if made.isdisjoint(node.input):
                ordered.append(node)
                made.difference_update(node.output)
            else:
                left.append(node)
        nodes = left
    return ordered


class _Reader:
    """Data reader of the quantiser: prepared inputs, one at a time."""

    def __init__(self, facts: Facts, images: Iterable[NamedImage]) -> None:
        self.inputs = self._prepared(facts, images)

    @staticmethod
    def _prepared(facts: Facts, images: Iterable[NamedImage]) -> Iterator[dict[str, Array]]:
        for number, image in enumerate(images):
            if number == MOST_IMAGES:
                return
            pixels, box = predict.prepare(image.pixels, facts, facts.imgsz)
            area = {} if facts.novelty is None else {"area": np.array([box.area], dtype=np.float32)}
            yield {"images": pixels[None], **area}

    def get_next(self) -> dict[str, Array] | None:
        return next(self.inputs, None)

    def set_range(self, start_index: int, end_index: int) -> None:
        raise NotImplementedError  # only called with the quantiser's stride option


def before_decoding(model: ModelProto) -> set[str]:
    """Names of the nodes up to the last convolutions of the base model; decoding and heads follow."""
    return _feeding(model, _inputs_of_convolutions(model)) | {node.name for node in model.graph.node if _of_base(node)}


def before_features(model: ModelProto) -> set[str]:
    """Names of the nodes of backbone and neck, on which the feature maps depend."""
    taken = {name for node in model.graph.node if node.name.startswith(HEADS) for name in node.input}
    return _feeding(model, taken & _inputs_of_convolutions(model))


def _inputs_of_convolutions(model: ModelProto) -> set[str]:
    """Inputs of the convolutions of the base model."""
    values = {name for node in model.graph.node if _of_base(node) for name in node.input}
    if not values:
        raise HaloposeError("the model has no convolutions to quantise: export it again with `halopose export`")
    return values


def _feeding(model: ModelProto, values: set[str]) -> set[str]:
    """Names of the nodes that the values depend on."""
    needed, names = set(values), set()
    for node in reversed(model.graph.node):  # ONNX stores nodes in the order of execution
        if not needed.isdisjoint(node.output):
            needed.update(node.input)
            names.add(node.name)
    return names


def _of_base(node: Any) -> bool:
    return node.op_type == "Conv" and not node.name.startswith(HEADS)
