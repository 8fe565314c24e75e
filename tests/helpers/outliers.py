"""pytorch-ood, an independent implementation of out-of-distribution detectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halopose.hosts.torchvision_shim import ensure_torchvision


def detector(name: str, *arguments: Any, **options: Any) -> Any:
    """A detector of pytorch-ood by name, on features. It imports torchvision, which the shim provides."""
    ensure_torchvision()
    from pytorch_ood import detector as detectors

    return getattr(detectors, name)(None, *arguments, **options)


def fitted(name: str, features: Tensor, *arguments: Any, **options: Any) -> Any:
    """A detector fitted on features (N, C) of one class."""
    labels = torch.zeros(len(features), dtype=torch.long)
    return detector(name, *arguments, **options).fit_features(features, labels)
