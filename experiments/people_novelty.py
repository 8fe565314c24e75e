"""Novelty for the heads that ship, on COCO persons: false alarms, a ladder of corruptions, and what ranks errors.

    python -m experiments.people_novelty --data coco-pose/data.yaml --work work/ -o heads.safetensors

Fits novelty on training photographs and corrupted copies of them. Every figure is of the evaluation images of
``shipped_data``, under calibrations and p-values from the choosing images; what is written has p-values from both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.shipped_data import arguments, load_splits
from experiments.shipped_heads import SETTINGS
from experiments.shipped_results import markdown
from halopose.cli.terminal import progress, say
from halopose.data.files import write_json
from halopose.data.splits import hashed_order
from halopose.fitting.artifact import Artifact
from halopose.fitting.novelty import NoveltySettings, collect_copies, fit_novelty, rows_of
from halopose.fitting.pipeline import calibrate_heads, collect_validation
from halopose.fitting.store import MatchStore
from halopose.hosts.loading import load_host
from halopose.hosts.shipped import find_base, shipped_artifact
from halopose.studies.shift import Shift, run_shift
from halopose.types import Array

COPIED = 580  # training photographs that are corrupted
LADDER = 150  # evaluation images on the ladder
RATES = (0.01, 0.05, 0.1)


def main() -> None:
    given = arguments(__doc__).parse_args()
    host, shipped = load_host(find_base()), Artifact.load(shipped_artifact())
    splits = load_splits(given.data, given.extra)
    how = NoveltySettings(COPIED)
    with progress() as step:
        copies = collect_copies(host, splits.heads["train"], given.work / "copies", 640, how, step, signals=True)
        val = collect_validation(host, splits.val, given.work / "val", SETTINGS, step)
        fair = replace(shipped, calibrations=calibrate_heads(shipped.heads.eval(), val, splits.choosing, SETTINGS))
        fair = fit_novelty(fair, copies, val, splits.choosing)
        some = splits.val.subset(hashed_order(splits.evaluation)[:LADDER])
        shift = run_shift(host, fair, some, given.work / "shift", progress=step)
    say("### False alarms\n\n" + alarm_table(fair, val, splits.evaluation))
    say("\n### The ladder\n\n" + ladder_table(shift))
    say("\n### Ranking\n\n" + ranking_table(shift))
    write_json(given.work / "shift.json", shift.to_json())
    fit_novelty(shipped, copies, val).save(given.output)
    say(f"-> {given.output}")


def alarm_table(artifact: Artifact, store: MatchStore, images: Array) -> str:
    """Shares of clean detections and images that are flagged, with one standard error over images."""
    novelty = artifact.novelty
    assert novelty is not None
    rows = []
    for conf in (0.05, 0.25, 0.7):
        found = rows_of(artifact, store, conf, images)
        chance = novelty.p_value(novelty.value(found.evidence), conf).numpy()
        rows.append([f"detections, confidence {conf:g}", *(_share(chance <= rate, found.image) for rate in RATES)])
    whole = rows_of(artifact, store, 0.05, images)
    chance = novelty.image_p_value(novelty.image_value(whole.vectors)).numpy()
    rows.append(["images", *(_share(chance <= rate, whole.ids) for rate in RATES)])
    return markdown(["flagged at a nominal", *(f"{100 * rate:.0f} %" for rate in RATES)], rows)


def _share(flagged: Array, image: Array) -> str:
    """Per cent, with the standard error of a ratio over images, whose detections are not independent."""
    _, place = np.unique(image, return_inverse=True)
    count = np.bincount(place)
    share = flagged.mean()
    off = np.bincount(place, flagged) - share * count
    error = np.sqrt((off**2).sum() / len(count) * len(count) / (len(count) - 1) / len(count)) / count.mean()
    return f"{100 * share:.1f} ± {100 * error:.1f} %"


def ladder_table(shift: Shift) -> str:
    rows = [
        [
            f"{row.name} {row.severity or ''}".strip(),
            str(row.detections),
            *(f"{100 * value:.1f}" for value in (row.coverage, row.coverage_kept, row.wrong, row.wrong_kept)),
            f"{row.error:.1f}",
            f"{row.sigma:.1f}",
            *(f"{100 * value:.0f}" for value in (row.alarms, row.image_alarms)),
        ]
        for row in shift.rows
    ]
    head = ["", "detections", "95 % holds", "of kept", "wrong", "wrong and kept", "error, px", "stated", "alarms"]
    return markdown([*head, "images"], rows)


def ranking_table(shift: Shift) -> str:
    rows = [
        [one.group, one.signal, f"{one.auroc:.3f} ({one.low:.3f} to {one.high:.3f})"] for one in shift.rankings
    ]
    return markdown(["images", "signal", "AUROC for outside the 99 % ellipse"], rows)


if __name__ == "__main__":
    main()
