"""Do regions hold what they promise, and does the joint law pay: measured on images that neither has seen.

In: true positives, and regions and a correlation fitted on other images, fold by fold. Out: ``RegionScores`` and
``JointScores``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from halopose.evaluation.bootstrap import margin_of, resamplings
from halopose.evaluation.promise_scores import REGION_LEVELS, JointNll, JointScores, Promise, RegionScores
from halopose.evaluation.protocol import Protocol
from halopose.evaluation.true_positives import MatchedPoses
from halopose.types import Array
from halopose.uncertainty.conformal import Regions, whole_distance
from halopose.uncertainty.correlation import Correlation, JointLaw, gains
from halopose.uncertainty.distributions import Bivariate, StudentT


@dataclass(frozen=True)
class Promises:
    """What regions and correlation say of M true positives, at ``REGION_LEVELS``.

    radius (M, K, 4), whole and whole_kept (M, 4): squared radii, inf where there are too few images for a level.
    fold (M,): which of the correlations was fitted on other images than this one's.
    """

    radius: Array
    whole: Array
    whole_kept: Array
    fold: Array
    correlations: tuple[Correlation, ...]

    @classmethod
    def of(
        cls, matched: MatchedPoses, regions: Regions | None, correlation: Correlation | None
    ) -> Promises | None:
        """Of true positives that nothing was fitted on; None without regions or correlation."""
        if regions is None or correlation is None:
            return None
        shape = (len(matched), len(REGION_LEVELS))
        scale = regions.scale_of(matched.box_area)
        levels = [level / 100 for level in REGION_LEVELS]
        return cls(
            radius=np.stack([regions.at(regions.keypoint, level)[scale] for level in levels], axis=-1),
            whole=np.broadcast_to([regions.at(regions.whole, level) for level in levels], shape),
            whole_kept=np.broadcast_to([regions.at(regions.whole_kept, level) for level in levels], shape),
            fold=np.zeros(len(matched), dtype=np.int64),
            correlations=(correlation,),
        )

    def select(self, index: Array) -> Promises:
        """Those of the true positives at the given indices."""
        chosen = {name: getattr(self, name)[index] for name in ("radius", "whole", "whole_kept", "fold")}
        return replace(self, **chosen)

    @classmethod
    def join(cls, parts: Sequence[Promises | None], back: Array) -> Promises | None:
        """The promises of all folds in the order of the true positives."""
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        radius, whole, kept = (
            np.concatenate([getattr(part, name) for part in known])[back]
            for name in ("radius", "whole", "whole_kept")
        )
        fold = np.repeat(np.arange(len(known)), [len(part.fold) for part in known])[back]
        return cls(radius, whole, kept, fold, tuple(part.correlations[0] for part in known))


def score_regions(
    matched: MatchedPoses, promises: Promises, kept: Array, protocol: Protocol, scales: Mapping[str, Array]
) -> RegionScores:
    """Coverage of regions overall, by keypoint and object scale (masks (M,) by name), and of whole objects."""
    held = matched.distance[..., None] <= promises.radius
    labelled = matched.labelled
    images = np.unique(matched.image_ids, return_inverse=True)[1]
    each = np.broadcast_to(images[:, None], labelled.shape)

    def share(hits: Array, image: Array, intervals: bool = True) -> Promise:
        draws = protocol.bootstrap if intervals else 0
        return _share(hits, image, int(images.max()) + 1, draws, protocol.seed)

    whole = {}
    for name, mask, radius in (
        ("whole", labelled, promises.whole),
        ("whole_kept", labelled & kept, promises.whole_kept),
    ):
        rows = np.flatnonzero(mask.any(1))
        largest, image = whole_distance(matched.distance, mask, images)
        whole[name] = share(largest[:, None] <= radius[rows], image)
    with np.errstate(invalid="ignore"):
        root = np.sqrt(np.sqrt(np.linalg.det(matched.scale)))[..., None] * np.sqrt(promises.radius)
    return RegionScores(
        keypoints=share(held[labelled], each[labelled]),
        per_keypoint={
            name: share(held[labelled[:, k], k], images[labelled[:, k]])
            for k, name in enumerate(matched.layout.names)
        },
        per_scale={
            name: share(held[rows][labelled[rows]], each[rows][labelled[rows]]) for name, rows in scales.items()
        },
        whole=whole["whole"],
        whole_kept=whole["whole_kept"],
        size=tuple(float(value) for value in np.median(root[labelled], axis=0)),
    )


def score_joint(
    matched: MatchedPoses, laws: Mapping[str, Bivariate], promises: Promises, protocol: Protocol
) -> JointScores:
    """Joint NLL by law against that of independent keypoints; as given if the predictions have a correlation."""
    names = [name for name in laws if name != "uncalibrated" or matched.correlation is not None]
    images, image = np.unique(matched.image_ids, return_inverse=True)
    count = np.bincount(image, matched.labelled.sum(1))
    scores = {}
    fitted = [name for name in names if name != "uncalibrated"]
    gain_of = dict(zip(fitted, _gains(matched, [laws[name] for name in fitted], promises), strict=True))
    for name in names:
        law = laws[name]
        gain = _given_gain(matched, law) if name == "uncalibrated" else gain_of[name]
        independent = -law.log_prob(torch.from_numpy(matched.residual)).numpy()
        alone = float(independent[matched.labelled].sum() / count.sum())
        by_image = np.bincount(image, gain)
        better = float(by_image.sum() / count.sum())
        draws = resamplings(len(images), protocol.bootstrap, protocol.seed)
        margin = margin_of([float(by_image[pick].sum() / max(count[pick].sum(), 1)) for pick in draws])
        scores[name] = JointNll(alone - better, alone, better, margin)
    folds = promises.correlations
    return JointScores(
        laws=scores,
        correlation=np.mean([each.matrix for each in folds], axis=0),
        dof=float(np.median([each.dof for each in folds])),
        shrinkage=float(np.mean([each.shrinkage for each in folds])),
    )


def _gains(matched: MatchedPoses, laws: Sequence[Bivariate], promises: Promises) -> list[Array]:
    """How much likelier objects (M,) are under each law than with independent keypoints, fold by fold."""
    factors = [law.scale_tril.numpy() for law in laws]
    dofs = [
        law.dof.expand(law.scale_tril.shape[:2]).numpy() if isinstance(law, StudentT) else None for law in laws
    ]
    result = [np.zeros(len(matched)) for _ in laws]
    for number, fitted in enumerate(promises.correlations):
        rows = np.flatnonzero(promises.fold == number)
        matrix = fitted.matrix if fitted.scales is None else fitted.of_objects(matched.box_area[rows])
        joint = [
            JointLaw(factor[rows], matrix, None if dof is None else dof[rows], fitted.dof)
            for factor, dof in zip(factors, dofs, strict=True)
        ]
        for whole, part in zip(result, gains(joint, matched.residual[rows], matched.labelled[rows]), strict=True):
            whole[rows] = part
    return result


def _given_gain(matched: MatchedPoses, law: Bivariate) -> Array:
    assert matched.correlation is not None
    dof = law.dof.expand(law.scale_tril.shape[:2]).numpy() if isinstance(law, StudentT) else None
    joint = JointLaw(law.scale_tril.numpy(), matched.correlation, dof)
    return joint.gain(matched.residual, matched.labelled)


def _share(hits: Array, image: Array, images: int, draws: int, seed: int) -> Promise:
    """Share of hits (n, 4) with intervals over images (n,) as everywhere in the protocol."""
    count = len(hits)
    if not count:
        nothing = (math.nan,) * len(REGION_LEVELS)
        return Promise(nothing, nothing, 0)
    held = tuple(float(value) for value in hits.mean(0))
    if not draws:
        return Promise(held, (math.nan,) * len(held), count)
    total = np.bincount(image, minlength=images)
    sums = np.stack([np.bincount(image, column, minlength=images) for column in hits.T], axis=1)
    picks = resamplings(images, draws, seed)
    drawn = total[picks].sum(1)
    shares = sums[picks].sum(1)[drawn > 0] / drawn[drawn > 0, None]  # a draw may miss all images of a group
    return Promise(held, tuple(margin_of(column) for column in shares.T), count)


__all__ = ["Promises", "score_joint", "score_regions"]
