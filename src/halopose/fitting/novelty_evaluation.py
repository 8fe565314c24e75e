"""Does novelty flag as much as it says: false alarms on images that it has not seen, and what flagging is worth.

In: an artifact and a store of annotated images. Out: ``NoveltyScores``, or None where there is nothing to count.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from halopose.evaluation.region_scores import ALARM_RATES, FlaggedShare, NoveltyScores
from halopose.fitting.artifact import Artifact
from halopose.fitting.feature_cache import SHARDS_AT_ONCE, MatchStore, NoDetectionError
from halopose.fitting.novelty_fitting import rows_of
from halopose.types import Array
from halopose.uncertainty.novelty import Novelty

CONFIDENCE = 0.25  # from which on ``halopose predict`` shows a detection
INSIDE = -2 * np.log(0.05)  # squared Mahalanobis distance of the 95 % ellipse


def score_novelty(
    artifact: Artifact, store: MatchStore, images: Array | None = None, conf: float = CONFIDENCE
) -> NoveltyScores | None:
    """Shares flagged of detections and of images, and what ellipses hold; None without novelty or images.

    Images that novelty was fitted or calibrated on are left out: the others are ranked among them.
    """
    if artifact.novelty is None:
        return None
    record = artifact.card.novelty
    seen = [] if record is None else [*record.images, *record.calibration]
    images = np.setdiff1d(store.images if images is None else images, seen)
    if not len(images):
        return None
    conf = max(conf, store.settings.conf)
    found = list(_detections(artifact, artifact.novelty, store, images, conf))
    none = np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros((0, len(store.layout)))
    chance, image, square = (np.concatenate(column) for column in zip(none, *found, strict=True))
    ids, vectors = store.image_vectors()
    whole = artifact.novelty.image_value(torch.from_numpy(vectors[np.isin(ids, images)]).float())
    return NoveltyScores(
        confidence=conf,
        detections=FlaggedShare.of(chance, image),
        images=FlaggedShare.of(artifact.novelty.image_p_value(whole).numpy(), ids[np.isin(ids, images)]),
        held_kept=tuple(held_share(square[chance > rate / 100]) for rate in ALARM_RATES),
        held_flagged=tuple(held_share(square[chance <= rate / 100]) for rate in ALARM_RATES),
    )


def _detections(
    artifact: Artifact, novelty: Novelty, store: MatchStore, images: Array, conf: float
) -> Iterator[tuple[Array, Array, Array]]:
    """p-values (n,), images (n,) and squared distances (n, K) of detections, a part of the store at a time."""
    for part in store.parts(SHARDS_AT_ONCE):
        try:
            rows = rows_of(artifact, part, conf, images)
        except NoDetectionError:
            continue
        yield novelty.p_value(novelty.value(rows.evidence), conf).numpy(), rows.image, rows.square


def held_share(square: Array) -> float:
    """Share of keypoints with known squared distances (N, K), NaN elsewhere, in their 95 % ellipse."""
    known = square[np.isfinite(square)]
    return float((known <= INSIDE).mean()) if len(known) else float("nan")
