"""Fingerprints of folded weights that agree within rounding, whatever framework or file holds them.

A hash changes with the last bit, and every tool folds batch norm with other rounding. The sketch of the pose head holds
the norm of every convolution and its projections on fixed random signs. The sketch of the backbone and neck holds sums
over all of their convolutions, which do not depend on their order. Sketches of one model differ by rounding only.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from halopose.types import Array

Precision = Literal["float", "half", "int8"]
TOLERANCE = 1e-5  # of norms and projections, relative to the norm, between files in single precision
HALF_TOLERANCE = 1e-3  # the same if one of the two files holds half precision
ONNX_PREFIX = "onnx:"  # of the hash of an ONNX graph
_PREFIX, _HALF_PREFIX = "pose-head:", "pose-head-half:"
_BACKBONE = "backbone:"  # then the precision
_BACKBONE_TOLERANCE = {"float": TOLERANCE, "half": HALF_TOLERANCE, "int8": 0.1}  # per convolution
_PROJECTIONS = 4

# Sketches of models whose artifacts were made before artifacts held one, by another fingerprint of the same model.
_YOLO11N_POSE = (
    "pose-head:"
    "x6SwQe9qbr+Tqtm/4L8PP2jxyL8Jt0xBu0iVv+3e+r+gZzlA4sd+v/XH90AVuRc+cSz9vp7X4Lx4M7a/wAVbQR8k"
    "sT7Lsce/oaw1P7IFmT+8UFJBD9czv1K0o752Itc9kbqbvUXNCUEIviS/0cGRPlC/Sr4PYTA+e9VVQQrgFj8/bR+/"
    "zeXIvp2Z4j4ELkdBXOKQPxEYPL+sxwM/qySjPub1IUEEyvE/QJ2uv/Qmjr4VvIm/"
)
_YOLO11N_BACKBONE = "backbone:float:AAAAAACAT0BBTMSr8KVmQAxjx+LyLCTAf7xbyutJ8D8QJhdvLAshQPpLv38dvBVA"
PUBLISHED = {
    "629b2025a8acf909afc681079bc8bc70587ceaf56bb2d14d002b24cf394cd170:0": (_YOLO11N_POSE, _YOLO11N_BACKBONE),
    "7d324db7f4a872c1e81608943e8bbb7178e78a06dcfc860b41cfb3cd314c0f47:0": (_YOLO11N_POSE, _YOLO11N_BACKBONE),
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


def backbone_sketch(convolutions: Iterable[tuple[Array, Array]], precision: Precision = "float") -> str:
    """Sketch of the weights and biases of all convolutions of backbone and neck, in any order.

    Args:
        convolutions: Weights and biases.
        precision: Number format in which the weights are stored.
    """
    sums, count = np.zeros(1 + _PROJECTIONS), 0
    for weight, bias in convolutions:
        flat = np.concatenate([np.asarray(weight, np.float64).ravel(), np.asarray(bias, np.float64).ravel()])
        norm = max(float(np.linalg.norm(flat)), 1e-30)
        sums[0] += np.log(norm)
        bits = np.frombuffer(np.random.RandomState(list(weight.shape)).bytes(-(-len(flat) // 8) * _PROJECTIONS), "u1")
        chosen = np.unpackbits(bits.reshape(_PROJECTIONS, -1), axis=1)[:, : len(flat)].astype(bool)
        sums[1:] += [(2 * flat[each].sum() - flat.sum()) / norm for each in chosen]
        count += 1
    encoded = base64.b64encode(np.array([count, *sums], "<f8").tobytes()).decode()
    return f"{_BACKBONE}{precision}:{encoded}"


def same_model(fingerprints: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether two sets of fingerprints are of the same model.

    Two checkpoints are the same model if they share a hash of all weights. If one side is an ONNX file, whose weights
    are folded and rounded, sketches of the pose head are compared within the tolerance instead, and those of backbone
    and neck where both sides have one and as many convolutions. Files that some tool has restructured, and artifacts
    from before there were such sketches, are compared by the pose head alone.
    """
    own, theirs = set(fingerprints), set(others)
    if any(not _is_sketch(name) for name in own & theirs):
        return True
    if not any(name.startswith(ONNX_PREFIX) for name in own | theirs):
        return False
    own, theirs = _with_published(own), _with_published(theirs)
    heads = any(_agree(one, other) for one in filter(_is_head, own) for other in filter(_is_head, theirs))
    return heads and not any(
        _differ(one, other) for one in filter(_is_backbone, own) for other in filter(_is_backbone, theirs)
    )


def _with_published(fingerprints: Iterable[str]) -> set[str]:
    given = set(fingerprints)
    return given.union(*(PUBLISHED[name] for name in given & set(PUBLISHED)))


def _is_head(fingerprint: str) -> bool:
    return fingerprint.startswith((_PREFIX, _HALF_PREFIX))


def _is_backbone(fingerprint: str) -> bool:
    return fingerprint.startswith(_BACKBONE)


def _is_sketch(fingerprint: str) -> bool:
    return _is_head(fingerprint) or _is_backbone(fingerprint)


def _differ(one: str, other: str) -> bool:
    """Whether two sketches of as many convolutions differ by more than rounding."""
    try:
        values, tolerance = [], 0.0
        for text in (one, other):
            _, precision, encoded = text.split(":", 2)
            tolerance = max(tolerance, _BACKBONE_TOLERANCE[precision])
            values.append(np.frombuffer(base64.b64decode(encoded), "<f8"))
        first, second = values
    except (ValueError, KeyError):
        return False
    if len(first) != len(second) or first[0] != second[0]:
        return False
    limits = tolerance * np.array([first[0], *[np.sqrt(first[0])] * (len(first) - 2)])
    return bool((np.abs(first - second)[1:] > limits).any())


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
