"""pytorch-ood, an independent implementation of what the literature does about data unlike all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halopose.hosts.torchvision_shim import ensure_torchvision


def detector(name: str, *arguments: Any, **options: Any) -> Any:
    """One of its detectors by name, for features alone; it imports torchvision, beside a CPU torch too."""
    ensure_torchvision()
    from pytorch_ood import detector as detectors

    return getattr(detectors, name)(None, *arguments, **options)


def fitted(name: str, features: Tensor, *arguments: Any, **options: Any) -> Any:
    """The same, fitted on features (N, C) of one class."""
    labels = torch.zeros(len(features), dtype=torch.long)
    return detector(name, *arguments, **options).fit_features(features, labels)
