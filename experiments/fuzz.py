"""Damaged and hostile files through every reader: each is read or refused in one line; nothing else, and at once.

    python -m experiments.fuzz --cases 6000 --seed 0

Prints a table of readers with how many cases were read and refused, and every traceback or hang with the number
that makes it again (``--only reader --seed N --cases 1``). Exits with 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml

from halopose.cli.app import main as command_line
from halopose.cli.options import read_config
from halopose.data.coco import image_ids_by_name, read_ground_truth, read_predictions
from halopose.data.files import read_json
from halopose.data.images import read_source
from halopose.data.loading import load_dataset
from halopose.data.prediction_log import PredictionLog
from halopose.data.synthetic import World, synthesize
from halopose.data.tensors import read_content, write_tensors
from halopose.errors import HaloposeError
from halopose.evaluation.calibration_file import CalibrationFile, _checksum
from halopose.evaluation.scores import Scores
from halopose.fitting.artifact import Artifact
from halopose.fitting.store import FORMAT, MatchStore
from halopose.keypoints import Keypoints
from halopose.uncertainty.calibration import Calibrations, GaussianCalibration, StudentTCalibration
from halopose.uncertainty.heads import ConvTemplate, ProbabilisticHeads

WORKING, WAITING = 20.0, 300.0  # seconds of the processor, and of the clock, until a case counts as a hang
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 0.5, 2**31, 2**63, 10**30, -(10**400), 1e308, -1e-320, math.nan, math.inf, "",
    "nan", "inf", "1e400", "٣", "²", "\0", "\ud800", "../../x", "a" * 5000, "<script>", [], {}, [[]], [None],
    [[[[[]]]]], {"": ""}, [1, [2, 3]], ["a", 1, None], {"names": 1}, [math.nan] * 4, [0] * 60,
    [["1", "0", "1"]] * 4,
]  # fmt: skip
NAMES = ["\0", "x" * 5000, "\udcff.jpg", "-", "--help", "a\nb.png", "*.png", "[", "~", "con.png", "rtsp://", "99"]


class Hang(BaseException):
    """Raised in a case that takes too long."""


@dataclass(frozen=True)
class Reader:
    """What makes a good input in a folder once, what damages it, and what reads it."""

    name: str
    share: float
    prepare: Callable[[Path], None]
    damage: Callable[[Path, random.Random], None]
    read: Callable[[Path], object]


def mangle(content: Any, rng: random.Random) -> Any:
    """Content with one to three values anywhere in it replaced, removed, repeated or shuffled."""
    content = copy.deepcopy(content)
    for _ in range(rng.randint(1, 3)):
        node = content
        while isinstance(node, (dict, list)) and node:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.75:
                node = node[key]
                continue
            action = rng.choice(["replace", "replace", "remove", "repeat", "shuffle"])
            if action == "replace":
                node[key] = copy.deepcopy(rng.choice(ODD))
            elif action == "remove":
                del node[key]
            elif action == "repeat" and isinstance(node, list):
                node.extend(copy.deepcopy(node[key]) for _ in range(rng.choice([1, 2, 50])))
            elif isinstance(node, list):
                rng.shuffle(node)
            break
    return content


def spoil(data: bytes, rng: random.Random) -> bytes:
    """Bytes with bits flipped, parts cut out, repeated or overwritten, or something else altogether."""
    content = bytearray(data)
    action = rng.choice(["flip", "flip", "flip", "cut", "remove", "repeat", "zero", "noise", "prefix", "other"])
    place = rng.randrange(len(content) or 1)
    length = rng.choice([1, 8, 100, 1000])
    if action == "flip":
        for _ in range(rng.choice([1, 1, 3, 20])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif action == "cut":
        del content[place:]
    elif action == "remove":
        del content[place : place + length]
    elif action == "repeat":
        content[place:place] = content[place : place + length]
    elif action == "zero":
        content[place : place + length] = bytes(length)
    elif action == "noise":
        content[place : place + length] = rng.randbytes(length)
    elif action == "prefix":
        content[:0] = rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\0" * 8, b"PK\x03\x04"])
    else:
        content = bytearray(rng.choice([b"", b"{", b"[" * 100_000, b"null", b"\x80\x04.", rng.randbytes(300)]))
    return bytes(content)


def dump(path: Path, content: Any) -> None:
    """Json as other programs might write it: NaN, infinities and lone surrogates included."""
    path.write_bytes(json.dumps(content).encode("utf-8", "surrogatepass"))


def damaged_json(name: str) -> Callable[[Path, random.Random], None]:
    """Damages a json file: its values, or, one time in four, its bytes."""

    def damage(folder: Path, rng: random.Random) -> None:
        whole = (folder / f"good-{name}").read_bytes()
        if rng.random() < 0.25:
            (folder / name).write_bytes(spoil(whole, rng))
        else:
            dump(folder / name, mangle(json.loads(whole), rng))

    return damage


def damaged_bytes(*names: str) -> Callable[[Path, random.Random], None]:
    """Damages the bytes of one of several files, and puts the good ones back in place of the others."""

    def damage(folder: Path, rng: random.Random) -> None:
        chosen = rng.choice(names)
        for name in names:
            whole = (folder / f"good-{name}").read_bytes()
            (folder / name).write_bytes(spoil(whole, rng) if name == chosen else whole)

    return damage


# --- json ---------------------------------------------------------------------------------------------------


def coco_files(folder: Path) -> None:
    truth, results = synthesize(World(images=4, persons=10))
    for number, image in enumerate(truth["images"]):
        image["file_name"] = f"{number}.png"
    for name, content in (("truth.json", truth), ("results.json", results)):
        dump(folder / f"good-{name}", content)
        dump(folder / name, content)


def calibration_file(folder: Path) -> None:
    calibration = StudentTCalibration(3)
    file = CalibrationFile(calibration, ("a", "b", "c"), -1.5, np.arange(4))
    file.save(folder / "good-calibration.json")


def resealed_calibration(folder: Path, rng: random.Random) -> None:
    """Half of them with the right checksum, so that what lies behind it is reached."""
    content = mangle(json.loads((folder / "good-calibration.json").read_bytes()), rng)
    if isinstance(content, dict) and rng.random() < 0.7:
        content["checksum"] = _checksum(content)
    dump(folder / "calibration.json", content)


def scores_file(folder: Path) -> None:
    from halopose.data.coco import parse_ground_truth, parse_predictions
    from halopose.data.files import write_json
    from halopose.evaluation.evaluate import evaluate
    from halopose.evaluation.true_positives import match_poses

    truth, results = synthesize(World(images=12, persons=40))
    objects = parse_ground_truth("truth", truth)
    scores = evaluate(match_poses(parse_predictions("results", results, objects), objects))
    write_json(folder / "good-metrics.json", scores.to_json())


# --- tensors ------------------------------------------------------------------------------------------------


def small_heads() -> ProbabilisticHeads:
    template = [ConvTemplate(torch.zeros(4, 4, 3, 3), torch.zeros(4), "silu")]
    return ProbabilisticHeads([template, template], [8, 16], 3)


def artifact_file(folder: Path) -> None:
    calibrations = Calibrations(GaussianCalibration(3), StudentTCalibration(3), -2.0, None)
    Artifact(small_heads(), calibrations, ("base:0",), Keypoints.of(3), 64).save(folder / "good-heads.safetensors")


def damaged_artifact(folder: Path, rng: random.Random) -> None:
    good = folder / "good-heads.safetensors"
    if rng.random() < 0.5:
        (folder / "heads.safetensors").write_bytes(spoil(good.read_bytes(), rng))
        return
    from safetensors.torch import load_file

    tensors = load_file(good)
    if rng.random() < 0.4:
        name = rng.choice(sorted(tensors))
        value = rng.choice([math.nan, math.inf, 0.0, -1.0, 1e200])
        tensors[name] = rng.choice([torch.full_like(tensors[name], value), tensors[name][:1], torch.zeros(0)])
    write_tensors(folder / "heads.safetensors", tensors, mangle(read_content(good), rng))


def store_folder(folder: Path) -> None:
    count, keypoints = 6, 3
    tensors: dict[str, torch.Tensor] = {}
    for kind in ("assigned", "detected"):
        columns = {
            "windows": torch.zeros(count, 4, 3, 3).half(),
            "inside": torch.ones((count, 3, 3), dtype=torch.uint8),
            "residual": torch.zeros(count, keypoints, 2),
            "labelled": torch.ones((count, keypoints), dtype=torch.uint8),
            "confidence": torch.ones(count),
            "area": torch.ones(count),
            "image_id": torch.arange(count),
            "object": torch.zeros(count, dtype=torch.long),
            "box": torch.ones(count, 4),
            "score": torch.ones(count),
            "keypoints": torch.zeros(count, keypoints, 2),
            "class_id": torch.zeros(count, dtype=torch.long),
        }
        tensors |= {f"{kind}.0.{name}": value for name, value in columns.items()}
    write_tensors(folder / "good-shard-00000.safetensors", tensors, {"skipped": [], "views": [[1, 2, 3]]})
    manifest = {
        "format": FORMAT, "base": ["base:0"], "layout": Keypoints.of(keypoints).to_json(), "levels": 1,
        "strides": [8], "settings": {"imgsz": [64]}, "images": list(range(count)), "area": "box", "shards": 1,
    }  # fmt: skip
    dump(folder / "good-manifest.json", manifest)


def damaged_store(folder: Path, rng: random.Random) -> None:
    damaged_bytes("shard-00000.safetensors", "manifest.json")(folder, rng)
    if rng.random() < 0.6:
        dump(folder / "manifest.json", mangle(json.loads((folder / "good-manifest.json").read_bytes()), rng))


def read_store(folder: Path) -> object:
    store = MatchStore(folder)
    identity = np.tile(np.eye(2), (1, 3, 1, 1))
    poses, _ = store.detections(lambda cells: np.repeat(identity, len(cells), axis=0))
    return list(store.cells("assigned")), poses, store.skipped(), store.digest()


# --- data sets, pictures, films -----------------------------------------------------------------------------


def yolo_folder(folder: Path) -> None:
    for kind in ("images", "labels"):
        (folder / kind / "train").mkdir(parents=True)
    for number in range(3):
        cv2.imwrite(str(folder / f"images/train/{number}.png"), np.full((12, 16, 3), 80, np.uint8))
        (folder / f"labels/train/{number}.txt").write_text("0 0.5 0.5 0.2 0.2 0.5 0.5 2 0.4 0.4 2\n")
    content = {
        "path": ".", "train": "images/train", "val": "images/train", "kpt_shape": [2, 3], "names": {0: "thing"},
        "kpt_names": {0: ["a", "b"]}, "kpt_oks_sigmas": [0.1, 0.1], "flip_idx": [1, 0],
    }  # fmt: skip
    (folder / "good-data.yaml").write_text(yaml.safe_dump(content))


def damaged_yolo(folder: Path, rng: random.Random) -> None:
    whole = (folder / "good-data.yaml").read_bytes()
    label = folder / f"labels/train/{rng.randrange(3)}.txt"
    good = "0 0.5 0.5 0.2 0.2 0.5 0.5 2 0.4 0.4 2\n"
    for number in range(3):
        (folder / f"labels/train/{number}.txt").write_text(good)
    (folder / "data.yaml").write_bytes(whole)
    what = rng.choice(["values", "values", "bytes", "labels", "numbers"])
    if what == "values":
        text = yaml.dump(mangle(yaml.safe_load(whole), rng), allow_unicode=False)
        (folder / "data.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    elif what == "bytes":
        (folder / "data.yaml").write_bytes(spoil(whole, rng))
    elif what == "labels":
        label.write_bytes(spoil(good.encode(), rng))
    else:
        words = good.split()
        words[rng.randrange(len(words))] = rng.choice(["nan", "1e999", "-1", "0.5", "x", "٣", "640", "1e-320"])
        label.write_text(" ".join(words))


def read_yolo_set(folder: Path) -> object:
    return [record.read() for record in load_dataset(folder / "data.yaml", "train").records]


def pictures(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    for suffix in ("png", "jpg", "bmp", "webp", "tif"):
        cv2.imwrite(str(folder / f"good-picture.{suffix}"), pixels)
    writer = cv2.VideoWriter(str(folder / "good-film.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 5, (32, 24))
    for _ in range(6):
        writer.write(pixels)
    writer.release()


def damaged_picture(folder: Path, rng: random.Random) -> None:
    for path in (folder / "place").glob("*"):
        path.unlink()
    (folder / "place").mkdir(exist_ok=True)
    source = rng.choice(sorted(folder.glob("good-*")))
    name = source.name.removeprefix("good-")
    if rng.random() < 0.1 and hasattr(os, "mkfifo"):
        os.mkfifo(folder / "place" / name)
    else:
        (folder / "place" / name).write_bytes(spoil(source.read_bytes(), rng))


def odd_name(folder: Path, rng: random.Random) -> None:
    (folder / "name").write_bytes(rng.choice(NAMES).encode("utf-8", "surrogateescape"))


def read_odd_name(folder: Path) -> object:
    name = (folder / "name").read_bytes().decode("utf-8", "surrogateescape")
    if name in ("99", "rtsp://"):  # a camera that is not there costs the system's time, not ours
        return read_ground_truth(folder / name)
    return list(read_source(folder / name))


# --- the rest -----------------------------------------------------------------------------------------------


def log_file(folder: Path) -> None:
    log = PredictionLog(folder, {"a": 1})
    for name in ("1.png", "2.png"):
        log.add(name, [{"image_id": 1, "keypoints": [1, 2, 3]}])
        log.done(name)
    (folder / ".predictions.jsonl").rename(folder / "good-.predictions.jsonl")


def read_log(folder: Path) -> object:
    log = PredictionLog(folder, {"a": 1})
    log.add("3.png", [])
    log.done("3.png")
    return log.close(True)


def config_file(folder: Path) -> None:
    (folder / "good-config.yaml").write_text("predict:\n  conf: 0.3\n  boxes: true\nfit:\n  epochs: 3\n")


def run_command(*words: str) -> Callable[[Path], object]:
    """A whole command in this process; more than one line, or another exit code than 2, is a fault."""

    def read(folder: Path) -> object:
        out, err = io.StringIO(), io.StringIO()
        before = sys.argv
        sys.argv = ["halopose", *(word.replace("@", str(folder)) for word in words)]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                command_line()
        except SystemExit as stop:
            if not stop.code:
                return out.getvalue()
            if stop.code != 2 or err.getvalue().count("\n") != 1:
                raise AssertionError(f"exit {stop.code}, said {err.getvalue()!r}") from None
            raise HaloposeError(err.getvalue()) from None
        finally:
            sys.argv = before
        raise AssertionError("the command did not say how it ended")

    return read


SCORE = ("--quiet", "score", "@/results.json", "@/truth.json", "-o", "@/report", "--bootstrap", "0")
READERS = (
    Reader("ground truth", 1.0, coco_files, damaged_json("truth.json"),
           lambda f: read_ground_truth(f / "truth.json")),
    Reader("ids by name", 0.4, coco_files, damaged_json("truth.json"),
           lambda f: image_ids_by_name(f / "truth.json")),
    Reader("predictions", 1.0, coco_files, damaged_json("results.json"),
           lambda f: read_predictions(f / "results.json")),
    Reader("score, results", 0.5, coco_files, damaged_json("results.json"), run_command(*SCORE)),
    Reader("score, truth", 0.5, coco_files, damaged_json("truth.json"), run_command(*SCORE)),
    Reader("calibration", 1.0, calibration_file, resealed_calibration,
           lambda f: CalibrationFile.load(f / "calibration.json")),
    Reader("metrics", 0.6, scores_file, damaged_json("metrics.json"),
           lambda f: Scores.from_json(read_json(f / "metrics.json"))),
    Reader("artifact", 1.0, artifact_file, damaged_artifact, lambda f: Artifact.load(f / "heads.safetensors")),
    Reader("store", 1.0, store_folder, damaged_store, read_store),
    Reader("YOLO data", 1.0, yolo_folder, damaged_yolo, read_yolo_set),
    Reader("pictures, films", 1.0, pictures, damaged_picture, lambda f: list(read_source(f / "place"))),
    Reader("names", 0.2, lambda f: None, odd_name, read_odd_name),
    Reader("stopped run", 0.5, log_file, damaged_bytes(".predictions.jsonl"), read_log),
    Reader("config", 0.5, config_file, damaged_bytes("config.yaml"),
           lambda f: read_config(f / "config.yaml", ["predict", "fit"])),
)  # fmt: skip


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Ends a case that hangs, where the system has a timer."""

    def stop(*_: object) -> None:
        raise Hang

    if not hasattr(signal, "setitimer"):
        yield
        return
    timers = ((signal.SIGPROF, signal.ITIMER_PROF, WORKING), (signal.SIGALRM, signal.ITIMER_REAL, WAITING))
    for alarm, timer, seconds in timers:
        signal.signal(alarm, stop)
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for _, timer, _ in timers:
            signal.setitimer(timer, 0)


