"""Train the runway detector that ships: YOLO11n-pose with four corners, on the synthetic world.

    python -m experiments.runway_detector --work work/ -o runway.safetensors

Starts from YOLO11n-pose, trains with the framework's own trainer on clear, hazy, dusk and night scenes, and prints
corner AP and pixel errors on scenes of other seeds, with fog beside. The result derives from an AGPL-3.0
checkpoint and stays under that licence. About an hour on two cores.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file

from halopose.cli.terminal import progress, say
from halopose.data.loading import load_dataset
from halopose.evaluation.true_positives import MatchedPoses, match_poses
from halopose.fitting.pipeline import FitSettings, collect_validation
from halopose.fitting.store import MatchStore
from halopose.hosts.loading import load_host
from halopose.hosts.shipped import find_base
from halopose.hosts.ultralytics.host import load_model
from halopose.hosts.ultralytics.training import OfflineTrainer
from halopose.hosts.ultralytics.weights import save_model
from halopose.landing.world.dataset import CORNER_NAMES, OKS_SIGMAS, write_dataset
from halopose.studies.analysis import constant_predictions
from halopose.studies.coco_ap import CocoScores

LICENCE = "AGPL-3.0, as a derivative of Ultralytics YOLO11n-pose"
SEED = 1
FIT = FitSettings(conf=0.05)


@dataclass(frozen=True)
class Stage:
    """Epochs at one input size.

    sigma: the loss saturates where a corner is off by more than a few kappa = 2 sigma of the runway's size, and is
    blind to errors of a fraction of it: it begins wide and ends narrow. Mirrored copies come first only: the
    framework mirrors about the image's edge, our pixels count from their centres, so that mirrored labels are one
    pixel off.
    """

    name: str
    imgsz: int
    epochs: int
    learning_rate: float
    sigma: float
    mirrored: float


STAGES = (
    Stage("small", 448, 8, 1e-3, 0.1, 0.5),
    Stage("full", 640, 4, 5e-4, 0.1, 0.0),
    Stage("sharp", 640, 4, 5e-4, 0.03, 0.0),
)


class RunwayTrainer(OfflineTrainer):
    """The framework's trainer on the synthetic world."""

    stage: Stage

    def get_dataset(self) -> dict[str, Any]:
        path = Path(self.args.data)
        content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        train = str((path.parent / content["train_detector"]).resolve())
        sigmas = {"kpt_oks_sigmas": [self.stage.sigma] * 4}
        return {**content, "train": train, "val": train, "nc": 1, "channels": 3, **sigmas}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1200)
    arguments = parser.parse_args()
    counts = {"train_detector": arguments.images, "test_detector": 400, "fog": 200}
    data = write_dataset(arguments.work / "world", counts, SEED, processes=2)
    if not arguments.output.is_file():
        train(data, arguments.work, arguments.output)
    host = load_host(arguments.output)
    with progress() as step:
        for split in ("test_detector", "fog"):
            store = collect_validation(host, load_dataset(data, split), arguments.work / split, FIT, step)
            say(f"{split}: {describe(store)}")


def train(data: Path, work: Path, output: Path) -> None:
    """Most epochs at a small input, the last ones at the full one; a rerun goes on after the last whole stage."""
    base = find_base()
    for stage in STAGES:
        result = work / f"{stage.name}.pt"
        if not result.is_file():
            run_stage(stage, base, data, work, result)
        base = result
    model = load_model(str(base), unsafe=False)
    model.kpt_oks_sigmas, model.kpt_names = list(OKS_SIGMAS), {0: list(CORNER_NAMES)}
    save_model(model, output, LICENCE)
    say(f"-> {output}")


def run_stage(stage: Stage, base: Path, data: Path, work: Path, result: Path) -> None:
    """Train a stage and write the averaged weights of its last epoch."""
    RunwayTrainer.stage = stage
    trainer = RunwayTrainer(
        overrides={
            "model": str(base),
            "data": str(data),
            "project": str(work.resolve()),
            "name": stage.name,
            "exist_ok": True,
            "epochs": stage.epochs,
            "batch": 8,
            "imgsz": stage.imgsz,
            "rect": True,  # 5 : 3 as the camera, without padding to a square
            "freeze": 5,  # edges are edges, and these layers are the dearest to train
            "optimizer": "AdamW",
            "lr0": stage.learning_rate,
            "lrf": 0.05,
            "warmup_epochs": 0.5,
            "warmup_bias_lr": 0.0,
            "mosaic": 0.0,
            "fliplr": stage.mirrored,
            "scale": 0.2,
            "translate": 0.1,
            "pose": 24.0,  # corners matter more here than boxes
            "seed": SEED,
            "workers": 1,
            "amp": False,
            "device": "cpu",
            "val": False,
            "save": False,
            "plots": False,
        }
    )
    threads = os.cpu_count() or 1  # the framework leaves one core idle
    trainer.add_callback("on_train_start", lambda _: torch.set_num_threads(threads))
    trainer.train()
    model = trainer.model
    model.load_state_dict(load_file(work / stage.name / "weights" / "tuned.safetensors"))
    torch.save({"model": model.eval()}, result)


def describe(store: MatchStore) -> str:
    """AP, AR and the corners' errors in pixels, by the runway's width in the image."""
    scores = CocoScores.of(store).scores()
    truth, detections = store.ground_truth(), constant_predictions(store)
    confident = detections[detections.scores >= 0.25]
    matched = match_poses(confident, truth)
    found = f"{len(matched)} of {len(truth.image_ids)} runways found"
    return f"AP {scores['ap']:.3f}, AR {scores['ar']:.3f}, {found}; errors {errors(matched)}"


def errors(matched: MatchedPoses) -> str:
    """Median and 90th percentile of the corner error, over three equal groups of size."""
    distance = np.hypot(*np.moveaxis(matched.residual, 2, 0))
    parts = np.array_split(np.argsort(matched.area), 3)
    return "; ".join(
        f"{np.sqrt(matched.area[part]).mean():.0f} px runways: median {np.median(distance[part]):.2f}, "
        f"90 % {np.quantile(distance[part], 0.9):.2f} px"
        for part in parts
    )


if __name__ == "__main__":
    main()
