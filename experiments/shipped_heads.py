"""Make the heads that ship with the package: YOLO11n-pose on COCO persons.

    python -m experiments.shipped_heads --data coco-pose/data.yaml --work work/ -o heads.safetensors

The data yaml has the splits train, train_small (256 px) and val. The val images are cut by a hash of their id:
60 % join the training images for the heads, 20 % calibrate, 20 % evaluate. The script prints the figures that
stand in docs/results.md.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from halopose.console import progress, say, write_scores
from halopose.datasets import load_dataset
from halopose.hub import find_base
from halopose.pipeline import (
    FitSettings,
    calibrate_heads,
    collect_training,
    collect_validation,
    evaluate_artifact,
    figures,
    train_heads,
    uncalibrated,
)
from halopose.predictor import load_host
from halopose.regimes import hashed_order
from halopose.training import TrainSettings

SETTINGS = FitSettings(train=TrainSettings(epochs=10, scale_weight=False), gamma_ks=0.3)
SIZES = {"train": (384, 512, 640), "train_small": (320,), "val": (512, 640)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    host = load_host(find_base())
    splits = {split: load_dataset(arguments.data, split) for split in SIZES}
    order = hashed_order(splits["val"].image_ids)
    fifth = len(order) // 5
    calibration, evaluation, heads_images = (np.sort(part) for part in np.split(order, [fifth, 2 * fifth]))
    held = splits["val"].subset(np.concatenate([calibration, evaluation]))
    splits["val"] = splits["val"].subset(heads_images)
    stores = []
    with progress() as step:
        for split, sizes in SIZES.items():
            settings = replace(SETTINGS, train_sizes=sizes)
            stores.append(collect_training(host, splits[split], arguments.work / split, settings, step))
        held_store = collect_validation(host, held, arguments.work / "held", SETTINGS, step)
        heads, trained = train_heads(host, stores, SETTINGS, arguments.work / "run.safetensors", step)
    calibrated = calibrate_heads(host, heads, held_store, calibration, SETTINGS)
    artifact = replace(
        uncalibrated(host, heads, SETTINGS, {}),
        gaussian=calibrated.gaussian,
        student=calibrated.student,
        threshold=calibrated.threshold,
    )
    metrics = evaluate_artifact(artifact, host, held_store, evaluation)
    card = {
        "base": host.description,
        "data": "COCO 2017 images with persons, by id; train, train_small and val as in docs/results.md",
        "settings": {**asdict(SETTINGS), "sizes": SIZES},
        "training": asdict(trained),
        "images": {
            "heads": np.concatenate([part.image_ids for part in splits.values()]).tolist(),
            "calibration": calibration.tolist(),
            "evaluation": evaluation.tolist(),
        },
        "figures": figures(metrics),
    }
    replace(artifact, card=card).save(arguments.output)
    write_scores(metrics, arguments.work / "report", host.description)
    say(f"-> {arguments.output}")


if __name__ == "__main__":
    main()
