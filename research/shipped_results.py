"""Tables and figures of docs/evidence/persons.md for the shipped heads, beside methods without heads.

    python -m research.shipped_results --data coco-pose/data.yaml --work work/ -o results/

Every figure is of the evaluation images, each scored with calibrations fitted on the other folds of val. Settings of
the other methods are chosen on the selection images. Writes results.md (tables 1, 2, 4 and 5 of the paper, other
methods, figures per scale), figures as png, metrics.json and report.html. Takes about 15 minutes on two cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from halopose.boxes import box_area
from halopose.calibration.calibrate import cross_fitted
from halopose.cli.terminal import progress, say, write_scores
from halopose.data.files import write_text
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.metrics import expected_normalized_calibration_error, variance_bins
from halopose.evaluation.scores import MetricSummary, Scores
from halopose.fitting.artifact import Artifact
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.pipeline import predictions_of
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.poses import GroundTruth, PoseDistributions
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.protocol import Protocol
from halopose.types import Array, Progress
from halopose.uncertainty.heads import with_bound
from halopose.uncertainty.pruning import Scalarisation, ThresholdRule
from research import rivals
from research.figures import TITLES, calibration_figure
from research.rivals import AugmentedPass
from research.shipped_data import Splits, arguments, collect_val, load_splits
from research.shipped_heads import SETTINGS, scored
from research.tables import cell, markdown, short

BOTH_DISTRIBUTIONS = ("ACE, Gaussian", "Student-t", "ENCE, Gaussian", "Student-t", "NLL, Gaussian", "Student-t")
SCALARISATIONS: tuple[Scalarisation, ...] = ("trace", "determinant", "eigenvalue")
RULES: tuple[ThresholdRule, ...] = ("youden", "distance", "f1")


def main() -> None:
    given = arguments(__doc__).parse_args()
    host, artifact = load_host(find_base()), Artifact.load(shipped_artifact())
    splits = load_splits(given.data, given.extra)
    with progress() as step:
        store = collect_val(host, splits, given.work, step)
        protocol = replace(SETTINGS.protocol, bootstrap=300)
        study = Study(host, artifact, store, splits, protocol)
        heads = study.shipped()
        others = study.rivals(given.work / "views.npz", step)
        cost = passes_cost(host, artifact, splits, 20)
    variants = study.variants()
    text = "\n\n".join(
        [
            f"{heads.matched_instances} instances, {heads.keypoints} keypoints of {heads.images} images.",
            "### Core figures (paper, table 1)\n\n" + core_table(heads) + "\n\n" + study.variance_note(),
            "### Pruning (paper, table 2)\n\n" + pruning_table(heads),
            "### Rivals\n\n" + rival_table(heads, others, cost),
            "### Scalarisations (paper, table 4)\n\n" + scalarisation_table(variants),
            "### Threshold rules (paper, table 5)\n\n" + rule_table(variants),
            "### Shrinkage\n\n" + shrinkage_table(study),
            "### By object scale\n\n" + scale_table(heads),
            "### The bound\n\n" + bound_table(study),
        ]
    )
    write_text(given.output / "results.md", text + "\n")
    calibration_figure(heads, others, given.output)
    write_scores(heads, given.output, host.description)
    say(text)


@dataclass(frozen=True)
class Study:
    """The shipped heads and their rivals on the evaluation images, cross-fitted alike."""

    host: Host
    artifact: Artifact
    store: MatchStore
    splits: Splits
    protocol: Protocol

    def shipped(self) -> Scores:
        return self._score(self._detections(), self.protocol)

    def variance_note(self) -> str:
        """ENCE of the evaluation images and of all of val, beside the ENCE of samples whose distribution is exact."""
        matched = match_poses(self._detections(), self.store.ground_truth(), self.protocol)
        distributions = cross_fitted(matched, self.protocol)
        lines = []
        for name, images in (("evaluation images", self.splits.evaluation), ("all of val", self.store.images)):
            chosen = np.flatnonzero(np.isin(matched.image_ids, images))
            part = matched.select(chosen)
            covariance = distributions.select(chosen).distributions["gaussian"].covariance.numpy()
            ence = ence_of(part.residual, covariance, part.labelled)
            right = right_distribution_ence(part.residual, covariance, part.labelled)
            low, high = np.percentile(right, [2.5, 97.5])
            lines.append(
                f"ENCE, Gaussian, {name}: {short(ence, 3)}; residuals dealt out anew among the persons: "
                f"{short(float(right.mean()), 3)} ({short(low, 3)} to {short(high, 3)})."
            )
        return "\n".join(lines)

    def variants(self) -> dict[str, Scores]:
        """Other scalarisations and threshold rules, each with its own threshold."""
        base = replace(self.protocol, bootstrap=0)
        protocols: dict[str, Protocol] = {name: replace(base, scalarisation=name) for name in SCALARISATIONS}
        protocols |= {rule: replace(base, threshold_rule=rule) for rule in RULES}
        detections = self._detections()
        return {name: self._score(detections, protocol) for name, protocol in protocols.items()}

    def rivals(self, path: Path, step: Progress) -> dict[str, Scores]:
        """Constant covariances and test-time augmentation, in place of the heads' covariances."""
        detections = self._detections()
        truth = self._truth(self.splits.choosing)
        matched = self.choosing_matches()
        constant = np.broadcast_to(rivals.constant_in_pixels(matched), detections.covariance.shape)
        per_size = rivals.constant_per_size(matched) * box_area(detections.boxes)[:, None, None, None]
        views = rivals.augmented(self.host, self.splits.val, detections, SETTINGS.imgsz, path, step)
        moments = rivals.spread(detections.keypoints, views)

        def with_share(share: float) -> PoseDistributions:
            return _given(detections, rivals.with_floor(moments, per_size, share))

        share = rivals.best_share(
            lambda share: match_poses(self._of(with_share(share), self.splits.choosing), truth, self.protocol)
        )
        say(f"floor of the augmented moments: {share:.3g} of the constant covariance per size")
        return {
            "constant per keypoint, pixels": self._score(_given(detections, constant), self.protocol),
            "constant per keypoint, times box area": self._score(_given(detections, per_size), self.protocol),
            f"test-time augmentation, {len(rivals.VIEWS)} views": self._score(with_share(share), self.protocol),
        }

    def choosing_matches(self) -> MatchedPoses:
        """True positives of the heads on the choosing images."""
        images = self.splits.choosing
        return match_poses(self._of(self._detections(), images), self._truth(images), self.protocol)

    def _score(self, detections: PoseDistributions, protocol: Protocol) -> Scores:
        """Calibrations and thresholds by cross-fitting over val, scored on the evaluation images."""
        return scored(detections, self.store, self.splits.evaluation, protocol)

    def unbounded(self) -> Study:
        """The same with heads whose dispersions have no bound."""
        free = with_bound(self.artifact.heads, np.zeros(self.artifact.heads.keypoints))
        return replace(self, artifact=replace(self.artifact, heads=free))

    def of_all(self) -> Study:
        """The same, scored on all of val."""
        return replace(self, splits=replace(self.splits, evaluation=self.store.images))

    def _detections(self) -> PoseDistributions:
        return predictions_of(self.artifact.heads.to(self.host.device).eval(), self.store)

    def _of(self, detections: PoseDistributions, images: Array) -> PoseDistributions:
        assert detections.image_ids is not None  # those of a store have them
        return detections[np.isin(detections.image_ids, images)]

    def _truth(self, images: Array) -> GroundTruth:
        return self.store.ground_truth(images)


