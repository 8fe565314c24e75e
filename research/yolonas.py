"""Train YOLO-NAS-Pose Nano with LibreYOLO's trainer, add uncertainty heads, and print the paper's figures.

    python -m research.yolonas --imgsz 256 --epochs 25 --work work/

No weights may be redistributed, so training starts from random weights, on near runways or on --data with splits train
and val. The heads train on train. A fifth of val calibrates, the rest evaluates. A rerun continues where it stopped.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from halopose.cli.terminal import progress, say, write_scores
from halopose.data.dataset_loading import load_dataset
from halopose.evaluation.scores import Scores
from halopose.fitting.pipeline import fit
from halopose.fitting.settings import FitSettings, TrainSettings
from halopose.hosts.base import LOAD_ERRORS
from halopose.hosts.loading import load_host
from halopose.landing.world.dataset_writer import write_dataset
from halopose.landing.world.scenes import SceneSettings

TRAINING_SIGMA = 0.25
PAPER = {"AKP": 0.935, "random": 0.791, "skill": 0.689, "ACE": 0.0016, "ENCE": 0.0434}  # Nano, COCO, Student-t


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a data yaml; else runways seen from 300 to 1,500 m are drawn")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.data = arguments.data or near_runways(arguments.work / "world")
    training, validation = (load_dataset(arguments.data, split) for split in ("train", "val"))
    host = load_host(train_base(arguments, len(training.layout)))
    settings = FitSettings(train=TrainSettings(epochs=12), train_sizes=(arguments.imgsz,), imgsz=arguments.imgsz)
    with progress() as step:
        artifact, scores = fit(host, training, validation, arguments.work / "fit", settings, step)
    artifact.save(arguments.work / "heads.safetensors")
    write_scores(scores, arguments.work / "report", host.description)
    say(beside_the_paper(scores))


def near_runways(folder: Path) -> Path:
    """A data set that random weights can learn in minutes."""
    settings = SceneSettings(distance=(300.0, 1500.0))
    return write_dataset(folder, {"train": 400, "val": 400}, seed=5, settings=settings)


def train_base(arguments: argparse.Namespace, keypoints: int) -> Path:
    """The averaged weights of the last epoch: none is chosen by looking at val.

    From chance, OKS is nearly zero everywhere: a loss with tight sigmas is flat there, and an assigner that
    multiplies by OKS gives no cell any weight. Hence wide sigmas and no such factor.
    """
    base: Path = arguments.work / "base.pt"
    if base.is_file():
        return base
    from libreyolo.models.yolonas.model import LibreYOLONAS

    weights = arguments.work / "base" / "weights"
    begun = newest(weights)
    model = LibreYOLONAS(begun and str(begun), size="n", task="pose", device="cpu")
    model.train(
        str(arguments.data.resolve()),
        epochs=arguments.epochs,
        batch=arguments.batch,
        imgsz=arguments.imgsz,
        device="cpu",
        workers=0,
        project=str(arguments.work),
        name="base",
        exist_ok=True,
        resume=begun is not None,
        amp=False,
        warmup_epochs=1,
        eval_interval=arguments.epochs,
        save_period=max(1, arguments.epochs // 5),
        oks_sigmas=[TRAINING_SIGMA] * keypoints,
        assigner_multiply_by_pose_oks=False,
    )
    shutil.copy(weights / "last.pt", base)
    return base


def newest(weights: Path) -> Path | None:
    """The newest complete checkpoint; a killed trainer may leave a truncated file."""
    for path in sorted(weights.glob("*.pt"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            torch.load(path, map_location="cpu", weights_only=True)
        except LOAD_ERRORS:
            continue
        return path
    return None


def beside_the_paper(scores: Scores) -> str:
    distribution = scores.student_t
    mine = (distribution.akp, scores.akp_random, scores.akp_skill, distribution.ace, distribution.ence)
    lines = [f"{'Student-t':12}" + "".join(f"{name:>10}" for name in PAPER)]
    for name, row in (("here", mine), ("paper, COCO", PAPER.values())):
        lines.append(f"{name:12}" + "".join(f"{value:10.4f}" for value in row))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
