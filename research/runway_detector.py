"""Train a runway detector: YOLO11n-pose with four corners, on the synthetic world.

    python -m research.runway_detector --work work/ -o plain.safetensors
    python -m research.runway_detector --plan footage --start plain.safetensors --work b/ -o runway.safetensors
    python -m research.runway_detector --plan parallel --start runway.safetensors --work c/ -o more.safetensors
    python -m research.runway_detector --plan parts --start more.safetensors --work d/ -o footage.safetensors

1. `plain` starts from YOLO11n-pose and trains with the framework's trainer on clear, hazy, dusk and night scenes.
2. `footage` adds scenes as real cameras record them, then parallel runways and land without a runway. It made the
   detector for simulated flights.
3. `parallel` trains on many more scenes; a third of them are far away, and most of these have a parallel runway.
4. `parts` adds parts of large pictures, and more haze and dusk. It made the detector for real cameras.

Plans 3 and 4 train two runs in parallel on different scenes and average their weights with those of the start. Every
plan prints corner AP and pixel errors on scenes of other seeds, and in fog. A rerun continues after the last whole
epoch. On two cores plan 1 takes about one hour and plan 2 four hours.

The result derives from an AGPL-3.0 checkpoint and stays under that licence.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from halopose.cli.terminal import progress, say
from halopose.data.files import write_text
from halopose.finetuning.ultralytics_trainer import FineTuner
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base
from halopose.hosts.ultralytics.ultralytics_host import load_model
from halopose.hosts.ultralytics.weights import save_model
from halopose.landing.runway_datasets import CORNER_NAMES, OKS_SIGMAS
from research.runway_scenes import SEED, describe, draw, judge

LICENCE = "AGPL-3.0, as a derivative of Ultralytics YOLO11n-pose"


@dataclass(frozen=True)
class Stage:
    """Epochs on some scenes of each world at one input size, which varies from batch to batch by ``varied``.

    sigma: scale of the keypoint loss, with kappa = 2 sigma times the size of the runway. The loss saturates beyond a
    few kappa and is flat far below it, so stages start wide and end narrow.
    mirrored: only in early stages. The framework mirrors about the edge of the image, but pixel coordinates refer to
    pixel centres, so mirrored labels are off by one pixel.
    half: train in bfloat16. It is faster, but cannot resolve the last 0.2 px.
    """

    name: str
    scenes: dict[str, int]
    imgsz: int
    epochs: int
    learning_rate: float
    sigma: float
    mirrored: float
    varied: float = 0.0
    half: bool = False


@dataclass(frozen=True)
class Plan:
    """The stages, images per step, parallel runs, and the weight of the start in the average.

    Each run has different scenes and one core, which is nearly twice as fast as one run on two cores. The detector is
    the mean of the runs' weights. The starting weights have a share of ``kept`` in this mean. On the selection scenes
    a share of 0.3 or 0.5 gave smaller corner errors than 0, with the same AP.
    """

    stages: tuple[Stage, ...]
    step: int
    runs: int = 1
    kept: float = 0.0
    seed: int = SEED


PLAIN, MIXED = {"detector": 1200}, {"detector": 1200, "footage": 2000}
MANY = {"detector": 4000, "footage": 4000, "parallel": 4000, "bare": 400}
PARTS = {"detector": 3600, "footage": 4400, "pale": 3600, "parts": 1800, "bare": 400}
PLANS = {
    "plain": Plan(
        (
            Stage("small", PLAIN, 448, 8, 1e-3, 0.1, 0.5),
            Stage("full", PLAIN, 640, 4, 5e-4, 0.1, 0.0),
            Stage("sharp", PLAIN, 640, 4, 5e-4, 0.03, 0.0),
        ),
        step=64,  # the framework's own; far too few steps for so few images
    ),
    "footage": Plan(
        (
            Stage("wide", MIXED, 448, 5, 1e-3, 0.06, 0.5, 0.25),
            Stage("fine", MIXED, 640, 3, 4e-4, 0.03, 0.0, 0.1),
            Stage("even", {"detector": 1200, "footage": 800, "parallel": 600, "bare": 150}, 640, 3, 3e-4, 0.03, 0.0),
        ),
        step=8,
    ),
    "parallel": Plan(
        (
            Stage("many", MANY, 640, 2, 4e-4, 0.03, 0.0, half=True),
            Stage("last", {world: 3 * count // 5 for world, count in MANY.items()}, 640, 1, 1.5e-4, 0.03, 0.0),
        ),
        step=8,
        runs=2,
        kept=0.3,
    ),
    "parts": Plan(
        (
            Stage("many", PARTS, 640, 1, 4e-4, 0.03, 0.0, half=True),
            Stage("last", {world: 2 * count // 5 for world, count in PARTS.items()}, 640, 1, 1.5e-4, 0.03, 0.0),
        ),
        step=8,
        runs=2,
        kept=0.3,
        seed=3,
    ),
}


class RunwayTrainer(FineTuner):
    """The framework's trainer on the synthetic world."""

    stage: Stage

    def get_dataset(self) -> dict[str, Any]:
        path = Path(self.args.data)
        content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        train = str(path.parent.resolve() / content["train"])
        sigmas = {"kpt_oks_sigmas": [self.stage.sigma] * 4}
        return {**content, "train": train, "val": train, "nc": 1, "channels": 3, **sigmas}

    def preprocess_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch = super().preprocess_batch(batch)
        return {**batch, "img": batch["img"].contiguous(memory_format=torch.channels_last)}  # a quarter faster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--plan", choices=sorted(PLANS), default="plain")
    parser.add_argument("--start", type=Path, help="the checkpoint to go on from; YOLO11n-pose by default")
    arguments = parser.parse_args()
    plan, work = PLANS[arguments.plan], arguments.work
    if arguments.plan != "plain" and arguments.start is None:
        before = {"footage": "plain", "parallel": "footage", "parts": "parallel"}[arguments.plan]
        parser.error(f"--plan {arguments.plan} goes on from the result of --plan {before}: name it with --start")
    if not arguments.output.is_file():
        train(plan, arguments.start or find_base(), work, arguments.output)
    host = load_host(arguments.output)
    judged = [("detector", "choose_detector", 200), ("detector", "test_detector", 400), ("detector", "fog", 200)]
    if arguments.plan != "plain":  # the first 400 were used to select the last stage of "footage"
        judged += [("detector", "test_again", 400), ("footage", "choose_footage", 200)]
    if arguments.plan in ("parallel", "parts"):  # and these to select this plan
        judged += [("detector", "test_last", 400)]
    if arguments.plan == "parts":  # for which all of those had been looked at
        judged += [("detector", "test_fresh", 400), ("parts", "choose_parts", 200)]
    with progress() as step:
        for world, split, count in judged:
            say(f"{split}: {describe(judge(host, work, world, split, count, step))}")


