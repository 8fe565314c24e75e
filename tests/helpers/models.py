"""Pose models with random weights, photographs, small data sets, and a runner that kills processes.

Nothing is downloaded: architectures and photographs are part of the ultralytics wheel.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import ultralytics
import yaml
from torch import nn
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import PoseModel, yaml_model_load

from halopose.calibration.calibrators import Calibrations, GaussianCalibration, StudentTCalibration
from halopose.calibration.conformal import fit_regions
from halopose.calibration.correlation import fit_correlation
from halopose.calibration.split_student_t import SplitStudentT
from halopose.fitting.artifact import Artifact, round_to_stored
from halopose.fitting.card import Card
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.hosts.torchvision_shim import ensure_torchvision
from halopose.uncertainty.conditional_scale import INPUTS, KNOTS, ConditionalScale
from halopose.uncertainty.heads import HeadSettings, ProbabilisticHeads
from tests.helpers.values import present, read_picture

ULTRALYTICS = ("v8", "11", "12", "26", "26-one-to-one")
KINDS = (*ULTRALYTICS, "nas")
PHOTOGRAPHS = ("bus.jpg", "zidane.jpg")
ROOT = Path(__file__).parents[2]
ASSETS = Path(ultralytics.__file__).parent / "assets"
_YAML = {"v8": "yolov8n-pose.yaml", "11": "yolo11n-pose.yaml", "12": "yolo12n-pose.yaml"}


def photograph(name: str) -> np.ndarray:
    return read_picture(ASSETS / name)


def wants_end2end(kind: str) -> bool | None:
    return {"26": False, "26-one-to-one": True}.get(kind)


def pose_model(kind: str, shape: tuple[int, int] = (17, 3), classes: int = 1, seed: int = 0) -> Any:
    """A new copy of a random model in which every layer affects the output and some cells are confident."""
    return copy.deepcopy(_pose_model(kind, shape, classes, seed))


@cache
def _pose_model(kind: str, shape: tuple[int, int], classes: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (_nas if kind == "nas" else _ultralytics)(kind, shape, classes)
        _liven(model)
    return model.eval()


def _ultralytics(kind: str, shape: tuple[int, int], classes: int) -> PoseModel:
    content = yaml_model_load(_YAML.get(kind, "yolo26n-pose.yaml"))
    content["kpt_shape"], content["nc"] = list(shape), classes
    model = PoseModel(content, verbose=False)
    model.args = get_cfg()
    return model


def _nas(kind: str, shape: tuple[int, int], classes: int) -> nn.Module:
    ensure_torchvision()
    from libreyolo.models.yolonas.nn import LibreYOLONASPoseModel

    model = LibreYOLONASPoseModel("n", num_keypoints=shape[0], num_classes=classes)
    for head in (model.heads.head1, model.heads.head2, model.heads.head3):
        head.reg_pred.bias.data = (-0.6 * torch.arange(17.0)).repeat(4)  # boxes of a few cells, not of the image
    return model


def _liven(model: nn.Module) -> None:
    """Set batch norm statistics from real activations, and scale last layers so that outputs vary over the image."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # cumulative average
        norm.reset_running_stats()
        nn.init.uniform_(norm.weight, 0.8, 1.2)
        nn.init.normal_(norm.bias, 0.0, 0.2)
    small = [cv2.resize(photograph(name), (160, 160)) for name in PHOTOGRAPHS]
    batch = torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).flip(1).float() / 255
    with torch.no_grad():
        model.train()(batch)
    for norm in norms:
        norm.momentum = 0.03
        variance = present(norm.running_var)
        variance.add_(0.1 * variance.mean())  # nearly constant channels would blow up
    for last, spread, level in _last_layers(model):
        _rescale(model.eval(), last, batch, spread, level)


def _last_layers(model: Any) -> Iterator[tuple[nn.Conv2d, float, float | None]]:
    """Last layers of scores, boxes and keypoints, with the target spread and mean of their outputs."""
    heads = [model.model[-1]] if isinstance(model, PoseModel) else list(model.heads.children())
    for name, spread, level in (
        ("cv3", 1.2, -1.2),
        ("cv2", 0.7, None),
        ("cv4", 0.4, None),
        ("cv4_kpts", 0.4, None),
        ("cls_pred", 1.2, -1.2),
        ("reg_pred", 2.0, None),
        ("pose_pred", 0.4, None),
    ):
        for head in heads:
            for part in (getattr(head, name, None), getattr(head, f"one2one_{name}", None)):
                for branch in part if isinstance(part, nn.ModuleList) else [part or nn.Identity()]:
                    layers = [layer for layer in branch.modules() if isinstance(layer, nn.Conv2d)]
                    if layers and layers[-1].kernel_size == (1, 1):
                        yield layers[-1], spread, level


