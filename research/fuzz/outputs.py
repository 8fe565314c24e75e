"""Output folders: planted links and files, a full disk, two processes at once, and runs resumed on changed inputs.

A predictor that answers with the mean of the pixels stands in for a model, so that every result shows its image.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from halopose.data.images import NamedImage, read_image
from halopose.errors import HaloposeError
from halopose.keypoints import Keypoints
from halopose.poses import PoseDistributions
from halopose.prediction.predict_files import PredictSettings, predict_files
from halopose.prediction.predictor import Predictor
from halopose.types import Family
from research.fuzz.damage import Reader, Wrong

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

IMAGES = 4
PLANTED = (".halopose-lock", ".predictions.jsonl", ".predictions.kept", "predictions.json", "predictions.writing",
           "0.jpg", "1.jpg", ".clip.partial.mp4", "clip.mp4")  # fmt: skip


@dataclass
class MeanOfPixels(Predictor):
    """One detection whose first keypoint is the mean of the image.

    Attributes:
        before: Called before every image.
    """

    before: Callable[[int], None] = lambda number: None
    family: Family = "gaussian"
    count: int = 0
    layout = Keypoints.of(3)
    imgsz = 32
    novelty_size = None

    def identity(self) -> list[Any]:
        return ["mean of pixels"]

    def predict(self, source: Any, **options: Any) -> list[PoseDistributions]:
        self.before(self.count)
        self.count += 1
        spread = np.tile(np.eye(2), (1, 3, 1, 1))
        place = np.full((1, 3, 2), float(np.mean(source)))
        box = np.array([[0.0, 0.0, 8.0, 8.0]])
        return [PoseDistributions(box, np.full(1, 0.5), place, spread, spread, visibility=np.ones((1, 3)))]

    def _stream(self, source: Any, *options: Any) -> Iterator[tuple[NamedImage, PoseDistributions]]:
        raise NotImplementedError


def sources(folder: Path, first: int = 0, film: bool = False) -> None:
    """Grey images of different brightness, and a film."""
    folder.mkdir()
    for number in range(IMAGES):
        cv2.imwrite(str(folder / f"{number}.png"), np.full((12, 16, 3), first + 20 * number, np.uint8))
    if film:
        writer = cv2.VideoWriter(str(folder / "clip.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 5, (32, 24))
        for _ in range(3):
            writer.write(np.full((24, 32, 3), 200, np.uint8))
        writer.release()


def expected(folder: Path) -> dict[str, float]:
    return {path.name: float(np.mean(read_image(path))) for path in sorted(folder.glob("*.png"))}


def check_results(folder: Path, inputs: Path, what: str) -> None:
    """Check that every image has exactly its detection."""
    entries = json.loads((folder / "predictions.json").read_text())
    found = [(e["file_name"], e["keypoints"][0]) for e in entries if e["file_name"].endswith(".png")]
    if len(found) != len(dict(found)) or dict(found) != expected(inputs):
        raise Wrong(f"{what}: results {found} of images {expected(inputs)}")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def fresh(folder: Path, *names: str) -> None:
    """Remove the files of the last case."""
    for path in folder.iterdir():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


# --- planted files ------------------------------------------------------------------------------------------


def images_and_others(folder: Path) -> None:
    sources(folder / "in", film=True)
    (folder / "others").mkdir()
    (folder / "others" / "kept").write_bytes(b"somebody else's")


def planted(folder: Path, rng: random.Random) -> None:
    fresh(folder, "in", "others")
    out = folder / "out"
    if rng.random() < 0.15:
        out.symlink_to(folder / rng.choice(["in", "others", "nowhere", "out"]))
        return
    out.mkdir()
    for name in rng.sample(PLANTED, rng.choice([1, 1, 2, 4])):
        plant(out / name, folder, rng)
    (folder / "plan").write_text(rng.choice(["anew", "exist ok"]))


def plant(path: Path, folder: Path, rng: random.Random) -> None:
    kind = rng.choice(["link", "link", "source", "dangling", "loop", "hard", "pipe", "folder", "bytes", "log"])
    targets = {
        "link": folder / "others" / "kept",
        "source": folder / "in" / "0.png",
        "dangling": folder / "new",
        "loop": path,
    }
    if kind in targets:
        path.symlink_to(targets[kind])
    elif kind == "hard":
        path.hardlink_to(folder / "others" / "kept")
    elif kind == "pipe" and hasattr(os, "mkfifo"):
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "log":
        path.write_bytes(rng.choice([b'{"key": "a"}', b"00000000 {}", b"[\n]\n", b"null"]))
    else:
        path.write_bytes(rng.randbytes(rng.choice([0, 10, 1000])))


def into_planted_folder(folder: Path) -> object:
    plan = folder / "plan"
    exist_ok = plan.is_file() and plan.read_text() == "exist ok"
    before = {**contents(folder / "in"), **contents(folder / "others")}
    try:
        written = predict_files(MeanOfPixels(), [folder / "in"], folder / "out", PredictSettings(exist_ok=exist_ok))
        check_results(written.folder, folder / "in", "planted")
        return written
    finally:
        after = {**contents(folder / "in"), **contents(folder / "others")}
        if any(after.get(path) != content for path, content in before.items()) or (folder / "new").is_file():
            fresh(folder)
            images_and_others(folder)
            raise Wrong("a file outside the output folder was written")


# --- a full disk --------------------------------------------------------------------------------------------


def full_disk(folder: Path, rng: random.Random) -> None:
    fresh(folder, "in", "others")
    (folder / "plan").write_text(str(rng.choice([0, 1, 50, 100, 300, 600, 1000, 2000, 4000, rng.randrange(6000)])))


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond this size, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def onto_full_disk(folder: Path) -> object:
    """Check that all written files are complete and that a rerun with free space gives all results."""
    error = None
    with largest_file(int((folder / "plan").read_text())):
        try:
            predict_files(MeanOfPixels(), [folder / "in"], folder / "out")
        except HaloposeError as caught:
            error = caught
    out = folder / "out"
    for path in [*out.glob("*.jpg"), *out.glob("*.mp4")] if out.is_dir() else []:
        shown = cv2.VideoCapture(str(path)) if path.suffix == ".mp4" else None
        if (shown is not None and not shown.read()[0]) or (shown is None and cv2.imread(str(path)) is None):
            raise Wrong(f"{path.name} is not whole")
    if (out / "predictions.json").exists():
        json.loads((out / "predictions.json").read_text())
    again = predict_files(MeanOfPixels(), [folder / "in"], out, PredictSettings(exist_ok=True))
    check_results(again.folder, folder / "in", "full disk")
    if error is not None:
        raise error
    return again


# --- two processes ------------------------------------------------------------------------------------------


def two_at_once(folder: Path, rng: random.Random) -> None:
    fresh(folder, "in", "others")
    plan = {
        "exist_ok": rng.random() < 0.5,
        "wait": rng.choice([0, 0.001, 0.005]),
        "pause": rng.choice([0, 0.001, 0.003]),
    }
    (folder / "plan").write_text(json.dumps(plan))


def by_two_processes(folder: Path) -> object:
    """Check two processes at once: either may succeed or be refused, but no detection is lost."""
    plan = json.loads((folder / "plan").read_text())
    settings = PredictSettings(exist_ok=plan["exist_ok"], pictures=None)
    other = os.fork()
    if other == 0:
        time.sleep(plan["wait"])
        os._exit(_once(folder, settings, plan["pause"]))
    mine = _once(folder, settings, plan["pause"])
    theirs = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
    if mine > 1 or theirs > 1 or (mine and theirs):
        raise Wrong(f"processes ended with {mine} and {theirs}")
    if mine or theirs:
        raise HaloposeError("one of two was refused")
    return mine, theirs


def _once(folder: Path, settings: PredictSettings, pause: float) -> int:
    """0 with all results, 1 if refused, 2 if results are wrong, 3 after a traceback."""
    try:
        written = predict_files(MeanOfPixels(lambda _: time.sleep(pause)), [folder / "in"], folder / "out", settings)
        check_results(written.folder, folder / "in", "two processes")
    except HaloposeError:
        return 1
    except Wrong:
        return 2
    except Exception:  # noqa: BLE001, the process must end with a code
        return 3
    return 0


# --- resumed runs -------------------------------------------------------------------------------------------


def stopped_and_changed(folder: Path, rng: random.Random) -> None:
    """A run that stops after a few images, and then other inputs."""
    fresh(folder)
    sources(folder / "in")
    sources(folder / "other", first=7)
    change = rng.choice(["none", "swap", "replace", "remove", "add", "folder", "link", "touch", "twice"])
    plan = {
        "stop": rng.randrange(IMAGES + 1),
        "change": change,
        "exist_ok": rng.random() < 0.5,
        "place": rng.randrange(IMAGES),
    }
    (folder / "plan").write_text(json.dumps(plan))


def stop_at(number: int) -> Callable[[int], None]:
    def before(count: int) -> None:
        if count == number:
            raise KeyboardInterrupt

    return before


def resumed(folder: Path) -> object:
    """Check that a resumed run has the results of the present images, whatever changed in between."""
    plan = json.loads((folder / "plan").read_text())
    given, settings = folder / "in", PredictSettings(exist_ok=plan["exist_ok"], pictures=None)
    for _ in range(2 if plan["change"] == "twice" else 1):
        with contextlib.suppress(KeyboardInterrupt):
            predict_files(MeanOfPixels(stop_at(plan["stop"])), [given], folder / "out", settings)
    chosen, next_one = given / f"{plan['place']}.png", given / f"{(plan['place'] + 1) % IMAGES}.png"
    other = folder / "other" / chosen.name
    if plan["change"] == "swap":
        a, b = chosen.read_bytes(), next_one.read_bytes()
        chosen.write_bytes(b)
        next_one.write_bytes(a)
    elif plan["change"] == "replace":
        shutil.copyfile(other, chosen)
    elif plan["change"] == "remove":
        chosen.unlink()
    elif plan["change"] == "add":
        shutil.copyfile(other, given / "9.png")
    elif plan["change"] == "folder":
        given = folder / "other"
    elif plan["change"] == "link":
        chosen.unlink()
        chosen.symlink_to(other)
    elif plan["change"] == "touch":
        os.utime(chosen, (1, 1))
    written = predict_files(MeanOfPixels(), [given], folder / "out", settings)
    check_results(written.folder, given, plan["change"])
    return written


READERS = (
    Reader("output folder", 1.0, images_and_others, planted, into_planted_folder),
    Reader("changed inputs", 1.0, lambda f: None, stopped_and_changed, resumed),
    *([Reader("full disk", 0.6, images_and_others, full_disk, onto_full_disk)] if resource is not None else []),
    *([Reader("two processes", 0.6, images_and_others, two_at_once, by_two_processes)] if hasattr(os, "fork") else []),
)  # fmt: skip
