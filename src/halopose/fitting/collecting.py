"""Collection of a feature cache: run the frozen model once over annotated images and store the results.

The result is the folder of shards that ``feature_cache`` reads. Shards are written atomically, so an interrupted
collection resumes with the missing ones.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halopose.data.dataset import Dataset, Objects, Record
from halopose.data.files import in_bytes, is_file, read_json, write_json
from halopose.data.storage.address import Place, to_place
from halopose.data.tensors import write_tensors
from halopose.errors import HaloposeError
from halopose.fitting.feature_cache import (
    FORMAT,
    CollectSettings,
    MatchStore,
    known_shards,
    shard_metadata,
    shard_path,
)
from halopose.fitting.prefetch import ImageTask, Reader, Reading, Task, read_ahead
from halopose.fitting.ray_collection import collect_on_ray
from halopose.fitting.workers import Tick, WorkerPool, share_out
from halopose.hosts.base import Host, HostOutput, Letterbox, Selection, Targets
from halopose.keypoints import Keypoints
from halopose.transfer import to_host
from halopose.types import Array, Counter
from halopose.uncertainty.heads import cut_windows
from halopose.uncertainty.novelty import pool_images

VIEWS_PER_SHARD = 32
_BORDER = 1.0  # pixels from the border of the image within which a box touches it

log = logging.getLogger(__name__)

_Rows = tuple[str, int, dict[str, Tensor]]  # kind, level, columns by name


def collect(
    host: Host,
    dataset: Dataset,
    folder: Place | str,
    settings: CollectSettings | None = None,
    progress: Counter | None = None,
    workers: WorkerPool | None = None,
) -> MatchStore:
    """Run the frozen model once over a data set and store the features; resumes an interrupted collection.

    The result does not depend on the workers: every shard is identical to that of a single process.

    Args:
        host: Host of the frozen model.
        dataset: Annotated images.
        folder: Folder of the feature cache.
        settings: Settings of the collection.
        progress: Called with the finished and the total number of views.
        workers: Distribution over processes and machines.

    Raises:
        HaloposeError: No image can be read, or the folder holds a cache of other data or settings.
    """
    collect_shards(host, dataset, folder, settings, progress, workers)
    return finished(folder)


def finished(folder: Place | str) -> MatchStore:
    """Open the complete cache.

    Raises:
        HaloposeError: Shards are missing, or no image could be read.
    """
    store = MatchStore(folder)
    skipped, images = store.skipped(), len(store.images)
    if len(skipped) == images * len(store.settings.imgsz):
        raise HaloposeError(f"none of the {images} images could be read: {skipped[0] if skipped else 'no data'}")
    return store


def collect_shards(
    host: Host,
    dataset: Dataset,
    folder: Place | str,
    settings: CollectSettings | None = None,
    progress: Counter | None = None,
    workers: WorkerPool | None = None,
) -> None:
    """Write this part of the shards; the feature cache is complete when all parts are done."""
    work = Collection.open(host, dataset, to_place(folder), settings or CollectSettings(), workers or WorkerPool())
    missing = work.missing()
    views = sum(len(work.views(number)) for number in work.own_shards())
    before = views - sum(len(work.views(number)) for number in missing)
    tick = None if progress is None else lambda done: progress(before + done, views)
    if tick and before:
        tick(0)
    if work.workers.engine == "ray":
        collect_on_ray(work, missing, tick)
        return
    processes = min(work.workers.processes, len(missing))
    if processes > 1:
        share_out(lambda number, tick: work.write([number], tick), missing, processes, tick)
        missing = work.missing()  # shards that killed processes did not finish
        before = views - sum(len(work.views(number)) for number in missing)
    work.write(missing, tick)


@dataclass(frozen=True)
class Collection:
    """A feature cache in collection, with the assignment of views to shards.

    Attributes:
        host: Host of the frozen model.
        dataset: Annotated images.
        folder: Folder of the cache.
        settings: Settings of the collection.
        workers: Distribution over processes and machines.
    """

    host: Host
    dataset: Dataset
    folder: Place
    settings: CollectSettings
    workers: WorkerPool

    @classmethod
    def open(
        cls, host: Host, dataset: Dataset, folder: Place, settings: CollectSettings, workers: WorkerPool
    ) -> Collection:
        """Start or resume a collection.

        Raises:
            HaloposeError: The data set does not fit the model or the existing cache, or the disk is too small.
        """
        host.check_layout(dataset.layout)
        for imgsz in settings.imgsz:
            host.check_size(imgsz)
        unknown = {int(k) for record in dataset.records for k in record.objects.class_ids} - set(
            range(len(host.class_names))
        )
        if unknown:
            raise HaloposeError(
                f"the data set has class {min(unknown)}, but the model has only {len(host.class_names)} classes: "
                "use a model that was trained on these classes"
            )
        settings = replace(settings, half=host.half)
        work = cls(host, dataset, folder, settings, workers)
        _open_store(host, dataset, folder, settings, work.shards)
        if isinstance(folder, Path):
            own_shards = {shard_path(folder, number).name for number in work.own_shards()}
            for leftover in folder.glob(".shard-*"):  # temporary files of a killed run
                if leftover.name[1:].rpartition(".")[0] in own_shards:
                    leftover.unlink(missing_ok=True)
            _check_disk(host, dataset, folder, settings, work.shards)
        return work

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-len(self.dataset) * len(self.settings.imgsz) // VIEWS_PER_SHARD)

    def own_shards(self) -> list[int]:
        """Return the numbers of the shards of this part."""
        return self.workers.own_shards(self.shards)

    def views(self, number: int) -> list[Task]:
        """Return the views of a shard; views are ordered by input size, then by image."""
        records, sizes = self.dataset.records, self.settings.imgsz
        places = range(number * VIEWS_PER_SHARD, min((number + 1) * VIEWS_PER_SHARD, len(records) * len(sizes)))
        return [(records[place % len(records)], sizes[place // len(records)]) for place in places]

    def missing(self) -> list[int]:
        """Return the shards of this part that must be collected; shards whose images have changed are removed."""
        missing, known = [], known_shards(self.folder)
        for number in self.own_shards():
            path = shard_path(self.folder, number)
            if path.name not in known:
                missing.append(number)
            elif changed := _changed(path, self.views(number)):
                log.info("%s changed since %s was collected: collecting this shard again", changed, path)
                path.unlink()
                missing.append(number)
        return missing

    def write(self, numbers: Sequence[int], tick: Tick | None = None) -> None:
        """Collect shards; the previous shard is written and the next one is read while the model runs."""
        done = 0
        reader = Reader(self.host.placer(), self.settings.rectangular)
        tasks = (task for number in numbers for task in self.views(number))
        depth = VIEWS_PER_SHARD + 2 * self.workers.readers
        # The pixels of all readings of a shard are in use at the same time.
        readings = read_ahead(reader, tasks, self.workers.readers, depth, max(self.settings.imgsz), VIEWS_PER_SHARD)
        with closing(readings), ThreadPoolExecutor(1) as pool:
            writing: Future[None] | None = None
            for number in numbers:
                shard = self.collect(number, readings, tick and partial(_tick_from, tick, done))
                done += len(self.views(number))
                if writing is not None:
                    writing.result()
                writing = pool.submit(_write_shard, shard_path(self.folder, number), *shard)
            if writing is not None:
                writing.result()

    def collect(
        self, number: int, readings: Iterator[Reading], tick: Tick | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and metadata of one shard.

        Args:
            number: Number of the shard.
            readings: Readings; the next ones are the views of the shard.
            tick: Called with the number of finished views.
        """
        views = islice(readings, len(self.views(number)))
        return _collect_views(self.host, list(views), self.settings, self.dataset.layout, tick)


