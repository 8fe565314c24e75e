"""Read access to an ONNX graph: producers, consumers, constants, and the convolutions behind a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from halopose.errors import HaloposeError
from halopose.types import Array

# Nodes whose output holds no values of their input.
_SHAPES = {"Shape", "Size", "ConstantOfShape", "Range"}
# Nodes that hand their first input on: the same values in another number format.
PASSED = {"Cast", "Identity", "QuantizeLinear", "DequantizeLinear"}
_INTEGER_CONVOLUTIONS = {"QLinearConv", "ConvInteger"}


@dataclass(frozen=True)
class FoldedConv:
    """A convolution of the graph with constant weights.

    Attributes:
        name: Name of the node.
        source: Tensor that it reads.
        weight: Weights (out, in, k, k).
        bias: Bias (out,).
    """

    name: str
    source: str
    weight: Array
    bias: Array


class GraphView:
    """The graph of an ONNX model."""

    def __init__(self, model: Any, where: str) -> None:
        import onnx
        from onnx import numpy_helper

        self._onnx, self._numpy = onnx, numpy_helper
        self.model, self.where = model, where
        self.nodes = list(model.graph.node)
        self.producers = {name: node for node in self.nodes for name in node.output if name}
        self.initialisers = {tensor.name: tensor for tensor in model.graph.initializer}
        self.consumers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in node.input:
                self.consumers.setdefault(name, []).append(node)
        self.inputs = [value for value in model.graph.input if value.name not in self.initialisers]
        self.outputs = [value.name for value in model.graph.output]
        self._behind: dict[str, frozenset[str]] = {}

    def attribute(self, node: Any, name: str, otherwise: Any = None) -> Any:
        """Value of an attribute of a node."""
        found = [each for each in node.attribute if each.name == name]
        return self._onnx.helper.get_attribute_value(found[0]) if found else otherwise

    def constant(self, name: str) -> Array | None:
        """Values of a constant tensor, also behind casts and dequantisation; None if it is not constant."""
        if name in self.initialisers:
            return np.asarray(self._numpy.to_array(self.initialisers[name]))
        node = self.producers.get(name)
        if node is None:
            return None
        if node.op_type == "Constant":
            value = self.attribute(node, "value")
            return None if value is None else np.asarray(self._numpy.to_array(value))
        if node.op_type in ("Identity", "Cast"):
            return self.constant(node.input[0])
        if node.op_type == "DequantizeLinear":
            return self._dequantised(node)
        return None

    def _dequantised(self, node: Any) -> Array | None:
        parts = [self.constant(name) for name in node.input]
        if any(part is None for part in parts):
            return None
        values, scale = (np.asarray(part, np.float64) for part in parts[:2])
        zero = np.zeros_like(scale) if len(parts) < 3 else np.asarray(parts[2], np.float64)
        if scale.ndim:
            axis = self.attribute(node, "axis", 1) % values.ndim
            shape = [-1 if number == axis else 1 for number in range(values.ndim)]
            scale, zero = scale.reshape(shape), zero.reshape(shape)
        return np.asarray((values - zero) * scale, np.float32)

    def passed(self, name: str) -> str:
        """The tensor in floating point behind casts, copies and quantisation."""
        node = self.producers.get(name)
        while node is not None and node.op_type in PASSED:
            name = node.input[0]
            node = self.producers.get(name)
        return name

    def names(self, node: Any) -> str:
        """What to call a node in a message."""
        return node.name or f"{node.op_type} -> {node.output[0]}"

    def behind(self, name: str) -> frozenset[str]:
        """Outputs of the convolutions that a tensor is computed from without a further convolution between."""
        if name in self._behind:
            return self._behind[name]
        stack, seen, found = [name], {name}, set()
        while stack:
            node = self.producers.get(stack.pop())
            if node is None or node.op_type in _SHAPES:
                continue
            if node.op_type in _INTEGER_CONVOLUTIONS:
                raise HaloposeError(
                    f"{self.where}: node {self.names(node)} is a {node.op_type}, whose weights cannot start heads: "
                    "quantise the model in the QDQ format, or give the model before quantisation"
                )
            if node.op_type == "Conv" and not self._is_expectation(node):
                found.add(node.output[0])
                continue
            for source in node.input:
                if source and source not in seen:
                    seen.add(source)
                    stack.append(source)
        self._behind[name] = frozenset(found)
        return self._behind[name]

    def _is_expectation(self, node: Any) -> bool:
        """Whether a convolution computes the mean of a distribution over distances: weights 0, 1, 2, ..."""
        weight = self.constant(node.input[1])
        if weight is None or weight.shape[0] != 1 or weight.shape[2:] != (1, 1):
            return False
        values = weight.ravel().astype(np.float64)
        return len(values) > 1 and bool(np.allclose(values, np.arange(len(values)), atol=0.1))

    def convolution(self, node: Any) -> FoldedConv:
        """Weights of a convolution that heads can copy."""
        weight = self.constant(node.input[1])
        bias = self.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if weight is None or (bias is None and len(node.input) > 2 and node.input[2]):
            raise HaloposeError(f"{self.where}: the weights of node {self.names(node)} are not constant")
        bias = np.zeros(len(weight), np.float32) if bias is None else bias
        kernel = weight.shape[2:]
        plain = len(kernel) == 2 and kernel[0] == kernel[1] and kernel[0] % 2 == 1 and weight.ndim == 4
        plain &= self.attribute(node, "group", 1) == 1 and set(self.attribute(node, "strides", [1])) == {1}
        plain &= set(self.attribute(node, "dilations", [1])) == {1} and bias.shape == (len(weight),)
        same = self.attribute(node, "auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER")
        pads = set(self.attribute(node, "pads", [0]))
        if not plain or not (same or pads == {kernel[0] // 2}):
            raise HaloposeError(
                f"{self.where}: node {self.names(node)} is a convolution that heads cannot mirror (kernel "
                f"{'x'.join(map(str, kernel))}): give the pose layers with --features"
            )
        return FoldedConv(self.names(node), node.input[0], np.asarray(weight, np.float32), np.asarray(bias, np.float32))

    def chain(self, convolution: Any) -> Iterator[tuple[Any, str]]:
        """Convolutions one after the other from one backwards, with the activation that follows each.

        Ends where something else than an activation lies between two convolutions.
        """
        activation: str | None = "identity"
        while convolution is not None and activation is not None:
            yield convolution, activation
            activation, convolution = self._before(convolution.input[0])

    def _before(self, name: str) -> tuple[str | None, Any]:
        """Activation and convolution that make a tensor; None, None if it is made otherwise."""
        name = self.passed(name)
        node = self.producers.get(name)
        if node is None:
            return None, None
        activation, source = "identity", name
        if node.op_type == "Relu" or (node.op_type == "Clip" and self._is_relu(node)):
            activation, source = "relu", node.input[0]
        elif node.op_type in ("Swish", "Silu"):
            activation, source = "silu", node.input[0]
        elif node.op_type == "Mul":
            gates = [self.producers.get(self.passed(each)) for each in node.input]
            for gate, other in zip(gates, reversed(node.input), strict=True):
                if gate is not None and gate.op_type == "Sigmoid" and self.passed(gate.input[0]) == self.passed(other):
                    activation, source = "silu", other
                    break
            else:
                return None, None
        made = self.producers.get(self.passed(source))
        return (activation, made) if made is not None and made.op_type == "Conv" else (None, None)

    def _is_relu(self, node: Any) -> bool:
        low = self.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
        return low is not None and float(low) == 0.0 and not (len(node.input) > 2 and node.input[2])

    def convolutions_before(self, names: Iterable[str]) -> Iterator[tuple[Array, Array]]:
        """Constant weights and biases of all convolutions that tensors are computed from."""
        stack = list(names)
        seen = set(stack)
        while stack:
            node = self.producers.get(stack.pop())
            if node is None:
                continue
            if node.op_type in ("Conv", "ConvTranspose"):
                weight = self.constant(node.input[1])
                bias = self.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
                if weight is not None and weight.ndim == 4:
                    channels = weight.shape[0 if node.op_type == "Conv" else 1]
                    yield weight, np.zeros(channels) if bias is None else bias
            for source in node.input:
                if source and source not in seen:
                    seen.add(source)
                    stack.append(source)

    def read_tensors(self, name: str) -> set[str]:
        """A tensor and those it is the same as, in floating point or quantised."""
        found = {name}
        node = self.producers.get(name)
        while node is not None and node.op_type in PASSED:
            name = node.input[0]
            found.add(name)
            node = self.producers.get(name)
        return found
