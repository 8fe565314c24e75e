"""Checkpoints that no loader may execute, and helpers for the tests of all hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halopose.errors import HaloposeError
from tests.helpers.models import (
    PHOTOGRAPHS,
    photograph,
)


def one_line(error: pytest.ExceptionInfo[HaloposeError]) -> str:
    text = str(error.value)
    assert text
    assert "\n" not in text
    return text


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested output, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


class Payload:
    """Unpickling it touches a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


class Foreign:
    """A class that no checkpoint may contain."""


def views() -> list[np.ndarray]:
    return [photograph(name)[:512, :640] for name in PHOTOGRAPHS]
