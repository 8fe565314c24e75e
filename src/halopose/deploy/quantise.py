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
    from onnx import ModelProto

HEADS = "/heads/"  # what the names of the heads' nodes begin with
MOST_IMAGES = 128  # that the ranges of activations are taken from


def to_half(model: ModelProto) -> ModelProto:
    """Half precision up to the last convolutions. Beyond, a pixel near 640 would be rounded to half a pixel."""
    require_onnx()
    from onnxruntime.transformers.float16 import convert_float_to_float16

    facts = read_facts(model, "the model")
    last = nodes_after_convolutions(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells of each weight that is too small for half precision
        half = convert_float_to_float16(model, keep_io_types=True, node_block_list=sorted(last))
    write_facts(half, replace(facts, precision="half"))
    return checked(half)


def to_int8(model: ModelProto, images: Iterable[NamedImage]) -> ModelProto:
    """Weights and activations of the base's convolutions in 8 bits, by ONNX Runtime's own quantisation."""
    require_onnx()
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    facts = read_facts(model, "the model")
    spared = nodes_after_convolutions(model) | _last_convolutions(model)
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
        small = read_model(target)
    write_facts(small, replace(facts, precision="int8"))
    return checked(small)


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
    return {node.name for node in _after(model) if node.op_type != "Conv" or node.name.startswith(HEADS)}


def _last_convolutions(model: ModelProto) -> set[str]:
    """Names of the convolutions that give boxes, scores and keypoints: in 8 bits they would cost most."""
    return {node.name for node in _after(model) if node.op_type == "Conv"}


def _after(model: ModelProto) -> list[Any]:
    """Nodes that feed no other convolution of the base."""
    needed: set[str] = set()  # values that some convolution depends on
    last = []
    for node in reversed(model.graph.node):  # in the order of execution, as ONNX demands
        feeds = any(name in needed for name in node.output)
        if not feeds:
            last.append(node)
        if feeds or (node.op_type == "Conv" and not node.name.startswith(HEADS)):
            needed.update(node.input)
    if len(last) == len(model.graph.node):
        raise HaloposeError("the model has no convolutions to quantise: export it with `halopose export` first")
    return last