@torch.no_grad()
def _rescale(model: nn.Module, layer: nn.Conv2d, batch: torch.Tensor, spread: float, level: float | None) -> None:
    """Give the layer's outputs a standard deviation, and a mean if ``level`` is given."""
    seen = []
    hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(batch)
    hook.remove()
    factor = spread / seen[0].std((0, 2, 3)).mean()
    layer.weight.mul_(factor)
    if level is not None:
        bias = present(layer.bias)
        bias.copy_(level - factor * (seen[0].mean() - bias))


def make_host(kind: str, model: nn.Module, **options: Any) -> Host:
    return load_host(model, end2end=wants_end2end(kind), **options)


@cache
def host_of(kind: str) -> Host:
    """The host of ``pose_model(kind)``, shared by tests because hosts do not change."""
    return make_host(kind, pose_model(kind))


def with_split_student(artifact: Artifact, threshold: float = -0.05) -> Artifact:
    """The artifact with random Student-t distributions for kept and for pruned keypoints."""
    fitted, parts = artifact.calibrations, []
    for factor in (0.7, 1.6):
        distribution = StudentTCalibration(len(artifact.layout))
        distribution.tau_, distribution.nu_ = factor * fitted.student.tau_, 2 + factor * (fitted.student.nu_ - 2)
        distribution.moment_tau_ = fitted.student.moment_tau_.clone()
        parts.append(distribution)
    return replace(artifact, calibrations=replace(fitted, threshold=threshold, split_student=SplitStudentT(*parts)))


def artifact_for(host: Host, settings: HeadSettings | None = None, imgsz: int = 64) -> Artifact:
    """An artifact with random heads and calibrations."""
    count = host.keypoint_count
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        heads = ProbabilisticHeads(host.pose_templates(), host.strides, count, settings)
        level: Any
        for level in heads.levels:
            nn.init.normal_(level.last.weight, 0.0, 0.3)
            nn.init.normal_(level.last.bias, -1.0, 0.3)
        if heads.context_head is not None:
            nn.init.normal_(heads.context_head.last, 0.0, 0.3)
        gaussian, student = GaussianCalibration(count), StudentTCalibration(count)
        gaussian.tau_.uniform_(0.5, 2.0)
        student.tau_.uniform_(0.5, 2.0)
        student.moment_tau_.uniform_(0.5, 2.0)
        student.nu_.uniform_(3.0, 9.0)
        gaussian.effective_samples_.fill_(100.0)
    rng = np.random.default_rng(5)
    regions = fit_regions(rng.chisquare(2, (120, count)), np.ones((120, count), dtype=bool), np.arange(120))
    together = rng.normal(size=(120, 1, 2)) + rng.normal(size=(120, count, 2))
    correlation = fit_correlation(together, np.tile(np.eye(2), (120, count, 1, 1)))
    return Artifact(
        heads=round_to_stored(heads.eval()),
        calibrations=Calibrations(gaussian, student, -0.5, None, regions, correlation),
        base=host.fingerprints,
        layout=host.layout,
        imgsz=imgsz,
        card=Card(data="random weights"),
    )


def random_scale(keypoints: int, seed: int = 0) -> ConditionalScale:
    """A feature-conditional scale of random weights whose knots cover the usual range of its inputs."""
    rng = np.random.default_rng(seed)
    knots = np.sort(rng.normal(0, 2, (len(INPUTS), KNOTS)), axis=1)
    weights = rng.normal(0, 0.3, (len(INPUTS), KNOTS - 1))
    parameters = (rng.normal(-2, 0.2, keypoints), knots, weights)
    return ConditionalScale(*(torch.from_numpy(values.astype(np.float32)) for values in parameters))


def framework_predict(kind: str, model: nn.Module, source: Any, **options: Any) -> list[Any]:
    """Prediction of the unmodified framework."""
    ensure_torchvision()
    if kind == "nas":
        return _libreyolo_predict(model, source, **options)
    from ultralytics import YOLO

    framework = YOLO(_YAML.get(kind, "yolo26n-pose.yaml"), task="pose", verbose=False)
    framework.model = copy.deepcopy(model)
    if wants_end2end(kind):
        options["nms"] = False  # how the framework asks for the one-to-one head
    threads = torch.get_num_threads()
    try:
        return framework.predict(source, verbose=False, save=False, device="cpu", **options)
    finally:
        torch.set_num_threads(threads)