def ence_of(residual: Array, covariance: Array, among: Array) -> float:
    """ENCE of the keypoints ``among`` (M, K)."""
    predicted, squared = np.trace(covariance, axis1=2, axis2=3) / 2, (residual**2).sum(-1) / 2
    return expected_normalized_calibration_error(variance_bins(predicted[among], squared[among]))


def right_distribution_ence(residual: Array, covariance: Array, labelled: Array, rounds: int = 200) -> Array:
    """ENCE (rounds,) that a sample of this size shows where variances are right.

    Whitened residuals are dealt out anew among the persons, all keypoints of a person together: tails and
    dependence stay, and whatever the predicted variance could have missed is gone.
    """
    factor, rng = np.linalg.cholesky(covariance), np.random.default_rng(0)
    white = np.linalg.solve(factor, residual[..., None])
    found = []
    for _ in range(rounds):
        order = rng.permutation(len(residual))
        found.append(ence_of((factor @ white[order])[..., 0], covariance, labelled & labelled[order]))
    return np.array(found)


def _given(detections: PoseDistributions, covariance: Array) -> PoseDistributions:
    covariance = np.ascontiguousarray(covariance)
    return replace(detections, covariance=covariance, scale=covariance)


def passes_cost(
    host: Host, artifact: Artifact, splits: Splits, count: int, views: Sequence[AugmentedPass] = rivals.VIEWS
) -> dict[str, float]:
    """Processor time per image over that of one pass of the base: with heads, and with all augmented passes."""
    model = UncertainPose(host, artifact)
    images = [record.pixels() for record in splits.val.records[:count]]
    runs: dict[str, Callable[[Array], object]] = {
        "base": lambda image: rivals.seen(host, image, None, SETTINGS.imgsz),
        "heads": lambda image: model.predict(image, conf=0.01),
        "views": lambda image: [rivals.seen(host, image, view, SETTINGS.imgsz) for view in (None, *views)],
    }
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for image in images:
        for name, run in runs.items():
            begin = time.process_time()
            run(image)
            spent[name].append(time.process_time() - begin)
    return {name: float(np.median(values) / np.median(spent["base"])) for name, values in spent.items()}


