"""Out-of-distribution p-values of detections and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from halopose.poses import PoseDistributions
from halopose.uncertainty.novelty import Evidence, Novelty, Pooling


def add_p_values(
    novelty: Novelty,
    poses: Sequence[PoseDistributions],
    pooling: Pooling,
    vectors: Tensor,
    conf: float,
    widen: bool = False,
) -> list[PoseDistributions]:
    """Add p-values to the poses of B images: one for each detection, and one for each image.

    Args:
        novelty: The out-of-distribution model.
        poses: Poses of each image.
        pooling: Evidence of all detections, image after image.
        vectors: Pooled features (B, D) of the images.
        conf: Lowest score of the detections; it selects the calibration detections to compare with.
        widen: Enlarge the covariances of detections that are out of distribution.

    Returns:
        The poses with ``novelty`` and ``image_novelty``.
    """
    scores = np.concatenate([each.scores for each in poses])
    counts = [len(each) for each in poses]
    numbers = [number for number, count in enumerate(counts) for _ in range(count)]
    white = novelty.whitened(vectors)
    evidence = Evidence(pooling.level, pooling.window, vectors[numbers], torch.from_numpy(scores).to(vectors))
    value = novelty.value(evidence, white[numbers])
    p_values = novelty.p_value(value, conf).cpu().numpy()
    images = novelty.image_p_value(novelty.image_value(vectors, white)).cpu().numpy()
    factor = novelty.widen(value).double().cpu().numpy()[:, None, None, None] if widen else None
    result, begin = [], 0
    for number, (each, count) in enumerate(zip(poses, counts, strict=True)):
        part = slice(begin, begin + count)
        begin += count
        wide = {}
        if factor is not None:
            spreads = {name: getattr(each, name) for name in ("covariance", "scale", "dispersion")}
            wide = {name: value * factor[part] for name, value in spreads.items() if value is not None}
        result.append(replace(each, novelty=p_values[part], image_novelty=images[number : number + 1], **wide))
    return result