def _tick_from(tick: Tick, before: int, done: int) -> None:
    """Report progress with an offset."""
    tick(before + done)


def _changed(path: Place, views: list[tuple[Record, int]]) -> str:
    """Return a text that names what has changed since a shard was collected; empty if nothing has."""
    try:
        known = shard_metadata(path)["views"]
    except HaloposeError:
        return f"{path.name} (damaged)"
    if len(known) != len(views):
        return "the list of images"
    changed = [
        str(record.path) for (record, _), state in zip(views, known, strict=True) if not record.is_as_it_was(state)
    ]
    return f"{changed[0]}{f' and {len(changed) - 1} more' * (len(changed) > 1)}" if changed else ""


def _open_store(host: Host, dataset: Dataset, folder: Place, settings: CollectSettings, shards: int) -> None:
    """Write the manifest, or check that an existing one has the same content."""
    manifest = {
        "format": FORMAT,
        "base": list(host.fingerprints),
        "layout": dataset.layout.to_json(),
        "levels": len(host.strides),
        "strides": list(host.strides),
        "settings": settings.to_json(),
        "images": dataset.image_ids.tolist(),
        "area": dataset.area,
        "shards": shards,
    }
    manifest = json.loads(json.dumps(manifest))  # JSON types, as in the file
    path = folder / "manifest.json"
    if is_file(path):
        if read_json(path) != manifest:
            raise HaloposeError(
                f"{folder} was collected with other data or settings: remove it or choose another folder"
            )
        return
    write_json(path, manifest)


