"""The contract between a frozen pose model and everything else, in pixels of the model's input.

A host loads a trained model, runs it unchanged, calls the framework's own training assigner and its own
post-processing, and describes the pose head that the probabilistic heads mirror.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halopose.heads import ConvTemplate
from halopose.poses import Array


@dataclass(frozen=True)
class HostOutput:
    """What one forward pass yields, per anchor cell (A cells over all levels, finest level first).

    features: a map (B, C, H, W) per level; scores (B, A), the confidence that ranks detections; keypoints
    (B, A, K, 2) before any clipping; raw: the framework's own output, for its assigner and post-processing.
    """

    features: tuple[Tensor, ...]
    scores: Tensor
    keypoints: Tensor
    raw: Any


@dataclass(frozen=True)
class Targets:
    """Objects of one image: boxes (M, 4) xyxy, class_ids (M,), keypoints (M, K, 2), labelled (M, K)."""

    boxes: Tensor
    class_ids: Tensor
    keypoints: Tensor
    labelled: Tensor


@dataclass(frozen=True)
class Assignment:
    """Cells that the framework's assigner gives to objects: image, cell, object in the image, (N,) each."""

    image: Tensor
    cell: Tensor
    object: Tensor


@dataclass(frozen=True)
class Selection:
    """Detections of one image that survive the framework's post-processing; cell (N,) says where from.

    boxes (N, 4) xyxy, scores (N,), class_ids (N,), keypoints (N, K, 2), visibility (N, K) or None.
    """

    cell: Tensor
    boxes: Tensor
    scores: Tensor
    class_ids: Tensor
    keypoints: Tensor
    visibility: Tensor | None


@dataclass(frozen=True)
class Letterbox:
    """How an image of ``shape`` (height, width) lies in the input: input = gain * original + pad, x and y."""

    shape: tuple[int, int]
    gain: tuple[float, float]
    pad: tuple[float, float]

    def to_input(self, points: Array) -> Array:
        """Original to input pixels (..., 2)."""
        return np.asarray(points * np.asarray(self.gain) + np.asarray(self.pad))

    def factors_to_original(self, scale_tril: Tensor) -> Tensor:
        """Cholesky factors (..., 2, 2) in original pixels; scaling rows keeps them lower triangular."""
        gain = torch.tensor(self.gain, dtype=scale_tril.dtype, device=scale_tril.device)
        return scale_tril / gain[:, None]


class Host(ABC):
    """A frozen pose model. Subclasses leave its parameters, buffers and outputs exactly as they are."""

    strides: tuple[int, ...]
    keypoint_count: int
    keypoint_names: tuple[str, ...]
    class_names: tuple[str, ...]
    sigmas: Array
    fingerprints: tuple[str, ...]
    description: str

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the model lives."""

    @abstractmethod
    def preprocess(self, images: Sequence[Array], imgsz: int, rectangular: bool) -> tuple[Tensor, list[Letterbox]]:
        """Input batch (B, 3, H, W) of BGR images (h, w, 3); rectangular trims padding if shapes agree."""

    @abstractmethod
    def forward(self, batch: Tensor) -> HostOutput:
        """Run the frozen model."""

    @abstractmethod
    def assign(self, output: HostOutput, targets: Sequence[Targets]) -> Assignment:
        """The framework's own training-time label assignment."""

    @abstractmethod
    def select(self, output: HostOutput, *, conf: float, iou: float, max_detections: int = 300) -> list[Selection]:
        """The framework's own inference-time post-processing, per image."""

    @abstractmethod
    def to_original(self, selection: Selection, letterbox: Letterbox, size: tuple[int, int]) -> Selection:
        """The same detections in original pixels, as the framework itself reports them."""

    @abstractmethod
    def pose_templates(self) -> list[list[ConvTemplate]]:
        """The pose head's convolutions before its last one, level by level."""


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and values of a state dict."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tuple(value.shape)}|{value.dtype}|".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