def _libreyolo_predict(model: nn.Module, source: Any, **options: Any) -> list[Any]:
    from libreyolo.models.yolonas.model import LibreYOLONAS

    framework = LibreYOLONAS(None, size="n", task="pose", device="cpu")
    framework.model, framework.nb_classes = copy.deepcopy(model).eval(), model.num_classes
    results = framework(source, **options)
    return results if isinstance(results, list) else [results]


@cache
def framework_on(kind: str, name: str, imgsz: int) -> Any:
    """Result of the framework for a photograph at its default thresholds."""
    return framework_predict(kind, pose_model(kind), photograph(name), imgsz=imgsz, conf=0.25, iou=0.7)[0]


def scenes(count: int, side: int = 64, seed: int = 0) -> list[np.ndarray]:
    """Random crops of the photographs."""
    generator = np.random.default_rng(seed)
    photographs = [photograph(name) for name in PHOTOGRAPHS]
    result = []
    for number in range(count):
        whole = photographs[number % 2]
        size = int(generator.integers(200, 600))
        top, left = (int(generator.integers(0, length - size)) for length in whole.shape[:2])
        result.append(cv2.resize(whole[top : top + size, left : left + size], (side, side)))
    return result


def write_yolo(root: Path, splits: dict[str, list[tuple[str, np.ndarray, list[list[float]]]]], **extra: Any) -> Path:
    """A YOLO data set: per split (file name, image, label rows)."""
    for split, items in splits.items():
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
        for name, image, rows in items:
            cv2.imwrite(str(root / "images" / split / name), image)
            lines = [" ".join(f"{value:.9g}" for value in row) for row in rows]
            (root / "labels" / split / name).with_suffix(".txt").write_text("\n".join(lines))
    content = {"path": str(root), "kpt_shape": [17, 3], "names": {0: "person"}, **extra}
    content |= {split: f"images/{split}" for split in splits}
    path = root / "data.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def labels_like_predictions(
    host: Host, image: np.ndarray, generator: np.random.Generator, most: int = 3
) -> list[list[float]]:
    """Label rows from the model's best detections; the size of the noise differs between keypoints."""
    batch, boxes = host.preprocess([image], 64, True)
    selection = host.select(host.forward(batch), conf=0.05, iou=0.3)[0]
    found = host.to_original(selection, boxes[0], (batch.shape[2], batch.shape[3]))
    height, width = image.shape[:2]
    rows = []
    for number in range(min(most, len(found.scores))):
        x1, y1, x2, y2 = found.boxes[number].tolist()
        count = found.keypoints.shape[1]
        noise = generator.normal(size=(count, 2)) * np.linspace(0.3, 1.5, count)[:, None]
        points = (found.keypoints[number].numpy() + noise) / [width, height]
        seen = np.where(np.arange(count) % 5 == 4, 0, 2)
        box = [(x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]
        rows.append([0, *box, *np.concatenate([points, seen[:, None]], axis=1).ravel().tolist()])
    return rows


def write_scenes(root: Path, host: Host, counts: dict[str, int], side: int = 64, **extra: Any) -> Path:
    """Photograph crops labelled with what the model predicts there, plus noise."""
    generator = np.random.default_rng(1)
    images = iter(scenes(sum(counts.values()), side))
    splits = {
        split: [
            (f"{split}_{number:03d}.png", image, labels_like_predictions(host, image, generator))
            for number, image in zip(range(count), images)  # noqa: B905
        ]
        for split, count in counts.items()
    }
    return write_yolo(root, splits, **extra)


def run_script(text: str, *arguments: Any) -> str:
    """Run Python text in a separate process that can import the tests; return its standard output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def survive_kills(work: Callable[[], object], progress: Callable[[], int], targets: list[int], seed: int = 0) -> None:
    """Run ``work`` in forked children, each killed -9 a random moment after ``progress`` passed its target.

    Then run it once more to its end. Prints the progress at each kill.
    """
    jitter = random.Random(seed)
    reached = []
    for target in [*targets, None]:
        child = os.fork()
        if not child:
            work()
            os._exit(0)
        if target is not None:
            while progress() < target and os.waitpid(child, os.WNOHANG) == (0, 0):
                time.sleep(0.001)
            time.sleep(jitter.uniform(0.0, 0.04))
            os.kill(child, signal.SIGKILL)
            reached.append(progress())
        _, status = os.waitpid(child, 0)
        assert (target is None) == (status == 0), status
    sys.stdout.write(json.dumps(reached))
