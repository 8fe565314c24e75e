"""Train YOLO-NAS-Pose Nano on runways from random weights, free of AGPL weights, code and labels.

    python -m research.runway_nas --work work/ -o runway-nas.pt

Every scene is drawn while training and seen once, so no augmentation is needed. The model, the loss and the assigner
are LibreYOLO's (MIT). A rerun continues where it stopped. The curve of the losses is ``curve.jsonl``, the averaged
weights after every few minutes are in ``snapshots``. ``--curve`` adds their AP on held-out scenes and draws both.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import radians
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from halopose.cli.terminal import progress, say
from halopose.data.files import make_folder, write_bytes
from halopose.finetuning.finetuning_settings import write_checkpoint
from halopose.geometry.camera import Camera
from halopose.hosts.torchvision_shim import ensure_torchvision
from halopose.hosts.yolonas.yolonas_host import YoloNASHost
from halopose.landing.runway_datasets import OKS_SIGMAS, RUNWAY, box_of
from halopose.landing.world.dataset_writer import split_seeds
from halopose.landing.world.render import render_scene
from halopose.landing.world.scenes import (
    TRAINING_WEATHERS,
    SceneSettings,
    corners_in_image,
    labelled_runways,
    sample_scene,
)
from halopose.studies.coco_ap import CocoScores
from halopose.types import Array
from research.runway_scenes import describe, judge

ensure_torchvision()
from libreyolo.models.yolonas.loss import YoloNASPoseLoss  # noqa: E402
from libreyolo.models.yolonas.nn import LibreYOLONASPoseModel  # noqa: E402
from libreyolo.utils.serialization import wrap_libreyolo_checkpoint  # noqa: E402

SEED = 41
SPLIT = "train_nas"
PAD = 127  # the framework pads below and right with this value
KEYPOINTS, ROWS = 4, 2
WARM_UP = 100  # steps
EMA_DECAY, EMA_RAMP = 0.998, 300


def _settings(width: int, height: int, view: float, near: float, far: float, **others: Any) -> SceneSettings:
    camera = Camera.from_fov(width, height, radians(view))
    return SceneSettings(camera=camera, distance=(near, far), **others)


@dataclass(frozen=True)
class Stage:
    """Images of one height and width.

    worlds: settings of the scenes, taken in turn. A camera with half the field of view has the resolution of the full
        input, so a small stage sees distant runways as large as the last one does.
    learning_rate, sigma: at the beginning and at the end, cosine and geometric in between. The keypoint loss saturates
        beyond a few kappa = 2 sigma times the size of the runway and is flat far below it.
    padded: every n-th batch has grey rows below, as square inputs have.
    images, stop: the schedule is that of so many images; the stage ends after ``stop`` of them, if given.
    """

    name: str
    shape: tuple[int, int]
    images: int
    batch: int
    worlds: tuple[SceneSettings, ...]
    learning_rate: tuple[float, float]
    sigma: tuple[float, float]
    padded: int = 4
    rows: int = 32
    stop: int | None = None

    @property
    def length(self) -> int:
        return self.images if self.stop is None else self.stop


_PARTS = (_settings(640, 384, 30, 300, 6000, part=160),)
_SMALL = (
    _settings(320, 192, 30, 300, 3000),
    _settings(320, 192, 15, 900, 6000, crab=radians(4.0)),
    _settings(320, 192, 30, 300, 3000),
    _settings(320, 192, 15, 900, 6000, crab=radians(4.0), parallel_share=0.5),
)
_LARGE = (
    _settings(640, 384, 30, 300, 6000),
    _settings(640, 384, 30, 300, 1500),
    _settings(640, 384, 30, 300, 6000),
    _settings(640, 384, 30, 1500, 6000, parallel_share=0.5),
)
STAGES = (
    Stage("parts", (96, 160), 16_000, 16, _PARTS, (1e-3, 1e-3), (0.25, 0.13), rows=0),
    Stage("small", (192, 320), 4_000, 8, _SMALL, (1e-3, 4e-4), (0.13, 0.06), stop=2_968),
    Stage("full", (384, 640), 1_600, 4, _LARGE, (4e-4, 1e-5), (0.06, 0.05)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, help="where to write the checkpoint of LibreYOLO")
    parser.add_argument("--start", type=Path, help="a snapshot to begin the last stage with, without optimiser state")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time; a rerun goes on")
    parser.add_argument("--every", type=float, default=4.0, help="minutes between saved states")
    parser.add_argument("--curve", type=Path, help="do not train: write the learning curve to this picture")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    cv2.setNumThreads(1)
    if arguments.curve:
        draw_curve(arguments.work, arguments.curve)
        return
    training = Training(make_folder(arguments.work), arguments.start)
    training.run(arguments.minutes, arguments.every)
    if arguments.output:
        write_model(training.averaged(), arguments.output)
        with progress() as step:
            store = judge(YoloNASHost.load(arguments.output), arguments.work, "detector", "test_nas", 400, step)
        say(describe(store))


def write_model(weights: dict[str, Tensor], path: Path) -> None:
    """Write a checkpoint that LibreYOLO and halopose load."""
    checkpoint = wrap_libreyolo_checkpoint(
        weights,
        model_family="yolonas",
        size="n",
        task="pose",
        nc=1,
        names={0: RUNWAY},
        imgsz=640,
        num_keypoints=KEYPOINTS,
        keypoint_dim=3,
        oks_sigmas=list(OKS_SIGMAS),
        config={"assigner_multiply_by_pose_oks": False},
    )
    write_checkpoint(path, {**checkpoint, "license": "Apache-2.0"})


class Training:
    """The model, its average and its optimiser, saved in a folder with the learning curve."""

    def __init__(self, work: Path, start: Path | None = None) -> None:
        torch.manual_seed(SEED)
        self.work = work
        self.model = LibreYOLONASPoseModel("n", num_keypoints=KEYPOINTS, num_classes=1).train()
        # The framework's blocks also hold the fused convolution of deployment, which training does not use.
        for name, weight in self.model.named_parameters():
            if "rbr_reparam" in name:
                weight.requires_grad_(False).zero_()
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        decayed = [weight for weight in self.weights if weight.ndim > 1]
        plain = [weight for weight in self.weights if weight.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}], lr=1e-3, fused=True
        )
        self.stage, self.done, self.step = 0, 0, 0  # images of the stage, steps of all
        self.seconds = 0.0  # processor time
        if start is not None:
            for model in (self.model, self.average):
                model.load_state_dict(load_file(start))
            self.stage = len(STAGES) - 1
        self._load()

    def run(self, minutes: float, every: float) -> None:
        begun = saved = time.monotonic()
        while self.stage < len(STAGES):
            stage = STAGES[self.stage]
            for batch in self._batches(stage):
                before = self._clock
                losses = self._train(stage, *batch)
                self.done += stage.batch
                self.step += 1
                self._log(stage, losses, before)
                now = time.monotonic()
                if now - saved > 60 * every or now - begun > 60 * minutes:
                    self.save()
                    saved = now
                if now - begun > 60 * minutes:
                    return
            self.stage, self.done = self.stage + 1, 0
            self.save()
            saved = time.monotonic()

    def _batches(self, stage: Stage) -> Iterator[tuple[Tensor, Tensor]]:
        seeds = split_seeds(SEED, f"{SPLIT}_{stage.name}", stage.images)
        while self.done + stage.batch <= stage.length:
            self._clock = time.process_time()
            drawn = [_draw(stage, seeds[i], i) for i in range(self.done, self.done + stage.batch)]
            images, rows = zip(*drawn, strict=True)
            pixels = torch.from_numpy(np.stack(images).transpose(0, 3, 1, 2).copy()).float() / 255
            targets = torch.zeros(len(rows), ROWS, 5 + 3 * KEYPOINTS)
            for target, row in zip(targets, rows, strict=True):
                target[: len(row)] = torch.from_numpy(row)
            yield pixels, targets

    def _train(self, stage: Stage, pixels: Tensor, targets: Tensor) -> Tensor:
        share = self.done / stage.images
        rate, sigma = _rate(stage, share), _sigma(stage, share)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, (self.step + 1) / WARM_UP)
        criterion = YoloNASPoseLoss([sigma] * KEYPOINTS, assigner_multiply_by_pose_oks=False)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = self.model(pixels)
        outputs = tuple(tuple(v.float() if isinstance(v, Tensor) else v for v in part) for part in outputs)
        loss, losses = criterion(outputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self._update_average()
        return losses

    @torch.no_grad()
    def _update_average(self) -> None:
        pairs = zip(self.average.state_dict().values(), self.model.state_dict().values(), strict=True)
        own, new = zip(*((a, b) for a, b in pairs if a.is_floating_point()), strict=True)
        torch._foreach_lerp_(own, new, 1 - EMA_DECAY * (1 - math.exp(-(self.step + 1) / EMA_RAMP)))

    def _log(self, stage: Stage, losses: Tensor, before: float) -> None:
        self.seconds += time.process_time() - before
        names = ("cls", "iou", "dfl", "pose_cls", "pose_reg", "loss")
        share = self.done / stage.images
        line = {
            "stage": stage.name,
            "images": sum(earlier.length for earlier in STAGES[: self.stage]) + self.done,
            "step": self.step,
            **{name: round(float(value), 5) for name, value in zip(names, losses, strict=True)},
            "rate": _rate(stage, share),
            "sigma": _sigma(stage, share),
            "processor_seconds": round(self.seconds, 2),
            "time": round(time.time(), 1),
        }
        with (self.work / "curve.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    # --- saved states ------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the state that a rerun needs, and the averaged weights in half precision for the learning curve."""
        state = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        state |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{number}.{name}": value for name, value in moments.items()}
        place = {"stage": self.stage, "done": self.done, "step": self.step, "seconds": self.seconds}
        part = self.work / "state.part"
        save_file({name: v.contiguous().clone() for name, v in state.items()}, part, {"place": json.dumps(place)})
        os.replace(part, self.work / "state.safetensors")
        images = sum(stage.length for stage in STAGES[: self.stage]) + self.done
        write_bytes(make_folder(self.work / "snapshots") / f"{images:06d}.safetensors", save(self.averaged()))
        say(f"{images} images, {self.seconds:.0f} s of processor time")

    def averaged(self) -> dict[str, Tensor]:
        """The averaged weights in half precision."""
        weights = self.average.state_dict()
        return {name: w.half() if w.is_floating_point() else w.clone() for name, w in weights.items()}

    def _load(self) -> None:
        path = self.work / "state.safetensors"
        if not path.is_file():
            return
        with safe_open(path, "pt") as file:
            place = json.loads(file.metadata()["place"])
        state = load_file(path)
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}}
        for name, value in state.items():
            kind, _, own = name.partition(".")
            parts[kind][own] = value
        self.model.load_state_dict(parts["model"])
        self.average.load_state_dict(parts["average"])
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in parts["optimizer"].items():
            number, kind = name.split(".")
            moments.setdefault(int(number), {})[kind] = value
        content = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer.load_state_dict({**content, "state": moments})
        self.stage, self.done, self.step = place["stage"], place["done"], place["step"]
        self.seconds = place["seconds"]
        curve = self.work / "curve.jsonl"  # without the steps after this state
        lines = curve.read_text(encoding="utf-8").splitlines(keepends=True)[: self.step]
        write_bytes(curve, "".join(lines).encode())


