"""A synthetic feature cache of any number of persons: windows of three channels, one level, no base model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from halopose.data.files import write_json
from halopose.data.tensors import write_tensors
from halopose.fitting.collecting import VIEWS_PER_SHARD
from halopose.fitting.feature_cache import FORMAT, shard_path
from halopose.keypoints import Keypoints
from halopose.uncertainty.heads import ConvTemplate, ProbabilisticHeads

CHANNELS, KEYPOINTS, CELLS, STORED = 3, 17, 4, 640


def synthetic_heads() -> ProbabilisticHeads:
    """Untrained heads for a synthetic feature cache."""
    convolution = ConvTemplate(torch.zeros(CHANNELS, CHANNELS, 3, 3), torch.zeros(CHANNELS), "relu")
    return ProbabilisticHeads([[convolution, convolution]], (8,), KEYPOINTS)


def write_store(folder: Path, images: int, persons: int) -> None:
    """Write a feature cache with four assigned cells and two detections per person, one of them correct."""
    shards = -(-images // VIEWS_PER_SHARD)
    generator = torch.Generator().manual_seed(0)
    for number in range(shards):
        begin, end = number * VIEWS_PER_SHARD, min((number + 1) * VIEWS_PER_SHARD, images)
        count = persons * end // images - persons * begin // images
        tensors = _shard(begin, end, count, generator)
        write_tensors(shard_path(folder, number), tensors, {"skipped": [], "views": [[begin, end, count]]})
    manifest = {
        "format": FORMAT,
        "base": ["synthetic"],
        "layout": Keypoints.of(KEYPOINTS).to_json(),
        "levels": 1,
        "strides": [8],
        "settings": {"imgsz": [STORED], "detections": 20},
        "images": list(range(images)),
        "area": "annotation",
        "shards": shards,
    }
    write_json(folder / "manifest.json", manifest)


def _shard(begin: int, end: int, persons: int, generator: torch.Generator) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    image = torch.randint(begin, end, (persons,), generator=generator).sort().values
    points = 320 + 40 * normal(persons, KEYPOINTS, 2)
    low, high = points.amin(1), points.amax(1)
    area = (high - low).prod(1)
    labelled = (torch.rand((persons, KEYPOINTS), generator=generator) < 0.7).to(torch.uint8)
    found = torch.cat([points + 3 * normal(persons, KEYPOINTS, 2), points + 500])
    tensors = {
        "truth.image_id": image,
        "truth.class_id": torch.zeros_like(image),
        "truth.boxes": torch.cat([low, high], 1).double(),
        "truth.keypoints": points.double(),
        "truth.labelled": labelled,
        "truth.area": area.double(),
        "truth.crowd": torch.zeros(persons, dtype=torch.uint8),
        "views.image_id": torch.arange(begin, end),
        "detected.0.box": torch.cat([found.amin(1), found.amax(1)], 1),
        "detected.0.score": torch.rand(2 * persons, generator=generator),
        "detected.0.class_id": torch.zeros(2 * persons, dtype=torch.long),
        "detected.0.keypoints": found,
        "detected.0.gain": torch.ones(2 * persons, 2),
        "detected.0.image_id": image.repeat(2),
        "assigned.0.residual": 3 * normal(CELLS * persons, KEYPOINTS, 2),
        "assigned.0.labelled": labelled.repeat(CELLS, 1),
        "assigned.0.confidence": torch.rand(CELLS * persons, generator=generator),
        "assigned.0.area": area.repeat(CELLS),
        "assigned.0.image_id": image.repeat(CELLS),
        "assigned.0.object": torch.zeros(CELLS * persons, dtype=torch.long),
    }
    for kind, rows in (("detected", 2 * persons), ("assigned", CELLS * persons)):
        tensors[f"{kind}.0.windows"] = normal(rows, CHANNELS, 5, 5).half()
        tensors[f"{kind}.0.inside"] = torch.ones((rows, 5, 5), dtype=torch.uint8)
    return tensors
