"""Out-of-distribution values in the exported graph, for the chosen cells and for the image.

The runtime converts them to p-values with the calibration values in the metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from halopose.hosts.traceable import Traced
from halopose.uncertainty.novelty import Evidence, Novelty


class NoveltyAt(nn.Module):
    """Out-of-distribution values of the chosen cells (``windows`` per level) and of the image."""

    level: Tensor

    def __init__(self, novelty: Novelty, strides: Sequence[int], windows: int) -> None:
        super().__init__()
        self.novelty, self.strides = novelty, tuple(strides)
        self.register_buffer("level", torch.arange(len(self.strides)).repeat_interleave(windows))

    def forward(self, traced: Traced, cells: Tensor, pooled: list[Tensor], area: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the values.

        Args:
            traced: Outputs of the traceable model.
            cells: Chosen cells (B, M).
            pooled: Mean features (B, M / L, C) of their windows, for each of L levels.
            area: Edges (B, 4) of the images in the input.

        Returns:
            Values (B, M) of the cells and (B,) of the images.
        """
        batch, count = cells.shape
        images = image_vectors(traced.features, self.strides, area)
        widest = max(self.novelty.widths)
        windows = torch.cat([pad(part, (0, widest - int(part.shape[2]))) for part in pooled], dim=1)
        evidence = Evidence(
            level=self.level.repeat(batch),
            window=windows.flatten(0, 1),
            image=images[:, None].expand(batch, count, -1).flatten(0, 1),
            score=traced.scores.amax(dim=2).gather(1, cells).flatten(),
        )
        return self.novelty.value(evidence).reshape(batch, count), self.novelty.image_value(images)


def image_vectors(features: Sequence[Tensor], strides: Sequence[int], area: Tensor) -> Tensor:
    """Image vectors (B, D) as in ``uncertainty.novelty.pool_images``, without a loop over images."""
    vectors = []
    for maps, stride in zip(features, strides, strict=True):
        low, high = (area / stride).round().clamp(min=0).split(2, dim=1)  # (B, 2): x, y
        high = torch.maximum(high, low + 1)
        inside = [
            (torch.arange(maps.shape[axis]) >= low[:, side : side + 1])
            & (torch.arange(maps.shape[axis]) < high[:, side : side + 1])
            for side, axis in ((1, 2), (0, 3))
        ]
        mask = (inside[0][:, :, None] & inside[1][:, None]).to(maps.dtype)[:, None]
        vectors.append((maps * mask).sum((2, 3)) / mask.sum((2, 3)))
    return torch.cat(vectors, dim=1)


def known_values(novelty: Novelty) -> dict[str, Any]:
    """Calibration values as JSON; nine digits represent every single-precision number exactly."""
    return {
        name: [[_short(each) for each in row] if isinstance(row, list) else _short(row) for row in table.tolist()]
        for name, table in (("known", novelty.known), ("known_images", novelty.known_images))
    }


def _short(value: float) -> float:
    return float(f"{value:.9g}")