def shrinkage_table(study: Study) -> str:
    """Pooling strength of the temperatures, cross-fitted on the selection images."""
    matched = study.choosing_matches()
    rows = []
    for least in (1, 50, 200, 400, 800):
        shrunk = replace(study.protocol, bootstrap=0, min_samples=float(least))
        scores = evaluate(matched, protocol=shrunk)
        rows.append([str(least), *both_distributions(scores.gaussian, scores.student_t)])
    return markdown(["samples", *BOTH_DISTRIBUTIONS], rows)


def bound_table(study: Study) -> str:
    """What the heads' bound changes, on the evaluation images and on all of val."""
    rows = []
    study = replace(study, protocol=replace(study.protocol, bootstrap=0))
    for images, some in (("evaluation images", study), ("all of val", study.of_all())):
        for name, one in (("without", some.unbounded()), ("with", some)):
            scores = one.shipped()
            large = scores.gaussian.per_scale["large"]
            rows.append(
                [
                    f"{name} a bound, {images}",
                    *both_distributions(scores.gaussian, scores.student_t),
                    cell(large, "ence"),
                    cell(scores.pruned.gaussian, "ace"),
                    cell(scores, "akp_skill"),
                ]
            )
    return markdown(["", *BOTH_DISTRIBUTIONS, "ENCE, large persons", "ACE, Gaussian, pruned", "skill"], rows)


def both_distributions(gaussian: MetricSummary, student: MetricSummary) -> list[str]:
    """Cells under the head BOTH_LAWS."""
    return [cell(distribution, metric) for metric in ("ace", "ence", "nll") for distribution in (gaussian, student)]


