"""Kill ``halopose fit`` at random moments, run it again, and compare the artifact with an undisturbed one.

    python -m research.kills --kills 20
    python -m research.kills --kills 4 --ranks 2

With ``--ranks``, one process of ``collect`` and of ``train`` under torchrun is killed (kill -9), and both run again.
The feature cache is compared with that of one process, and the heads with those of an undisturbed process group.

The data are two photographs that come with ultralytics, cut into views and labelled with the base model's predictions
plus noise.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import ultralytics

from halopose.data.images import read_image
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base

IMAGES = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder / "data")
        if arguments.ranks > 1:
            kill_ranks(folder, arguments.ranks, arguments.kills, generator)
            return
        start = time.monotonic()
        run(folder, "whole", None)
        duration = time.monotonic() - start
        print(f"undisturbed: {duration:.1f} s, {digest(folder / 'whole.safetensors')}")
        killed = 0
        while killed < arguments.kills:
            moment = generator.uniform(0.15, 0.95) * duration
            if run(folder, "killed", moment):  # finished before the kill: start again
                check(folder)
                print(f"finished after {killed} kills: equal")
                for path in (folder / "killed", folder / "killed-report"):
                    subprocess.run(["rm", "-rf", str(path)], check=True)
                (folder / "killed.safetensors").unlink()
                continue
            killed += 1
            stores = len(list((folder / "killed").rglob("shard-*.safetensors")))
            print(f"kill {killed} after {moment:.1f} s: {stores} shards")
        run(folder, "killed", None)
        check(folder)
        print(f"{killed} kills: the artifact equals the undisturbed one byte for byte")


def check(folder: Path) -> None:
    if digest(folder / "whole.safetensors") != digest(folder / "killed.safetensors"):
        sys.exit("the artifacts differ")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(folder: Path, name: str, kill_after: float | None) -> bool:
    """Fit; True if it finished."""
    command = [
        sys.executable, "-m", "halopose", "fit", str(folder / "data" / "data.yaml"), "--base",
        str(find_base()), "-o", str(folder / f"{name}.safetensors"), "--imgsz", "320", "--epochs", "8",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, error = process.communicate(timeout=kill_after)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return False
        if process.returncode:
            sys.exit(error.decode())
        return True


def kill_ranks(folder: Path, ranks: int, kills: int, generator: random.Random) -> None:
    """Kill processes of collect and of train a given number of times each."""
    data, base = str(folder / "data" / "data.yaml"), ["--base", str(find_base())]
    collect = ["collect", data, *base, "--sizes", "320", "--workers", "1", "-o"]
    torchrun(1, [*collect, str(folder / "one")])
    expected = digest_of(folder / "one")
    killed = killed_often(ranks, [*collect, str(folder / "ranks")], kills, generator)
    if digest_of(folder / "ranks") != expected:
        sys.exit("the stores differ")
    print(f"collect: {killed} ranks killed; the store equals that of one process byte for byte")
    train = ["train", str(folder / "one"), *base, "--epochs", "30", "-o"]
    torchrun(ranks, [*train, str(folder / "whole.safetensors")])
    killed = killed_often(ranks, [*train, str(folder / "killed.safetensors")], kills, generator)
    check(folder)
    print(f"train: {killed} ranks killed; the heads equal those of {ranks} undisturbed ranks byte for byte")


def killed_often(ranks: int, words: list[str], kills: int, generator: random.Random) -> int:
    """Kill one process of each run, then let one run finish; return the number of kills before the end."""
    killed = sum(torchrun(ranks, words, generator) for _ in range(kills))
    torchrun(ranks, words)
    return killed


def torchrun(ranks: int, words: list[str], killer: random.Random | None = None) -> bool:
    """Run a command in several single-threaded processes; killing one of them ends all."""
    begin = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*begin, "-m", "halopose", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        if killer is not None:
            while process.poll() is None and len(children := ranks_of(process.pid)) < ranks:
                time.sleep(0.1)
            time.sleep(killer.uniform(2, 25))
            if process.poll() is None and (children := ranks_of(process.pid)):
                os.kill(killer.choice(children), signal.SIGKILL)
        _, error = process.communicate()
        if process.returncode and killer is None:
            sys.exit(error.decode()[-2000:])
        return process.returncode != 0


def ranks_of(process: int) -> list[int]:
    """Processes that torchrun started (Linux)."""
    tasks = Path(f"/proc/{process}/task")
    names = [name for task in tasks.iterdir() for name in (task / "children").read_text().split()]
    return [int(name) for name in names if b"RANK=" in Path(f"/proc/{name}/environ").read_bytes()]


def digest_of(folder: Path) -> dict[str, str]:
    return {path.name: digest(path) for path in folder.iterdir() if not path.name.startswith(".")}


def make_data(folder: Path) -> None:
    """Views of the photographs with YOLO labels: the base model's predictions plus noise."""
    host = load_host(find_base())
    generator = np.random.default_rng(0)
    assets = Path(ultralytics.__file__).parent / "assets"
    photographs = [read_image(assets / name) for name in ("bus.jpg", "zidane.jpg")]
    for number in range(IMAGES):
        split = "val" if number % 3 == 0 else "train"
        height, width = photographs[number % 2].shape[:2]
        left, top = (int(value) for value in generator.integers(0, [width // 5, height // 5]))
        view = photographs[number % 2][top:, left:]
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / "images" / split / f"{number:04d}.png"), view)
        batch, boxes = host.preprocess([view], 320, rectangular=True)
        found = host.select(host.forward(batch), conf=0.4, iou=0.7)[0]
        found = host.to_original(found, boxes[0], (batch.shape[2], batch.shape[3]))
        size = np.array([view.shape[1], view.shape[0]])
        lines = []
        for box, keypoints in zip(found.boxes.numpy(), found.keypoints.numpy(), strict=True):
            centre, extent = (box[:2] + box[2:]) / 2 / size, (box[2:] - box[:2]) / size
            noisy = (keypoints + generator.normal(0, 4, keypoints.shape)) / size
            values = [*centre, *extent, *np.concatenate([noisy, np.full((17, 1), 2)], axis=1).ravel()]
            lines.append("0 " + " ".join(f"{value:.6f}" for value in values))
        (folder / "labels" / split / f"{number:04d}.txt").write_text("\n".join(lines) + "\n")
    (folder / "data.yaml").write_text(
        "path: .\ntrain: images/train\nval: images/val\nkpt_shape: [17, 3]\nnames:\n  0: person\n"
    )


if __name__ == "__main__":
    main()
