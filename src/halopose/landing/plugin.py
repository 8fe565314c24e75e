"""The landing plug-in: what the package adds to the command line, the data formats and the named models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halopose.landing.shipped_detectors import (
    footage_artifact,
    footage_detector,
    runway_artifact,
    runway_detector,
)
from halopose.plugins import NamedModel, Plugin, PluginExtra, PublishedFigures

if TYPE_CHECKING:
    import typer

    from halopose.data.dataset import Dataset


@dataclass(frozen=True)
class RunwayReader:
    """Reader of runway datasets: LARD csv files, and folders of images with LabelMe files as in BARS."""

    name: str = "LARD or BARS"

    def reads(self, path: Path) -> bool:
        """Return whether the path is a csv file, or a folder with LabelMe files beside images."""
        from halopose.landing.runway_datasets import is_runways

        return is_runways(path)

    def read(self, path: Path) -> Dataset:
        """Read the images and runway corners."""
        from halopose.landing.runway_datasets import read_runways

        return read_runways(path)


_FLIGHT_OPTIONS = (
    "weather without outage attitude prune integrity requirement camera runway others gnss ils radio irs terrain truth "
    "offset roi_refinement"
)


def _register(app: typer.Typer) -> None:
    from halopose.cli.option_groups import add_option_group
    from halopose.cli.options import add_command
    from halopose.landing.commands import land_app, world

    add_option_group("Flight", _FLIGHT_OPTIONS, commands=("simulate", "replay"))
    app.add_typer(land_app)
    add_command(app, world)


def _convert_coco(categories: list[Any]) -> Any:
    from halopose.landing.runway_datasets import polygons_as_keypoints

    return polygons_as_keypoints(categories)


_LICENCE, _NETWORK = "AGPL-3.0", "YOLO11n-pose"
PLUGIN = Plugin(
    name="landing",
    register=_register,
    dataset_readers=(RunwayReader(),),
    coco_converters=(_convert_coco,),
    models=(
        NamedModel(
            "runway",
            "runways from the air, 4 corners",
            runway_detector,
            runway_artifact,
            licence=_LICENCE,
            network=_NETWORK,
            figures=PublishedFigures(0.817, "Gaussian 95.0 %", 0.996, 1.03, ("runways.md", "regions.md", "speed.md")),
        ),
        NamedModel(
            "runway-footage",
            "the same, as real cameras record them",
            footage_detector,
            footage_artifact,
            licence=_LICENCE,
            network=_NETWORK,
            figures=PublishedFigures(
                0.656, "Gaussian 99 % and 81 % on two real sequences", 0.943, 1.03, ("runways.md", "speed.md")
            ),
        ),
    ),
    extras=(
        PluginExtra("landing", ("matplotlib",), "pictures and films of a landing"),
        PluginExtra("recordings", ("pymap3d", "mcap", "rosbags"), "recorded approaches: ROS bags, MCAP, WGS84"),
        PluginExtra("rerun", ("rerun",), "Rerun recordings"),
    ),
)
