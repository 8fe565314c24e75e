"""Fingerprint of a pose head's folded weights that agrees within rounding, whatever framework or file holds them.

A hash changes with the last bit, and every tool folds batch norm with other rounding. The sketch holds the norm of
every pose convolution and its projections on fixed random signs; sketches of one model differ by rounding only. Models
with one pose head and different backbones have one sketch.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

import numpy as np

from halopose.types import Array

TOLERANCE = 1e-5  # of norms and projections, relative to the norm, between files in single precision
HALF_TOLERANCE = 1e-3  # the same if one of the two files holds half precision
ONNX_PREFIX = "onnx:"  # of the hash of an ONNX graph
_PREFIX, _HALF_PREFIX = "pose-head:", "pose-head-half:"
_PROJECTIONS = 4

# Sketches of models whose artifacts were made before artifacts held one, by another fingerprint of the same model.
_YOLO11N_POSE = (
    "pose-head:"
    "x6SwQe9qbr+Tqtm/4L8PP2jxyL8Jt0xBu0iVv+3e+r+gZzlA4sd+v/XH90AVuRc+cSz9vp7X4Lx4M7a/wAVbQR8k"
    "sT7Lsce/oaw1P7IFmT+8UFJBD9czv1K0o752Itc9kbqbvUXNCUEIviS/0cGRPlC/Sr4PYTA+e9VVQQrgFj8/bR+/"
    "zeXIvp2Z4j4ELkdBXOKQPxEYPL+sxwM/qySjPub1IUEEyvE/QJ2uv/Qmjr4VvIm/"
)
PUBLISHED = {
    "629b2025a8acf909afc681079bc8bc70587ceaf56bb2d14d002b24cf394cd170:0": _YOLO11N_POSE,
    "7d324db7f4a872c1e81608943e8bbb7178e78a06dcfc860b41cfb3cd314c0f47:0": _YOLO11N_POSE,
}


def weight_sketch(levels: Iterable[Sequence[tuple[Array, Array]]], half: bool = False) -> str:
    """Sketch of weights (out, in, k, k) and biases (out,) of the pose convolutions, level by level.

    Args:
        levels: Convolutions of every level, from the feature map to the raw keypoints.
        half: Whether the weights are stored in half precision.
    """
    signs = np.random.RandomState(0)
    values: list[float] = []
    for level in levels:
        for weight, bias in level:
            flat = np.concatenate([np.asarray(weight, np.float64).ravel(), np.asarray(bias, np.float64).ravel()])
            norm = float(np.linalg.norm(flat))
            rows = signs.randint(0, 2, (_PROJECTIONS, len(flat))) * 2.0 - 1.0
            values += [norm, *(rows @ flat / max(norm, 1e-30)).tolist()]
    encoded = base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()
    return f"{_HALF_PREFIX if half else _PREFIX}{encoded}"


def same_model(fingerprints: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether two sets of fingerprints are of the same model.

    Two checkpoints are the same model if they share a hash of all weights. If one side is an ONNX file, whose weights
    are folded and rounded, sketches of the pose head are compared within the tolerance instead.
    """
    own, theirs = set(fingerprints), set(others)
    if any(not _is_sketch(name) for name in own & theirs):
        return True
    if not any(name.startswith(ONNX_PREFIX) for name in own | theirs):
        return False
    own, theirs = _with_published(own), _with_published(theirs)
    return any(_agree(one, other) for one in filter(_is_sketch, own) for other in filter(_is_sketch, theirs))


def _with_published(fingerprints: Iterable[str]) -> set[str]:
    given = set(fingerprints)
    return given | {PUBLISHED[name] for name in given & set(PUBLISHED)}


def _is_sketch(fingerprint: str) -> bool:
    return fingerprint.startswith((_PREFIX, _HALF_PREFIX))


def _agree(one: str, other: str) -> bool:
    half = _HALF_PREFIX in (one[: len(_HALF_PREFIX)], other[: len(_HALF_PREFIX)])
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    try:
        values = [np.frombuffer(base64.b64decode(text.split(":", 1)[1]), "<f4") for text in (one, other)]
    except ValueError:
        return False
    if len(values[0]) != len(values[1]) or len(values[0]) % (_PROJECTIONS + 1):
        return False
    first, second = (each.astype(np.float64).reshape(-1, _PROJECTIONS + 1) for each in values)
    apart = np.abs(first - second)
    apart[:, 0] /= np.maximum(first[:, 0], 1e-30)
    return bool((apart <= tolerance).all())
