"""The contract between a frozen pose model and everything else, in pixels of the model's input.

A host loads a trained model, runs it unchanged, calls the framework's own training assigner and its own
post-processing, and describes the pose head that the probabilistic heads mirror.
"""

from __future__ import annotations

import hashlib
import logging
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from halopose.errors import HaloposeError
from halopose.hosts.traceable import Traceable
from halopose.hosts.weight_sketch import weight_sketch
from halopose.keypoints import Keypoints
from halopose.types import Array
from halopose.uncertainty.context_features import (
    CANDIDATES,
    Candidates,
    CellBoxes,
    ContextFeatures,
    context_features_at,
    pad_by_image,
    take_rows,
)
from halopose.uncertainty.heads import ConvTemplate

log = logging.getLogger(__name__)

# What loaders of checkpoints raise, by how a file is damaged or what it asks to be unpickled.
LOAD_ERRORS = (
    TypeError, ImportError, AttributeError, RuntimeError, OSError, EOFError, LookupError, ValueError,
    AssertionError, UnpicklingError,
)  # fmt: skip


# What torch and Ultralytics say of a checkpoint that only unsafe loading would take.
REFUSED_TYPES = ("unsupported global", "references types outside")


@dataclass(frozen=True)
class HostOutput:
    """Result of one forward pass for A cells over all levels, finest level first.

    Attributes:
        features: A map (B, C, H, W) per level.
        scores: Confidence (B, A) that ranks detections.
        keypoints: Keypoints (B, A, K, 2) before clipping.
        raw: The framework's output, for its assigner and post-processing.
    """

    features: tuple[Tensor, ...]
    scores: Tensor
    keypoints: Tensor
    raw: Any


@dataclass(frozen=True)
class Targets:
    """Objects of one image: boxes (M, 4) xyxy, class_ids (M,), keypoints (M, K, 2), labelled (M, K).

    A keypoint that is not labelled may hold anything, NaN included.
    """

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

    @property
    def area(self) -> tuple[float, float, float, float]:
        """Where the image itself lies in the input: left, top, right, bottom."""
        (height, width), (left, top) = self.shape, self.pad
        return left, top, left + self.gain[0] * width, top + self.gain[1] * height

    def to_input(self, points: Array) -> Array:
        """Original to input pixels (..., 2)."""
        return np.asarray(points * np.asarray(self.gain) + np.asarray(self.pad))

    def factors_to_original(self, scale_tril: Array) -> Array:
        """Cholesky factors (..., 2, 2) in original pixels; scaling rows keeps them lower triangular."""
        return np.asarray(scale_tril / np.array(self.gain)[:, None])


class Placer(Protocol):
    """Lays an image into the input. It holds no model, so that other processes may do it."""

    def __call__(
        self, image: Array, imgsz: int, rectangular: bool, room: Array | None = None
    ) -> tuple[Array, Letterbox]:
        """Pixels of a BGR image (h, w, 3) in an input of a size, and where it lies there.

        rectangular: whether to trim the padding. room: bytes (n,) where pixels that fit may be laid at once, which
        saves a copy; they are an array of their own where a framework does not let one say where.
        """


def laid_in(room: Array | None, shape: tuple[int, ...]) -> Array:
    """Bytes of a shape at the beginning of a room (n,), where there is one that holds them; else a new array."""
    count = math.prod(shape)
    return np.empty(shape, np.uint8) if room is None or count > room.size else room[:count].reshape(shape)


