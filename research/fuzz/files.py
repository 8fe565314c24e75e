"""Readers of results, data sets, artifacts, feature caches, images and settings."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch
import yaml
from safetensors.torch import load_file

from halopose.calibration.calibration_file import CalibrationFile, _checksum
from halopose.calibration.calibrators import Calibrations, GaussianCalibration, StudentTCalibration
from halopose.cli.app import main as command_line
from halopose.data.coco import (
    parse_ground_truth,
    parse_predictions,
    read_ground_truth,
    read_numbering,
    read_predictions,
)
from halopose.data.dataset_loading import load_dataset
from halopose.data.files import read_json, write_json
from halopose.data.images import read_source
from halopose.data.storage.prediction_log import PredictionLog
from halopose.data.synthetic_poses import World, synthesize
from halopose.data.tensors import read_content, write_tensors
from halopose.errors import HaloposeError
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.scores import Scores
from halopose.fitting.artifact import Artifact
from halopose.fitting.feature_cache import FORMAT, MatchStore
from halopose.fitting.head_training import train
from halopose.fitting.settings import TrainSettings
from halopose.keypoints import Keypoints
from halopose.matching.matched_poses import match_poses
from halopose.uncertainty.heads import ConvTemplate, ProbabilisticHeads
from research.fuzz.damage import (
    Reader,
    damaged_bytes,
    damaged_json,
    damaged_words,
    damaged_yaml,
    dump,
    mangle,
    spoil,
)

LABEL = "0 0.5 0.5 0.2 0.2 0.5 0.5 2 0.4 0.4 2\n"
NAMES = ["\0", "x" * 5000, "\udcff.jpg", "-", "--help", "a\nb.png", "*.png", "[", "~", "con.png", "rtsp://", "99"]

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
    """Give half of the cases a valid checksum, so that the code behind the check is reached."""
    content = mangle(json.loads((folder / "good-calibration.json").read_bytes()), rng)
    if isinstance(content, dict) and rng.random() < 0.7:
        content["checksum"] = _checksum(content)
    dump(folder / "calibration.json", content)


def scores_file(folder: Path) -> None:
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
    resealed(folder, "heads.safetensors", rng)


def resealed(folder: Path, name: str, rng: random.Random) -> None:
    """Change the content and update the checksum, so that the code behind the check is reached."""
    tensors, content = load_file(folder / f"good-{name}"), read_content(folder / f"good-{name}")
    if rng.random() < 0.5:
        chosen = rng.choice(sorted(tensors))
        value = tensors[chosen]
        odd = [value[:1], torch.zeros(0), value.double(), value[None], value.flip(0), value.to(torch.int8)]
        odd += [torch.full_like(value.float(), number) for number in (math.nan, math.inf, 0.0, -1.0, 1e38)]
        tensors[chosen] = rng.choice(odd)
    else:
        content = mangle(content, rng)
    write_tensors(folder / name, tensors, content)


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
    what = rng.random()
    if what < 0.4:
        dump(folder / "manifest.json", mangle(json.loads((folder / "good-manifest.json").read_bytes()), rng))
    elif what < 0.7:
        (folder / "manifest.json").write_bytes((folder / "good-manifest.json").read_bytes())
        resealed(folder, "shard-00000.safetensors", rng)


def training_state(folder: Path) -> None:
    store_folder(folder)
    for name in ("shard-00000.safetensors", "manifest.json"):
        (folder / f"good-{name}").rename(folder / name)
    train(small_heads(), MatchStore(folder), TrainSettings(epochs=2), checkpoint=folder / "good-state.safetensors")


def read_training_state(folder: Path) -> object:
    return train(small_heads(), MatchStore(folder), TrainSettings(epochs=2), checkpoint=folder / "state.safetensors")


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
        (folder / f"labels/train/{number}.txt").write_text(LABEL)
    content = {
        "path": ".", "train": "images/train", "val": "images/train", "kpt_shape": [2, 3], "names": {0: "thing"},
        "kpt_names": {0: ["a", "b"]}, "kpt_oks_sigmas": [0.1, 0.1], "flip_idx": [1, 0],
    }  # fmt: skip
    (folder / "good-data.yaml").write_text(yaml.safe_dump(content))


def damaged_yolo(folder: Path, rng: random.Random) -> None:
    for number in range(3):
        (folder / f"labels/train/{number}.txt").write_text(LABEL)
    (folder / "data.yaml").write_bytes((folder / "good-data.yaml").read_bytes())
    if rng.random() < 0.6:
        damaged_yaml("data.yaml")(folder, rng)
    else:
        (folder / f"labels/train/{rng.randrange(3)}.txt").write_bytes(damaged_words(LABEL, rng, " "))


def read_yolo_set(folder: Path) -> object:
    return [record.read() for record in load_dataset(folder / "data.yaml", "train").records]


def read_coco_set(folder: Path) -> object:
    return load_dataset(folder / "truth.json", "train", images=folder).records


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
    if name in ("99", "rtsp://"):  # opening a missing camera takes time in the system
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
    text = "synthesize:\n  images: 3\n  persons: 4\n  dof: 5.0\n  gaussian: true\nfit:\n  epochs: 3\n"
    (folder / "good-config.yaml").write_text(text)


def run_command(*words: str) -> Callable[[Path], object]:
    """Run a command in this process; an error of more than one line or with an exit code other than 2 is a fault."""

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
                raise AssertionError(f"exit {stop.code}, printed {err.getvalue()!r}") from None
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
           lambda f: read_numbering(f / "truth.json")),
    Reader("predictions", 1.0, coco_files, damaged_json("results.json"),
           lambda f: read_predictions(f / "results.json")),
    Reader("score, results", 0.2, coco_files, damaged_json("results.json"), run_command(*SCORE)),
    Reader("score, truth", 0.2, coco_files, damaged_json("truth.json"), run_command(*SCORE)),
    Reader("calibration", 1.0, calibration_file, resealed_calibration,
           lambda f: CalibrationFile.load(f / "calibration.json")),
    Reader("metrics", 0.6, scores_file, damaged_json("metrics.json"),
           lambda f: Scores.from_json(read_json(f / "metrics.json"))),
    Reader("artifact", 1.0, artifact_file, damaged_artifact, lambda f: Artifact.load(f / "heads.safetensors")),
    Reader("store", 1.0, store_folder, damaged_store, read_store),
    Reader("stopped training", 0.2, training_state, damaged_bytes("state.safetensors"), read_training_state),
    Reader("YOLO data", 1.0, yolo_folder, damaged_yolo, read_yolo_set),
    Reader("COCO data", 0.6, coco_files, damaged_json("truth.json"), read_coco_set),
    Reader("pictures, films", 1.0, pictures, damaged_picture, lambda f: list(read_source(f / "place"))),
    Reader("names", 0.2, lambda f: None, odd_name, read_odd_name),
    Reader("stopped predict", 0.5, log_file, damaged_bytes(".predictions.jsonl"), read_log),
    Reader("config", 0.4, config_file, damaged_yaml("config.yaml"),
           run_command("--quiet", "--config", "@/config.yaml", "synthesize", "-o", "@/out")),
)  # fmt: skip
