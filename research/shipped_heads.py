"""Train the shipped heads of YOLO11n-pose on COCO persons.

    python -m research.shipped_heads --data a.yaml --extra b.yaml --many c.yaml --work w/ -o heads.safetensors

The images are those of ``shipped_data``. The bound of the heads is fitted on the selection images, and the artifact is
calibrated on all of val. Its figures are of the evaluation images, each scored with what was fitted on the other folds
of val. The settings come from research/head_search.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from halopose.calibration.calibrate import cross_fitted
from halopose.cli.terminal import progress, say, write_scores
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.scores import Scores
from halopose.fitting.card import CardFigures, ImageRoles
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.pipeline import (
    bound_heads,
    calibrate_heads,
    predictions_of,
    train_heads,
    uncalibrated,
)
from halopose.fitting.presets import PRESETS
from halopose.fitting.workers import ProcessGroup
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base
from halopose.matching.matched_poses import match_poses
from halopose.poses import PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array
from research.shipped_data import PARTS, Splits, arguments, collect_part, collect_val, load_splits

SETTINGS = PRESETS["best"]


def scored(detections: PoseDistributions, store: MatchStore, images: Array, protocol: Protocol | None = None) -> Scores:
    """The protocol on some images of val, each under what was fitted on the other folds of all of val."""
    protocol = protocol or SETTINGS.protocol
    matched = match_poses(detections, store.ground_truth(), protocol)
    distributions = cross_fitted(matched, protocol)
    chosen = np.flatnonzero(np.isin(matched.image_ids, images))
    return evaluate(matched.select(chosen), distributions.select(chosen), protocol)


def card_images(splits: Splits, stores: list[MatchStore]) -> ImageRoles:
    """Image ids by role."""
    heads = np.unique(np.concatenate([store.images for store in stores]))
    return ImageRoles(
        heads=tuple(heads.tolist()),
        calibration=tuple(splits.val.image_ids.tolist()),
        choosing=tuple(splits.choosing.tolist()),
        evaluation=tuple(splits.evaluation.tolist()),
    )


def main() -> None:
    given = arguments(__doc__).parse_args()
    host, splits = load_host(find_base()), load_splits(given.data, given.extra, given.many)
    with progress() as step:
        store = collect_val(host, splits, given.work, step)
        stores = [collect_part(host, splits, part, given.work, step) for part in PARTS]
        group = ProcessGroup.joined(host.device)  # under torchrun
        heads, trained = train_heads(host, stores, SETTINGS, given.work / "run.safetensors", step, group=group)
    if group.rank:
        return
    heads = bound_heads(heads, store, splits.choosing, SETTINGS.protocol)
    artifact = replace(
        uncalibrated(host, heads, stores, SETTINGS, trained),
        calibrations=calibrate_heads(heads, store, store.images, SETTINGS),
    )
    protocol = replace(SETTINGS.protocol, bootstrap=200)
    scores = scored(predictions_of(heads, store), store, splits.evaluation, protocol)
    card = replace(
        artifact.card,
        data="COCO 2017 images with persons, by id; which did what as in docs/evidence/persons.md",
        images=card_images(splits, stores),
        figures=CardFigures.of(scores),
        other={"parts": [part.name for part in PARTS]},
    )
    replace(artifact, card=card).save(given.output)
    write_scores(scores, given.work / "report", host.description)
    say(f"-> {given.output}")


if __name__ == "__main__":
    main()
