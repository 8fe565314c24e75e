"""Interface between a frozen pose model and all other code, in pixels of the model's input.

A host loads a trained model, runs it unchanged, calls the framework's own label assignment and post-processing, and
describes the pose head that the probabilistic heads mirror.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
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
from halopose.transfer import to_host
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

# Exceptions of checkpoint loaders, by kind of damage or forbidden content.
LOAD_ERRORS = (
    TypeError, ImportError, AttributeError, RuntimeError, OSError, EOFError, LookupError, ValueError,
    ArithmeticError, AssertionError, UnpicklingError, struct.error,
)  # fmt: skip


# Messages of torch and Ultralytics for a checkpoint that needs unsafe loading.
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
    """Objects of one image.

    Attributes:
        boxes: boxes (M, 4) xyxy.
        class_ids: classes (M,).
        keypoints: keypoints (M, K, 2); any value, including NaN, where not labelled.
        labelled: which keypoints (M, K) are labelled.
    """

    boxes: Tensor
    class_ids: Tensor
    keypoints: Tensor
    labelled: Tensor


@dataclass(frozen=True)
class Assignment:
    """Cells that the framework's assigner gives to objects: image, cell, and object in the image, (N,) each."""

    image: Tensor
    cell: Tensor
    object: Tensor


@dataclass(frozen=True)
class Selection:
    """Detections of one image after the framework's post-processing.

    Attributes:
        cell: cell (N,) of each detection.
        boxes: boxes (N, 4) xyxy.
        scores: scores (N,).
        class_ids: classes (N,).
        keypoints: keypoints (N, K, 2).
        visibility: visibility scores (N, K), or None.
    """

    cell: Tensor
    boxes: Tensor
    scores: Tensor
    class_ids: Tensor
    keypoints: Tensor
    visibility: Tensor | None


def on_host(selections: list[Selection]) -> list[Selection]:
    """Copy the selections of a batch to the host in one transfer."""
    if not selections:
        return selections
    present = [name for name, value in vars(selections[0]).items() if value is not None]
    found = to_host({name: torch.cat([getattr(one, name) for one in selections]) for name in present})
    counts = [len(one.scores) for one in selections]
    parts = {name: values.split(counts) for name, values in found.items()}
    return [replace(one, **{name: parts[name][number] for name in present}) for number, one in enumerate(selections)]


@dataclass(frozen=True)
class Letterbox:
    """Place of an image of ``shape`` (height, width) in the input: input = gain * original + pad, for x and y."""

    shape: tuple[int, int]
    gain: tuple[float, float]
    pad: tuple[float, float]

    @property
    def area(self) -> tuple[float, float, float, float]:
        """Part of the input that the image covers: left, top, right, bottom."""
        (height, width), (left, top) = self.shape, self.pad
        return left, top, left + self.gain[0] * width, top + self.gain[1] * height

    def to_input(self, points: Array) -> Array:
        """Convert original to input pixels (..., 2)."""
        return np.asarray(points * np.asarray(self.gain) + np.asarray(self.pad))

    def factors_to_original(self, scale_tril: Array) -> Array:
        """Convert Cholesky factors (..., 2, 2) to original pixels; scaled rows stay lower triangular."""
        return np.asarray(scale_tril / np.array(self.gain)[:, None])


class Placer(Protocol):
    """Places an image in the input. It holds no model, so that other processes can use it."""

    def __call__(
        self, image: Array, imgsz: int, rectangular: bool, room: Array | None = None
    ) -> tuple[Array, Letterbox]:
        """Return the input pixels of a BGR image (h, w, 3), and its place in the input.

        Args:
            image: BGR image.
            imgsz: input size.
            rectangular: trim the padding.
            room: memory (n,) for the pixels, which saves a copy; a framework that cannot use it returns a new array.
        """


def laid_in(room: Array | None, shape: tuple[int, ...]) -> Array:
    """Return an array of a shape at the start of ``room`` (n,) if it fits; else a new array."""
    count = math.prod(shape)
    return np.empty(shape, np.uint8) if room is None or count > room.size else room[:count].reshape(shape)


