"""Figures of docs/evidence/regions.md: conformal regions, the guarantee of pruning, the joint distribution.

    python -m research.regions --data coco-pose/data.yaml --work work/ -o results/

Persons: the shipped heads of YOLO11n-pose on val images that they were not trained on, calibrated on the selection
images and measured on the others. Runways: the shipped detector on 1,000 clear and hazy scenes with a separate seed.
Feature caches are kept in the work folder.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from halopose.calibration.calibrate import FoldRegions, apply_calibrations, fit_calibrations, fit_gaussian
from halopose.calibration.conformal import fit_regions
from halopose.calibration.correlation import Correlation
from halopose.calibration.thresholds import guaranteed_threshold
from halopose.cli.terminal import progress, say, write_scores
from halopose.data.dataset import Dataset
from halopose.data.dataset_loading import load_dataset
from halopose.data.files import read_json, write_text
from halopose.evaluation.bootstrap import half_width, resample_images
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.region_evaluation import RegionEvaluation, score_regions
from halopose.evaluation.region_scores import REGION_LEVELS, CoverageEstimate
from halopose.fitting.artifact import Artifact
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.pipeline import collect_validation, predictions_of
from halopose.fitting.settings import FitSettings
from halopose.geometry.camera import Camera, project_points
from halopose.geometry.joint import position_ellipsoid, solve_jointly
from halopose.geometry.observations import Observations
from halopose.hosts import model_zoo
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.landing import shipped_detectors
from halopose.landing.runway import runway_corners
from halopose.landing.world.dataset_writer import write_dataset
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.joint_distribution import JointDistribution, joint_covariance
from halopose.uncertainty.pruning import risk_guarantee
from halopose.uncertainty.whitening import whiten
from research.tables import markdown

PROTOCOL = Protocol(area="box", bootstrap=200)
RULE = "risk:0.05@0.95"
SPLITS = 200
UNSEEN, SEED = "unseen", 46  # no setting was selected on these scenes; those of seed 16 were used to find errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="COCO data yaml; without it only the runway")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    parts = []
    if arguments.data is not None:
        parts.append(persons(arguments.data, arguments.work, arguments.output))
    parts.append(runways(arguments.work))
    text = "\n\n".join(parts)
    write_text(arguments.output / "regions.md", text + "\n")
    say(text)


def collected(host: Host, dataset: Dataset, folder: Path, settings: FitSettings) -> MatchStore:
    """Feature cache of a data set; an existing one is reused."""
    if (folder / "manifest.json").is_file():
        return MatchStore(folder)
    with progress() as step:
        return collect_validation(host, dataset, folder, settings, step)


def matched_of(artifact: Artifact, store: MatchStore, images: Array | None = None) -> MatchedPoses:
    """True positives with the dispersions of the heads."""
    truth = replace(store.ground_truth(images), layout=artifact.layout)
    matched = match_poses(predictions_of(artifact.heads, store, images), truth, PROTOCOL)
    offset = artifact.calibrations.offset
    return matched if offset is None else matched.moved(offset.numpy())


# --- persons ------------------------------------------------------------------------------------------------


def persons(data: Path, work: Path, output: Path) -> str:
    """Regions of the shipped heads, their size relative to constant covariances, guaranteed pruning, joint NLL."""
    artifact, host = Artifact.load(model_zoo.shipped_artifact()), load_host(model_zoo.find_base())
    settings = FitSettings(imgsz=artifact.imgsz, head=artifact.heads.settings)
    store = collected(host, load_dataset(data, "val"), work / "store-persons", settings)
    seen, unseen = (
        matched_of(artifact, store, np.intersect1d(store.images, artifact.card.images.of(part)))
        for part in ("choosing", "evaluation")  # the shipped calibration was fitted on all of them
    )
    fitted = fit_calibrations(seen, PROTOCOL)
    distributions = apply_calibrations(unseen, fitted, PROTOCOL, "fitted on other images")
    scores = evaluate(unseen, distributions, PROTOCOL)
    write_scores(scores, output / "persons", "YOLO11n-pose")
    if scores.regions is None or scores.joint is None:
        raise SystemExit("the artifact has no regions: calibrate it again")
    found = scores.regions
    enough = {name: one for name, one in found.per_keypoint.items() if one.count >= 200}
    worst = min(enough, key=lambda name: enough[name].at(90))
    rows = [["keypoints", *coverage_cells(found.keypoints)]]
    rows += [[f"{worst}, the lowest at 90 %", *coverage_cells(enough[worst])]]
    rows += [[f"scale: {name}", *coverage_cells(one)] for name, one in found.per_scale.items() if one.count > 99]
    rows += [["whole persons", *coverage_cells(found.whole)]]
    rows += [["whole persons, kept keypoints", *coverage_cells(found.whole_kept)]]
    head = [f"{len(unseen)} persons", *(f"{level} %" for level in REGION_LEVELS)]
    gains = [f"{name}: {one.gain:.3f} ± {one.margin:.3f}" for name, one in scores.joint.distributions.items()]
    broken, kept, wrong = guarantee_over_splits(MatchedPoses.concatenate([seen, unseen]))
    return "\n\n".join(
        [
            "### Persons\n\n" + markdown(head, rows),
            markdown(["median radius, px", *head[1:]], size_rows(seen, unseen, found.size)),
            f"joint gain in nats per keypoint: {', '.join(gains)}; joint t with {scores.joint.dof:.0f} "
            f"degrees of freedom, shrinkage {scores.joint.shrinkage:.2f}",
            f"{RULE} over {SPLITS} random halves: broken in {100 * broken:.1f} %, keeps {100 * kept:.0f} %, "
            f"{100 * wrong:.1f} % of those wrong",
        ]
    )


def coverage_cells(one: CoverageEstimate) -> list[str]:
    return [f"{100 * held:.1f} ± {100 * margin:.1f}" for held, margin in zip(one.held, one.margin, strict=True)]


def size_rows(seen: MatchedPoses, unseen: MatchedPoses, heads: tuple[float, ...]) -> list[list[str]]:
    """Median radius of regions of the heads and of covariances that do not depend on the image."""
    rows = [["heads", *(f"{size:.1f}" for size in heads)]]
    for name, unit in (("constant per keypoint, pixels", False), ("constant per keypoint, times box area", True)):
        parts = []
        for matched in (seen, unseen):
            area = matched.box_area if unit else np.ones(len(matched))
            constant = np.tile(area[:, None, None, None] * np.eye(2), (1, matched.scale.shape[1], 1, 1))
            parts.append(replace(matched, scale=constant))
        regions = fit_regions(parts[0].distance, parts[0].labelled, parts[0].image_ids)
        fold = np.zeros(len(parts[1]), dtype=np.int64)
        fitted = FoldRegions.of(fold, [regions], [Correlation(np.eye(2 * len(seen.layout)))])
        region_evaluation = RegionEvaluation.of(parts[1], fitted)
        assert region_evaluation is not None
        none = replace(PROTOCOL, bootstrap=0)
        found = score_regions(parts[1], region_evaluation, unseen.labelled, none, {})
        rows.append([f"{name} ({100 * found.keypoints.at(90):.1f} at 90 %)", *(f"{size:.1f}" for size in found.size)])
    return rows


def guarantee_over_splits(matched: MatchedPoses) -> tuple[float, float, float]:
    """Share of splits that break the pruning guarantee, the share kept, and the share of wrong kept keypoints."""
    images = np.unique(matched.image_ids)
    rng = np.random.default_rng(0)
    labelled = matched.labelled
    wrong = (matched.similarity < PROTOCOL.gamma_ks)[labelled]
    image = np.broadcast_to(matched.image_ids[:, None], labelled.shape)[labelled]
    outcomes = []
    for _ in range(SPLITS):
        chosen = rng.permutation(images)[: len(images) // 2]
        gaussian = fit_gaussian(matched.select(np.flatnonzero(np.isin(matched.image_ids, chosen))))
        tau = gaussian.tau_.numpy()[:, None, None]
        confidence = matched.confidence(tau**2 * matched.covariance, PROTOCOL)[labelled]
        fitted = np.isin(image, chosen)
        guarantee = risk_guarantee(RULE)
        assert guarantee is not None
        limit = guaranteed_threshold(confidence[fitted], ~wrong[fitted], image[fitted], *guarantee)
        keep = confidence[~fitted] >= limit
        share = float(wrong[~fitted][keep].mean()) if keep.any() else 0.0
        outcomes.append((share > guarantee[0], float(keep.mean()), share))
    broken, kept, share = np.mean(outcomes, axis=0).tolist()
    return broken, kept, share


# --- runways ------------------------------------------------------------------------------------------------


def runways(work: Path) -> str:
    """Regions of single corners and of all corners jointly; PnP with independent and with joint covariances."""
    artifact, host = (
        Artifact.load(shipped_detectors.runway_artifact()),
        load_host(shipped_detectors.runway_detector()),
    )
    scenes, folder = work / f"unseen-{SEED}", work / f"runway-unseen-{SEED}"
    data = write_dataset(scenes, {UNSEEN: 1000}, SEED, {UNSEEN: ("clear", "haze")}, processes=2)
    dataset = load_dataset(data, UNSEEN, otherwise=artifact.layout)
    store = collected(host, dataset, folder, FitSettings(imgsz=artifact.imgsz))
    matched = matched_of(artifact, store)
    fitted = artifact.calibrations
    if fitted.regions is None or fitted.correlation is None:
        raise SystemExit("the artifact has no regions: calibrate it again")
    factor, tail = (
        distribution.tau_.numpy()[:, None, None] * np.linalg.cholesky(matched.scale)
        for distribution in (fitted.gaussian, fitted.student)
    )
    together = fitted.correlation.of_objects(matched.box_area)
    nu = fitted.student.nu_.numpy()
    residual, apart = matched.residual, np.broadcast_to(np.eye(8), together.shape)
    distributions = {
        "independent Gaussian corners": JointDistribution(factor, apart),
        "the joint Gaussian": JointDistribution(factor, together),
        "the joint Student-t": JointDistribution(tail, together, nu, fitted.correlation.dof),
    }
    single = np.square(whiten(residual, factor)).sum(-1)
    held = {
        "each corner in its 95 % ellipse": (single < stats.chi2.ppf(0.95, 2)).mean(1),
        "each corner in its 95 % region": (matched.distance <= fitted.regions.of_objects(0.95, matched.box_area)).mean(
            1
        ),
        **{
            f"all four in the ellipsoid of {name}": distribution.holds(residual, 0.95)
            for name, distribution in distributions.items()
        },
        "all four in their whole-object region": matched.distance.max(1) <= fitted.regions.whole_radius(0.95),
    }
    gains = {
        name: distribution.gain(residual, matched.labelled) / 4
        for name, distribution in distributions.items()
        if name.startswith("the joint")
    }
    rows = [
        [name, f"{100 * np.mean(inside):.1f} ± {196 * error(inside, matched.image_ids):.1f}"]
        for name, inside in held.items()
    ]
    rows += positions(scenes, matched, store, factor, together, fitted.correlation.dof)
    better = [f"{name} {gain.mean():.3f} ± {1.96 * error(gain, matched.image_ids):.3f}" for name, gain in gains.items()]
    table = markdown([f"{len(matched)} runways", "held, %"], rows)
    return f"### Runways\n\n{table}\n\ngain in nats a corner over independent ones: {', '.join(better)}"


def error(values: Array, image_ids: Array) -> float:
    """Standard error of a mean over objects, by resampling images."""
    images, image = np.unique(image_ids, return_inverse=True)
    sums, count = np.bincount(image, np.asarray(values, dtype=float)), np.bincount(image)
    return half_width([sums[pick].sum() / count[pick].sum() for pick in resample_images(len(images), 500)]) / 1.96


def positions(
    scenes: Path, matched: MatchedPoses, store: MatchStore, factor: Array, together: Array, dof: float
) -> list[list[str]]:
    """Coverage of the 95 % ellipsoid of PnP with known attitude, for independent and for correlated corners."""
    content = read_json(scenes / "annotations" / f"{UNSEEN}.json")
    images = {entry["id"]: entry for entry in content["images"]}
    truth = store.ground_truth()
    inside: dict[str, list[bool]] = {}
    for n in range(len(matched)):
        entry = images[int(matched.image_ids[n])]
        camera = camera_of(entry)
        corners = truth.keypoints[matched.objects[n]]
        found = own_runway(camera, entry, corners)
        if found is None:
            continue
        points, rotation, eye = found
        pixels = (corners - matched.residual[n])[None]
        covariance = (factor[n] @ np.swapaxes(factor[n], 1, 2))[None]
        for name, matrix, nu in (
            ("independent Gaussian corners", np.eye(8), np.inf),
            ("the joint Gaussian", together[n], np.inf),
            ("the joint Student-t", together[n], dof),
        ):
            solution = solve_jointly(
                Observations(camera, points, pixels, joint_covariance(covariance, matrix), rotation[None])
            )
            if solution.converged[0]:
                away = solution.position[0] - eye
                region = position_ellipsoid(solution, 0.95, nu)[0]
                inside.setdefault(name, []).append(bool(away @ np.linalg.solve(region, away) <= 1))
    return [
        [
            f"position of PnP in its 95 % ellipsoid, {name} ({len(each)} frames)",
            f"{100 * np.mean(each):.1f} ± {196 * np.std(each) / np.sqrt(len(each)):.1f}",
        ]
        for name, each in inside.items()
    ]


def camera_of(entry: dict[str, Any]) -> Camera:
    """The camera of an image."""
    lens, size = entry["camera"], (entry["width"], entry["height"])
    return Camera(lens["fx"], lens["fy"], lens["cx"], lens["cy"], *size, tuple(lens["distortion"]))


def own_runway(camera: Camera, entry: dict[str, object], corners: Array) -> tuple[Array, Array, Array] | None:
    """Corners (4, 3) of the runway landed on, if that is what these pixels (4, 2) show, and the camera's pose."""
    rotation, eye = (np.array(entry[name], dtype=float) for name in ("camera_rotation", "camera_position"))
    runway = entry["runways"][0]  # type: ignore[index]
    points = runway_corners(runway["length"], runway["width"])
    away = np.abs(project_points(camera, rotation, eye, points) - corners).max()
    return (points, rotation, eye) if away < 0.5 else None


if __name__ == "__main__":
    main()
