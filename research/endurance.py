"""Memory over many frames, and a folder in which some files are damaged.

    python -m research.endurance

Prints how many of 500 images get a result when 5 of them are damaged, and the exit status. Then prints how the memory
of the process grows over 2,000 frames of a film, for ``halopose predict`` and for ``UncertainPose.stream``. The model
is the shipped runway detector at a small input size. Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np

SIZE = 64
RESIDENT = """
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
"""
STREAM = """
import os, sys
from halopose import UncertainPose
from halopose.landing.shipped_detectors import runway_detector, runway_artifact
model = UncertainPose.load(runway_detector(), runway_artifact())
for number, (image, poses) in enumerate(model.stream(sys.argv[1], imgsz=int(sys.argv[2]), conf=0.01), 1):
    if number % 100 == 0:
        print(number, resident(), flush=True)
"""
COMMAND = """
import os, sys
from halopose.cli import prediction
from halopose.cli.app import main
whole, count = prediction._Run._poses, 0
def counted(self, image, file_name):
    global count
    count += 1
    if count % 100 == 0:
        print(count, resident(), file=sys.stderr, flush=True)
    return whole(self, image, file_name)
prediction._Run._poses = counted
main()
"""


def write_film(path: Path, frames: int) -> None:
    """Noise and a moving square; no two frames are equal."""
    rng = np.random.default_rng(0)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 25, (96, 64))
    for number in range(frames):
        frame = rng.integers(0, 90, (64, 96, 3), dtype=np.uint8)
        frame[20:44, number % 70 : number % 70 + 24] += 120
        writer.write(frame)
    writer.release()


def command(*words: object) -> list[str]:
    from halopose.landing.shipped_detectors import runway_artifact, runway_detector

    model = ("--base", runway_detector(), "--artifact", runway_artifact(), "--imgsz", SIZE, "--conf", 0.01)
    return ["predict", *map(str, words), *map(str, model)]


def bad_day(images: int, damaged: int) -> None:
    """A folder with damaged files among the good ones."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "in"
        folder.mkdir()
        rng = np.random.default_rng(0)
        for number in range(images):
            cv2.imwrite(str(folder / f"{number:04d}.jpg"), rng.integers(0, 255, (64, 96, 3), dtype=np.uint8))
        for number in np.linspace(0, images - 1, damaged).astype(int):
            content = (folder / f"{number:04d}.jpg").read_bytes()
            (folder / f"{number:04d}.jpg").write_bytes(content[:40])
        words = command(folder, "-o", Path(place) / "out")
        done = subprocess.run([sys.executable, "-m", "halopose", *words], capture_output=True, text=True, check=False)
        pictures = len(list((Path(place) / "out").glob("*.jpg")))
        json.loads((Path(place) / "out" / "predictions.json").read_text())
        print(f"{images} images, {damaged} damaged: {pictures} results, exit code {done.returncode}")
        for line in done.stdout.splitlines()[-damaged - 1 :]:
            print(f"    {line}")


def memory(script: str, words: list[str]) -> list[tuple[int, float]]:
    """Number of finished frames and memory of the process in MiB."""
    done = subprocess.run([sys.executable, "-c", RESIDENT + script, *words], capture_output=True, text=True, check=True)
    lines = re.findall(r"^(\d+) (\d+\.\d+)$", done.stdout + done.stderr, re.MULTILINE)
    return [(int(frame), float(size)) for frame, size in lines]


def long_run(frames: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        film = Path(place) / "film.avi"
        write_film(film, frames)
        ways = {
            "stream": memory(STREAM, [str(film), str(SIZE)]),
            "halopose predict": memory(COMMAND, command(film, "-o", Path(place) / "out")),
        }
    for name, sizes in ways.items():
        (first, low), (last, high) = sizes[2], sizes[-1]
        print(f"{name:18}{low:8.1f} MiB after {first} frames, {high:8.1f} after {last}: {high - low:+.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--damaged", type=int, default=5)
    parser.add_argument("--frames", type=int, default=2000)
    given = parser.parse_args()
    bad_day(given.images, given.damaged)
    long_run(given.frames)


if __name__ == "__main__":
    main()
