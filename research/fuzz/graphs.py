"""ONNX files as base models: graphs with changed nodes, tensors, attributes, inputs, outputs and metadata."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from halopose.data.files import write_bytes
from halopose.errors import HaloposeError
from halopose.hosts.onnx.onnx_host import OnnxHost
from research.fuzz.bases import small_model
from research.fuzz.damage import Reader, Wrong, spoil

GOOD, FILE = "good-base.onnx", "base.onnx"
OPERATORS = (
    "Relu",
    "Sigmoid",
    "Identity",
    "Conv",
    "Concat",
    "Transpose",
    "Add",
    "NonMaxSuppression",
    "QLinearConv",
    "Nonsense",
)
METADATA = ("", "[]", "{}", "[17]", "[3, 3]", "[-1, 2]", "nan", "{0: 1}", "'" * 3000, "(" * 500)
PROPERTIES = [
    *("input", "output", "opset", "metadata", "kpt_shape", "damaged", "initializer", "features", "node", "tensor"),
    *("channels", "version", "acyclic", "no graph"),
]


def onnx_file(folder: Path) -> None:
    """Ultralytics' own export of a small model."""
    from benchmarks.export import ultralytics_onnx

    work = folder / "export"
    work.mkdir()
    shutil.move(ultralytics_onnx(small_model(), work, size=64), folder / GOOD)


def changed_graph(folder: Path, rng: random.Random) -> None:
    """Damage bytes, or apply one to three changes to the graph."""
    import onnx

    good = folder / GOOD
    if rng.random() < 0.15:
        write_bytes(folder / FILE, spoil(good.read_bytes(), rng))
        return
    model = onnx.load(good)
    for _ in range(rng.randint(1, 3)):
        rng.choice(CHANGES)(model, rng)
    write_bytes(folder / FILE, model.SerializeToString())


def _node(model: Any, rng: random.Random) -> Any:
    """A node; often one near the outputs, where the analysis looks."""
    nodes = model.graph.node
    return nodes[-1 - int(len(nodes) * rng.random() ** 2)] if nodes else _nothing()


def _nothing() -> Any:
    import onnx

    return onnx.NodeProto()


def _remove_node(model: Any, rng: random.Random) -> None:
    if model.graph.node:
        model.graph.node.remove(_node(model, rng))


def _change_operator(model: Any, rng: random.Random) -> None:
    _node(model, rng).op_type = rng.choice(OPERATORS)


def _change_inputs(model: Any, rng: random.Random) -> None:
    node, other = _node(model, rng), _node(model, rng)
    names = list(node.input)
    if rng.random() < 0.5:
        rng.shuffle(names)
    elif names:
        names[rng.randrange(len(names))] = rng.choice([*other.output, *other.input, "", "nowhere"])
    del node.input[rng.randint(0, len(names)) :]
    node.input[:] = names


def _remove_input(model: Any, rng: random.Random) -> None:
    node = _node(model, rng)
    if node.input:
        del node.input[rng.randrange(len(node.input))]


def _change_attribute(model: Any, rng: random.Random) -> None:
    node = _node(model, rng)
    if not node.attribute:
        return
    attribute = rng.choice(list(node.attribute))
    if rng.random() < 0.3:
        node.attribute.remove(attribute)
    elif attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice([-7, 0, 3, 2**40])
    else:
        attribute.i = rng.choice([-7, 0, 3, 2**40])


def _change_tensor(model: Any, rng: random.Random) -> None:
    from onnx import numpy_helper

    if not model.graph.initializer:
        return
    tensor = rng.choice(list(model.graph.initializer))
    kind = rng.randrange(5)
    if kind == 0:
        model.graph.initializer.remove(tensor)
    elif kind == 1 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice([0, -1, 1, 5, 2**40])
    elif kind == 2:
        tensor.data_type = rng.choice([0, 1, 2, 7, 10, 99])
    elif kind == 3:
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.full_like(values, rng.choice([0, 1])), tensor.name))
    else:
        tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 2]


def _change_outputs(model: Any, rng: random.Random) -> None:
    outputs = model.graph.output
    kind = rng.randrange(4)
    if kind == 0:
        del outputs[:]
    elif kind == 1:
        outputs.add().name = rng.choice([*_node(model, rng).output, "nowhere"])
    elif outputs and kind == 2:
        outputs[0].name = rng.choice([*_node(model, rng).output, ""])
    elif outputs:
        outputs.add().CopyFrom(copy.deepcopy(outputs[0]))


def _change_image(model: Any, rng: random.Random) -> None:
    value = model.graph.input[0]
    sides = value.type.tensor_type.shape.dim
    kind = rng.randrange(4)
    if kind == 0 and sides:
        rng.choice(list(sides)).dim_value = rng.choice([0, 1, 7, 64, 100, -3, 2**40])
    elif kind == 1 and sides:
        del sides[-1]
    elif kind == 2:
        value.type.tensor_type.elem_type = rng.choice([0, 2, 7, 10, 99])
    else:
        model.graph.input.add().CopyFrom(value)


def _change_version(model: Any, rng: random.Random) -> None:
    kind = rng.randrange(3)
    if kind == 0:
        model.opset_import[0].version = rng.choice([0, 1, 9, 12, 99, -1])
    elif kind == 1:
        del model.opset_import[:]
    else:
        model.ir_version = rng.choice([0, 1, 3, 99])


def _change_metadata(model: Any, rng: random.Random) -> None:
    if model.metadata_props:
        rng.choice(list(model.metadata_props)).value = rng.choice(METADATA)


CHANGES = (
    *(_remove_node, _change_operator, _change_inputs, _change_inputs, _remove_input, _change_attribute),
    *(_change_tensor, _change_tensor, _change_outputs, _change_image, _change_version, _change_metadata),
)


def read_graph(folder: Path) -> object:
    """Open the file and predict; a refusal must name a node, a tensor or a property."""
    try:
        host = OnnxHost(folder / FILE)
        size = max(host.graph.input.size or (64, 64))
        image = np.random.default_rng(0).integers(0, 255, (64, 48, 3), dtype=np.uint8)
        batch, boxes = host.preprocess([image], size, True)
        output = host.forward(batch)
        return host.select(output, conf=0.0, iou=0.7, letterboxes=boxes)
    except HaloposeError as error:
        if not any(name in str(error).lower() for name in (*PROPERTIES, *_names(folder / FILE))):
            raise Wrong(f"names no node, tensor or property: {error}") from None
        raise


def _names(path: Path) -> set[str]:
    """Names of nodes, tensors and operators of a file that can be parsed."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(path).graph
    except (DecodeError, ValueError, TypeError):
        return set()
    found = {name for node in graph.node for name in (node.name, node.op_type, *node.input, *node.output)}
    return {name.lower() for name in found if len(name) > 2}


READERS = (Reader("ONNX base", 0.3, onnx_file, changed_graph, read_graph),)
