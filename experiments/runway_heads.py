"""Calibrate the runway heads that ship, and what they know of novelty, on many scenes.

    python -m experiments.runway_heads --work work/ -o runway-heads.safetensors

The heads stay as ``halopose fit`` trained them, and so does what it learnt of novelty on copies of 300 scenes, bit
for bit. Drawing is cheap, so 1,600 scenes of a seed of their own, in the four weathers of training, give
temperatures, thresholds, regions and correlation by object scale, and the p-values of novelty. What is drawn and
collected stays in the work folder: a rerun goes on where it stopped. The figures on the card are of scenes of the
heads' own seed that neither they nor the calibration have seen.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from halopose.cli.terminal import progress, say, write_scores
from halopose.data.loading import load_dataset
from halopose.fitting.artifact import Artifact
from halopose.fitting.novelty import calibrate_novelty
from halopose.fitting.pipeline import (
    FitSettings,
    calibrate_artifact,
    collect_validation,
    evaluate_artifact,
    figures,
)
from halopose.fitting.store import MatchStore
from halopose.hosts import shipped
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.landing.world.dataset import write_dataset
from halopose.types import Progress

CALIBRATION = "calibration"
SCENES, SEED = 1600, 21
UNSEEN = 900  # scenes that the figures on the card are of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="another detector, with its heads; else those that ship")
    parser.add_argument("--artifact", type=Path, help="the heads to calibrate")
    given = parser.parse_args()
    if (given.base is None) != (given.artifact is None):
        parser.error("--base and --artifact belong together: give both or neither")
    host = load_host(given.base or shipped.runway_detector())
    artifact = Artifact.load(given.artifact or shipped.runway_artifact())
    artifact.check(host)
    settings = FitSettings.from_json(artifact.card["settings"])
    with progress() as step:
        store = calibration_store(host, artifact, given.work, step)
        unseen = write_dataset(given.work / "unseen", {"val": UNSEEN}, shipped.RUNWAY_SEED, processes=2)
        held = collect_validation(host, load_dataset(unseen, "val"), given.work / "unseen-store", settings, step)
    artifact = calibrate_artifact(artifact, host, store, settings.calibration, region_scales=True)
    artifact = calibrate_novelty(artifact, store)
    scores = evaluate_artifact(artifact, host, held)
    card = {**artifact.card, "data": "scenes of experiments/runway_heads.py", "figures": figures(scores)}
    replace(artifact, card=card).save(given.output)
    write_scores(scores, given.work / "report", host.description)
    say(f"-> {given.output}")


def calibration_store(host: Host, artifact: Artifact, work: Path, step: Progress) -> MatchStore:
    """The scenes that the artifact is calibrated on."""
    data = write_dataset(work / "calibration", {CALIBRATION: SCENES}, SEED, processes=2)
    settings = FitSettings.from_json(artifact.card["settings"])
    return collect_validation(host, load_dataset(data, CALIBRATION), work / "calibration-store", settings, step)


if __name__ == "__main__":
    main()
