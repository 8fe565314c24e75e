"""Rivals of the shipped heads on identical detections of held-out COCO images, in one table with intervals.

    python -m research.compare_rivals --data coco-pose/data.yaml --work work/ -o rivals/

Half of the val images, by a hash of their ids, fits every method and its calibration; the other half is scored. Every
row has the same detections of the frozen YOLO11n-pose, the same true positives and the same calibration: one Gaussian
and one Student-t per keypoint, and 90 % conformal regions. Methods without heads are constants, a regression of the log
variance on scores and boxes, and test-time augmentation. The paper's head and our recipe train on the images of the
split ``train``. The latter is also scored as an ensemble and with a last-layer Laplace approximation. The last row are
the shipped heads. A rerun keeps augmented passes and trained heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halopose.boxes import box_area
from halopose.calibration.calibrate import apply_calibrations, fit_calibrations
from halopose.calibration.calibrators import Calibrations
from halopose.calibration.dispersion_features import Feature
from halopose.calibration.dispersion_model import DispersionModel
from halopose.cli.terminal import progress, say
from halopose.data.dataset_loading import load_dataset
from halopose.data.files import read_json, write_json, write_text
from halopose.evaluation.bootstrap import half_width, resample_images
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.scores import DistributionScores, Scores
from halopose.fitting.artifact import Artifact
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings, MatchStore
from halopose.fitting.pipeline import bound_heads, predictions_of, train_heads, uncalibrated
from halopose.fitting.presets import PRESETS, Preset
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.poses import PoseDistributions
from halopose.protocol import Protocol
from halopose.types import Array, named
from halopose.uncertainty.heads import ProbabilisticHeads, without_conditional_scale
from research import rivals
from research.head_search import slug
from research.shipped_calibration import halves
from research.shipped_data import load_splits
from research.shipped_results import passes_cost
from research.tables import markdown

PROTOCOL = replace(PRESETS["best"].protocol, split_student=False, bootstrap=100)
REGRESSION: tuple[Feature, ...] = ("score", "visibility", "size")
POSTURE: tuple[Feature, ...] = (*REGRESSION, "neighbours", "posture")
LEVEL = 90  # per cent of the conformal regions
TIMED = 20  # images that are timed
VIEWS = [rivals.VIEWS[place] for place in (1, 6)]  # one zoomed and shifted, one mirrored and shifted
VIEWS_FILE = "views-2.npz"
SEEDS, SAMPLES = 5, 10  # members of the ensemble, draws of the Laplace approximation


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        name: Name of the method.
        covariance: Computes covariances (N, K, 2, 2) of all detections.
        cost: Time over one pass of the base model.
    """

    name: str
    covariance: Callable[[], Array]
    cost: float