def _check_disk(host: Host, dataset: Dataset, folder: Path, settings: CollectSettings, shards: int) -> None:
    """Raise a HaloposeError if the disk may be too small for the cache."""
    missing = shards - len(known_shards(folder))
    needed = predicted_bytes(host, dataset, settings) * missing / max(shards, 1)
    free = shutil.disk_usage(folder).free
    if needed > 0.95 * free:
        raise HaloposeError(
            f"collecting may need {in_bytes(needed)}, {folder} has {in_bytes(free)} free: "
            "choose another disk or fewer cells per object"
        )


def predicted_bytes(host: Host, dataset: Dataset, settings: CollectSettings) -> int:
    """Return an upper bound on the size of the feature cache in bytes."""
    largest = max(
        template[0].weight.shape[1] * (2 * sum(conv.reach for conv in template) + 1) ** 2 * 2
        for template in host.pose_templates()
    )
    objects = sum(len(record.objects) for record in dataset.records)
    rows = objects * settings.cells_per_object * settings.assigned + len(dataset) * settings.detections
    if settings.context_features:
        channels = sum(template[0].weight.shape[1] for template in host.pose_templates())
        largest += host.keypoint_count * (2 * channels + 40)
    return rows * (largest + 16 * host.keypoint_count + 256) * len(settings.imgsz)