class Host(ABC):
    """A frozen pose model. Subclasses never change its parameters, buffers and outputs.

    Attributes:
        layout: Keypoints as the checkpoint describes them.
    """

    strides: tuple[int, ...]
    layout: Keypoints
    class_names: tuple[str, ...]
    fingerprints: tuple[str, ...]
    description: str

    is_file: bool = False  # whether the model is a deployed file, which stays as it is
    half: bool = False  # whether ``use_half`` was asked for

    @property
    def keypoint_count(self) -> int:
        return len(self.layout)

    def use_half(self) -> None:
        """Run all before the head in half precision from now on: faster on a GPU, and never the default.

        Outputs are then no longer those of the framework bit for bit.
        """
        kind = self.device.type
        log.warning("half precision on %s: keypoints and covariances are not those of the model as it is", kind)
        self.half = True

    @contextmanager
    def precision(self, head: nn.Module) -> Iterator[None]:
        """What the model runs in. In half precision the head, which says where things are, stays in full."""
        if not self.half:
            yield
            return
        kind, own = self.device.type, head.forward

        def in_full(features: Any, *rest: Any) -> Any:
            with torch.autocast(kind, enabled=False):
                return own([maps.float() for maps in features], *rest)

        head.forward = in_full
        try:
            with torch.autocast(kind, dtype=torch.bfloat16 if kind == "cpu" else torch.float16):
                yield
        finally:
            del head.forward

    def check_layout(self, layout: Keypoints) -> None:
        """Refuse data of another number of keypoints than the model has."""
        if len(layout) != self.keypoint_count:
            raise HaloposeError(
                f"the data have {len(layout)} keypoints, the model {self.keypoint_count}: they do not fit"
            )

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        """Height and width of the only input that the model takes; None if it takes any."""
        return None

    def check_size(self, imgsz: int) -> None:
        """Refuse an input size that the model does not take."""
        fixed, stride = self.fixed_size, max(self.strides[-1], 32)
        if fixed is not None and -(-imgsz // stride) * stride != max(fixed):
            raise HaloposeError(
                f"{self.description} takes inputs of {fixed[1]} x {fixed[0]} only: give --imgsz {max(fixed)}, or "
                "export the model with dynamic sizes"
            )

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the model lives."""

    def preprocess(self, images: Sequence[Array], imgsz: int, rectangular: bool) -> tuple[Tensor, list[Letterbox]]:
        """Input batch (B, 3, H, W) of BGR images (h, w, 3), as the framework itself makes it.

        rectangular: where the framework can, trim the padding if all shapes agree.
        """
        rectangular = rectangular and len({image.shape for image in images}) == 1
        place = self.placer()
        placed = [place(image, imgsz, rectangular) for image in images]
        return self.to_batch([pixels for pixels, _ in placed]), [box for _, box in placed]

    @abstractmethod
    def placer(self) -> Placer:
        """What lays an image into the input; it holds no model, so that other processes may do it."""

    @abstractmethod
    def to_batch(self, placed: Sequence[Array]) -> Tensor:
        """The input batch (B, 3, H, W) of placed images of one shape, where the model lives."""

    @abstractmethod
    def forward(self, batch: Tensor) -> HostOutput:
        """Run the frozen model."""

    @abstractmethod
    def assign(self, output: HostOutput, targets: Sequence[Targets], sigmas: tuple[float, ...]) -> Assignment:
        """The framework's own training-time label assignment; some compare keypoints, by the sigmas (K,)."""

    @abstractmethod
    def select(
        self,
        output: HostOutput,
        *,
        conf: float,
        iou: float,
        max_detections: int = 300,
        letterboxes: Sequence[Letterbox] | None = None,
    ) -> list[Selection]:
        """The framework's own inference-time post-processing, per image.

        letterboxes: where the images lie in the input. A framework that clips boxes to the image before it
        suppresses overlaps needs them; without them nothing is clipped.
        """

    def cells(self, output: HostOutput) -> CellBoxes | None:
        """What any cells say before suppression; None of a one-to-one model."""
        return None

    @torch.inference_mode()
    def context_features(self, output: HostOutput, image: Tensor, cell: Tensor) -> ContextFeatures:
        """Compute the context features of cells (N,) of images (N,)."""
        said, scores = self.cells(output), output.scores
        if said is None:
            raise HaloposeError(f"{self.description} has one cell per object: use heads without context features")
        own, place = pad_by_image(image, cell, len(scores))
        best, cells = scores.topk(min(CANDIDATES, scores.shape[1]), dim=1, sorted=False)
        boxes, count = said.boxes(torch.cat([own, cells], 1)), own.shape[1]
        candidates = Candidates(best, boxes[:, count:], lambda chosen: said.points(take_rows(cells, chosen)))
        mine = scores.gather(1, own), boxes[:, :count], said.points(own)
        found = context_features_at(output.features, self.strides, candidates, mine, self.keypoint_count)
        return found if place is None else found.select(place)

    @abstractmethod
    def to_original(self, selection: Selection, letterbox: Letterbox, size: tuple[int, int]) -> Selection:
        """The same detections in original pixels, as the framework itself reports them."""

    def traceable(self) -> Traceable:
        """A copy of the model in the form in which the framework itself exports it."""
        raise HaloposeError(f"{type(self).__name__} cannot be exported: use a host that can")

    @abstractmethod
    def pose_templates(self) -> list[list[ConvTemplate]]:
        """The pose head's convolutions before its last one, level by level."""


def refusal(path: object, error: Exception, unsafe: bool) -> HaloposeError:
    """What to say, in one line, of a checkpoint that could not be loaded."""
    reason = " ".join(str(error).split())
    _, cause, rest = reason.partition("Unsupported global: GLOBAL ")  # torch says it after much advice
    reason = f"it holds {rest.split()[0]}" if cause else reason[:160]
    code = any(words in str(error).lower() for words in REFUSED_TYPES) and _is_pickled(path)
    hint = "; if you trust it, allow that with --unsafe (unsafe=True)" if code and not unsafe else ""
    return HaloposeError(f"cannot load {path} ({reason}){hint}")


def check_checkpoint(path: Path | str) -> None:
    """Refuse a zipped checkpoint whose entries are larger than the file: torch never compresses them."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return  # refused by torch with a reason
    if total > Path(path).stat().st_size:
        raise HaloposeError(f"{path} unpacks to {total} bytes, more than the file has: get it again")


def check_weights(path: object, tensors: Iterable[Tensor]) -> None:
    """Refuse weights that repeat a small storage, such as a tensor with stride 0: a copy would fill the memory."""
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise HaloposeError(f"{path} has weights that are larger than their data: get it again")


def _is_pickled(path: object) -> bool:
    """Whether a file begins as torch's files do, zipped or not; others are no checkpoint at all."""
    try:
        with open(str(path), "rb") as file:
            return file.read(2) in (b"PK", b"\x80\x02")
    except OSError:
        return False


def sketch_of_head(templates: Sequence[Sequence[ConvTemplate]], lasts: Sequence[nn.Conv2d], half: bool = False) -> str:
    """Fingerprint of a pose head within rounding; see ``hosts.weight_sketch``.

    Args:
        templates: Folded convolutions of every level before the last one.
        lasts: The last convolution of every level.
        half: Whether the weights are stored in half precision.
    """
    return weight_sketch(
        [
            [
                *((layer.weight.numpy(), layer.bias.numpy()) for layer in level),
                (last.weight.detach().cpu().numpy(), _bias_of(last).detach().cpu().numpy()),
            ]
            for level, last in zip(templates, lasts, strict=True)
        ],
        half,
    )


def _bias_of(layer: nn.Conv2d) -> Tensor:
    return layer.weight.new_zeros(layer.out_channels) if layer.bias is None else layer.bias


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and values of a state dict."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tuple(value.shape)}|{value.dtype}|".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
