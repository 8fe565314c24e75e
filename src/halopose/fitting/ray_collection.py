"""Collection of a feature cache on a Ray cluster: each shard is a task.

The cluster is that of ``RAY_ADDRESS``, or a local one. The calling process writes the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from halopose.data.files import write_bytes
from halopose.data.tensors import sealed
from halopose.errors import HaloposeError
from halopose.fitting.feature_cache import shard_path
from halopose.fitting.prefetch import Reader, read_ahead
from halopose.fitting.workers import Tick
from halopose.install_advice import install_command

if TYPE_CHECKING:
    from halopose.fitting.collecting import Collection

RETRIES = 3  # retries of a task whose worker was lost
AHEAD = 2  # tasks per core, including finished ones; limits the memory of the object store


def collect_on_ray(work: Collection, numbers: Sequence[int], tick: Tick | None = None) -> None:
    """Collect shards as Ray tasks and write each result as it arrives.

    Args:
        work: Collection; it is sent to the object store once.
        numbers: Numbers of the shards.
        tick: Called with the number of finished views.
    """
    ray = require_ray()
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)  # or the cluster that RAY_ADDRESS names
    task = ray.remote(max_retries=RETRIES)(shard_bytes)
    held = ray.put(work)
    most = AHEAD * max(int(ray.cluster_resources().get("CPU", 1)), 1)
    waiting: dict[Any, int] = {}
    left, done = list(numbers), 0
    while left or waiting:
        while left and len(waiting) < most:
            number = left.pop(0)
            waiting[task.remote(held, number)] = number
        [ready], _ = ray.wait(list(waiting), num_returns=1)
        number = waiting.pop(ready)
        write_bytes(shard_path(work.folder, number), _result(ray, ready))
        done += len(work.views(number))
        if tick:
            tick(done)


def _result(ray: Any, ready: Any) -> bytes:
    """Return the result of a task, or raise its HaloposeError."""
    try:
        return bytes(ray.get(ready))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, HaloposeError):
            raise HaloposeError(str(error.cause)) from None
        raise


def shard_bytes(work: Collection, number: int) -> bytes:
    """Return the file of one shard, computed with one thread like in every worker process."""
    torch.set_num_threads(1)
    reader = Reader(work.host.placer(), work.settings.rectangular)
    tensors, metadata = work.collect(number, read_ahead(reader, work.views(number), 0, 1))
    return sealed(tensors, metadata)


def require_ray() -> Any:
    """Import ray, or raise a HaloposeError with the command that installs it."""
    try:
        import ray
    except ImportError:
        raise HaloposeError(f"this needs the ray extra: {install_command('ray')}") from None
    return ray