@dataclass(frozen=True)
class Comparison:
    """The detections that all methods share.

    Attributes:
        detections: All retained detections, under the dispersions of the shipped heads.
        store: Feature cache of val.
        fitting: Ids of the images that methods and calibrations are fitted on.
        scored: Ids of the images that are scored.
    """

    detections: PoseDistributions
    store: MatchStore
    fitting: Array
    scored: Array

    def given(self, covariance: Array) -> PoseDistributions:
        covariance = np.ascontiguousarray(np.broadcast_to(covariance, self.detections.covariance.shape))
        return replace(self.detections, covariance=covariance, scale=covariance)

    def matched(self, covariance: Array, images: Array, protocol: Protocol = PROTOCOL) -> MatchedPoses:
        poses = self.given(covariance)
        assert poses.image_ids is not None  # those of a store have them
        return match_poses(poses[np.isin(poses.image_ids, images)], self.store.ground_truth(images), protocol)

    def fitted(self, covariance: Array) -> Calibrations:
        return fit_calibrations(self.matched(covariance, self.fitting), PROTOCOL)

    def score(self, covariance: Array) -> dict[str, Any]:
        """Figures of the table on the scored images, and bootstrap draws of the NLL."""
        calibrations, matched = self.fitted(covariance), self.matched(covariance, self.scored)
        distributions = apply_calibrations(matched, calibrations, PROTOCOL)
        scores = evaluate(matched, distributions, PROTOCOL)
        by_oks, (held, size) = scores.matches["oks"], region_size(matched, calibrations)
        student = by_oks.distributions["student_t"]
        return {
            "sample": [scores.images, scores.matched_instances, scores.keypoints],
            "visibility": [scores.akp_visibility, margin_of(scores, "akp_visibility")],
            "akp": [scores.gaussian.akp, margin_of(scores.gaussian, "akp")],
            "skill": [scores.akp_skill, margin_of(scores, "akp_skill")],
            "auroc": [by_oks.selective.auroc.value, by_oks.selective.auroc.margin],
            "ence": [scores.gaussian.ence, margin_of(scores.gaussian, "ence")],
            "ace": [student.ace, student.floors["ace"].high],
            "energy": student.proper.energy,
            "region": [100 * held, size],
            "nll": nll_draws(matched, distributions.distributions["student_t"]).tolist(),
        }

    def bounded(self, heads: ProbabilisticHeads) -> ProbabilisticHeads:
        """Heads with a bound fitted on the fitting images, as in the preset ``best``."""
        return bound_heads(heads, self.store, self.fitting, PROTOCOL)

    def constants(self) -> list[Row]:
        matched = self.matched(self.detections.covariance, self.fitting)
        per_size = rivals.constant_per_size(matched) * box_area(self.detections.boxes)[:, None, None, None]
        return [
            Row("constants in pixels", lambda: rivals.constant_in_pixels(matched), 1.0),
            Row("constants times box area", lambda: per_size, 1.0),
        ]

    def regressions(self) -> list[Row]:
        images = self.detections.image_ids
        assert images is not None
        own, truth = self.detections[np.isin(images, self.fitting)], self.store.ground_truth(self.fitting)

        def fitted(features: Sequence[Feature]) -> Array:
            return DispersionModel.fit(own, truth, PROTOCOL, features).apply(self.detections).covariance

        return [
            Row("regression on visibility, score and box", lambda: fitted(REGRESSION), 1.0),
            Row("regression on these and posture", lambda: fitted(POSTURE), 1.0),
        ]

    def augmented(self, host: Host, data: Path, work: Path, step: Callable[..., None]) -> Array:
        """Second moments over augmented passes plus a share of constants that the fitting images choose."""
        floor = self.constants()[1].covariance()
        dataset = load_dataset(data, "val")
        views = rivals.augmented(host, dataset, self.detections, 640, work / VIEWS_FILE, step, VIEWS)
        moments = rivals.spread(self.detections.keypoints, views)
        share = rivals.best_share(lambda one: self.matched(rivals.with_floor(moments, floor, one), self.fitting))
        return rivals.with_floor(moments, floor, share)


def region_size(matched: MatchedPoses, fitted: Calibrations) -> tuple[float, float]:
    """Share of keypoints in their 90 % regions, and median area of the regions over the object area."""
    assert fitted.regions is not None
    radius = fitted.regions.of_objects(LEVEL / 100, matched.box_area)
    held = (matched.distance <= radius)[matched.labelled].mean()
    root = np.sqrt(np.linalg.det(matched.scale_tril @ np.swapaxes(matched.scale_tril, -1, -2)))
    return float(held), float(np.median((np.pi * radius * root / matched.area[:, None])[matched.labelled]))


def nll_draws(matched: MatchedPoses, distribution: object) -> Array:
    """Mean NLL of every bootstrap draw of images, for paired differences."""
    nll = -distribution.log_prob(torch.from_numpy(matched.residual)).numpy()  # type: ignore[attr-defined]
    images, place = np.unique(matched.image_ids, return_inverse=True)
    total = np.bincount(place, np.where(matched.labelled, nll, 0.0).sum(1), len(images))
    count = np.bincount(place, matched.labelled.sum(1), len(images))
    draws = [np.arange(len(images)), *resample_images(len(images), PROTOCOL.bootstrap)]
    return np.array([total[drawn].sum() / count[drawn].sum() for drawn in draws])


def trained(host: Host, store: MatchStore, preset: Preset, seed: int, work: Path) -> ProbabilisticHeads:
    """Heads of a preset trained on the feature cache of ``train``; kept in a file."""
    path = work / f"{preset}-{seed}.safetensors"
    if not path.is_file():
        settings = PRESETS[preset]
        settings = replace(settings, train=replace(settings.train, seed=seed))
        heads, history = train_heads(host, [store], settings)
        uncalibrated(host, heads, [store], settings, history).save(path)
    return Artifact.load(path).heads.eval()


