"""Make the heads that ship with the package: YOLO11n-pose on COCO persons.

    python -m experiments.shipped_heads --data coco-pose/data.yaml --work work/ -o heads.safetensors

Only validation images are used. The base was trained on the training images, where its residuals are smaller
and lighter-tailed than on anything it meets later; heads trained on those rank and calibrate worse (see
docs/results.md). The images are split by a hash of their id: 60 % heads, 20 % calibration, 20 % evaluation.
Several runs that differ in their seed, all started from the pose head's own convolutions, are averaged into one.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from halopose.artifact import round_to_stored
from halopose.console import progress, say, write_scores
from halopose.datasets import load_dataset
from halopose.heads import HeadSettings, ProbabilisticHeads
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

SETTINGS = FitSettings(
    train=TrainSettings(epochs=12, learning_rate=3e-4, scale_weight=False, patience=12),
    head=HeadSettings(),
    train_sizes=(448, 544, 640, 736),
    imgsz=640,
)
SEEDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    host = load_host(find_base())
    dataset = load_dataset(arguments.data, "val")
    order = hashed_order(dataset.image_ids)
    fifth = len(order) // 5
    calibration, evaluation, heads_images = (np.sort(part) for part in np.split(order, [fifth, 2 * fifth]))
    with progress() as step:
        held = dataset.subset(np.concatenate([calibration, evaluation]))
        store = collect_training(host, dataset.subset(heads_images), arguments.work / "heads", SETTINGS, step)
        held_store = collect_validation(host, held, arguments.work / "held", SETTINGS, step)
        runs = []
        for seed in range(SEEDS):
            settings = replace(SETTINGS, train=replace(SETTINGS.train, seed=seed))
            runs.append(train_heads(host, [store], settings, arguments.work / f"run{seed}.safetensors", step)[0])
    heads = round_to_stored(average(runs))
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
        "data": "COCO 2017 validation images with persons, by id",
        "settings": asdict(SETTINGS),
        "seeds": SEEDS,
        "images": {
            "heads": heads_images.tolist(),
            "calibration": calibration.tolist(),
            "evaluation": evaluation.tolist(),
        },
        "figures": figures(metrics),
    }
    replace(artifact, card=card).save(arguments.output)
    write_scores(metrics, arguments.work / "report", host.description)
    say(f"-> {arguments.output}")


def average(runs: list[ProbabilisticHeads]) -> ProbabilisticHeads:
    """One head with the mean of the runs' weights; they share their start, so their valley too."""
    states = [run.state_dict() for run in runs]
    runs[0].load_state_dict({name: torch.stack([s[name] for s in states]).mean(0) for name in states[0]})
    return runs[0]


if __name__ == "__main__":
    main()
