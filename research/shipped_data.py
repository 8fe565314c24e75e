"""The images behind the shipped heads: for training, for selecting settings, and for evaluation.

    python -m research.shipped_data --data pose.yaml --extra extra.yaml --many many.yaml --work work/

Collects features of all of them; resumable. The first yaml has the splits train, train_small (256 px) and val. The
second has further training photographs, the third tens of thousands more at 256 px. Heads train on no image of val. A
hash of its id decides whether a val image is for selection (two in five) or for evaluation. Calibrations are
cross-fitted over all val images.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from halopose.cli.terminal import progress
from halopose.data.dataset import Dataset, Objects, Record
from halopose.data.dataset_loading import load_dataset
from halopose.data.splits import hashed_order
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings, MatchStore
from halopose.fitting.workers import WorkerPool
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base
from halopose.types import Array, Progress, named

# COCO's left and right keypoints exchanged, as a mirror does.
MIRROR = [0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15]


@dataclass(frozen=True)
class Part:
    """Images of a split at one input size: the share used, whether they are mirrored, and cells per object."""

    split: str
    imgsz: int
    share: float = 1.0
    mirrored: bool = False
    cells: int = 10

    @property
    def name(self) -> str:
        return f"{self.split}-{self.imgsz}{'-mirrored' * self.mirrored}"


# In the order of collection, the most valuable first.
PARTS = (
    Part("train", 640),
    Part("extra", 640),
    Part("train_small", 320),
    Part("extra", 448, 0.5),
    Part("many", 320, cells=4),
)


@dataclass(frozen=True)
class Splits:
    """Training images by split; val images, and the ids for selection and for evaluation."""

    heads: dict[str, Dataset]
    val: Dataset
    choosing: Array
    evaluation: Array


def load_splits(data: Path, extra: Path | None, many: Path | None = None) -> Splits:
    """The fixed division of the images."""
    heads = {split: load_dataset(data, split) for split in ("train", "train_small")}
    heads |= {split: load_dataset(path, "train") for split, path in (("extra", extra), ("many", many)) if path}
    val = load_dataset(data, "val")
    order = hashed_order(val.image_ids)
    choosing, evaluation = np.split(order, [2 * len(order) // 5])
    return Splits(heads, val, np.sort(choosing), np.sort(evaluation))


def collect_part(host: Host, splits: Splits, part: Part, work: Path, step: Progress | None = None) -> MatchStore:
    """Feature cache for training: label-assigned cells with context features."""
    dataset = splits.heads[part.split]
    if part.share < 1:
        order = hashed_order(dataset.image_ids)
        dataset = dataset.subset(order[: round(part.share * len(order))])
    if part.mirrored:
        dataset = replace(dataset, records=tuple(Mirrored.of(record) for record in dataset.records))
    settings = CollectSettings(imgsz=(part.imgsz,), cells_per_object=part.cells, context_features=True)
    workers = WorkerPool.of_machine(host.device)
    return collect(host, dataset, work / part.name, settings, named(step, f"collecting {part.name}"), workers)


def collect_val(host: Host, splits: Splits, work: Path, step: Progress | None = None) -> MatchStore:
    """Feature cache for calibration, selection and evaluation: retained detections with context features."""
    settings = CollectSettings(imgsz=(640,), detections=20, context_features=True)
    return collect(host, splits.val, work / "val", settings, named(step, "collecting val"))


@dataclass(frozen=True)
class Mirrored(Record):
    """A mirrored image with mirrored labels, under the id of the original."""

    @classmethod
    def of(cls, record: Record) -> Mirrored:
        return cls(record.path, record.image_id, record.objects, record.relative, record.area_factor)

    def pixels(self, encoded: bytes | None = None) -> Array:
        return np.ascontiguousarray(super().pixels(encoded)[:, ::-1])

    def objects_in(self, shape: tuple[int, ...]) -> Objects:
        objects, width = super().objects_in(shape), shape[1]
        boxes = objects.boxes.copy()
        boxes[:, [0, 2]] = width - objects.boxes[:, [2, 0]]
        keypoints = objects.keypoints[:, MIRROR].copy()
        keypoints[..., 0] = width - keypoints[..., 0]
        return replace(objects, boxes=boxes, keypoints=keypoints, labelled=objects.labelled[:, MIRROR])


def arguments(description: str | None, rest: Sequence[str] = ("output",)) -> argparse.ArgumentParser:
    """Command line arguments of all scripts for the shipped heads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="yaml with train, train_small and val")
    parser.add_argument("--extra", type=Path, help="yaml with further training photographs")
    parser.add_argument("--many", type=Path, help="yaml with many more of them at 256 px")
    parser.add_argument("--work", type=Path, required=True, help="folder for stores and checkpoints")
    if "output" in rest:
        parser.add_argument("-o", "--output", type=Path, required=True)
    return parser


def main() -> None:
    given = arguments(__doc__, ()).parse_args()
    host, splits = load_host(find_base()), load_splits(given.data, given.extra, given.many)
    with progress() as step:
        collect_val(host, splits, given.work, step)
        for part in PARTS:
            collect_part(host, splits, part, given.work, step)


if __name__ == "__main__":
    main()
