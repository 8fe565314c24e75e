"""Copies from the model's device to the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def to_host(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors (N, ...) to the host in one transfer, because each transfer waits for the device.

    Args:
        columns: Tensors of one device, whose values single precision holds exactly.
    """
    tensors = list(columns.values())
    if tensors[0].device == torch.device("cpu"):
        return dict(columns)
    flat = [tensor.reshape(len(tensor), -1).float() for tensor in tensors]
    parts = torch.cat(flat, 1).cpu().split([one.shape[1] for one in flat], 1)
    return {
        name: part.reshape(tensor.shape).to(tensor.dtype)
        for (name, tensor), part in zip(columns.items(), parts, strict=True)
    }
