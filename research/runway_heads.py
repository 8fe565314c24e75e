"""Train the shipped runway heads: for simulated flights or for real cameras, calibrated, with OOD model.

    python -m research.runway_heads --work work/ -o heads.safetensors
    python -m research.runway_heads --recorded --work other/ -o footage-heads.safetensors

Heads for simulated flights train on 1,800 plain scenes and 1,200 scenes of footage. Their out-of-distribution model is
fitted on copies of 300 plain scenes. Another 1,600 plain scenes in the four weathers of training give temperatures,
thresholds, regions, correlation by object scale, and p-values.

Heads for real cameras (`--recorded`) have another detector. They train with a Student-t loss on plain scenes, parts of
large pictures, and footage where pavement may begin before the threshold. They are calibrated on 800 scenes of
footage where it does so as often as at real airports. Their out-of-distribution model uses copies of 900 plain scenes.

The figures on each card are of scenes that neither heads nor calibration have seen. A rerun continues from the work
folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from halopose.cli.terminal import progress, say, write_scores
from halopose.data.dataset import Dataset
from halopose.data.dataset_loading import load_dataset
from halopose.evaluation.scores import Scores
from halopose.fitting.artifact import Artifact
from halopose.fitting.card import CardFigures
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.novelty_fitting import collect_copies, fit_novelty
from halopose.fitting.pipeline import (
    calibrate_artifact,
    collect_training,
    collect_validation,
    evaluate_artifact,
    train_heads,
    uncalibrated,
)
from halopose.fitting.settings import FitSettings, NoveltySettings, TrainSettings
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.landing import shipped_detectors
from halopose.landing.world.dataset_writer import write_dataset
from halopose.landing.world.footage_style import PAVED
from halopose.landing.world.scenes import SceneSettings
from halopose.types import Progress
from research.runway_scenes import WORLDS

SEED, UNSEEN = 21, 900  # of scenes to calibrate on; how many the figures are of, in each world
PLAIN = 1800  # scenes of the plain world to train on
SETTINGS = FitSettings(TrainSettings(epochs=16), region_scales=True)
# Labels at another start of the runway are outliers: with the Gaussian loss a few of them widen all near corners.
FOR_TAILS = replace(SETTINGS, train=TrainSettings(epochs=16, dof=4.0, scale_weight=False))
# Worlds by the first word of a split's name.
DRAWN = {
    "footage": SceneSettings(footage=True),
    "recorded": WORLDS["footage"],
    "real": SceneSettings(footage=True, paved=PAVED),
    "parts": WORLDS["parts"],
}


@dataclass(frozen=True)
class Kind:
    """A detector; its splits for training, corrupted copies, calibration and evaluation; at most this many copies."""

    detector: Callable[[], Path]
    learnt: Mapping[str, int]
    copied: str
    copies: NoveltySettings
    calibration: str
    scenes: int
    judged: str
    settings: FitSettings


SIMULATED = Kind(
    shipped_detectors.runway_detector,
    {"train": PLAIN, "footage": 1200},
    "train",
    NoveltySettings(),
    "calibration",
    1600,
    "val",
    SETTINGS,
)
RECORDED = Kind(
    shipped_detectors.footage_detector, {"train": PLAIN, "parts": 600, "recorded": 1200}, "train",
    NoveltySettings(images=900), "real_calibration", 800, "real_val", FOR_TAILS,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="another detector than the one that ships")
    parser.add_argument("--recorded", action="store_true", help="heads for real cameras")
    parser.add_argument("--gaussian", action="store_true", help="with the paper's loss, for real cameras too")
    given = parser.parse_args()
    kind, work = RECORDED if given.recorded else SIMULATED, given.work
    settings = kind.settings
    if given.gaussian:
        settings = replace(settings, train=replace(settings.train, dof=None))
    host = load_host(given.base or kind.detector())
    data = {name: drawn(work, name, count) for name, count in kind.learnt.items()}
    with progress() as step:
        stores = [collect_training(host, each, work / f"store-{n}", SETTINGS, step) for n, each in data.items()]
        heads, facts = train_heads(host, stores, settings, work / "training.safetensors", step)
        copies = collect_copies(host, data[kind.copied], work / "copies", SETTINGS.imgsz, kind.copies, step)
        store = calibration_store(host, work, step, kind)
        held = {
            name: collect_validation(host, drawn(work, name, UNSEEN), work / f"store-{name}", SETTINGS, step)
            for name in dict.fromkeys(["val", kind.judged])
        }
    artifact = uncalibrated(host, heads, stores, settings, facts)
    artifact = calibrate_artifact(artifact, host, store, SETTINGS.calibration, region_scales=True)
    artifact = fit_novelty(artifact, copies, store, store.images, kind.copies)
    written(artifact, host, held, kind.judged, given.output)


def written(artifact: Artifact, host: Host, held: Mapping[str, MatchStore], own: str, output: Path) -> None:
    """Save heads with the figures of their world on the card; print the figures of all worlds."""
    scores = {name: evaluate_artifact(artifact, host, store) for name, store in held.items()}
    measured = CardFigures.of(scores[own])
    card = replace(artifact.card, data="scenes of research/runway_heads.py", figures=measured)
    replace(artifact, card=card).save(output)
    write_scores(scores[own], output.parent / f"report-{own}", host.description)
    say("\n".join([*(line(name, one) for name, one in scores.items()), f"-> {output}"]))


def drawn(work: Path, split: str, count: int, seed: int = shipped_detectors.RUNWAY_SEED) -> Dataset:
    """Scenes of a seed, by default the heads' own, of the world that the split's name begins with, else the plain
    one."""
    settings = DRAWN.get(split.split("_")[0])
    return load_dataset(write_dataset(work / split, {split: count}, seed, settings=settings, processes=2), split)


def calibration_store(host: Host, work: Path, step: Progress, kind: Kind = SIMULATED) -> MatchStore:
    """Feature cache of the scenes for calibration."""
    data = calibration_scenes(work, kind)
    return collect_validation(host, data, work / f"store-{kind.calibration}", SETTINGS, step)


def calibration_scenes(work: Path, kind: Kind = SIMULATED) -> Dataset:
    """Data set of the scenes for calibration."""
    return drawn(work, kind.calibration, kind.scenes, SEED)


def line(name: str, scores: Scores) -> str:
    """Figures in one line."""
    measured = CardFigures.of(scores)
    distributions = ", ".join(
        f"{regime} ACE {each.ace:.3f}, ENCE {each.ence:.3f}, NLL {each.nll:.2f}"
        for regime, each in (("gaussian", measured.gaussian), ("student_t", measured.student_t))
    )
    counts = f"{measured.matched_instances} runways; {distributions}; skill {measured.akp_skill:.3f}"
    return f"{name}: {counts}, {100 * measured.kept_fraction:.0f} % kept"


if __name__ == "__main__":
    main()
