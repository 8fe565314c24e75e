"""Ultralytics pose models as safetensors: weights in half precision, architecture and names as JSON beside them.

In: a trained ``PoseModel``, or such a file. Out: the other. Nothing is unpickled: any file is safe to read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from ultralytics.nn.tasks import PoseModel

from halopose.errors import HaloposeError

FORMAT = "halopose ultralytics pose model 1"
_ATTRIBUTES = ("names", "kpt_names", "kpt_oks_sigmas")


def save_model(model: PoseModel, path: Path | str, licence: str) -> None:
    """Write an unfused model; weights are rounded to half precision, and the file says under which licence."""
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
    """The model of a file that ``save_model`` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads((file.metadata() or {}).get("halopose", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError):
        raise HaloposeError(f"{path} is damaged or no safetensors file: get it again") from None
    if content.get("format") != FORMAT:
        raise HaloposeError(f"{path} does not say which model it holds: give a .pt file, or one of halopose")
    model = PoseModel(content["yaml"], verbose=False)
    try:
        model.load_state_dict({name: _full(value) for name, value in tensors.items()})
    except RuntimeError:
        raise HaloposeError(f"the weights in {path} do not fit the architecture it names") from None
    for name in _ATTRIBUTES:
        if name in content:
            setattr(model, name, _restored(content[name]))
    return model.eval()


def _half(value: Tensor) -> Tensor:
    return value.detach().cpu().half() if value.is_floating_point() else value.detach().cpu()


def _full(value: Tensor) -> Tensor:
    return value.to(torch.float32) if value.is_floating_point() else value


def _plain(value: Any) -> Any:
    """The value as JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def _restored(value: Any) -> Any:
    """JSON turns class numbers into text; the framework wants them back."""
    return {int(key): each for key, each in value.items()} if isinstance(value, dict) else value
