"""Make the runway heads that ship: for simulated flights and for real cameras, calibrated, with novelty.

    python -m experiments.runway_heads --work work/ -o heads.safetensors --footage footage.safetensors

Heads for simulated flights learn from 1,800 scenes of the plain world and 600 parts of large pictures, novelty
from copies of the plain ones. Drawing is cheap, so 1,600 further scenes, in the four weathers of training, give
temperatures, thresholds, regions and correlation by object scale, and the p-values of novelty. With --footage
other heads learn from 1,200 scenes as real cameras record them and people label them beside, and are calibrated
on 800 more, for frames of one's own; their novelty is the same, with p-values of these 800. What is drawn and
collected stays in the work folder: a rerun goes on where it stopped. The figures on each card are of scenes of
its world that neither heads nor calibration have seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.runway_detector import WORLDS as DETECTED
from halopose.cli.terminal import progress, say, write_scores
from halopose.data.dataset import Dataset
from halopose.data.loading import load_dataset
from halopose.evaluation.scores import Scores
from halopose.fitting.artifact import Artifact
from halopose.fitting.novelty import NoveltySettings, calibrate_novelty, collect_copies, fit_novelty
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
from halopose.types import Progress

CALIBRATION = "calibration"
SCENES, RECORDED, SEED = 1600, 800, 21  # to calibrate on: plain, footage
PLAIN, PARTS, FOOTAGE, UNSEEN = 1800, 600, 1200, 900  # scenes to train on, and those that the figures are of
WORLDS = {name: DETECTED[name] for name in ("footage", "parts")}
SETTINGS = FitSettings(TrainSettings(epochs=16), region_scales=True)
COPIES = NoveltySettings(images=PLAIN)  # of 300, as usual, a gate for fog learns far too little


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="another detector than the one that ships")
    parser.add_argument("--footage", type=Path, help="write heads calibrated on footage here too")
    given = parser.parse_args()
    work, host = given.work, load_host(given.base or shipped.runway_detector())
    plain, parts, footage = (
        drawn(work, name, count) for name, count in (("train", PLAIN), ("parts", PARTS), ("footage", FOOTAGE))
    )
    with progress() as step:
        stores = [
            collect_training(host, data, work / f"store-{name}", SETTINGS, step)
            for name, data in (("train", plain), ("parts", parts), ("footage", footage))
        ]
        artifact = trained(host, stores[:2], work / "training.safetensors", step)
        copies = collect_copies(host, plain, work / "copies", SETTINGS.imgsz, COPIES, step)
        store = calibration_store(host, work, step)
        held = {
            name: collect_validation(host, drawn(work, name, UNSEEN), work / f"store-{name}", SETTINGS, step)
            for name in ("val", "footage_val")
        }
        if given.footage:
            recorded = calibration_store(host, work, step, footage=True)
            other = trained(host, stores, work / "training-footage.safetensors", step)
    artifact = calibrate_artifact(artifact, host, store, SETTINGS.calibration, region_scales=True)
    artifact = fit_novelty(artifact, copies, store, store.images, COPIES)
    written(artifact, host, held, "val", given.output)
    if given.footage:
        other = calibrate_artifact(other, host, recorded, SETTINGS.calibration, region_scales=True)
        card = {**other.card, "novelty": artifact.card["novelty"]}
        other = calibrate_novelty(replace(other, novelty=artifact.novelty, card=card), recorded)
        written(other, host, held, "footage_val", given.footage)


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


def drawn(work: Path, split: str, count: int) -> Dataset:
    """Scenes of the heads' own seed, of the world that their split is named after, or else of the plain one."""
    settings = WORLDS.get(split.split("_")[0])
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
    data = write_dataset(work / name, {name: count}, SEED, settings=WORLDS.get(name.split("_")[0]), processes=2)
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


__all__ = ["COPIES", "calibration_scenes", "calibration_store"]

if __name__ == "__main__":
    main()
