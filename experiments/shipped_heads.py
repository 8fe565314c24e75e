"""Make the heads that ship with the package: YOLO11n-pose on COCO persons.

    python -m experiments.shipped_heads --data coco-pose/data.yaml --work work/ -o heads.safetensors

The data yaml has the splits train, train_small (256 px) and val. The val images are cut by a hash of their id:
20 % calibrate, 20 % evaluate, 60 % join the training images for the heads; full-size images come mirrored, too.
The script prints the figures that stand in docs/results.md; its settings come from experiments/head_search.py.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np

from halopose.cli.terminal import progress, say, write_scores
from halopose.data.dataset import Dataset, Record
from halopose.data.loading import load_dataset
from halopose.data.splits import hashed_order
from halopose.fitting.pipeline import (
    FitSettings,
    calibrate_heads,
    collect_training,
    collect_validation,
    evaluate_artifact,
    figures,
    train_heads,
    uncalibrated,
)
from halopose.fitting.store import MatchStore
from halopose.fitting.training import TrainSettings
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.hosts.shipped import find_base
from halopose.types import Array, Progress

SETTINGS = FitSettings(train=TrainSettings(epochs=10, scale_weight=False), gamma_ks=0.3)
SIZES = {"train": (384, 512, 640), "train_small": (320,), "val": (512, 640)}
MIRRORED_SIZES = (512, 640)
# COCO's left and right keypoints exchanged, as a mirror does.
MIRROR = [0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15]


@dataclass(frozen=True)
class Splits:
    """Images for the heads by split, and the val images that calibrate and evaluate, with their ids."""

    heads: dict[str, Dataset]
    held: Dataset
    calibration: Array
    evaluation: Array


def load_splits(data: Path) -> Splits:
    """The same cut of the same images every time."""
    heads = {split: load_dataset(data, split) for split in SIZES}
    order = hashed_order(heads["val"].image_ids)
    fifth = len(order) // 5
    calibration, evaluation, rest = (np.sort(part) for part in np.split(order, [fifth, 2 * fifth]))
    held = heads["val"].subset(np.concatenate([calibration, evaluation]))
    return Splits({**heads, "val": heads["val"].subset(rest)}, held, calibration, evaluation)


def collect_heads(host: Host, splits: Splits, work: Path, step: Progress) -> dict[str, MatchStore]:
    """The stores that the heads train on."""
    stores = {
        split: collect_training(
            host, splits.heads[split], work / split, replace(SETTINGS, train_sizes=sizes), step
        )
        for split, sizes in SIZES.items()
    }
    copies = mirrored(Dataset.join([splits.heads["train"], splits.heads["val"]]), work / "mirrored-images")
    settings = replace(SETTINGS, train_sizes=MIRRORED_SIZES)
    return {**stores, "mirrored": collect_training(host, copies, work / "mirrored", settings, step)}


def mirrored(dataset: Dataset, folder: Path) -> Dataset:
    """Mirrored copies of images with their labels, under the ids of the originals."""
    folder.mkdir(parents=True, exist_ok=True)
    return replace(dataset, records=tuple(_mirrored(record, folder) for record in dataset.records))


def _mirrored(record: Record, folder: Path) -> Record:
    image, objects = record.read()
    path = folder / f"{record.image_id}.png"
    if not path.is_file():
        cv2.imwrite(str(path), image[:, ::-1])
    width = image.shape[1]
    boxes = objects.boxes.copy()
    boxes[:, [0, 2]] = width - objects.boxes[:, [2, 0]]
    keypoints = objects.keypoints[:, MIRROR].copy()
    keypoints[..., 0] = width - keypoints[..., 0]
    objects = replace(objects, boxes=boxes, keypoints=keypoints, labelled=objects.labelled[:, MIRROR])
    return replace(record, path=path, objects=objects, relative=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    host = load_host(find_base())
    splits = load_splits(arguments.data)
    with progress() as step:
        stores = list(collect_heads(host, splits, arguments.work, step).values())
        held = collect_validation(host, splits.held, arguments.work / "held", SETTINGS, step)
        heads, trained = train_heads(host, stores, SETTINGS, arguments.work / "run.safetensors", step)
    calibrations = calibrate_heads(heads, held, splits.calibration, SETTINGS)
    artifact = replace(
        uncalibrated(host, heads, stores, SETTINGS, trained),
        calibrations=replace(calibrations, visibility_threshold=None),  # the confidence decides alone
    )
    scores = evaluate_artifact(artifact, host, held, splits.evaluation)
    card = {
        **artifact.card,
        "data": "COCO 2017 images with persons, by id; train, train_small and val as in docs/results.md",
        "sizes": SIZES,
        "images": {
            "heads": np.concatenate([part.image_ids for part in splits.heads.values()]).tolist(),
            "calibration": splits.calibration.tolist(),
            "evaluation": splits.evaluation.tolist(),
        },
        "figures": figures(scores),
    }
    replace(artifact, card=card).save(arguments.output)
    write_scores(scores, arguments.work / "report", host.description)
    say(f"-> {arguments.output}")


if __name__ == "__main__":
    main()
