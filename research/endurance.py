"""Long runs: many images, an hour of film, several processes in one folder, and runs that are killed and resumed.

    python -m research.endurance --work /tmp/endurance
    python -m research.endurance --work /tmp/endurance --only film --minutes 10

Four parts, each of which prints its figures and keeps them in the work folder, so that the same command resumes after a
stop and skips what is finished:

- images: ``predict_files`` over 20,000 images, with the memory of the process.
- film: ``halopose track`` over 60 minutes of film at 25 frames per second, with the memory of the process.
- parallel: 8 processes predict into one folder; all but one must be refused.
- kills: a run is killed (kill -9) at random moments and resumed, 100 times; its files must equal an undisturbed run's.

The model is a stand-in that finds the bright square of an image (``--model square``), or a model by name such as
``--model runway``. Linux only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from halopose.cli.app import main as command_line
from halopose.data.images import NamedImage, read_image, read_source
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.prediction import uncertain_pose
from halopose.prediction.predict_files import PictureSettings, PredictSettings, predict_files
from halopose.types import Array, Family

WIDTH, HEIGHT, RATE, SIDE = 96, 64, 25, 24
PARTS = ("images", "film", "parallel", "kills")
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])


@dataclass
class SquareFinder:
    """A stand-in for a model: one detection, the corners of the bright square.

    Attributes:
        pause: additional seconds per image.
    """

    pause: float = 0.0
    layout: Keypoints = field(default_factory=lambda: Keypoints.of(4))
    imgsz: int = 64
    family: Family = "gaussian"
    has_novelty: bool = False

    def identity(self) -> list[Any]:
        return ["bright square"]

    def predict(self, source: Any, **settings: Any) -> list[PoseDistributions]:
        time.sleep(self.pause)
        rows, columns = np.nonzero(np.asarray(source)[..., 0] > 100)
        if not len(rows):
            rows, columns = np.array([0, SIDE]), np.array([0, SIDE])
        low = np.array([columns.min(), rows.min()], dtype=float)
        size = np.array([columns.max(), rows.max()], dtype=float) - low + 1
        spread = np.tile(np.eye(2), (1, 4, 1, 1))
        box = np.concatenate([low, low + size])[None]
        points = (low + CORNERS * size)[None]
        return [PoseDistributions(box, np.full(1, 0.9), points, spread, spread, visibility=np.ones((1, 4)))]

    def stream(self, source: Any, **settings: Any) -> Iterator[tuple[NamedImage, PoseDistributions]]:
        for image in read_source(source):
            yield image, self.predict(image.pixels)[0]


def picture(number: int) -> Array:
    """Noise and a moving square; all pictures differ."""
    frame = np.random.default_rng(number).integers(0, 90, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    x, y = number % (WIDTH - SIDE), number // (WIDTH - SIDE) % (HEIGHT - SIDE)
    frame[y : y + SIDE, x : x + SIDE] = 200
    return frame


def write_pictures(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(list(folder.iterdir())), count):
        cv2.imwrite(str(folder / f"{number}.png"), picture(number))


def write_film(path: Path, frames: int) -> None:
    partial = path.with_name(f"partial-{path.name}")
    writer = cv2.VideoWriter(str(partial), cv2.VideoWriter.fourcc(*"MJPG"), RATE, (WIDTH, HEIGHT))
    for number in range(frames):
        writer.write(picture(number))
    writer.release()
    partial.replace(path)


def started(work: Callable[..., int], *arguments: Any) -> Any:
    """Start a child process that ends with this one."""
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(work(*arguments)), daemon=True)
    process.start()
    return process


def memory_of(process: Any) -> list[float]:
    """Resident MiB of a process from its start to its end, every 0.2 seconds."""
    sizes: list[float] = []
    while process.is_alive():
        try:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            break
        if pages:
            sizes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
        time.sleep(0.2)
    process.join()
    return sizes


def curve(sizes: list[float]) -> list[float]:
    """Memory at 5 %, 10 %, 20 % ... 100 % of the duration."""
    places = [0.05, *np.arange(1, 11) / 10]
    return [round(sizes[min(int(share * len(sizes)), len(sizes) - 1)], 1) for share in places] if sizes else []


def quietly(work: Callable[[], object]) -> int:
    """Run work without output; return 0, or 2 if it was refused."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        work()
    except HaloposeError:
        return 2
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def predict_into(model: Any, source: Path, target: Path, pictures: bool) -> int:
    shown = PictureSettings() if pictures else None
    settings = PredictSettings(pictures=shown, imgsz=model.imgsz, conf=0.01)
    return quietly(lambda: predict_files(model, [source], target, settings))


