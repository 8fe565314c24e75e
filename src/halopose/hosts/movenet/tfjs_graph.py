"""Convert the convolutional part of a TensorFlow.js graph model to ONNX.

A graph model is a JSON file with nodes and a weights manifest, and binary files with the weights.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.types import Array

_ARITHMETIC = {"Sub": "Sub", "Mul": "Mul", "AddV2": "Add"}
_DEPTHWISE = {"DepthwiseConv2dNative", "FusedDepthwiseConv2dNative"}
_PADDING = {"SAME": "SAME_UPPER", "VALID": "VALID"}
_OPSET, _IR = 17, 9


class GraphModel:
    """Nodes by name and weights of a TensorFlow.js graph model."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            self.nodes: dict[str, Any] = {node["name"]: node for node in content["modelTopology"]["node"]}
            groups = content["weightsManifest"]
            self.weights: dict[str, Array] = {}
            for group in groups:
                data = b"".join((self.path.parent / Path(name).name).read_bytes() for name in group["paths"])
                self.weights |= _weights(group["weights"], data)
        except OSError as error:
            raise HaloposeError(f"cannot read {error.filename}: keep the json and bin files together") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise HaloposeError(
                f"{path} is no TensorFlow.js graph model ({type(error).__name__}: {str(error)[:80]})"
            ) from None

    def ending(self, name: str) -> str:
        """Return the full name of the only node with this ending."""
        found = [node for node in self.nodes if node.endswith(name)]
        if len(found) != 1:
            raise HaloposeError(f"{self.path} has {len(found)} nodes {name}, not one: it is another network")
        return found[0]

    def inputs(self, name: str) -> list[str]:
        """Return the inputs of a node."""
        return [source.split(":")[0] for source in self.nodes[name].get("input", [])]

    def to_onnx(self, outputs: Mapping[str, str]) -> Any:
        """Convert everything that the outputs are computed from.

        Args:
            outputs: Node of each output, by the name that it gets.

        Returns:
            ONNX model with images (n, 3, h, w) from 0 to 255 as ``input``, and maps (n, c, h, w).
        """
        import onnx

        converter = _Converter(self)
        for name, node in outputs.items():
            converter.add("Identity", [converter.convert(node)], name)
        value = onnx.helper.make_tensor_value_info
        kind = onnx.TensorProto.FLOAT
        maps = [value(name, kind, ["n", f"{name}_channels", "rows", "columns"]) for name in outputs]
        image = value("input", kind, ["n", 3, "h", "w"])
        graph = onnx.helper.make_graph(converter.nodes, self.path.stem, [image], maps, converter.constants)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", _OPSET)])
        model.ir_version = _IR
        onnx.checker.check_model(model)
        return model


def _weights(entries: list[Any], data: bytes) -> dict[str, Array]:
    weights, start = {}, 0
    for entry in entries:
        stored = entry.get("quantization", {})
        if stored and stored["dtype"] != "float16":
            raise ValueError("weights in 8 or 16 bits")
        kind = np.dtype(stored.get("dtype", entry["dtype"]))
        count = math.prod(entry["shape"])
        values = np.frombuffer(data, kind, count, start).reshape(entry["shape"])
        weights[entry["name"]] = values.astype(np.float32) if kind.kind == "f" else values
        start += count * kind.itemsize
    if start != len(data):
        raise ValueError(f"{len(data)} bytes of weights, not {start}")
    return weights


class _Converter:
    """Nodes and constants of the ONNX graph. Maps are (n, c, h, w) instead of (n, h, w, c)."""

    def __init__(self, model: GraphModel) -> None:
        self.model = model
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._converted: dict[str, str] = {}

    def add(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, values: Array) -> str:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values, np.float32), name))
        return name

    def convert(self, name: str) -> str:
        """Return the ONNX tensor of a node."""
        if name not in self._converted:
            self._converted[name] = self._convert(name)
        return self._converted[name]

    def _convert(self, name: str) -> str:
        model = self.model
        if name in model.weights:
            values = model.weights[name]
            return self.constant(name, values.transpose(0, 3, 1, 2) if values.ndim == 4 else values)
        if name not in model.nodes:
            raise HaloposeError(f"{model.path} has no node {name}")
        kind, inputs = model.nodes[name]["op"], model.inputs(name)
        if kind == "Placeholder":
            return "input"
        if kind == "Cast":
            return self.convert(inputs[0])
        if kind == "_FusedConv2D" or kind in _DEPTHWISE:
            return self._convolution(name, kind in _DEPTHWISE)
        if kind == "ResizeBilinear":
            return self._resize(name)
        if kind == "Sigmoid":
            return self.add("Sigmoid", [self.convert(inputs[0])], name)
        if kind in _ARITHMETIC:
            return self.add(_ARITHMETIC[kind], [self.convert(source) for source in inputs], name)
        raise HaloposeError(f"{model.path}: node {name} is a {kind}, which cannot be converted")

    def _resize(self, name: str) -> str:
        attributes = self.model.nodes[name]["attr"]
        if attributes["align_corners"]["b"] or not attributes["half_pixel_centers"]["b"]:
            raise HaloposeError(f"{self.model.path}: node {name} resizes in a way that cannot be converted")
        scales = self.constant(f"{name}/scales", np.array([1, 1, 2, 2]))  # every upsampling of the network doubles
        source = self.convert(self.model.inputs(name)[0])
        return self.add(
            "Resize", [source, "", scales], name, mode="linear", coordinate_transformation_mode="half_pixel"
        )

    def _convolution(self, name: str, depthwise: bool) -> str:
        attributes, sources = self.model.nodes[name]["attr"], self.model.inputs(name)
        weight = self.model.weights[sources[1]]
        fused = [_text(each) for each in attributes.get("fused_ops", {}).get("list", {}).get("s", [])]
        inputs = [self.convert(sources[0]), self.constant(sources[1], kernel_of(weight, depthwise))]
        if "BiasAdd" in fused:
            inputs.append(self.constant(sources[2], self.model.weights[sources[2]]))
        activation = next((each for each in fused if each != "BiasAdd"), None)
        result = self.add(
            "Conv",
            inputs,
            name if activation is None else f"{name}/convolution",
            auto_pad=_PADDING[_text(attributes["padding"]["s"])],
            strides=[int(step) for step in attributes["strides"]["list"]["i"]][1:3],
            group=weight.shape[2] if depthwise else 1,
            kernel_shape=list(weight.shape[:2]),
        )
        if activation is None:
            return result
        if activation == "Relu":
            return self.add("Relu", [result], name)
        if activation != "Relu6":
            raise HaloposeError(f"{self.model.path}: node {name} has a {activation}, which cannot be converted")
        limits = [self.constant(f"{name}/{limit}", np.array(limit)) for limit in (0.0, 6.0)]
        return self.add("Clip", [result, *limits], name)


def kernel_of(weight: Array, depthwise: bool) -> Array:
    """Return a kernel (h, w, in, out) of TensorFlow as (out, in, h, w); a depthwise one as (in * out, 1, h, w)."""
    if depthwise:
        return weight.transpose(2, 3, 0, 1).reshape(-1, 1, *weight.shape[:2])
    return weight.transpose(3, 2, 0, 1)


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()
