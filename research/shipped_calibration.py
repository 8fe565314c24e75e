"""Calibrate the shipped heads for detections matched by OKS and by box, and measure it on held-out images.

    python -m research.shipped_calibration --data coco-pose/data.yaml --work work/ -o heads.safetensors

The heads do not change. Half of the val images, by a hash of their ids, calibrate; the other half is scored and was
never used to choose anything about this step. The saved artifact is calibrated on all val images. `--occluded-first`
also measures a calibration that gives weight to occluded keypoints matched by box, which does not ship.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from halopose.cli.terminal import progress, say, write_scores
from halopose.data.dataset_loading import load_dataset
from halopose.evaluation.scores import Scores
from halopose.fitting.artifact import Artifact
from halopose.fitting.card import CardFigures
from halopose.fitting.collecting import collect
from halopose.fitting.conditional_calibration import calibrate_for_both
from halopose.fitting.feature_cache import CollectSettings, MatchStore
from halopose.fitting.pipeline import bound_heads, calibrate_heads, evaluate_artifact
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.protocol import Protocol
from halopose.types import Array, named
from halopose.uncertainty.heads import without_conditional_scale

BLENDED = 1000.0  # samples under which temperatures are blended in the alternative
COLUMNS = ("ACE", "95 % range by chance", "ENCE", "NLL", "50 %", "95 %", "99 %")


def halves(images: Array) -> tuple[Array, Array]:
    """Images to calibrate on and images to score, by a hash of their ids."""
    even = np.array([int(hashlib.sha1(str(image).encode()).hexdigest()[:8], 16) % 2 == 0 for image in images.tolist()])
    return images[even], images[~even]


def calibrated(
    artifact: Artifact, store: MatchStore, images: Array, *, both: bool, occluded_first: bool = False
) -> Artifact:
    """The artifact calibrated on images, for both kinds of matches or for OKS alone, with a bound fitted on them."""
    settings = replace(artifact.card.fit_settings, match="both" if both else "oks")
    if occluded_first:
        settings = replace(settings, min_samples=BLENDED)
    heads = bound_heads(without_conditional_scale(artifact.heads), store, images, settings.protocol)
    if both:
        heads, fitted = calibrate_for_both(heads, store, images, settings.protocol, occluded_first=occluded_first)
    else:
        fitted = calibrate_heads(heads, store, images, settings)
    card = replace(artifact.card, settings=replace(settings, head=heads.settings))
    return replace(artifact, heads=heads, calibrations=fitted, card=card)


def table(scores: Scores) -> str:
    """Markdown rows by match and distribution, and the groups of keypoints under the Student-t."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for kind, match in scores.matches.items():
        for name in ("gaussian", "student_t"):
            one = match.distributions[name]
            floor, held = one.floors["ace"], one.coverage
            cells = [f"{one.ace:.4f}", f"{floor.low:.4f} to {floor.high:.4f}", f"{one.ence:.3f}", f"{one.nll:.2f}"]
            cells += [f"{100 * held[level]:.1f}" for level in (50, 95, 99)]
            lines.append(f"| {kind}, {name} | " + " | ".join(cells) + " |")
    lines += ["", "| match | group | keypoints | ACE | by chance up to | 95 % |", "|---|---|---|---|---|---|"]
    for kind, match in scores.matches.items():
        for group in match.groups:
            one_group = group.distributions["student_t"]
            lines.append(
                f"| {kind} | {group.kind}: {group.name} | {group.count} | {one_group.ace:.4f} | "
                f"{one_group.floor.high:.4f} | {100 * one_group.coverage[95]:.1f} |"
            )
        lines.append(f"| {kind} | regions, per cent | | {match.regions} | | |")
    return "\n".join(lines)


def measured(artifact: Artifact, host: Host, store: MatchStore, images: Array) -> Scores:
    return evaluate_artifact(artifact, host, store, images, Protocol(bootstrap=200, area="box", gamma_ks=0.3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="yaml with the split val")
    parser.add_argument("--work", type=Path, required=True, help="folder for the feature cache and reports")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--occluded-first", action="store_true", help="measure the alternative too")
    given = parser.parse_args()
    artifact, host = Artifact.load(shipped_artifact()), load_host(find_base())
    settings = CollectSettings(imgsz=(640,), detections=20, context_features=True)
    with progress() as step:
        dataset = load_dataset(given.data, "val")
        store = collect(host, dataset, given.work / "val", settings, named(step, "collecting val"))
    calibration, evaluation = halves(store.images)
    for name in ("oks", *["occluded-first"] * given.occluded_first, "both"):
        held_out = calibrated(artifact, store, calibration, both=name != "oks", occluded_first=name == "occluded-first")
        scores = measured(held_out, host, store, evaluation)
        say(f"\n## Calibrated for {name}: skill {scores.akp_skill:.3f}, kept ACE {scores.pruned.student_t.ace:.4f}\n")
        say(table(scores))
        write_scores(scores, given.work / f"report-{name}", host.description)
    final = calibrated(artifact, store, store.images, both=True)
    replace(final, card=replace(final.card, figures=CardFigures.of(scores))).save(given.output)
    say(f"-> {given.output}")


if __name__ == "__main__":
    main()
