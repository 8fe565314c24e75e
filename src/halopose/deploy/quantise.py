"""Smaller numbers for the base's convolutions: half precision, or 8 bits. Decoding and heads stay in float.

In: a float model of ``onnx_file.build``, and for 8 bits some images. Out: another model with the same outputs.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halopose.data.images import NamedImage
from halopose.deploy import predict
from halopose.deploy.onnx_file import checked, read_facts, read_model, require_onnx, write_facts, write_model
from halopose.deploy.predict import Facts
from halopose.errors import HaloposeError
from halopose.poses import Array

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

HEADS = "/heads/"  # what the names of the heads' nodes begin with
MOST_IMAGES = 128  # that the ranges of activations are taken from
SPARED = 3  # convolutions before each output that stay in float: there 8 bits cost most, and save least


def to_half(model: ModelProto) -> ModelProto:
    """Half precision up to the last convolutions. Beyond, a pixel near 640 would be rounded to half a pixel."""
    onnx = require_onnx()
    from onnxruntime.transformers.float16 import convert_float_to_float16

    facts = read_facts(model, "the model")
    front, back = _parted(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells of each weight that is too small for half precision
        front = convert_float_to_float16(front, keep_io_types=True)
    half = onnx.ModelProto()
    half.CopyFrom(model)
    del half.graph.node[:], half.graph.initializer[:], half.graph.value_info[:]
    half.graph.node.extend(_sorted([*front.graph.node, *back.node]))
    half.graph.initializer.extend([*front.graph.initializer, *back.initializer])
    write_facts(half, replace(facts, precision="half"))
    return checked(half)


def _parted(model: ModelProto) -> tuple[ModelProto, GraphProto]:
    """The model up to its last convolutions, whose outputs are what the rest takes from it, and the rest."""
    onnx = require_onnx()
    last = nodes_after_convolutions(model)
    nodes: dict[bool, list[Any]] = {True: [], False: []}
    for node in model.graph.node:
        nodes[node.name in last].append(node)
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
    """Weights and activations of the base's convolutions in 8 bits, by ONNX Runtime's own quantisation."""
    require_onnx()
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    facts = read_facts(model, "the model")
    spared = nodes_after_convolutions(model) | last_convolutions(model, SPARED)
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
            # Dedicated, so that the heads, which stay in float, take the features before they are rounded.
            extra_options={"CalibMovingAverage": True, "DedicatedQDQPair": True},
        )
        small = read_model(target)
    write_facts(small, replace(facts, precision="int8"))
    return checked(small)


def _sorted(nodes: list[Any]) -> list[Any]:
    """Every node behind those whose results it takes: the converter puts its casts last."""
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
    """Inputs one by one, as the quantiser asks for them."""

    def __init__(self, facts: Facts, images: Iterable[NamedImage]) -> None:
        self.inputs = self._prepared(facts, images)

    @staticmethod
    def _prepared(facts: Facts, images: Iterable[NamedImage]) -> Iterator[dict[str, Array]]:
        for number, image in enumerate(images):
            if number == MOST_IMAGES:
                return
            yield {"images": predict.prepare(image.pixels, facts, facts.imgsz)[0][None]}

    def get_next(self) -> dict[str, Array] | None:
        return next(self.inputs, None)

    def set_range(self, start_index: int, end_index: int) -> None:
        raise NotImplementedError  # asked for only if the quantiser is told to work in strides


def nodes_after_convolutions(model: ModelProto) -> set[str]:
    """Names of the nodes that no convolution of the base comes after: the decoding, and all of the heads."""
    return {node.name for node, behind in _with_convolutions_behind(model) if not behind and not _of_base(node)}


def last_convolutions(model: ModelProto, count: int) -> set[str]:
    """Names of the base's last ``count`` convolutions on every way to an output."""
    return {node.name for node, behind in _with_convolutions_behind(model) if behind < count and _of_base(node)}


def _with_convolutions_behind(model: ModelProto) -> list[tuple[Any, int]]:
    """Nodes, and how many of the base's convolutions come after each at most."""
    depth: dict[str, int] = {}
    counted = []
    for node in reversed(model.graph.node):  # in the order of execution, as ONNX demands
        behind = max((depth.get(name, 0) for name in node.output), default=0)
        counted.append((node, behind))
        for name in node.input:
            depth[name] = max(depth.get(name, 0), behind + _of_base(node))
    if not any(depth.values()):
        raise HaloposeError("the model has no convolutions to quantise: export it with `halopose export` first")
    return counted


def _of_base(node: Any) -> bool:
    return node.op_type == "Conv" and not node.name.startswith(HEADS)