def many_images(model: Any, work: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Check that all images have results, equal to those of single predictions."""
    source, target = work / "images", work / "images-out"
    write_pictures(source, given.images)
    began = time.monotonic()
    process = started(predict_into, model, source, target, True)
    sizes = memory_of(process)
    entries = json.loads((target / "predictions.json").read_text())
    by_name: dict[str, list[Any]] = {}
    for entry in entries:
        by_name.setdefault(entry["file_name"], []).append(entry["keypoints"])
    wrong = 0
    for number in random.Random(0).sample(range(given.images), min(200, given.images)):
        [poses] = model.predict(read_image(source / f"{number}.png"), imgsz=model.imgsz, conf=0.01)
        alone = [entry["keypoints"] for entry in poses.to_json()]
        wrong += not np.allclose(alone, by_name.get(f"{number}.png", []), atol=1e-6) if alone else 0
    return {
        "exit code": process.exitcode, "images": given.images, "pictures": len(list(target.glob("*.jpg"))),
        "images with detections": len(by_name), "of 200 differ": wrong, "MiB": curve(sizes),
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def hour_of_film(model: Any, work: Path, given: argparse.Namespace) -> dict[str, Any]:
    """``halopose track`` from the film to tracks.json, tracks.csv and the annotated film."""
    frames, film = round(given.minutes * 60 * RATE), work / f"film-{given.minutes:g}.avi"
    if not film.is_file():
        write_film(film, frames)
    began = time.monotonic()

    def tracked() -> int:
        uncertain_pose.UncertainPose.load = lambda *names, **settings: model  # type: ignore[method-assign]
        sys.argv = ["halopose", "--quiet", "track", str(film), "-o", str(work / "tracks"), "--imgsz", str(model.imgsz)]
        return quietly(command_line)

    process = started(tracked)
    sizes = memory_of(process)
    rows = sum(1 for _ in (work / "tracks" / "tracks.csv").open()) - 1
    shown = cv2.VideoCapture(str(work / "tracks" / f"{film.stem}.mp4"))
    return {
        "exit code": process.exitcode, "frames": frames, "rows of tracks.csv": rows,
        "frames of the annotated film": int(shown.get(cv2.CAP_PROP_FRAME_COUNT)), "MiB": curve(sizes),
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def parallel_runs(model: Any, work: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Check that one of several processes predicts, the others are refused, and no result is lost."""
    source, target = work / "parallel-images", work / "parallel-out"
    write_pictures(source, 300)
    shutil.rmtree(target, ignore_errors=True)
    processes = [started(predict_into, model, source, target, False) for _ in range(given.processes)]
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    names = {entry["file_name"] for entry in json.loads((target / "predictions.json").read_text())}
    return {
        "processes": given.processes, "succeeded": codes.count(0), "refused": codes.count(2),
        "images": 300, "images with detections": len(names),
        "folders": len(list(work.glob("parallel-out*"))),
    }  # fmt: skip


def digest(folder: Path) -> str:
    """SHA-256 of the names and bytes of all files, except the lock that a killed process leaves behind."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".halopose-lock":
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def kills_and_resumes(model: Any, work: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Kill a run at random moments and restart it until it ends; repeat."""
    source, whole, target = work / "kill-images", work / "kill-whole", work / "kill-out"
    write_pictures(source, 60)
    for folder in (whole, *work.glob("kill-out*")):
        shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    started(predict_into, model, source, whole, True).join()
    duration, expected = time.monotonic() - began, digest(whole)
    generator = random.Random(given.seed)
    killed = finished = differ = 0
    while killed < given.kills or target.exists():
        process = started(predict_into, model, source, target, True)
        if killed < given.kills:
            process.join(generator.uniform(0, 0.7) * duration)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                killed += 1
                continue
        process.join()
        finished += 1
        differ += process.exitcode != 0 or digest(target) != expected
        shutil.rmtree(target, ignore_errors=True)
    return {"kills": killed, "seed": given.seed, "runs that ended": finished, "differ from the undisturbed run": differ}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="Folder of inputs, outputs and finished figures.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="square", help="square, or a model by name.")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    model: Any = SquareFinder(0.002) if given.model == "square" else uncertain_pose.UncertainPose.load(given.model)
    if given.model != "square":
        model.imgsz = 64
    steps = dict(zip(PARTS, (many_images, hour_of_film, parallel_runs, kills_and_resumes), strict=True))
    for part in given.only:
        settings = (given.images, given.minutes, given.processes, given.kills)[PARTS.index(part)]
        kept = given.work / f"{part}-{settings:g}-{given.model}.json"
        if not kept.is_file():
            figures = steps[part](model, given.work, given)
            kept.write_text(json.dumps(figures))
        print(f"{part} ({given.model}): {kept.read_text()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