class Host(ABC):
    """A frozen pose model. Subclasses never change its parameters, buffers and outputs.

    Attributes:
        strides: pixels per cell of each level.
        layout: keypoints as the checkpoint describes them.
        class_names: names of the classes.
        fingerprints: hashes of the weights; an artifact is tied to them.
        description: name in messages and reports.
        half: whether ``use_half`` was called.
    """

    strides: tuple[int, ...]
    layout: Keypoints
    class_names: tuple[str, ...]
    fingerprints: tuple[str, ...]
    description: str

    is_file: bool = False  # whether the model is a deployed file, which is not changed
    half: bool = False  # whether ``use_half`` was called

    @property
    def keypoint_count(self) -> int:
        return len(self.layout)

    def use_half(self) -> None:
        """Run everything before the head in half precision from now on; faster on a GPU.

        Outputs then differ slightly from those of the framework.
        """
        kind = self.device.type
        log.warning(
            "half precision on %s: keypoints and covariances differ slightly from those of the unchanged model", kind
        )
        self.half = True

    @contextmanager
    def precision(self, head: nn.Module) -> Iterator[None]:
        """Return the context in which the model runs. In half precision the head stays in full precision."""
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
        """Raise an error for data with another number of keypoints."""
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
        """Device of the model."""

    def preprocess(self, images: Sequence[Array], imgsz: int, rectangular: bool) -> tuple[Tensor, list[Letterbox]]:
        """Return the input batch (B, 3, H, W) of BGR images (h, w, 3), equal to that of the framework, and their
        places.

        ``rectangular``: trim the padding if all shapes agree and the framework supports it.
        """
        rectangular = rectangular and len({image.shape for image in images}) == 1
        place = self.placer()
        placed = [place(image, imgsz, rectangular) for image in images]
        return self.to_batch([pixels for pixels, _ in placed]), [box for _, box in placed]

    @abstractmethod
    def placer(self) -> Placer:
        """Return the function that places an image in the input; it holds no model, so that other processes can
        use it.
        """

    @abstractmethod
    def to_batch(self, placed: Sequence[Array]) -> Tensor:
        """Return the input batch (B, 3, H, W) of placed images of one shape, on the model's device."""

    @abstractmethod
    def forward(self, batch: Tensor) -> HostOutput:
        """Run the frozen model."""

    @abstractmethod
    def assign(self, output: HostOutput, targets: Sequence[Targets], sigmas: tuple[float, ...]) -> Assignment:
        """Run the framework's own label assignment of training; some assigners use the sigmas (K,)."""

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
        """Run the framework's own post-processing for each image.

        ``letterboxes`` are the places of the images. A framework that clips boxes to the image before suppression needs
        them; without them nothing is clipped.
        """

    def cells(self, output: HostOutput) -> CellBoxes | None:
        """Return the predictions of cells before suppression; None for a one-to-one model."""
        return None

    @torch.inference_mode()
    def context_features(self, output: HostOutput, image: Tensor, cell: Tensor) -> ContextFeatures:
        """Compute the context features of cells (N,) of images (N,)."""
        cell_boxes, scores = self.cells(output), output.scores
        if cell_boxes is None:
            raise HaloposeError(f"{self.description} has one cell per object: use heads without context features")
        own, place = pad_by_image(image, cell, len(scores))
        best, cells = scores.topk(min(CANDIDATES, scores.shape[1]), dim=1, sorted=False)
        boxes, count = cell_boxes.boxes(torch.cat([own, cells], 1)), own.shape[1]
        candidates = Candidates(best, boxes[:, count:], lambda chosen: cell_boxes.points(take_rows(cells, chosen)))
        mine = scores.gather(1, own), boxes[:, :count], cell_boxes.points(own)
        found = context_features_at(output.features, self.strides, candidates, mine, self.keypoint_count)
        return found if place is None else found.select(place)

    @abstractmethod
    def to_original(self, selection: Selection, letterbox: Letterbox, size: tuple[int, int]) -> Selection:
        """Convert detections to original pixels, equal to those that the framework reports."""

    def traceable(self) -> Traceable:
        """Return a copy of the model in the form in which the framework exports it."""
        raise HaloposeError(f"{type(self).__name__} cannot be exported: use a host that can")

    @abstractmethod
    def pose_templates(self) -> list[list[ConvTemplate]]:
        """Return the convolutions of the pose head before its last one, level by level."""


def refusal(path: object, error: Exception, unsafe: bool) -> HaloposeError:
    """Return a one-line error for a checkpoint that could not be loaded."""
    reason = " ".join(str(error).split())
    _, cause, rest = reason.partition("Unsupported global: GLOBAL ")  # torch puts it after long advice
    reason = f"it holds {rest.split()[0]}" if cause else reason[:160]
    code = any(words in str(error).lower() for words in REFUSED_TYPES) and _is_pickled(path)
    hint = "; if you trust it, allow this with --unsafe (unsafe=True)" if code and not unsafe else ""
    return HaloposeError(f"cannot load {path} ({reason}){hint}")


def check_checkpoint(path: Path | str) -> None:
    """Raise an error for a zipped checkpoint whose entries are larger than the file: torch never compresses them."""
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
    """Raise an error for weights that repeat a small storage, such as a tensor with stride 0: a copy would fill the
    memory.
    """
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise HaloposeError(f"{path} has weights that are larger than their data: get it again")


def _is_pickled(path: object) -> bool:
    """Return whether a file starts like a torch checkpoint, zipped or not."""
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


def folded_convolutions(modules: Iterable[nn.Module], unused: str = "") -> Iterator[tuple[Array, Array]]:
    """Weights and biases of all convolutions inside modules, as exporters fold them.

    Args:
        modules: The modules.
        unused: Name of convolutions that the model does not run.

    A batch norm that is named ``bn`` and follows a convolution belongs to it.
    """
    for parent in (parent for module in modules for parent in module.modules()):
        children: list[tuple[str, nn.Module | None]] = [*parent.named_children(), ("", None)]
        for (name, layer), (next_name, norm) in pairwise(children):
            if not isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)) or name == unused:
                continue
            weight = layer.weight.detach().double().cpu()
            bias = weight.new_zeros(layer.out_channels) if layer.bias is None else layer.bias.detach().double().cpu()
            if isinstance(norm, nn.BatchNorm2d) and next_name == "bn":
                state = {key: value.double().cpu() for key, value in norm.state_dict().items()}
                factor = state["weight"] / torch.sqrt(state["running_var"] + norm.eps)
                weight = weight * factor[:, None, None, None]
                bias = (bias - state["running_mean"]) * factor + state["bias"]
            yield weight.numpy(), bias.numpy()


def _bias_of(layer: nn.Conv2d) -> Tensor:
    return layer.weight.new_zeros(layer.out_channels) if layer.bias is None else layer.bias


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, shapes and values of a state dict."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tuple(value.shape)}|{value.dtype}|".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
