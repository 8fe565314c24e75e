"""Model form that hosts give to the exporter: the framework's output plus inputs of the probabilistic heads.

Batch and image sizes stay dynamic: they are read from the tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from halopose.uncertainty.context_features import CellBoxes

Layout = Literal["ultralytics", "ultralytics-end2end", "yolonas"]


@dataclass(frozen=True)
class Traced:
    """One pass of a model that is being traced, A cells over all levels.

    Attributes:
        native: Outputs of the framework.
        features: Neck feature map (B, C, H, W) of each level.
        scores: Class scores (B, A, classes).
        cell_boxes: Boxes and keypoints of all cells, if the framework suppresses overlaps after the model.
        rows: Cells (B, R) of the rows of an output that is already selected.
    """

    native: tuple[Tensor, ...]
    features: tuple[Tensor, ...]
    scores: Tensor
    cell_boxes: CellBoxes | None
    rows: Tensor | None = None


class Traceable(nn.Module):
    """Base class of copies of a model in the form in which the framework exports it."""

    layout: Layout
    output_names: tuple[str, ...]
    visibility: bool
    fewest_cells: int  # smallest number of cells of an input

    @abstractmethod
    def forward(self, images: Tensor) -> Traced:
        """Run the model."""