def train(plan: Plan, start: Path, work: Path, output: Path) -> None:
    """Every run of the plan, then the mean of their weights."""
    for stage in plan.stages:
        training_data(stage, plan, work)
    base = work / "start.pt"
    if not base.is_file():
        torch.save({"model": load_model(str(start), unsafe=False).float()}, base)
    if plan.runs == 1:
        run(plan, 0, base, work)
    else:
        with ProcessPoolExecutor(plan.runs, get_context("spawn")) as pool:
            list(pool.map(partial(run, plan, base=base, work=work), range(plan.runs)))
    model = load_model(str(base), unsafe=False)
    weights = [(plan.kept, model.state_dict())]
    weights += [((1 - plan.kept) / plan.runs, averaged(work, number, plan.stages[-1])) for number in range(plan.runs)]
    model.load_state_dict(mean_weights(weights))
    model.kpt_oks_sigmas, model.kpt_names = list(OKS_SIGMAS), {0: list(CORNER_NAMES)}
    save_model(model, output, LICENCE)
    say(f"-> {output}")


def run(plan: Plan, number: int, base: Path, work: Path) -> None:
    """All stages of one run: most epochs at a small input or in half precision, the last ones in full."""
    torch.set_num_threads(max((os.cpu_count() or 1) // plan.runs, 1))
    for stage in plan.stages:
        result = folder_of(work, number, stage).with_suffix(".pt")
        if not result.is_file():
            run_stage(stage, number, plan.step, base, work, result)
        base = result


def folder_of(work: Path, number: int, stage: Stage) -> Path:
    return work / f"{stage.name}-{number}"


def training_data(stage: Stage, plan: Plan, work: Path) -> None:
    """A data yaml and an image list for each run of a stage."""
    content: dict[str, Any] = {}
    images: list[list[Path]] = [[] for _ in range(plan.runs)]
    for world, count in stage.scenes.items():
        split = f"train_{world}"
        data = draw(work, world, split, count, plan.seed)
        content = yaml.safe_load(data.read_text(encoding="utf-8"))
        drawn = sorted((data.parent / "images" / split).resolve().iterdir())
        for number, own in enumerate(images):
            own += drawn[number :: plan.runs][: count // plan.runs]
    for number, own in enumerate(images):
        place = folder_of(work, number, stage)
        write_text(place.with_suffix(".txt"), "".join(f"{image}\n" for image in own))
        write_text(place.with_suffix(".yaml"), yaml.safe_dump({**content, "train": f"{place.name}.txt"}))


def run_stage(stage: Stage, number: int, step: int, base: Path, work: Path, result: Path) -> None:
    """Train a stage and write the averaged weights of its last epoch."""
    RunwayTrainer.stage = stage
    folder = folder_of(work, number, stage)
    trainer = RunwayTrainer(
        overrides={
            "model": str(base),
            "data": str(folder.with_suffix(".yaml")),
            "project": str(folder.resolve()),
            "name": "run",
            "exist_ok": True,
            "epochs": stage.epochs,
            "batch": 8,
            "nbs": step,
            "imgsz": stage.imgsz,
            "multi_scale": stage.varied,
            "rect": True,  # 5 : 3 as the camera, without padding to a square
            "freeze": 5,  # low-level features transfer, and these layers are the slowest to train
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
            "seed": SEED + number,
            "workers": 0,
            "amp": False,  # the framework has no bfloat16 on processors
            "device": "cpu",
            "val": False,
            "save": True,
            "plots": False,
        }
    )
    threads = torch.get_num_threads()  # the framework leaves one core idle
    trainer.add_callback("on_train_start", lambda _: torch.set_num_threads(threads))
    trainer.add_callback("on_train_start", lambda t: t.model.to(memory_format=torch.channels_last))
    if stage.half:
        trainer.add_callback("on_train_start", lambda t: setattr(t.model, "forward", halved(t.model.forward)))
        trainer.add_callback("on_train_end", lambda t: delattr(t.model, "forward"))
    state = folder / "state.pt"
    if state.is_file() and torch.load(state, weights_only=True)["epoch"] + 1 == stage.epochs:
        trainer.setup_model()  # it was stopped after its last epoch
    else:
        trainer.train()
    model = trainer.model
    model.load_state_dict(torch.load(state, map_location="cpu", weights_only=True)["ema"])
    torch.save({"model": model.eval()}, result)


def averaged(work: Path, number: int, stage: Stage) -> dict[str, Tensor]:
    """The averaged weights of a run after a stage."""
    state = folder_of(work, number, stage) / "state.pt"
    weights: dict[str, Tensor] = torch.load(state, map_location="cpu", weights_only=True)["ema"]
    return weights


def mean_weights(given: Sequence[tuple[float, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Weighted mean of weights; integer counters are those of the last."""
    last = given[-1][1]
    return {
        name: torch.stack([share * each[name] for share, each in given]).sum(0) if w.is_floating_point() else w
        for name, w in last.items()
    }


def halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The model in bfloat16."""

    def run(*given: Any, **options: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*given, **options)

    return run


if __name__ == "__main__":
    main()
