"""An annotated copy of a film: ``halopose predict`` against ``yolo predict save=True``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import torch

from benchmarks.interleave import Comparison, compare
from benchmarks.overhead import PHOTOGRAPH
from halopose.data.films import FilmWriter
from halopose.data.images import read_image
from halopose.hosts.model_zoo import find_base, shipped_artifact
from halopose.hosts.torchvision_shim import ensure_torchvision
from halopose.hosts.ultralytics.ultralytics_host import load_model
from halopose.prediction.predict_files import PredictSettings, predict_files
from halopose.prediction.uncertain_pose import UncertainPose

FRAMES = 25
WIDTH, HEIGHT = 1280, 720


def compare_film(rounds: int = 7) -> Comparison:
    """Read a film of 1280x720, predict, draw and write it; both as their commands do it, seconds per frame.

    Each uses the number of threads that it chooses by itself: Ultralytics sets it when it predicts.
    """
    ensure_torchvision()
    from ultralytics import YOLO

    framework = YOLO("yolo11n-pose.yaml", task="pose", verbose=False)
    framework.model = load_model(str(find_base()), unsafe=False).float()
    model = UncertainPose.load_base(find_base(), shipped_artifact())
    with tempfile.TemporaryDirectory() as place, _threads_restored() as threads:
        folder = Path(place)
        film = _write_film(folder / "film.mp4")
        options = {"imgsz": 640, "conf": 0.25, "iou": 0.7, "verbose": False, "device": "cpu"}
        where = {"project": str(folder), "name": "framework", "exist_ok": True}

        def ours() -> None:
            torch.set_num_threads(threads)
            predict_files(model, [film], folder / "ours", PredictSettings(exist_ok=True))

        def peer() -> None:
            for _ in framework.predict(str(film), save=True, stream=True, **options, **where):
                pass

        return compare(ours, peer, rounds).divided(FRAMES, FRAMES)


@contextmanager
def _threads_restored() -> Iterator[int]:
    """Give the number of PyTorch's threads, and restore it."""
    threads = torch.get_num_threads()
    yield threads
    torch.set_num_threads(threads)


def _write_film(path: Path) -> Path:
    """Write a film that moves over a photograph."""
    photograph = cv2.resize(read_image(PHOTOGRAPH), (WIDTH, round(WIDTH * 4 / 3)))
    with FilmWriter(path, 25.0) as writer:
        for number in range(FRAMES):
            writer.write(photograph[6 * number : 6 * number + HEIGHT])
    return path
