"""Figures of docs/evidence/landing.md: the runway detector and its heads on real cockpit frames.

    python -m research.real_footage --data runway-real -o results/

The data folder holds `images/` and `runway_keypoints.json`, COCO keypoints whose images also name their `sequence`.
Prints for each sequence the share of runways found at confidence 0.5, the corner error, and the share of corners in
their 95 % ellipses. Heads are used as shipped; calibrated on 40 frames of the other sequence, with and without means
(`halopose calibrate --offset`); and calibrated on the first 40 frames of the same sequence. Out-of-distribution flags
(`--alarm`) and widened ellipses (`--widen`) are printed too.

Neighbouring frames are nearly equal, so intervals resample blocks of ten consecutive frames. There are two controls:
frames whose runway is painted over, and mirrored frames.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from scipy.stats import chi2

from halopose.calibration.calibrate import apply_calibrations
from halopose.calibration.calibrators import Calibrations
from halopose.cli.terminal import progress, say
from halopose.data.dataset import Dataset
from halopose.data.dataset_loading import load_dataset
from halopose.data.files import make_folder, write_json
from halopose.fitting.artifact import Artifact
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.pipeline import calibrate_heads, collect_validation, predictions_of
from halopose.fitting.settings import FitSettings
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.landing.shipped_detectors import footage_artifact, footage_detector
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.poses import PoseDistributions
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.types import Array
from halopose.uncertainty.whitening import whiten

CONF, PROBABILITY, BLOCK, FRAMES, DRAWS, ALARM = 0.5, 0.95, 10, 40, 2000, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="another detector, with --artifact")
    parser.add_argument("--artifact", type=Path, help="heads; default: the shipped heads for footage")
    arguments = parser.parse_args()
    host = load_host(arguments.base or footage_detector())
    artifact = Artifact.load(arguments.artifact or footage_artifact())
    truth = arguments.data / "runway_keypoints.json"
    data = load_dataset(truth, "", images=arguments.data / "images", otherwise=artifact.layout)
    data = replace(data, layout=artifact.layout)
    content = json.loads(truth.read_text(encoding="utf-8"))
    sequences: dict[str, list[int]] = {}
    for image in content["images"]:
        sequences.setdefault(str(image["sequence"]), []).append(int(image["id"]))
    work = make_folder(arguments.output)
    with progress() as step:
        store = collect_validation(host, data, work / "store", settings_of(artifact), step)
        results = {name: told(store, artifact, ids, others_of(sequences, name)) for name, ids in sequences.items()}
        if artifact.novelty is not None:
            widened = widened_poses(host, artifact, data)
            for name, ids in sequences.items():
                results[name] |= unlike(widened, store, np.array(sorted(ids), dtype=np.int64))
        results["controls"] = controls(host, artifact, data)
    write_json(work / "real_footage.json", results)
    say(table(results))
    say(f"-> {work / 'real_footage.json'}")


def settings_of(artifact: Artifact) -> FitSettings:
    return replace(artifact.card.fit_settings, imgsz=artifact.imgsz, conf=0.05)


def others_of(sequences: dict[str, list[int]], name: str) -> list[int]:
    return sorted(number for other, ids in sequences.items() if other != name for number in ids)


def told(store: MatchStore, artifact: Artifact, ids: list[int], others: list[int]) -> dict[str, Any]:
    """Everything of one sequence (ids), with adaptation to frames of the others."""
    images = np.array(sorted(ids), dtype=np.int64)
    matched = found_in(store, artifact, images)
    blocks = np.arange(len(images)) // BLOCK
    seen = np.isin(images, matched.image_ids)
    error = np.hypot(*np.moveaxis(matched.residual, 2, 0))
    of_block = blocks[np.searchsorted(images, matched.image_ids)]
    chosen = np.array(others, dtype=np.int64)[np.linspace(0, len(others) - 1, FRAMES).round().astype(int)]
    ways = {
        "as shipped": artifact.calibrations,
        "temperature": adapted(store, artifact, chosen),
        "temperature and means": adapted(store, artifact, chosen, means=True),
    }
    return {
        "frames": len(images),
        "found": interval(seen.astype(float), blocks, np.mean),
        "median error, px": interval(error, of_block, np.median),
        "90 % of errors, px": interval(error, of_block, lambda values: np.quantile(values, 0.9)),
        "object size, px": float(np.sqrt(matched.area).mean()),
        "mean residual, px": matched.residual.mean(0).round(2).tolist(),
        "largest mean residual, px": float(np.linalg.norm(matched.residual.mean(0), axis=1).max()),
        "spread over stated": spread_over_stated(matched, artifact.calibrations),
        "coverage": {name: interval(inside(matched, fitted), of_block, np.mean) for name, fitted in ways.items()},
        "temperatures": {name: fitted.gaussian.tau_.tolist() for name, fitted in ways.items()},
        "same sequence": same_sequence(store, artifact, images),
    }


def same_sequence(store: MatchStore, artifact: Artifact, images: Array) -> dict[str, list[float]]:
    """Coverage in the later frames of a sequence after adaptation to its first ones, a block apart."""
    first, later = images[:FRAMES], images[FRAMES + BLOCK :]
    matched = found_in(store, artifact, later)
    of_block = np.searchsorted(later, matched.image_ids) // BLOCK
    return {
        way: interval(inside(matched, adapted(store, artifact, first, means=means)), of_block, np.mean)
        for way, means in (("temperature", False), ("temperature and means", True))
    }


def adapted(store: MatchStore, artifact: Artifact, images: Array, *, means: bool = False) -> Calibrations:
    """What ``halopose calibrate`` makes of some frames."""
    heads, before = artifact.heads.eval(), artifact.calibrations
    return calibrate_heads(heads, store, images, settings_of(artifact), offset=means, before=before)


def found_in(store: MatchStore, artifact: Artifact, images: Array) -> MatchedPoses:
    """True positives among what is found at the confidence asked for."""
    predictions = predictions_of(artifact.heads.eval(), store, images)
    return match_poses(predictions[predictions.scores >= CONF], store.ground_truth(images))


def widened_poses(host: Host, artifact: Artifact, data: Dataset) -> PoseDistributions:
    """All detections, with covariances widened where they are out of distribution (``--widen``)."""
    model = UncertainPose(host, artifact, widen=True)
    parts = []
    for record in data.records:
        poses = model.predict(record.path, conf=CONF)[0]
        parts.append(replace(poses, image_ids=np.full(len(poses), record.image_id, dtype=np.int64)))
    return PoseDistributions.concatenate(parts)


def unlike(widened: PoseDistributions, store: MatchStore, images: Array) -> dict[str, Any]:
    """Detections flagged as out of distribution, and coverage of their widened ellipses."""
    poses = widened[np.isin(np.asarray(widened.image_ids), images)]
    matched = match_poses(poses, store.ground_truth(images))
    distance = np.square(whiten(matched.residual, np.linalg.cholesky(matched.covariance))).sum(-1)
    held = (distance <= chi2.ppf(PROBABILITY, 2)).astype(float)
    of_block = np.searchsorted(images, matched.image_ids) // BLOCK
    return {
        "flagged as unlike": float((~poses.in_distribution(ALARM)).mean()),
        "widened": interval(held, of_block, np.mean),
    }


def inside(matched: MatchedPoses, fitted: Calibrations) -> Array:
    """Which corners (M, 4) lie in their ellipses."""
    moved = matched if fitted.offset is None else matched.moved(fitted.offset.numpy())
    distribution = apply_calibrations(moved, fitted, FitSettings().protocol).distributions["gaussian"]
    residual = torch.from_numpy(moved.residual)
    return np.asarray(
        (distribution.mahalanobis_cdf(distribution.mahalanobis(residual)) <= PROBABILITY).double().numpy()
    )


def spread_over_stated(matched: MatchedPoses, fitted: Calibrations) -> float:
    """Residuals around their mean, corner by corner, over the standard deviations that the heads state."""
    distribution = apply_calibrations(matched, fitted, FitSettings().protocol).distributions["gaussian"]
    centred = torch.from_numpy(matched.residual - matched.residual.mean(0))
    return float((distribution.mahalanobis(centred).mean() / 2).sqrt())


def interval(values: Array, blocks: Array, statistic: Callable[[Array], Any]) -> list[float]:
    """A statistic of values (N, ...) and its 95 % interval, by drawing whole blocks (N,) anew."""
    parts = [values[blocks == block] for block in np.unique(blocks)]
    rng = np.random.default_rng(0)
    drawn = [
        statistic(np.concatenate([parts[k] for k in rng.integers(len(parts), size=len(parts))])) for _ in range(DRAWS)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return [float(statistic(values)), float(low), float(high)]


def controls(host: Host, artifact: Artifact, data: Dataset) -> dict[str, float]:
    """How often a runway is found near the truth in every fifth frame with it painted over, and mirrored."""
    model = UncertainPose(host, artifact)
    counts = {"erased": 0, "mirrored": 0}
    records = data.records[::5]
    for record in records:
        image, objects = record.read()
        corners = objects.keypoints[0]
        middle, size = corners.mean(0), np.sqrt(objects.area[0])
        mask = np.zeros(image.shape[:2], np.uint8)
        cv2.fillConvexPoly(mask, np.rint(corners).astype(np.int32), 255)
        erased = cv2.inpaint(image, cv2.dilate(mask, np.ones((9, 9), np.uint8)), 5, cv2.INPAINT_TELEA)
        turned = np.array([image.shape[1] - 1 - middle[0], middle[1]])
        for name, picture, place in (("erased", erased, middle), ("mirrored", image[:, ::-1].copy(), turned)):
            poses = model.predict(picture, conf=CONF)[0]
            away = np.linalg.norm(poses.keypoints.mean(1) - place, axis=1)
            counts[name] += bool((away < size).any())
    return {name: count / len(records) for name, count in counts.items()}


def table(results: dict[str, Any]) -> str:
    """For the terminal: a sequence in each column."""
    names = [name for name in results if name != "controls"]

    def row(title: str, cells: list[list[float]], scale: float, unit: str) -> str:
        told = [f"{scale * a:.1f}{unit} ({scale * b:.1f} to {scale * c:.1f})" for a, b, c in cells]
        return f"{title:42}" + "".join(f"{cell:>28}" for cell in told)

    lines = [f"{'':42}" + "".join(f"{f'sequence {name}':>28}" for name in names)]
    lines.append(f"{'frames':42}" + "".join(f"{results[name]['frames']:>28}" for name in names))
    lines.append(row(f"found at confidence {CONF}", [results[name]["found"] for name in names], 100, " %"))
    for key in ("median error, px", "90 % of errors, px"):
        lines.append(row(key, [results[name][key] for name in names], 1, ""))
    for key in ("largest mean residual, px", "spread over stated"):
        lines.append(f"{key:42}" + "".join(f"{results[name][key]:>28.2f}" for name in names))
    for way in results[names[0]]["coverage"]:
        cells = [results[name]["coverage"][way] for name in names]
        lines.append(row(f"in 95 % ellipses, {way}", cells, 100, " %"))
    for way in results[names[0]]["same sequence"]:
        cells = [results[name]["same sequence"][way] for name in names]
        lines.append(row(f"the same, {way} of its first {FRAMES}", cells, 100, " %"))
    if "widened" in results[names[0]]:
        lines.append(row("the same, as shipped, widened (--widen)", [results[n]["widened"] for n in names], 100, " %"))
        flagged = [100 * results[name]["flagged as unlike"] for name in names]
        title = f"flagged as unlike at {ALARM}"
        lines.append(f"{title:42}" + "".join(f"{share:>26.0f} %" for share in flagged))
    erased, mirrored = (100 * results["controls"][name] for name in ("erased", "mirrored"))
    lines.append(f"controls, every fifth frame: found in {erased:.0f} % erased, {mirrored:.0f} % mirrored")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
