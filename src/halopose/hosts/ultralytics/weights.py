"""Ultralytics pose models as safetensors: half-precision weights, with architecture and names as JSON.

Nothing is unpickled and only layers of the framework are built, so any file is safe to read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from ultralytics.nn import modules
from ultralytics.nn.tasks import PoseModel

from halopose.errors import HaloposeError
from halopose.hosts.base import LOAD_ERRORS

FORMAT = "halopose ultralytics pose model 1"
_ATTRIBUTES = ("names", "kpt_names", "kpt_oks_sigmas")
_ACTIVATION = re.compile(r"(torch\.)?nn\.\w+\((inplace=True)?\)")  # the framework would evaluate this text as code
_WIDEST, _DEEPEST = 8192, 100  # largest number of channels or classes, and of repetitions of a layer


def save_model(model: PoseModel, path: Path | str, licence: str) -> None:
    """Write an unfused model with its licence; weights are rounded to half precision."""
    if model.is_fused():
        raise HaloposeError("this model is fused: save it before it is made ready for inference")
    described = {name: _plain(getattr(model, name)) for name in _ATTRIBUTES if hasattr(model, name)}
    content = {"format": FORMAT, "yaml": _plain(model.yaml), "licence": licence, **described}
    tensors = {name: _half(value).contiguous() for name, value in model.state_dict().items()}
    try:
        save_file(tensors, path, metadata={"halopose": json.dumps(content)})
    except (OSError, SafetensorError) as error:
        raise HaloposeError(f"cannot write {path} ({error}): check the folder and the disk") from None


def read_model(path: Path | str) -> PoseModel:
    """Read a model that ``save_model`` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads((file.metadata() or {}).get("halopose", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError):
        raise HaloposeError(f"{path} is damaged or no safetensors file: get it again") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise HaloposeError(f"{path} does not say which model it holds: give a .pt file, or one of halopose")
    architecture = content.get("yaml")
    if not _is_architecture(architecture):
        raise HaloposeError(f"{path} names an architecture that is none of the framework's: get it again")
    try:
        model = PoseModel(architecture, verbose=False)
        model.load_state_dict({name: _full(value) for name, value in tensors.items()})
        for name in _ATTRIBUTES:
            if name in content:
                setattr(model, name, _restored(content[name]))
    except LOAD_ERRORS:
        raise HaloposeError(f"the weights in {path} do not fit the architecture it names: get it again") from None
    return model.eval()


def _is_architecture(content: Any) -> bool:
    """Return whether content describes layers of the framework or torch with valid sizes.

    The framework would call any function named as a layer, and evaluate an activation as code.
    """
    if not isinstance(content, dict) or not _is_small(content):
        return False
    activation = content.get("activation")
    if activation is not None and not (isinstance(activation, str) and _ACTIVATION.fullmatch(activation)):
        return False
    layers = [content.get(part) for part in ("backbone", "head")]
    return all(isinstance(part, list) and part and all(map(_is_layer, part)) for part in layers)


def _is_layer(layer: Any) -> bool:
    """Return whether content is a layer: from, repetitions, name of a module, arguments."""
    if not isinstance(layer, list) or len(layer) != 4 or not isinstance(layer[2], str):
        return False
    place, name = (nn, layer[2][3:]) if layer[2].startswith("nn.") else (modules, layer[2])
    kind = getattr(place, name, None)
    repeated = isinstance(layer[1], int) and 1 <= layer[1] <= _DEEPEST
    return repeated and isinstance(layer[3], list) and isinstance(kind, type) and issubclass(kind, nn.Module)


def _is_small(value: Any, depth: int = 0) -> bool:
    """Return whether all numbers in nested content, and its depth, are within the limits of a model."""
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return depth < 6 and all(_is_small(entry, depth + 1) for entry in inner)
    return not isinstance(value, (int, float)) or -_DEEPEST <= value <= _WIDEST


def _half(value: Tensor) -> Tensor:
    return value.detach().cpu().half() if value.is_floating_point() else value.detach().cpu()


def _full(value: Tensor) -> Tensor:
    return value.to(torch.float32) if value.is_floating_point() else value


def _plain(value: Any) -> Any:
    """Return the value as JSON content."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def _restored(value: Any) -> Any:
    """Convert class numbers, which JSON stores as text, back to numbers."""
    return {int(key): each for key, each in value.items()} if isinstance(value, dict) else value
