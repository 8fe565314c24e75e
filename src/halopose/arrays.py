"""What numpy and torch call differently, for code that runs on either.

On a dozen rows a step in numpy takes a third of the time of one in torch, which in turn can be traced, trained and
put on a GPU. Functions that are written with these take arrays or tensors and give back what they were given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from halopose.types import Array

Values = Any  # an Array or a Tensor


def library_of(values: Values) -> Any:
    """The module, numpy or torch, whose functions take these."""
    return np if isinstance(values, np.ndarray) else torch


def alike(tensor: Tensor, values: Values) -> Values:
    """A tensor as an array, without a copy, if values are one."""
    return tensor.numpy() if isinstance(values, np.ndarray) else tensor


def of_kind(array: Array, values: Values) -> Values:
    """An array as it is if values are one, else as a tensor of their type and on their device."""
    return array if isinstance(values, np.ndarray) else torch.from_numpy(array).to(values)


def same_kind(values: Values, others: Values) -> Values:
    """Values as an array or a tensor, whichever the others are."""
    return of_kind(values, others) if isinstance(values, np.ndarray) else alike(values, others)


def as_array(values: Values) -> Array:
    """Values as an array, from whatever device."""
    return values if isinstance(values, np.ndarray) else np.asarray(values.cpu().numpy())


def converted(values: Values, dtype: str) -> Values:
    """Values as another type, by the name that both libraries have for it."""
    return values.astype(dtype) if isinstance(values, np.ndarray) else values.to(getattr(torch, dtype))


def at_least(values: Values, least: float) -> Values:
    """The larger of values (...) and a number."""
    return np.maximum(values, least) if isinstance(values, np.ndarray) else values.clamp_min(least)


def between(values: Values, least: float, most: float) -> Values:
    """Values (...) brought within bounds."""
    if isinstance(values, np.ndarray):
        return np.minimum(np.maximum(values, least), most)
    return values.clamp(least, most)


def joined(parts: list[Values], axis: int) -> Values:
    """Parts one after the other along an axis."""
    return np.concatenate(parts, axis) if isinstance(parts[0], np.ndarray) else torch.cat(parts, axis)


def stacked(parts: list[Values]) -> Values:
    """Parts (...) side by side along a new last axis."""
    if isinstance(parts[0], np.ndarray):  # numpy's own stack is written in Python
        return np.concatenate([part[..., None] for part in parts], -1)
    return torch.stack(parts, -1)


def zeros_like(values: Values) -> Values:
    """As many zeros."""
    return np.zeros(values.shape, values.dtype) if isinstance(values, np.ndarray) else torch.zeros_like(values)


def turned(values: Values, axis: int = 1) -> Values:
    """(N, b, a) of (N, a, b): an axis and the next one change places."""
    if isinstance(values, np.ndarray):
        return values.swapaxes(axis, axis + 1)
    return values.transpose(axis, axis + 1)


def linear(values: Values, weight: Values, bias: Values | None = None) -> Values:
    """A weight (b, a) times values (..., a), plus a bias (b,)."""
    if not isinstance(values, np.ndarray):
        return F.linear(values, weight, bias)
    product = values @ weight.T
    return product if bias is None else product + bias


def silu(values: Values) -> Values:
    """Values (...) times their logistic function."""
    if not isinstance(values, np.ndarray):
        return F.silu(values)
    half = values / 2
    return half + half * np.tanh(half)  # cannot overflow


def repeated(values: Values, count: int) -> Values:
    """(N, count, C) of (N, C), as a view where there is one for less than a copy of a dozen rows."""
    if isinstance(values, np.ndarray):
        return values[:, None].repeat(count, 1)
    return values[:, None].expand(-1, count, -1)


def repeated_view(array: Array, count: int) -> Array:
    """The same array so often (count, ...), not to be written to; numpy's own way is written in Python."""
    array = np.ascontiguousarray(array)
    view: Array = np.ndarray((count, *array.shape), array.dtype, array, strides=(0, *array.strides))
    view.flags.writeable = False
    return view


def largest(values: Values, count: int) -> tuple[Values, Values]:
    """The largest (..., count) along the last axis, in any order, and their places."""
    if isinstance(values, np.ndarray):  # numpy's own argpartition takes half as long again
        best, place = torch.from_numpy(values).topk(count, sorted=False)
        return best.numpy(), place.numpy()
    return tuple(values.topk(count, dim=-1, sorted=False))


def take(rows: Values, place: Values) -> Values:
    """Rows (B, n, ...) at places (B, n) among (B, A, ...)."""
    if isinstance(rows, np.ndarray):
        return rows[np.arange(len(rows))[:, None], place]
    shape = [int(side) for side in rows.shape[2:]]
    start = torch.arange(rows.shape[0], device=place.device)[:, None] * rows.shape[1]
    flat = rows.reshape(-1, *shape).index_select(0, (start + place).reshape(-1))
    return flat.reshape(-1, int(place.shape[1]), *shape)
