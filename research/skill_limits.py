"""What limits the skill of the shipped heads: single changes that need no new heads, and models that see more.

    python -m research.skill_limits --data coco-pose/data.yaml --work work/ -o limits.md

Every row is of the calibration half of val (``shipped_calibration.halves``), cross-fitted over five folds of images.
The other half is not used. Differences to the first row use the same bootstrap draws of images. Rows in italics cannot
ship: they know the object area, see augmented passes of the model, or train on val images. They tell how much skill the
features of the pass still hold. ``--work`` may have the augmented passes of ``compare_rivals``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.ensemble import HistGradientBoostingRegressor

from halopose.calibration.calibrate import cross_fitted
from halopose.calibration.dispersion_features import FEATURES
from halopose.calibration.dispersion_model import cross_fitted_dispersions
from halopose.cli.terminal import progress, say
from halopose.data.dataset_loading import load_dataset
from halopose.data.files import write_text
from halopose.data.splits import image_folds
from halopose.evaluation.bootstrap import half_width
from halopose.fitting.artifact import Artifact
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CachedCells, CollectSettings, MatchStore
from halopose.fitting.pipeline import bound_heads, predictions_of
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.matching.matched_poses import MatchedPoses, match_poses, matched_pairs
from halopose.poses import PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array, named
from halopose.uncertainty.context_features import ContextFeatures
from halopose.uncertainty.context_head import overlap_inputs
from halopose.uncertainty.heads import ProbabilisticHeads, with_bound, without_conditional_scale
from research import rivals
from research.compare_rivals import VIEWS_FILE
from research.head_search import SCORES, score_matched
from research.shipped_calibration import halves
from research.tables import markdown

OWN, SHARED = Protocol(area="box", gamma_ks=0.3), Protocol(area="box", gamma_ks=0.3, min_samples=1000.0)
FOLDS, TREES, LEAVES = 5, 100, 15
DRAWS = 100
SMALLEST = 0.05  # added to squared distances, so that the logarithm of a perfect keypoint is not the target
Draws = dict[str, list[float]]


@dataclass(frozen=True)
class Half:
    """The calibration half: detections of the frozen model, and its feature cache."""

    store: MatchStore
    images: Array
    heads: ProbabilisticHeads

    def detections(self, heads: ProbabilisticHeads) -> PoseDistributions:
        return predictions_of(heads, self.store, self.images)

    def matched(self, poses: PoseDistributions, protocol: Protocol = SHARED) -> MatchedPoses:
        return match_poses(poses, self.store.ground_truth(self.images), protocol)

    def stated(self) -> PoseDistributions:
        """Dispersions from the stated ones and all features of a prediction file, cross-fitted."""
        truth = self.store.ground_truth(self.images)
        return cross_fitted_dispersions(self.detections(self.heads), truth, SHARED, FEATURES, base="stated")

    def trees(self, views: Path | None = None) -> MatchedPoses:
        """Stated dispersions times a factor of gradient-boosted trees on everything that the heads see, cross-fitted.

        Args:
            views: Keypoints in augmented passes, as a further feature.
        """
        poses = self.detections(self.heads)
        matched = self.matched(poses)
        rows, _ = matched_pairs(poses, self.store.ground_truth(self.images), SHARED)
        features = self._features(poses, views)[rows]
        labelled = matched.labelled
        target = np.log(matched.distance + SMALLEST)
        fold = image_folds(matched.image_ids, FOLDS)
        factor = np.zeros(labelled.shape)
        for number in range(FOLDS):
            known = labelled & (fold != number)[:, None]
            model = HistGradientBoostingRegressor(
                max_iter=TREES, max_leaf_nodes=LEAVES, learning_rate=0.05, l2_regularization=10.0, random_state=0
            )
            model.fit(features[known], target[known])
            mine = fold == number
            factor[mine] = model.predict(features[mine].reshape(-1, features.shape[-1])).reshape(-1, labelled.shape[1])
        covariance = matched.covariance * np.exp(factor)[..., None, None]
        return replace(matched, covariance=covariance, scale=covariance)

    def _features(self, poses: PoseDistributions, views: Path | None) -> Array:
        """Everything that the heads see of each keypoint (N, K, F), and the stated sigmas of the whole object."""
        wanted, parts = np.sort(self.images), []
        for cells in (part.of_images(wanted) for part in self.store.cells("detected")):
            if len(cells):
                parts.append((cells.columns["image_id"].numpy(), cells.columns["score"].numpy(), self._inputs(cells)))
        image, score, found = (np.concatenate(each) for each in zip(*parts, strict=True))
        found = found[np.lexsort((-score, image))]
        trace = np.trace(poses.covariance, axis1=2, axis2=3)
        area = np.prod(poses.boxes[:, 2:] - poses.boxes[:, :2], axis=1)[:, None]
        sigma = np.log(trace / area) / 2
        every = np.repeat(sigma[:, None], sigma.shape[1], 1)
        number = np.broadcast_to(np.arange(sigma.shape[1])[:, None], (*sigma.shape, 1))
        columns = [sigma[..., None], every, number, found]
        if views is not None:
            known = np.load(views)["keypoints"][:, self._rows_of_views(views)]
            apart = np.trace(rivals.spread(poses.keypoints, known), axis1=2, axis2=3)
            columns.append(np.log(apart / area + 1e-8)[..., None])
        return np.concatenate(columns, -1)

    def _rows_of_views(self, views: Path) -> Array:
        """Rows of all detections of val that are of this half."""
        every = predictions_of(self.heads, self.store).image_ids
        assert every is not None
        return np.flatnonzero(np.isin(every, self.images))

    @torch.inference_mode()
    def _inputs(self, cells: CachedCells) -> Array:
        network, level = self.heads.context_head, self.heads.by_level[cells.level]
        assert network is not None
        assert network.features is not None
        context = ContextFeatures.of_columns(cells.columns)
        strides = torch.full((len(cells),), float(self.heads.strides[cells.level]))
        hidden = level.hidden_at(cells.windows.float(), cells.inside)
        own = overlap_inputs(context, strides)
        sampled = F.linear(context.features, network.features.weight)
        whole = hidden[:, None].expand(-1, own.shape[1], -1)
        return np.asarray(torch.cat([own, sampled, whole], -1).numpy())


def rows_of(half: Half, free: ProbabilisticHeads, views: Path | None) -> dict[str, Callable[[], Draws]]:
    """Each row by its name."""
    heads = half.heads

    def scored(poses: PoseDistributions, protocol: Protocol) -> Draws:
        matched = half.matched(poses, protocol)
        return score_matched(matched, cross_fitted(matched, protocol), protocol, DRAWS)

    def of_trees(path: Path | None) -> Draws:
        matched = half.trees(path)
        return score_matched(matched, cross_fitted(matched, SHARED), SHARED, DRAWS)

    annotated = replace(SHARED, area="annotation")
    found: dict[str, Callable[[], Draws]] = {
        "a temperature for each keypoint": lambda: scored(half.detections(heads), OWN),
        "temperatures blended under 1,000 samples": lambda: scored(half.detections(heads), SHARED),
        "and no bound": lambda: scored(half.detections(free), SHARED),
        "*and the annotated area, which nobody knows*": lambda: scored(half.detections(heads), annotated),
        "*and a model of scores, boxes and posture*": lambda: scored(half.stated(), SHARED),
        "*and trees on all features of the pass*": lambda: of_trees(None),
    }
    if views is not None:
        found["*and trees that also see augmented passes*"] = lambda: of_trees(views)
    return found


def line(name: str, draws: Draws, first: Draws) -> list[str]:
    """Each score, and its paired difference to the first row."""
    cells = [name]
    for score in SCORES:
        apart = np.array(draws[score]) - np.array(first[score])
        cells += [f"{draws[score][0]:.3f}", "" if draws is first else f"{apart[0]:+.3f} ± {half_width(apart[1:]):.3f}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="yaml with the split val")
    parser.add_argument("--work", type=Path, required=True, help="folder for the feature cache")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    host, artifact = load_host(find_base()), Artifact.load(shipped_artifact())
    settings = CollectSettings(imgsz=(640,), detections=20, context_features=True)
    with progress() as step:
        store = collect(host, load_dataset(given.data, "val"), given.work / "val", settings, named(step, "collecting"))
    images, _ = halves(store.images)
    trained = without_conditional_scale(artifact.heads.eval())
    half = Half(store, images, bound_heads(trained, store, images, OWN))
    views = given.work / VIEWS_FILE
    rows = rows_of(half, with_bound(trained, np.zeros(trained.keypoints)), views if views.is_file() else None)
    found: dict[str, Draws] = {}
    for name, run in rows.items():
        found[name] = run()
        say(" | ".join(line(name, found[name], next(iter(found.values())))))
    first = next(iter(found.values()))
    head = ["", "skill", "Δ", "ACE, Student-t", "Δ", "ENCE, Gaussian", "Δ", "NLL, Student-t", "Δ"]
    write_text(given.output, markdown(head, [line(name, each, first) for name, each in found.items()]) + "\n")
    say(f"-> {given.output}")


if __name__ == "__main__":
    main()
