"""The tables and figures of docs/results.md for the heads that ship, beside what a user has without them.

    python -m experiments.shipped_results --data coco-pose/data.yaml --work work/ -o results/

Writes results.md (tables 1, 2, 4 and 5 of the paper, the rivals, figures per keypoint and scale), figures as png,
metrics.json and report.html. About fifteen minutes, nearly all of it for the rival that runs the base nine times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import rivals
from experiments.figures import calibration_figure
from experiments.shipped_heads import SETTINGS, Splits, load_splits
from halopose.cli.terminal import progress, say, write_scores
from halopose.data.files import write_text
from halopose.evaluation.calibrations import Fitted, Given, cross_fitted
from halopose.evaluation.protocol import evaluate
from halopose.evaluation.true_positives import MatchedPoses, Protocol, match_poses
from halopose.fitting.artifact import Artifact
from halopose.fitting.pipeline import collect_validation, evaluate_artifact, predictions_of
from halopose.fitting.store import MatchStore
from halopose.hosts.base import Host
from halopose.hosts.shipped import find_base, shipped_artifact
from halopose.poses import PoseDistributions
from halopose.types import Array
from halopose.predictor import UncertainPose
from halopose.hosts.loading import load_host

REGIMES = {"uncalibrated": "as given", "gaussian": "Gaussian", "student_t": "Student-t"}
SCALARS = ("ace", "ence", "nll", "akp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    host, artifact = load_host(find_base()), Artifact.load(shipped_artifact())
    splits = load_splits(arguments.data)
    with progress() as step:
        store = collect_validation(host, splits.held, arguments.work / "held", SETTINGS, step)
        study = Study(host, artifact, store, splits, protocol(artifact, bootstrap=300))
        heads = study.shipped()
        others = study.rivals(arguments.work / "views.npz", step)
        cost = passes_cost(host, artifact, splits, 20)
    variants = study.variants()
    text = "\n\n".join(
        [
            f"{heads['matched_instances']} instances, {heads['keypoints']} keypoints of {heads['images']} images.",
            "### Core figures (paper, table 1)\n\n" + core_table(heads),
            "### Pruning (paper, table 2)\n\n" + pruning_table(heads),
            "### Rivals\n\n" + rival_table(heads, others, cost),
            "### Scalarisations (paper, table 4)\n\n" + scalarisation_table(variants),
            "### Threshold rules (paper, table 5)\n\n" + rule_table(variants),
            "### Shrinkage\n\n" + shrinkage_table(study),
            "### By object scale\n\n" + scale_table(heads),
        ]
    )
    write_text(arguments.output / "results.md", text + "\n")
    calibration_figure(heads, {**others}, arguments.output)
    write_scores(heads, arguments.output, host.description)
    say(text)


def protocol(artifact: Artifact, **changes: Any) -> Protocol:
    return Protocol(area="box", box_area_factor=artifact.area_factor, gamma_ks=SETTINGS.gamma_ks, **changes)


@dataclass(frozen=True)
class Study:
    """The shipped heads on their evaluation images, and rivals calibrated on the same calibration images."""

    host: Host
    artifact: Artifact
    store: MatchStore
    splits: Splits
    protocol: Protocol

    def shipped(self, **changes: Any) -> dict[str, Any]:
        changed = replace(self.protocol, **changes)
        return evaluate_artifact(self.artifact, self.host, self.store, self.splits.evaluation, changed)

    def variants(self) -> dict[str, dict[str, Any]]:
        """Other scalarisations and threshold rules, each with its own threshold from the calibration images."""
        changes = [{"scalarisation": name} for name in ("trace", "determinant", "eigenvalue")]
        changes += [{"threshold_rule": name} for name in ("youden", "distance", "f1")]
        detections = self._detections()
        return {
            next(iter(change.values())): self._score(detections, replace(self.protocol, bootstrap=0, **change))
            for change in changes
        }

    def rivals(self, path: Path, step: rivals.Progress) -> dict[str, dict[str, Any]]:
        """Constant covariances and test-time augmentation, in place of the heads' covariances."""
        detections = self._detections()
        truth = self._truth(self.splits.calibration)
        matched = self.calibration_matches()
        size = (detections.boxes[:, 2:] - detections.boxes[:, :2]).prod(1)[:, None, None, None]
        constant = np.broadcast_to(rivals.constant_in_pixels(matched), detections.covariance.shape)
        per_size = rivals.constant_per_size(matched) * np.maximum(size, 1.0)
        views = rivals.augmented(self.host, self.splits.held, detections, SETTINGS.imgsz, path, step)
        moments = rivals.spread(detections.keypoints, views)

        def with_share(share: float) -> PoseDistributions:
            return _given(detections, rivals.with_floor(moments, per_size, share))

        share = rivals.best_share(
            lambda share: match_poses(self._of(with_share(share), self.splits.calibration), truth, self.protocol)
        )
        say(f"floor of the augmented moments: {share:.3g} of the constant covariance per size")
        return {
            "constant per keypoint, pixels": self._score(_given(detections, constant), self.protocol),
            "constant per keypoint, times box area": self._score(_given(detections, per_size), self.protocol),
            f"test-time augmentation, {len(rivals.VIEWS)} views": self._score(with_share(share), self.protocol),
        }

    def calibration_matches(self) -> MatchedPoses:
        """True positives of the heads on the calibration images."""
        images = self.splits.calibration
        return match_poses(self._of(self._detections(), images), self._truth(images), self.protocol)

    def _score(self, detections: PoseDistributions, settings: Protocol) -> dict[str, Any]:
        """Calibrate and choose the threshold on calibration images, score on evaluation images."""
        calibration, evaluation = (
            match_poses(self._of(detections, images), self._truth(images), settings)
            for images in (self.splits.calibration, self.splits.evaluation)
        )
        fitted = Fitted.on(calibration, settings)
        given = Given(fitted.gaussian, fitted.student, fitted.threshold)
        return evaluate(evaluation, cross_fitted(evaluation, settings, given), settings)

    def _detections(self) -> PoseDistributions:
        return predictions_of(self.artifact.heads.to(self.host.device).eval(), self.store)

    def _of(self, detections: PoseDistributions, images: Array) -> PoseDistributions:
        return detections[np.isin(detections.image_ids, images)]

    def _truth(self, images: Array) -> Any:
        return self.store.ground_truth(self.artifact.keypoint_names, np.asarray(self.artifact.sigmas), images)


