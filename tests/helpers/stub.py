"""Small images with objects for the stub host of the benchmarks."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from halopose.data.dataset import Dataset, Objects, Record
from halopose.keypoints import Keypoints


def noise_pictures(folder: Path, count: int, keypoints: int = 3, seed: int = 0) -> Dataset:
    """Pictures of two shapes with one or two objects each."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for number in range(count):
        shape = (48, 64) if number % 3 else (64, 48)
        path = folder / f"{number:04d}.png"
        cv2.imwrite(str(path), generator.integers(0, 256, (*shape, 3), dtype=np.uint8))
        objects = 1 + number % 2
        corner = generator.uniform(0, 20, (objects, 2))
        objects_ = Objects(
            boxes=np.concatenate([corner, corner + 20], axis=1),
            class_ids=np.zeros(objects, dtype=np.int64),
            keypoints=corner[:, None] + generator.uniform(0, 20, (objects, keypoints, 2)),
            labelled=generator.uniform(size=(objects, keypoints)) < 0.8,
            area=np.full(objects, 200.0),
            crowd=np.zeros(objects, dtype=bool),
        )
        records.append(Record(path, number, objects_, relative=False, area_factor=1.0))
    return Dataset(tuple(records), Keypoints.of(keypoints), "annotation")