def outcome(reader: Reader, folder: Path, seed: int) -> tuple[str, str]:
    """How one case ended, and the traceback if it ended in one."""
    rng = random.Random(f"{reader.name} {seed}")
    reader.damage(folder, rng)
    try:
        with time_limit():
            reader.read(folder)
    except HaloposeError as error:
        return ("refused", "") if "\n" not in str(error).strip() else ("traceback", f"several lines: {error}")
    except Hang:
        return "hang", traceback.format_exc()
    except Exception:  # noqa: BLE001, whatever it is, it is what is looked for
        return "traceback", traceback.format_exc()
    return "read", ""


def run(cases: int, seed: int, only: str | None) -> Counter[tuple[str, str]]:
    """All cases; the outcomes by reader."""
    readers = [reader for reader in READERS if only in (None, reader.name)]
    whole = sum(reader.share for reader in readers)
    found: Counter[tuple[str, str]] = Counter()
    for reader in readers:
        with tempfile.TemporaryDirectory() as place:
            reader.prepare(Path(place))
            for number in range(math.ceil(cases * reader.share / whole)):
                kind, text = outcome(reader, Path(place), seed + number)
                found[reader.name, kind] += 1
                if text:
                    print(f"--- {kind}: --only {reader.name!r} --seed {seed + number} --cases 1\n{text}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[reader.name for reader in READERS])
    given = parser.parse_args()
    os.environ.setdefault("OPENCV_LOG_LEVEL", "OFF")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        found = run(given.cases, given.seed, given.only)
    kinds = ("read", "refused", "traceback", "hang")
    print(f"{'reader':18}" + "".join(f"{kind:>11}" for kind in ("cases", *kinds)))
    for name in dict.fromkeys(name for name, _ in found):
        counts = [found[name, kind] for kind in kinds]
        print(f"{name:18}{sum(counts):11}" + "".join(f"{count:11}" for count in counts))
    totals = [sum(count for (_, what), count in found.items() if what == kind) for kind in kinds]
    print(f"{'all':18}{sum(totals):11}" + "".join(f"{count:11}" for count in totals))
    return int(totals[2] + totals[3] > 0)


if __name__ == "__main__":
    sys.exit(main())
