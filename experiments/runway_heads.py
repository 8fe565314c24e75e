"""Make the runway heads that ship: trained on two worlds, calibrated, with novelty.

    python -m experiments.runway_heads --work work/ -o heads.safetensors --footage footage.safetensors

Heads learn from 1,800 scenes of the plain world and 1,200 of footage, novelty from copies of 300 plain ones.
Drawing is cheap, so 1,600 further scenes of the plain world, in the four weathers of training, give
temperatures, thresholds, regions and correlation by object scale, and the p-values of novelty. With --footage
other heads, for frames of one's own, learn from 1,200 scenes of footage where labels may begin with the
pavement before a threshold, and are calibrated on 800 such; their novelty is the same, with p-values of these.
What is drawn and collected stays in the work folder: a rerun goes on where it stopped. The figures on each card
are of scenes of its world that neither the heads nor the calibration have seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from halopose.cli.terminal import progress, say, write_scores
from halopose.data.dataset import Dataset
from halopose.data.loading import load_dataset
from halopose.evaluation.scores import Scores
from halopose.fitting.artifact import Artifact
from halopose.fitting.novelty import calibrate_novelty, collect_copies, fit_novelty
from halopose.fitting.pipeline import (
    FitSettings,
    calibrate_artifact,
    collect_training,
    collect_validation,
    evaluate_artifact,
    figures,
    train_heads,
    uncalibrated,
)
from halopose.fitting.store import MatchStore
from halopose.fitting.training import TrainSettings
from halopose.hosts import shipped
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.landing.world.dataset import write_dataset
from halopose.landing.world.scenes import SceneSettings
from halopose.types import Progress

CALIBRATION = "calibration"
SCENES, RECORDED, SEED = 1600, 800, 21  # to calibrate on: plain, footage
PLAIN, FOOTAGE, UNSEEN = 1800, 1200, 900  # scenes to train on, and those that the figures are of
SETTINGS = FitSettings(TrainSettings(epochs=16), region_scales=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="another detector than the one that ships")
    parser.add_argument("--footage", type=Path, help="write heads calibrated on footage here too")
    given = parser.parse_args()
    work, host = given.work, load_host(given.base or shipped.runway_detector())
    plain, footage = drawn(work, "train", PLAIN), drawn(work, "footage", FOOTAGE)
    with progress() as step:
        stores = [
            collect_training(host, data, work / f"store-{name}", SETTINGS, step)
            for name, data in (("train", plain), ("footage", footage))
        ]
        artifact = trained(host, stores, work / "training.safetensors", step)
        copies = collect_copies(host, plain, work / "copies", SETTINGS.imgsz, progress=step)
        store = calibration_store(host, work, step)
        held = {
            name: collect_validation(host, drawn(work, name, UNSEEN), work / f"store-{name}", SETTINGS, step)
            for name in ("val", "footage_val")
        }
    artifact = calibrate_artifact(artifact, host, store, SETTINGS.calibration, region_scales=True)
    artifact = fit_novelty(artifact, copies, store, store.images)
    written(artifact, host, held, "val", given.output)
    if given.footage:
        with progress() as step:
            for_real_cameras(artifact, host, stores[0], held["val"], work / "paved", given.footage, step)


def for_real_cameras(
    artifact: Artifact, host: Host, plain: MatchStore, val: MatchStore, work: Path, output: Path, step: Progress
) -> None:
    """Heads of the plain world and of footage with pavement before thresholds, with the artifact's novelty."""
    data = drawn(work, "footage", FOOTAGE, paved=True)
    stores = [plain, collect_training(host, data, work / "store-footage", SETTINGS, step)]
    other = trained(host, stores, work / "training.safetensors", step)
    recorded = calibration_store(host, work, step, footage=True)
    data = drawn(work, "footage_val", UNSEEN, paved=True)
    unseen = collect_validation(host, data, work / "store-footage_val", SETTINGS, step)
    other = calibrate_artifact(other, host, recorded, SETTINGS.calibration, region_scales=True)
    card = {**other.card, "novelty": artifact.card["novelty"]}
    other = calibrate_novelty(replace(other, novelty=artifact.novelty, card=card), recorded)
    written(other, host, {"val": val, "footage_val": unseen}, "footage_val", output)


def trained(host: Host, stores: Sequence[MatchStore], state: Path, step: Progress) -> Artifact:
    """Heads that have learnt from some stores, still uncalibrated."""
    heads, facts = train_heads(host, stores, SETTINGS, state, step)
    return uncalibrated(host, heads, stores, SETTINGS, facts)


def written(artifact: Artifact, host: Host, held: Mapping[str, MatchStore], own: str, output: Path) -> None:
    """Save heads with the figures of their own world on their card, and say those of both."""
    scores = {name: evaluate_artifact(artifact, host, store) for name, store in held.items()}
    card = {**artifact.card, "data": "scenes of experiments/runway_heads.py", "figures": figures(scores[own])}
    replace(artifact, card=card).save(output)
    write_scores(scores[own], output.parent / f"report-{own}", host.description)
    say("\n".join([*(line(name, one) for name, one in scores.items()), f"-> {output}"]))


def drawn(work: Path, split: str, count: int, *, paved: bool = False) -> Dataset:
    """Scenes of the heads' own seed; those of footage by the name of their split."""
    settings = SceneSettings(footage=split.startswith("footage"), paved=paved)
    data = write_dataset(work / split, {split: count}, shipped.RUNWAY_SEED, settings=settings, processes=2)
    return load_dataset(data, split)


def calibration_store(host: Host, work: Path, step: Progress, *, footage: bool = False) -> MatchStore:
    """The scenes that heads and novelty are calibrated on, of the plain world or as real cameras record them."""
    name = "footage_calibration" if footage else CALIBRATION
    data = calibration_scenes(work, footage=footage)
    return collect_validation(host, data, work / f"store-{name}", SETTINGS, step)


def calibration_scenes(work: Path, *, footage: bool = False) -> Dataset:
    """The same as a data set."""
    name = "footage_calibration" if footage else CALIBRATION
    count = RECORDED if footage else SCENES
    settings = SceneSettings(footage=footage, paved=footage)
    data = write_dataset(work / name, {name: count}, SEED, settings=settings, processes=2)
    return load_dataset(data, name)


def line(name: str, scores: Scores) -> str:
    """The figures of some scenes in one line."""
    told = figures(scores)
    laws = ", ".join(
        f"{law} ACE {told[law]['ace']:.3f}, ENCE {told[law]['ence']:.3f}, NLL {told[law]['nll']:.2f}"
        for law in ("gaussian", "student_t")
    )
    counts = f"{told['matched_instances']} runways; {laws}; skill {told['akp_skill']:.3f}"
    return f"{name}: {counts}, {100 * told['kept_fraction']:.0f} % kept"


__all__ = ["calibration_scenes", "calibration_store"]

if __name__ == "__main__":
    main()
