"""Fit and test the out-of-distribution model of the shipped heads on COCO persons.

    python -m research.people_novelty --data coco-pose/data.yaml --work work/ -o heads.safetensors

The model is fitted on training photographs and corrupted copies of them. Prints false-alarm rates, flagged shares for
corruptions of increasing strength, and how well scores rank errors. Every figure is of the evaluation images of
``shipped_data``, with calibrations and p-values from the selection images. The written artifact has p-values from both.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from halopose.cli.terminal import progress, say
from halopose.data.files import write_json
from halopose.data.splits import hashed_order, image_folds
from halopose.evaluation.region_scores import ALARM_RATES
from halopose.fitting.artifact import Artifact
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.novelty_fitting import (
    OUTSIDE,
    Rows,
    collect_copies,
    fit_novelty,
    logistic,
    rows_of,
)
from halopose.fitting.pipeline import calibrate_heads, collect_validation
from halopose.fitting.settings import NoveltySettings
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.studies.shift_study import ShiftResult, auroc, run_shift
from halopose.types import Array
from research.runway_novelty import flagged_cells
from research.shipped_data import arguments, load_splits
from research.shipped_heads import SETTINGS
from research.tables import markdown

COPIED = 580  # training photographs that are corrupted
LADDER = 150  # evaluation images on the ladder
FOLDS = 5


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--artifact", type=Path, help="heads for YOLO11n-pose; default: the shipped ones")
    given = parser.parse_args()
    host, shipped = load_host(find_base()), Artifact.load(given.artifact or shipped_artifact())
    splits = load_splits(given.data, given.extra)
    how = NoveltySettings(COPIED)
    with progress() as step:
        copies = collect_copies(
            host, splits.heads["train"], given.work / "copies", 640, how, step, context_features=True
        )
        val = collect_validation(host, splits.val, given.work / "val", SETTINGS, step)
        fair = replace(shipped, calibrations=calibrate_heads(shipped.heads.eval(), val, splits.choosing, SETTINGS))
        fair = fit_novelty(fair, copies, val, splits.choosing)
        some = splits.val.subset(hashed_order(splits.evaluation)[:LADDER])
        shift = run_shift(host, fair, some, given.work / "shift", progress=step)
    say("### False alarms\n\n" + alarm_table(fair, val, splits.evaluation))
    say("\n### The ladder\n\n" + ladder_table(shift))
    say("\n### Ranking\n\n" + ranking_table(shift))
    say("\n" + learnt_note(fair, val))
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
        rows.append([f"detections, confidence {conf:g}", *flagged_cells(chance, found.image)])
    whole = rows_of(artifact, store, 0.05, images)
    chance = novelty.image_p_value(novelty.image_value(whole.vectors)).numpy()
    rows.append(["images", *flagged_cells(chance, whole.ids)])
    return markdown(["flagged at a nominal", *(f"{rate} %" for rate in ALARM_RATES)], rows)


def ladder_table(shift: ShiftResult) -> str:
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


def ranking_table(shift: ShiftResult) -> str:
    rows = [[one.group, one.signal, f"{one.auroc:.3f} ({one.low:.3f} to {one.high:.3f})"] for one in shift.rankings]
    return markdown(["images", "signal", "AUROC for outside the 99 % ellipse"], rows)


def learnt_note(artifact: Artifact, store: MatchStore, conf: float = 0.25) -> str:
    """A logistic regression that predicts which keypoints of val lie outside their ellipse.

    Inputs are the keypoint, the stated covariance, the scores and the box, cross-fitted over folds of images. Its
    ranking is an upper reference: methods with fewer inputs cannot be expected to do better.
    """
    found = rows_of(artifact, store, conf)
    known, label = found.labelled, (found.square > OUTSIDE)[found.labelled]
    inputs = torch.from_numpy(_inputs(found)[known])
    image = np.broadcast_to(found.image[:, None], known.shape)[known]
    fold = image_folds(image, FOLDS)
    ranked = []
    for number in np.unique(fold):
        here = torch.from_numpy(fold == number)
        weights = logistic(inputs[~here], torch.from_numpy(label)[~here].double(), torch.ones(int((~here).sum())), 3.0)
        ranked.append(auroc((inputs[here] @ weights).numpy(), label[fold == number]))
    return (
        f"Taught which of {len(label)} keypoints of val lie outside ({100 * label.mean():.1f} %), and asked about "
        f"other images: AUROC {np.mean(ranked):.3f} ± {np.std(ranked, ddof=1) / len(ranked) ** 0.5:.3f}."
    )


def _inputs(found: Rows) -> Array:
    """Features of every keypoint (N, K, D), scaled to order one, with one-hot keypoint index."""
    boxes, shape = found.poses.boxes, found.labelled.shape
    sides = np.maximum(boxes[:, 2:] - boxes[:, :2], 1.0)
    spread = np.trace(found.poses.covariance, axis1=2, axis2=3)
    seen = np.ones(shape) if found.poses.visibility is None else found.poses.visibility.clip(1e-3, 1 - 1e-3)
    place = (found.poses.keypoints - boxes[:, None, :2]) / sides[:, None] - 0.5
    rows = np.stack([np.log(sides.prod(1)), np.log(sides[:, 1] / sides[:, 0]), found.evidence.odds[:, 0].numpy()], 1)
    numbers = [np.log(spread / sides.prod(1)[:, None]), np.log(seen / (1 - seen)), *np.moveaxis(abs(place), 2, 0)]
    each = np.concatenate([np.stack(numbers, 2), np.broadcast_to(rows[:, None], (*shape, 3))], 2)
    each = (each - each.mean((0, 1))) / each.std((0, 1))
    return np.concatenate([each, np.broadcast_to(np.eye(shape[1]), (*shape, shape[1]))], 2)


if __name__ == "__main__":
    main()
