"""Scenes of the synthetic world that runway detectors are trained and judged on, and how they are judged."""

from __future__ import annotations

from math import radians
from pathlib import Path

import numpy as np

from halopose.data.dataset_loading import load_dataset
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.pipeline import collect_validation
from halopose.fitting.settings import FitSettings
from halopose.geometry.camera import Camera
from halopose.hosts.base import Host
from halopose.landing.world.dataset_writer import write_dataset
from halopose.landing.world.scenes import SceneSettings, Weather
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.studies.coco_ap import CocoScores
from halopose.studies.residual_analysis import constant_predictions
from halopose.types import Progress

SEED = 1
FIT = FitSettings(conf=0.05)
PROCESSES = 2  # that draw


# Scenes to train on, by the name of their split and folder
WORLDS = {
    "detector": SceneSettings(),
    "footage": SceneSettings(footage=True, paved=0.35),
    "parallel": SceneSettings(parallel_share=1.0, distance=(1500.0, 6000.0)),  # two of three scenes show both
    "pale": SceneSettings(parallel_share=1.0, distance=(1500.0, 6000.0)),  # the same, mostly in haze and at dusk
    "parts": SceneSettings(camera=Camera.from_fov(1920, 1152, radians(30)), distance=(1000.0, 6000.0), part=640),
    "bare": SceneSettings(bare=True),  # nothing to find
}
WEATHERS: dict[str, tuple[Weather, ...]] = {
    "footage": ("clear", "haze", "clear", "dusk", "clear", "night"),  # as most of it is
    "pale": ("haze", "dusk", "clear", "haze", "dusk", "night"),  # where most runways are missed
}


def draw(work: Path, world: str, split: str, count: int, seed: int = SEED) -> Path:
    """Data yaml of a split; its images are rendered if they do not exist."""
    weather = {split: WEATHERS[world]} if world in WEATHERS else None
    folder = work / "scenes" / split
    return write_dataset(folder, {split: count}, seed, weather, WORLDS[world], processes=PROCESSES)


def judge(
    host: Host, work: Path, world: str, split: str, count: int, step: Progress, store: str | None = None
) -> MatchStore:
    """Detections of a model on scenes that no detector was trained on, matched to the labels.

    ``store`` names the feature cache where several models are judged in one folder.
    """
    data = draw(work, world, split, count)
    return collect_validation(host, load_dataset(data, split), work / "stores" / (store or split), FIT, step)


def describe(store: MatchStore) -> str:
    """AP, AR and the corners' errors in pixels, by the runway's width in the image."""
    scores = CocoScores.of(store).scores()
    truth, detections = store.ground_truth(), constant_predictions(store)
    confident = detections[detections.scores >= 0.25]
    matched = match_poses(confident, truth)
    found = f"{len(matched)} of {len(truth.image_ids)} runways found"
    return f"AP {scores['ap']:.3f}, AR {scores['ar']:.3f}, {found}; errors {errors(matched)}"


def errors(matched: MatchedPoses) -> str:
    """Median and 90th percentile of the corner error, over three equal groups of size."""
    distance = np.hypot(*np.moveaxis(matched.residual, 2, 0))
    parts = np.array_split(np.argsort(matched.area), 3)
    return "; ".join(
        f"{np.sqrt(matched.area[part]).mean():.0f} px runways: median {np.median(distance[part]):.2f}, "
        f"90 % {np.quantile(distance[part], 0.9):.2f} px"
        for part in parts
    )
