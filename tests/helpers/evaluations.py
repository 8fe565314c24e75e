"""True positives of a known distribution and their scores, for tests of evaluation and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halopose.calibration.calibrate import DISTRIBUTIONS, DistributionSet, cross_fitted, stated_distribution
from halopose.data.coco import parse_ground_truth, parse_predictions
from halopose.data.files import write_json
from halopose.data.synthetic_poses import World, synthesize
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.scores import Scores
from halopose.keypoints import Keypoints
from halopose.matching.matched_poses import MatchedPoses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.protocol import Protocol
from halopose.uncertainty.distributions import Bivariate, Gaussian, StudentT, scale_tril_from_raw


def poses(
    instances: int,
    keypoints: int,
    nu: float | None = None,
    seed: int = 0,
    images: int | None = None,
    flaw: float = 1.0,
    names: Sequence[str] | None = None,
) -> MatchedPoses:
    """True positives drawn from their stated distribution, with errors scaled by ``flaw``; no selection by OKS."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(instances, keypoints, 3)) * [1.0, 2.0, 1.0] + 1.5
    raw[..., 1] -= 1.5
    factors = scale_tril_from_raw(torch.from_numpy(raw))
    dof = None if nu is None else np.full((instances, keypoints), float(nu))
    distribution: Bivariate = Gaussian(factors) if dof is None else StudentT(factors, torch.from_numpy(dof))
    residual = flaw * distribution.sample(1, torch.Generator().manual_seed(seed))[0].numpy()
    images = images or max(instances // 3, 2)
    return MatchedPoses(
        image_ids=np.sort(rng.integers(0, images, instances)) * 7 + 1,
        objects=np.arange(instances),
        residual=residual,
        labelled=rng.random((instances, keypoints)) < 2,
        covariance=distribution.covariance.numpy(),
        scale=distribution.scale.numpy(),
        visibility=rng.random((instances, keypoints)),
        area=np.exp(rng.uniform(np.log(300), np.log(60_000), instances)),
        box_area=np.exp(rng.uniform(np.log(300), np.log(60_000), instances)),
        dof=dof,
        layout=Keypoints.of(
            keypoints,
            names=names or [f"k{i}" for i in range(keypoints)],
            sigmas=np.linspace(0.05, 0.1, keypoints),
            area_factor=0.53,
        ),
    )


def partly_labelled(matched: MatchedPoses, seed: int = 0, share: float = 0.7) -> MatchedPoses:
    labelled = np.random.default_rng(seed).random(matched.labelled.shape) < share
    return replace(matched, labelled=labelled)


def with_informative_visibility(matched: MatchedPoses, seed: int = 0, noise: float = 0.5) -> MatchedPoses:
    """Visibility scores correlated with the actual errors, unlike the covariances."""
    error = np.random.default_rng(seed).normal(0, noise, matched.labelled.shape)
    return replace(matched, visibility=1 / (1 + np.exp(-np.log(matched.similarity + 1e-9) - 1 + error)))


def as_given(
    matched: MatchedPoses, threshold: float = -np.inf, distribution: Bivariate | None = None
) -> DistributionSet:
    """The stated distribution in place of all three distributions."""
    distribution = distribution or stated_distribution(matched)
    return DistributionSet(
        distributions=dict.fromkeys(DISTRIBUTIONS, distribution),
        confidence=matched.confidence(distribution.covariance.numpy(), Protocol()),
        threshold=np.full(len(matched), threshold),
        visibility_threshold=None,
        source="as given",
    )


@cache
def synthetic_poses() -> tuple[PoseDistributions, GroundTruth]:
    """Predictions and ground truth of 80 synthetic images."""
    content, entries = synthesize(World(images=80, persons=250))
    truth = parse_ground_truth("truth", content)
    return parse_predictions("predictions", entries, truth), truth


@cache
def real_scores(
    names: tuple[str, ...] = ("nose", "left_eye"),
    edges: tuple[float, ...] = (1024.0,),
    instances: int = 120,
    bootstrap: int = 0,
    prune: bool = True,
) -> Scores:
    """Scores of an evaluation with heavy-tailed errors, of keypoints with the given names."""
    matched = poses(instances, len(names), 4, seed=1, flaw=1.3, names=names)
    protocol = Protocol(scale_edges=edges, bootstrap=bootstrap)
    distributions = cross_fitted(matched, protocol)
    if not prune:
        distributions = replace(distributions, threshold=np.full(len(matched), -np.inf))
    return evaluate(matched, distributions, protocol)


def json_text(scores: Scores, folder: Path) -> str:
    """Content of metrics.json."""
    write_json(folder / "metrics.json", scores.to_json())
    return (folder / "metrics.json").read_text()


def with_distribution(scores: Scores, name: str, **changes: Any) -> Scores:
    """The scores with changes to one distribution."""
    changed: dict[str, Any] = {name: replace(scores.distribution(name), **changes)}
    return replace(scores, **changed)


def with_pruned_distribution(scores: Scores, name: str, **changes: Any) -> Scores:
    """The scores with changes to one distribution after pruning."""
    changed: dict[str, Any] = {name: replace(scores.pruned.distribution(name), **changes)}
    return replace(scores, pruned=replace(scores.pruned, **changed))