def _given(detections: PoseDistributions, covariance: Array) -> PoseDistributions:
    covariance = np.ascontiguousarray(covariance)
    return replace(detections, covariance=covariance, scale=covariance)


def passes_cost(host: Host, artifact: Artifact, splits: Splits, count: int) -> dict[str, float]:
    """Time per image over that of one pass of the base: with heads, and with all augmented passes beside it."""
    model = UncertainPose(host, artifact)
    images = [record.read()[0] for record in splits.held.records[:count]]
    runs: dict[str, Callable[[Array], object]] = {
        "base": lambda image: rivals.seen(host, image, None, SETTINGS.imgsz),
        "heads": lambda image: model.predict(image, conf=0.01),
        "views": lambda image: [rivals.seen(host, image, view, SETTINGS.imgsz) for view in (None, *rivals.VIEWS)],
    }
    spent = dict.fromkeys(runs, 0.0)
    for number, image in enumerate(images):
        for name, run in runs.items():
            begin = time.perf_counter()
            run(image)
            spent[name] += (time.perf_counter() - begin) * (number > 0)  # the first image warms up
    return {name: value / spent["base"] for name, value in spent.items()}


def shrinkage_table(study: Study) -> str:
    """How strongly a keypoint's temperature leans on all of them, cross-fitted on calibration images."""
    matched = study.calibration_matches()
    rows = []
    for least in (1, 50, 200, 400, 800):
        shrunk = replace(study.protocol, bootstrap=0, min_samples=float(least))
        scores = evaluate(matched, cross_fitted(matched, shrunk), shrunk)
        cells = [cell(scores[regime], key) for key in SCALARS[:3] for regime in ("gaussian", "student_t")]
        rows.append([str(least), *cells])
    head = ["samples", "ACE, Gaussian", "Student-t", "ENCE, Gaussian", "Student-t", "NLL, Gaussian", "Student-t"]
    return markdown(head, rows)


def cell(block: dict[str, Any], name: str) -> str:
    digits = 2 if name == "nll" else 3
    text = _short(block[name], digits)
    interval = block.get("interval", {}).get(name)
    return text if interval is None else f"{text} ({_short(interval[0], digits)} to {_short(interval[1], digits)})"