def _rate(stage: Stage, share: float) -> float:
    first, last = stage.learning_rate
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


def _sigma(stage: Stage, share: float) -> float:
    first, last = stage.sigma
    return float(first * (last / first) ** share)


def _draw(stage: Stage, seed: int, index: int) -> tuple[Array, Array]:
    """The image of a scene, and a row for the loss for each of its runways: class, box, corners with visibility."""
    settings = stage.worlds[index % len(stage.worlds)]
    rows = stage.rows if index // stage.batch % stage.padded == 0 else 0
    settings = _lower(settings, rows)
    weather = TRAINING_WEATHERS[index // len(stage.worlds) % len(TRAINING_WEATHERS)]
    scene = sample_scene(seed, weather, settings)
    image = np.full((*stage.shape, 3), PAD, dtype=np.uint8)
    height, width = min(scene.camera.height, stage.shape[0]), min(scene.camera.width, stage.shape[1])
    image[:height, :width] = render_scene(scene)[:height, :width]
    labels = []
    for runway in labelled_runways(scene):
        corners, _ = corners_in_image(scene, runway)
        left, top, right, bottom = box_of(corners, scene.camera.width, scene.camera.height)
        points = np.column_stack([corners, np.full(KEYPOINTS, 2.0)]).ravel()
        labels.append([0, (left + right) / 2, (top + bottom) / 2, right - left, bottom - top, *points])
    return image, np.array(labels[:ROWS], dtype=np.float32)


def _lower(settings: SceneSettings, rows: int) -> SceneSettings:
    """The settings with a camera that is lower by some rows."""
    camera = settings.camera
    if not rows:
        return settings
    smaller = replace(camera, height=camera.height - rows, cy=camera.cy - rows / 2)
    return replace(settings, camera=smaller)


# --- learning curve ---------------------------------------------------------------------------------------------


def draw_curve(work: Path, picture: Path) -> None:
    """AP of every snapshot on 100 held-out scenes at 640 pixels, kept in ``ap.json``, and the losses beside it."""
    path = work / "ap.json"
    known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for snapshot in sorted((work / "snapshots").glob("*.safetensors")):
        if snapshot.stem in known:
            continue
        checkpoint = work / "judged.pt"
        write_model(load_file(snapshot), checkpoint)
        with progress() as step:
            host = YoloNASHost.load(checkpoint)
            store = judge(host, work, "detector", "choose_nas", 100, step, f"choose_nas-{snapshot.stem}")
        known[snapshot.stem] = float(CocoScores.of(store).scores()["ap"])
        write_bytes(path, json.dumps(known, indent=1).encode())
        say(f"{int(snapshot.stem)} images: {describe(store)}")
    lines = [json.loads(line) for line in (work / "curve.jsonl").read_text(encoding="utf-8").splitlines()]
    images, loss = (np.array([line[name] for line in lines], dtype=float) for name in ("images", "loss"))
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    count = max(len(loss) // 100, 1)
    smooth = [part.mean() for part in np.array_split(loss, max(len(loss) // count, 1))]
    at = [part.mean() for part in np.array_split(images, max(len(loss) // count, 1))]
    left.plot(at, smooth)
    left.set(xlabel="images", ylabel="loss of a batch, mean", yscale="log")
    right.plot([int(name) for name in known], list(known.values()), "o-")
    right.set(xlabel="images", ylabel="AP on 100 held-out scenes", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