def core_table(scores: Scores) -> str:
    rows = [
        [title, *(cell(scores.distribution(name), key) for key in ("ace", "ace_x", "ace_y", "ence", "nll", "akp"))]
        for name, title in TITLES.items()
    ]
    rows.append(["*paper, Nano, Gaussian*", "*0.058*", "", "", "*0.057*", "*5.62*", "*0.935*"])
    rows.append(["*paper, Nano, Student-t*", "*0.002*", "", "", "*0.043*", "*5.50*", "*0.935*"])
    ranking = (
        f"\n\nRanking: visibility score {cell(scores, 'akp_visibility')}, random {cell(scores, 'akp_random')}, "
        f"skill {cell(scores, 'akp_skill')}; the paper's Nano: random 0.791, skill 0.689."
    )
    return markdown(["", "ACE", "ACE x", "ACE y", "ENCE", "NLL", "AKP"], rows) + ranking


def pruning_table(scores: Scores) -> str:
    rows = []
    for name in ("gaussian", "student_t"):
        row, whole, pruned = [TITLES[name]], scores.distribution(name), scores.pruned.distribution(name)
        for key in ("ace", "ence", "nll"):
            digits = 2 if key == "nll" else 3
            row += [cell(pruned, key), f"{pruned.metric(key) - whole.metric(key):+.{digits}f}"]
        rows.append(row)
    rows.append(["*paper, Nano, Gaussian*", "*0.054*", "*-.004*", "*0.047*", "*-.010*", "*5.35*", "*-.27*"])
    rows.append(["*paper, Nano, Student-t*", "*0.005*", "*+.003*", "*0.049*", "*+.005*", "*5.25*", "*-.25*"])
    kept = f"Keeps {100 * scores.pruned.kept_fraction:.0f} % of keypoints.\n\n"
    return kept + markdown(["", "ACE", "change", "ENCE", "change", "NLL", "change"], rows)


def rival_table(heads: Scores, others: dict[str, Scores], cost: dict[str, float]) -> str:
    visibility = ["visibility score (ranks, no covariance)", cell(heads, "akp_visibility"), "", "", "", "", "1"]
    rows = [visibility]
    for name, scores in {**others, "shipped heads": heads}.items():
        price = cost["heads"] if scores is heads else cost["views"] if "augment" in name else 1.0
        rows.append(
            [
                name,
                *(cell(scores.gaussian, key) for key in ("akp", "ence", "nll")),
                *(cell(scores.student_t, key) for key in ("ace", "nll")),
                f"{price:.2f}" if price < 2 else f"{price:.1f}",
            ]
        )
    head = ["", "AKP", "ENCE, Gaussian", "NLL, Gaussian", "ACE, Student-t", "NLL, Student-t", "time / base"]
    return markdown(head, rows)


def scalarisation_table(variants: dict[str, Scores]) -> str:
    paper = {
        "trace": ("*0.935*", "*0.935*"),
        "determinant": ("*0.935*", "*0.934*"),
        "eigenvalue": ("*0.933*", "*0.933*"),
    }
    rows = [
        [name, cell(variants[name].gaussian, "akp"), cell(variants[name].student_t, "akp"), *cells]
        for name, cells in paper.items()
    ]
    return markdown(["", "AKP, Gaussian", "AKP, Student-t", "*paper, Gaussian*", "*paper, Student-t*"], rows)


def rule_table(variants: dict[str, Scores]) -> str:
    rows = []
    for name in RULES:
        pruned = variants[name].pruned
        rows.append(
            [name, f"{100 * pruned.kept_fraction:.0f} %", *both_distributions(pruned.gaussian, pruned.student_t)]
        )
    return markdown(["", "kept", *BOTH_DISTRIBUTIONS], rows)


def scale_table(scores: Scores) -> str:
    rows = [
        [name, str(gaussian.count), *both_distributions(gaussian, scores.student_t.per_scale[name])]
        for name, gaussian in scores.gaussian.per_scale.items()
    ]
    return markdown(["", "keypoints", *BOTH_DISTRIBUTIONS], rows)


if __name__ == "__main__":
    main()