def _collect_views(
    host: Host,
    readings: list[Reading],
    settings: CollectSettings,
    layout: Keypoints,
    tick: Tick | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Run the model on readings and return the tensors and metadata of their shard."""
    views = [reading.view for reading in readings if reading.view is not None]
    reaches = [sum(conv.reach for conv in template) for template in host.pose_templates()]
    rows: list[_Rows] = []
    done = len(readings) - len(views)
    for batch in _batches(views, settings.batch):
        rows += _collect_batch(host, batch, settings, layout, reaches)
        done += len(batch)
        if tick:
            tick(done)
    tensors = _concatenated(rows, len(host.strides))
    tensors |= _truth_table(views, settings.imgsz[0])
    tensors["views.image_id"] = torch.tensor([view.record.image_id for view in views], dtype=torch.int64)
    skipped = [reading.skipped for reading in readings if reading.view is None]
    return tensors, {"skipped": skipped, "views": [reading.state for reading in readings]}


def _batches(views: list[ImageTask], size: int) -> Iterator[list[ImageTask]]:
    """Group views of equal input shape into batches; with batches of one, views of equal shape are consecutive."""
    groups: dict[Any, list[ImageTask]] = {}
    for view in views:
        shape = view.pixels.shape if size > 1 else view.shape
        groups.setdefault((shape, view.imgsz), []).append(view)
    for group in groups.values():
        yield from (group[begin : begin + size] for begin in range(0, len(group), size))


def _collect_batch(
    host: Host, views: list[ImageTask], settings: CollectSettings, layout: Keypoints, reaches: Sequence[int]
) -> list[_Rows]:
    """Run the model on a batch and return the rows to store."""
    batch, boxes = host.to_batch([view.pixels for view in views]), [view.box for view in views]
    output = host.forward(batch)
    found: list[_Cells] = []
    if settings.assigned:
        found.append(_assigned_cells(host, output, views, boxes, settings, layout))
    if settings.detections:
        selections = host.select(
            output,
            conf=settings.conf,
            iou=settings.iou,
            max_detections=settings.detections,
            letterboxes=boxes,
        )
        size = (int(batch.shape[2]), int(batch.shape[3]))
        for number, (selection, view, box) in enumerate(zip(selections, views, boxes, strict=True)):
            found.append(_detected_cells(host, number, selection, view, box, size))
    found = [cells for cells in found if len(cells.cell)]
    if settings.context_features:
        found = [_with_context_features(host, output, cells) for cells in found]
    rows = _with_windows(output, found, reaches)
    if settings.detections:
        rows.append(("image", 0, _image_row(host, output, views, boxes)))
    return rows


@dataclass(frozen=True)
class _Cells:
    """Cells of a batch that are stored.

    Attributes:
        kind: ``"assigned"`` or ``"detected"``.
        image: Index of the image in the batch (N,).
        cell: Index of the cell, counted over all levels (N,).
        columns: Stored columns by name, (N, ...) each.
    """

    kind: str
    image: Tensor
    cell: Tensor
    columns: dict[str, Tensor]

    def by_level(self, firsts: Array) -> list[_Cells]:
        """Split by feature level.

        Args:
            firsts: First cell of each level, then the number of cells (L + 1,).
        """
        level = np.searchsorted(firsts, self.cell.numpy(), side="right")
        order = torch.from_numpy(level.argsort(kind="stable"))
        sizes = np.bincount(level, minlength=len(firsts))[1:].tolist()
        image, cell, *columns = (value[order].split(sizes) for value in (self.image, self.cell, *self.columns.values()))
        return [
            _Cells(self.kind, image[number], cell[number], dict(zip(self.columns, values, strict=True)))
            for number, values in enumerate(zip(*columns, strict=True))
        ]


def _image_row(host: Host, output: HostOutput, views: list[ImageTask], boxes: list[Letterbox]) -> dict[str, Tensor]:
    """Return the pooled feature vectors of the images, for out-of-distribution scores."""
    vectors = pool_images(output.features, host.strides, [box.area for box in boxes])
    return {
        "vector": vectors.float().cpu(),
        "image_id": torch.tensor([view.record.image_id for view in views], dtype=torch.int64),
    }


def _assigned_cells(
    host: Host,
    output: HostOutput,
    views: list[ImageTask],
    boxes: list[Letterbox],
    settings: CollectSettings,
    layout: Keypoints,
) -> _Cells:
    """Return label-assigned cells in input pixels, limited per object; crowds are not assigned."""
    views = [replace(view, objects=view.objects.select(~view.objects.crowd)) for view in views]
    targets = [to_targets(view.objects, box) for view, box in zip(views, boxes, strict=True)]
    found = host.assign(output, targets, layout.sigmas)
    scores, located = output.scores[found.image, found.cell], output.keypoints[found.image, found.cell]
    columns = {**vars(found), "confidence": scores.float(), "located": located.float()}
    image, cell, object, confidence, located = to_host(columns).values()
    firsts = torch.tensor([0, *np.cumsum([len(target.boxes) for target in targets])[:-1]], dtype=torch.long)
    row = firsts[image] + object  # among the objects of all images
    keep = _best_of_each(row.numpy(), confidence.numpy(), settings.cells_per_object)
    if len(keep) < len(row):
        image, cell, object, confidence, located, row = (
            values[keep] for values in (image, cell, object, confidence, located, row)
        )
    wanted, labelled = (
        torch.cat([getattr(target, name) for target in targets])[row] for name in ("keypoints", "labelled")
    )
    areas = torch.from_numpy(np.concatenate([view.objects.area for view in views])).float()[row]
    gains = torch.tensor([box.gain[0] * box.gain[1] for box in boxes])
    columns = {
        "residual": torch.where(labelled[..., None], wanted - located, 0.0),
        "labelled": labelled.to(torch.uint8),
        "confidence": confidence,
        "area": areas * gains[image],
        "image_id": torch.tensor([view.record.image_id for view in views])[image],
        "object": object,
    }
    return _Cells("assigned", image, cell, columns)


def _best_of_each(object: Array, confidence: Array, cap: int) -> Tensor:
    """Return the indices of the most confident cells of each object, in the given order.

    Args:
        object: Object of each cell (N,).
        confidence: Score of each cell (N,).
        cap: Largest number of cells per object.
    """
    counts = np.bincount(object)
    if not len(counts) or counts.max() <= cap:
        return torch.arange(len(object))
    order = np.lexsort((-confidence, object))
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy(np.sort(order[place < cap]))


def to_targets(objects: Objects, box: Letterbox) -> Targets:
    """Convert objects from original pixels to targets in input pixels."""
    corners = objects.boxes.reshape(-1, 2, 2)
    return Targets(
        boxes=torch.from_numpy(box.to_input(corners).reshape(-1, 4)).float(),
        class_ids=torch.from_numpy(objects.class_ids),
        keypoints=torch.from_numpy(box.to_input(objects.keypoints)).float(),
        labelled=torch.from_numpy(objects.labelled),
    )


def _detected_cells(
    host: Host, number: int, selection: Selection, view: ImageTask, box: Letterbox, size: tuple[int, int]
) -> _Cells:
    """Return retained detections of one image in original pixels, as the framework reports them.

    Args:
        host: Host of the model.
        number: Index of the image in the batch.
        selection: Detections in input pixels.
        view: The image.
        box: Letterbox of the image.
        size: Height and width of the input.
    """
    original = host.to_original(selection, box, size)
    count = len(original.scores)
    columns = {
        "box": original.boxes.float().cpu(),
        "score": original.scores.float().cpu(),
        "class_id": original.class_ids.cpu(),
        "keypoints": original.keypoints.float().cpu(),
        "gain": torch.tensor(box.gain).expand(count, 2).contiguous(),
        "image_id": torch.full((count,), view.record.image_id),
    }
    if original.visibility is not None:
        columns["visibility"] = original.visibility.float().cpu()
    return _Cells("detected", torch.full((count,), number), original.cell.cpu(), columns)


def _with_context_features(host: Host, output: HostOutput, cells: _Cells) -> _Cells:
    """Add the columns of the context features."""
    found = host.context_features(output, cells.image, cells.cell.to(host.device)).columns()
    return replace(cells, columns=cells.columns | to_host(found))


def _with_windows(output: HostOutput, found: Sequence[_Cells], reaches: Sequence[int]) -> list[_Rows]:
    """Split rows by level and add their feature windows.

    Args:
        output: Output of the host.
        found: Cells to store.
        reaches: Reach of the windows of each level, in cells.
    """
    firsts = np.cumsum([0, *(maps.shape[2] * maps.shape[3] for maps in output.features)])
    split = [cells.by_level(firsts) for cells in found]
    rows: list[_Rows] = []
    for level, (maps, reach) in enumerate(zip(output.features, reaches, strict=True)):
        parts = [levels[level] for levels in split if len(levels[level].cell)]
        if parts:
            image, cell = torch.cat([part.image for part in parts]), torch.cat([part.cell for part in parts])
            place = cell - int(firsts[level])
            windows, inside = cut_windows(maps, image, place, reach)
            counts = [len(part.cell) for part in parts]
            cut = windows.half().cpu().contiguous().split(counts), inside.to(torch.uint8).cpu().split(counts)
            for part, own, on_map in zip(parts, *cut, strict=True):
                rows.append((part.kind, level, part.columns | {"windows": own, "inside": on_map}))
    return rows


def _concatenated(rows: list[_Rows], levels: int) -> dict[str, Tensor]:
    """Concatenate rows into the tensors of a shard by name."""
    tensors: dict[str, Tensor] = {}
    for kind in ("assigned", "detected", "image"):
        for level in range(levels):
            parts = [part for k, lv, part in rows if (k, lv) == (kind, level)]
            if parts:
                for name in parts[0]:
                    tensors[f"{kind}.{level}.{name}"] = torch.cat([part[name] for part in parts]).contiguous()
    return tensors


def _truth_table(views: list[ImageTask], imgsz: int) -> dict[str, Tensor]:
    """Return the table of annotated objects in original pixels, once per image."""
    once = [view for view in views if view.imgsz == imgsz]
    objects = [view.objects for view in once]
    ids = [np.full(len(o), view.record.image_id) for o, view in zip(objects, once, strict=True)]
    if not once:
        return {}
    columns = {
        "image_id": np.concatenate(ids),
        "class_id": np.concatenate([o.class_ids for o in objects]),
        "boxes": np.concatenate([o.boxes for o in objects]),
        "keypoints": np.concatenate([o.keypoints for o in objects]),
        "labelled": np.concatenate([o.labelled for o in objects]).astype(np.uint8),
        "area": np.concatenate([o.area for o in objects]),
        "crowd": np.concatenate([o.crowd for o in objects]).astype(np.uint8),
        "truncated": np.concatenate([_truncated(view) for view in once]).astype(np.uint8),
    }
    if all(o.occluded is not None for o in objects):
        columns["occluded"] = np.concatenate([o.occluded for o in objects]).astype(np.uint8)
    return {f"truth.{name}": torch.from_numpy(np.ascontiguousarray(value)) for name, value in columns.items()}


def _truncated(view: ImageTask) -> Array:
    """Return which objects (M,) have boxes that touch the border of the image."""
    boxes, size = view.objects.boxes, np.array([view.shape[1], view.shape[0]], dtype=float)
    return np.asarray((boxes[:, :2] <= _BORDER).any(1) | (boxes[:, 2:] >= size - _BORDER).any(1))


def _write_shard(path: Place, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Write a shard atomically."""
    try:
        write_tensors(path, tensors, metadata)
    except HaloposeError as error:
        raise HaloposeError(f"{error}: free disk space and run the command again to resume") from None
