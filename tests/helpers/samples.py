"""Squared distances of one keypoint, as input of calibrations."""

from typing import Any

import numpy as np
import torch

from halopose.calibration.estimation import Sample


def double(values: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)


def column(distances: Any, weight: Any = None) -> Sample:
    weight = np.ones(len(distances)) if weight is None else weight
    return Sample(double(distances)[:, None], double(weight)[:, None])