def heads_rows(comparison: Comparison, host: Host, store: MatchStore, work: Path, cost: float) -> list[Row]:
    """The paper's head, and our recipe: alone, with last-layer Laplace, as an ensemble, and as shipped."""

    def mean_of(heads: Sequence[ProbabilisticHeads]) -> Array:
        total = np.zeros_like(comparison.detections.covariance)
        for one in heads:
            total += predictions_of(one, comparison.store).covariance
        return total / len(heads)

    def bounded(seed: int) -> ProbabilisticHeads:
        return comparison.bounded(trained(host, store, "best", seed, work))

    def shipped() -> Array:
        """The shipped conditional scale and bound were fitted on images that are scored here, so new ones are used."""
        ours = without_conditional_scale(Artifact.load(shipped_artifact()).heads.eval())
        return mean_of([comparison.bounded(ours)])

    count = f"{len(store.images)} photographs"
    photographs = len(Artifact.load(shipped_artifact()).card.images.of("heads"))
    return [
        Row(f"the paper's head, {count}", lambda: mean_of([trained(host, store, "paper", 0, work)]), cost),
        *(
            Row(f"our recipe, {count}, seed {seed}", partial(lambda seed: mean_of([bounded(seed)]), seed), cost)
            for seed in range(SEEDS)
        ),
        Row(
            f"seed 0 with last-layer Laplace, {SAMPLES} samples",
            lambda: mean_of(rivals.laplace(bounded(0), store, SAMPLES)),
            cost,
        ),
        Row(
            f"ensemble of the {SEEDS} seeds", lambda: mean_of(list(map(bounded, range(SEEDS)))), 1 + SEEDS * (cost - 1)
        ),
        Row(f"shipped heads, {photographs:,} photographs", shipped, cost),
    ]


def table(rows: Sequence[tuple[Row, dict[str, Any]]]) -> str:
    """One line per method. The difference of the NLL is to the last method."""

    def cell(values: Sequence[float], digits: int = 3) -> str:
        return f"{values[0]:.{digits}f} ± {values[1]:.{digits}f}"

    best = rows[-1][1]
    lines = [["visibility score (ranks only)", cell(best["visibility"]), *[""] * 7, "1.00"]]
    for row, found in rows:
        apart = np.array(found["nll"]) - best["nll"]
        to_ours = "" if found is best else f" ({apart[0]:+.2f} ± {half_width(apart[1:]):.2f})"
        lines.append(
            [
                row.name,
                *(cell(found[name]) for name in ("akp", "skill", "auroc", "ence")),
                f"{found['ace'][0]:.4f} ({found['ace'][1]:.4f})",
                f"{found['energy']:.2f}",
                f"{found['nll'][0]:.2f}{to_ours}",
                f"{found['region'][0]:.1f} %, {found['region'][1]:.4f}",
                f"{row.cost:.2f}",
            ]
        )
    head = [
        "", "AKP", "skill", "AUROC", "ENCE, Gaussian", "ACE, Student-t (floor up to)", "energy score, px",
        "NLL, Student-t (to ours)", "90 % region: holds, area / s²", "time / base",
    ]  # fmt: skip
    return markdown(head, lines)


def margin_of(scores: Scores | DistributionScores, name: str) -> float:
    """Half the width of an interval."""
    low, high = scores.interval[name]
    return float(high - low) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="yaml with the split val")
    parser.add_argument("--work", type=Path, required=True, help="folder for the feature cache and augmented passes")
    parser.add_argument("--no-views", action="store_true", help="leave out test-time augmentation")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    host, artifact = load_host(find_base()), Artifact.load(shipped_artifact())
    of_val = CollectSettings(imgsz=(640,), detections=20, context_features=True)
    of_train = CollectSettings(imgsz=(640,), context_features=True)
    with progress() as step:
        store = collect(host, load_dataset(given.data, "val"), given.work / "val", of_val, named(step, "val"))
        training = load_dataset(given.data, "train")
        known = collect(host, training, given.work / "train-640", of_train, named(step, "train"))
        own = predictions_of(artifact.heads.eval(), store)
        comparison = Comparison(own, store, *halves(store.images))
        cost = passes_cost(host, artifact, load_splits(given.data, None), TIMED, VIEWS)
        rows = [*comparison.constants(), *comparison.regressions()]
        if not given.no_views:
            name = f"test-time augmentation, {len(VIEWS)} views"
            rows.append(Row(name, partial(comparison.augmented, host, given.data, given.work, step), cost["views"]))
    rows += heads_rows(comparison, host, known, given.work, cost["heads"])
    found = []
    for row in rows:
        path = given.output / "rows" / f"{slug(row.name)}.json"
        if not path.is_file():
            write_json(path, comparison.score(row.covariance()))
        found.append((row, read_json(path)))
        say(row.name)
    images, persons, keypoints = found[-1][1]["sample"]
    text = f"{images} images, {persons} persons, {keypoints} keypoints.\n\n{table(found)}\n"
    write_text(given.output / "rivals.md", text)
    say(text)


if __name__ == "__main__":
    main()