def _short(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def core_table(metrics: dict[str, Any]) -> str:
    rows = [
        [title, *(cell(metrics[name], key) for key in ("ace", "ace_x", "ace_y", "ence", "nll", "akp"))]
        for name, title in REGIMES.items()
    ]
    rows.append(["*paper, Nano, Gaussian*", "*.058*", "", "", "*.057*", "*5.62*", "*.935*"])
    rows.append(["*paper, Nano, Student-t*", "*.002*", "", "", "*.043*", "*5.50*", "*.935*"])
    ranking = (
        f"\n\nRanking: visibility score {cell(metrics, 'akp_visibility')}, random {cell(metrics, 'akp_random')}, "
        f"skill {cell(metrics, 'akp_skill')}; the paper's Nano: random .791, skill .689."
    )
    return markdown(["", "ACE", "ACE x", "ACE y", "ENCE", "NLL", "AKP"], rows) + ranking


def pruning_table(metrics: dict[str, Any]) -> str:
    pruned, rows = metrics["pruned"], []
    for name, title in list(REGIMES.items())[1:]:
        row = [title]
        for key in ("ace", "ence", "nll"):
            digits = 2 if key == "nll" else 3
            row += [cell(pruned[name], key), f"{pruned[name][key] - metrics[name][key]:+.{digits}f}"]
        rows.append(row)
    rows.append(["*paper, Nano, Gaussian*", "*.054*", "*-.004*", "*.047*", "*-.010*", "*5.35*", "*-.27*"])
    rows.append(["*paper, Nano, Student-t*", "*.005*", "*+.003*", "*.049*", "*+.005*", "*5.25*", "*-.25*"])
    kept = f"Keeps {100 * pruned['kept_fraction']:.0f} % of keypoints.\n\n"
    return kept + markdown(["", "ACE", "change", "ENCE", "change", "NLL", "change"], rows)


def rival_table(heads: dict[str, Any], others: dict[str, dict[str, Any]], cost: dict[str, float]) -> str:
    visibility = ["visibility score (ranks, no covariance)", cell(heads, "akp_visibility"), "", "", "", "", "1"]
    rows = [visibility]
    for name, metrics in {**others, "shipped heads": heads}.items():
        price = cost["heads"] if metrics is heads else cost["views"] if "augment" in name else 1.0
        rows.append(
            [
                name,
                cell(metrics["gaussian"], "akp"),
                cell(metrics["gaussian"], "ence"),
                cell(metrics["gaussian"], "nll"),
                cell(metrics["student_t"], "ace"),
                cell(metrics["student_t"], "nll"),
                f"{price:.2f}" if price < 2 else f"{price:.1f}",
            ]
        )
    head = ["", "AKP", "ENCE, Gaussian", "NLL, Gaussian", "ACE, Student-t", "NLL, Student-t", "time / base"]
    return markdown(head, rows)


def scalarisation_table(variants: dict[str, dict[str, Any]]) -> str:
    paper = {
        "trace": ("*.935*", "*.935*"),
        "determinant": ("*.935*", "*.934*"),
        "eigenvalue": ("*.933*", "*.933*"),
    }
    rows = [
        [name, cell(variants[name]["gaussian"], "akp"), cell(variants[name]["student_t"], "akp"), *cells]
        for name, cells in paper.items()
    ]
    return markdown(["", "AKP, Gaussian", "AKP, Student-t", "*paper, Gaussian*", "*paper, Student-t*"], rows)


def rule_table(variants: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name in ("youden", "distance", "f1"):
        pruned = variants[name]["pruned"]
        cells = [cell(pruned[regime], key) for key in SCALARS[:3] for regime in ("gaussian", "student_t")]
        rows.append([name, f"{100 * pruned['kept_fraction']:.0f} %", *cells])
    return markdown(
        ["", "kept", "ACE, Gaussian", "Student-t", "ENCE, Gaussian", "Student-t", "NLL, Gaussian", "Student-t"],
        rows,
    )


def scale_table(metrics: dict[str, Any]) -> str:
    rows = [
        [
            name,
            str(metrics["gaussian"]["per_scale"][name]["count"]),
            *(
                cell(metrics[regime]["per_scale"][name], key)
                for key in ("ace", "ence", "nll")
                for regime in ("gaussian", "student_t")
            ),
        ]
        for name in metrics["gaussian"]["per_scale"]
    ]
    return markdown(
        [
            "",
            "keypoints",
            "ACE, Gaussian",
            "Student-t",
            "ENCE, Gaussian",
            "Student-t",
            "NLL, Gaussian",
            "Student-t",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
