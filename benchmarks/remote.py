"""A double of a GPU: PyTorch on the CPU, with tensors that count as being on another device.

``torch.device("cpu", 0)`` stands for the GPU and ``torch.device("cpu")`` for the host. Results are those of the CPU.
Every transfer, every wait for a result and every operation on tensors of both devices is recorded with its place in the
source. Operations inside compiled kernels are not seen, and no time is simulated.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

REMOTE = torch.device("cpu", 0)
Kind = Literal["download", "upload", "wait", "mismatch"]
_WAITS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose"}
_WAITS |= {"nonzero", "masked_select", "unique", "bincount", "argwhere"}  # the size of the result depends on values
_HOST_ONLY = {"numpy", "__array__"}
_ANY_DEVICE = {"__get__", "__set__", "to", "copy_", "index_put_", "__setitem__", "__getitem__", "__repr__", "type_as"}


@dataclass(frozen=True)
class Event:
    """Something that costs time on a GPU, or fails there.

    Attributes:
        kind: A copy to the host or from it, a wait of the host for a value, or an operation on tensors of both devices,
            which fails.
        operation: name of the operation.
        place: file and line of the innermost Python frame outside PyTorch.
    """

    kind: Kind
    operation: str
    place: str


@dataclass
class RemoteDevice(TorchFunctionMode):
    """Context in which tensors made on ``REMOTE`` count as remote.

    >>> with RemoteDevice() as device:
    ...     total = torch.ones(3, device=REMOTE).sum()
    ...     value = total.item()
    >>> [(event.kind, event.operation) for event in device.events]
    [('wait', 'item')]
    """

    events: list[Event] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def count(self, kind: Kind) -> int:
        """Number of events of a kind."""
        return sum(event.kind == kind for event in self.events)

    def clear(self) -> None:
        """Forget all events and operations."""
        self.events.clear()
        self.operations.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        remote = [is_remote(one) for one in given]
        if name == "__get__":
            if func == Tensor.device.__get__ and any(remote):
                return REMOTE
            return _marked(func(*args, **kwargs), any(remote))
        target = _target(name, args, kwargs)
        on_remote = any(remote) if target is None else target == REMOTE
        self._record(name, args, given, remote, target, on_remote)
        result = func(*args, **kwargs)
        if target is not None and any(result is one for one in given) and on_remote != remote[0]:
            result = result.clone()  # a copy to another device is another tensor
        return _marked(result, on_remote and name != "cpu")

    def _record(
        self, name: str, args: Any, given: list[Tensor], remote: list[bool], target: Any, on_remote: bool
    ) -> None:
        some, whole = any(remote), all(one or not tensor.dim() for one, tensor in zip(remote, given, strict=True))
        from_host = name in ("tensor", "as_tensor") or not all(remote)
        if some or on_remote:
            self.operations[name] += 1
        if some and name in _HOST_ONLY:
            self._add("mismatch", name)
        elif some and (name == "cpu" or (target is not None and not on_remote)):
            self._add("download", name)
        elif (target is not None and on_remote and from_host) or (some and name == "new_tensor"):
            self._add("upload", name)
        elif some and (name in _WAITS or _masked(name, args) or (name == "where" and len(args) == 1)):
            self._add("wait", name)
        elif some and name in ("__getitem__", "__setitem__", "index_put_", "copy_") and not whole:
            self._add("upload", name)
        elif some and not whole and name not in _ANY_DEVICE:
            self._add("mismatch", name)

    def _add(self, kind: Kind, operation: str) -> None:
        frame = sys._getframe(3)
        while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        self.events.append(Event(kind, operation, f"{path.parent.name}/{path.name}:{frame.f_lineno}"))


def is_remote(tensor: Tensor) -> bool:
    """Whether a tensor counts as being on ``REMOTE``."""
    return bool(getattr(tensor, "_is_remote", False))


def to_remote(module: nn.Module) -> None:
    """Make the parameters and buffers of a module, and tensors among its attributes, remote."""
    for part in module.modules():
        for tensor in chain(part.parameters(False), part.buffers(False), _tensors(vars(part).values())):
            _marked(tensor, True)


def _tensors(values: Any) -> Iterator[Tensor]:
    yield from (value for value in values if isinstance(value, Tensor))


def _marked(result: Any, remote: bool) -> Any:
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            vars(leaf)["_is_remote"] = remote
    return result


def _target(name: str, args: Any, kwargs: Any) -> torch.device | None:
    """Device that an operation was asked to put its result on."""
    device = kwargs.get("device")
    if device is None and name == "to":
        other = next((value for value in args[1:] if isinstance(value, (torch.device, str, Tensor))), None)
        device = (REMOTE if is_remote(other) else "cpu") if isinstance(other, Tensor) else other
    return None if device is None else torch.device(device)


def _masked(name: str, args: Any) -> bool:
    """Whether an index is a mask, whose number of elements the host has to wait for."""
    if name not in ("__getitem__", "__setitem__"):
        return False
    return any(
        isinstance(leaf, Tensor) and leaf.dtype == torch.bool and is_remote(leaf) for leaf in tree_leaves(args[1])
    )
