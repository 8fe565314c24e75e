"""Evaluation of the out-of-distribution model: false-alarm rates on held-out images, and coverage with and without
flagged detections.
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

CONFIDENCE = 0.25  # default score threshold of ``halopose predict``
INSIDE = -2 * np.log(0.05)  # squared Mahalanobis distance of the 95 % ellipse


def score_novelty(
    artifact: Artifact, store: MatchStore, images: Array | None = None, conf: float = CONFIDENCE
) -> NoveltyScores | None:
    """Measure shares of flagged detections and images, and the coverage of ellipses.

    Args:
        artifact: Artifact; without an out-of-distribution model the result is None.
        store: Feature cache of annotated images.
        images: Image ids; default: all. Images that the model was fitted or calibrated on are left out.
        conf: Lowest score of the detections.

    Returns:
        The scores, or None if no image is left.
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
    p_values, image, square = (np.concatenate(column) for column in zip(none, *found, strict=True))
    ids, vectors = store.image_vectors()
    whole = artifact.novelty.image_value(torch.from_numpy(vectors[np.isin(ids, images)]).float())
    return NoveltyScores(
        confidence=conf,
        detections=FlaggedShare.of(p_values, image),
        images=FlaggedShare.of(artifact.novelty.image_p_value(whole).numpy(), ids[np.isin(ids, images)]),
        held_kept=tuple(held_share(square[p_values > rate / 100]) for rate in ALARM_RATES),
        held_flagged=tuple(held_share(square[p_values <= rate / 100]) for rate in ALARM_RATES),
    )


def _detections(
    artifact: Artifact, novelty: Novelty, store: MatchStore, images: Array, conf: float
) -> Iterator[tuple[Array, Array, Array]]:
    """Yield p-values (n,), image ids (n,) and squared distances (n, K) of detections, part by part."""
    for part in store.parts(SHARDS_AT_ONCE):
        try:
            rows = rows_of(artifact, part, conf, images)
        except NoDetectionError:
            continue
        yield novelty.p_value(novelty.value(rows.evidence), conf).numpy(), rows.image, rows.square


def held_share(square: Array) -> float:
    """Return the share of labelled keypoints inside their 95 % ellipse.

    Args:
        square: Squared Mahalanobis distances (N, K); NaN without a label.
    """
    known = square[np.isfinite(square)]
    return float((known <= INSIDE).mean()) if len(known) else float("nan")
