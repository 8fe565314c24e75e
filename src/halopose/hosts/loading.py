"""Load the host of a base model. Each framework is imported only for its own models."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halopose.errors import HaloposeError
from halopose.hosts.base import Host
from halopose.plugins import host_loader


def load_host(
    base: Path | str | nn.Module | Host,
    *,
    device: torch.device | str | None = None,
    unsafe: bool = False,
    end2end: bool | None = None,
) -> Host:
    """Load the host of a base model; the model's class or the names in the checkpoint decide the framework.

    Args:
        base: Path of a checkpoint, a loaded model, or a host, which is returned unchanged.
        device: Torch device.
        unsafe: Allow the checkpoint to run code.
        end2end: Head of a model that has two; default: the one that the framework uses.
    """
    if isinstance(base, Host):
        return base
    _check_device(device)
    plugin = host_loader(base)
    if plugin is not None:
        return plugin.load(base, device=device, unsafe=unsafe, end2end=end2end)
    options: dict[str, Any] = {"device": device, "end2end": end2end}
    if not isinstance(base, nn.Module) and Path(base).suffix.lower() == ".onnx":
        from halopose.hosts.onnx.onnx_host import OnnxHost

        if end2end is not None:
            raise HaloposeError(f"{base} has the head that it was exported with: leave --end2end off")
        return OnnxHost(base, device=device)
    if not isinstance(base, nn.Module) and Path(base).suffix.lower() == ".json":
        from halopose.hosts.movenet.movenet_host import MoveNetHost

        return MoveNetHost(base, device=device)
    if is_yolonas(base):
        from halopose.hosts.yolonas.yolonas_host import YoloNASHost

        if isinstance(base, nn.Module):
            return YoloNASHost(base, **options)
        return YoloNASHost.load(base, unsafe=unsafe, **options)
    from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost

    if isinstance(base, nn.Module):
        return UltralyticsHost(base, **options)
    return UltralyticsHost.load(base, unsafe=unsafe, **options)


def _check_device(device: torch.device | str | None) -> None:
    """Raise an error for a device that does not exist."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # the latter where torch was built without CUDA
        raise HaloposeError(
            f"no device {str(device)!r} here: give cpu, or cuda, cuda:1, mps where torch has them"
        ) from None


def is_yolonas(base: Path | str | nn.Module) -> bool:
    """Return whether a base model is YOLO-NAS-Pose, by the name of a weight; checkpoints are not compressed."""
    if isinstance(base, nn.Module):
        return type(base).__module__.startswith("libreyolo.")
    path = Path(base)
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"heads.head1.cls_pred.weight") >= 0
