"""Checkpoints of both frameworks and deployed folders, and what reads them.

The models are real ones of a few channels; a checkpoint's pickle is also damaged inside its whole archive.
"""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halopose.calibration.calibrators import Calibrations, GaussianCalibration, StudentTCalibration
from halopose.deploy.deployed_model import MODEL, Deployed, Detecting
from halopose.deploy.folder import write_folder
from halopose.deploy.graph import TopkSettings
from halopose.deploy.onnx_file import ExportSettings, build, read_model, write_model
from halopose.fitting.artifact import Artifact
from halopose.hosts.loading import load_host
from halopose.uncertainty.heads import ProbabilisticHeads
from research.fuzz.damage import Reader, damaged_bytes, mangle, spoil

KEYPOINTS = 3


def small_model() -> Any:
    """A YOLOv8 pose model of few channels."""
    from ultralytics.nn.tasks import PoseModel, yaml_model_load

    content = yaml_model_load("yolov8n-pose.yaml")
    content |= {"kpt_shape": [KEYPOINTS, 3], "nc": 1, "scales": {"n": [0.33, 0.25, 64]}}
    torch.manual_seed(0)
    return PoseModel(content, verbose=False).eval()


def own_base(folder: Path) -> None:
    from halopose.hosts.ultralytics.weights import save_model

    save_model(small_model(), folder / "good-base.safetensors", "none")


def damaged_own_base(folder: Path, rng: random.Random) -> None:
    """Damage bytes; in half of the cases the description of the model or one of the tensors."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    good, target = folder / "good-base.safetensors", folder / "base.safetensors"
    if rng.random() < 0.5:
        target.write_bytes(spoil(good.read_bytes(), rng))
        return
    with safe_open(good, framework="pt") as file:
        content = json.loads(file.metadata()["halopose"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if rng.random() < 0.3:
        chosen = rng.choice(sorted(tensors))
        tensors[chosen] = rng.choice([torch.zeros(0), tensors[chosen][None], tensors[chosen].float() * torch.nan])
    else:
        content = mangle(content, rng)
    save_file(tensors, target, metadata={"halopose": json.dumps(content)})


def checkpoint(folder: Path) -> None:
    torch.save({"model": small_model().half(), "ema": None, "train_args": {}}, folder / "good-base.pt")


def nas_checkpoint(folder: Path) -> None:
    from halopose.hosts.torchvision_shim import ensure_torchvision

    ensure_torchvision()
    from libreyolo.models.yolonas.nn import LibreYOLONASPoseModel

    model = LibreYOLONASPoseModel("n", num_keypoints=KEYPOINTS, num_classes=1)
    torch.save({"net": model.state_dict(), "oks_sigmas": [0.1] * KEYPOINTS, "names": ["a"]}, folder / "good-base.pt")


def damaged_checkpoint(folder: Path, rng: random.Random) -> None:
    """Damage the bytes of the file, or one member of an otherwise intact archive."""
    good, target = folder / "good-base.pt", folder / "base.pt"
    if rng.random() < 0.3:
        target.write_bytes(spoil(good.read_bytes(), rng))
        return
    with zipfile.ZipFile(good) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))
    chosen = pickled if rng.random() < 0.8 else rng.choice(sorted(members))
    members[chosen] = spoil(members[chosen], rng)
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def deployed_folder(folder: Path) -> None:
    host = load_host(small_model())
    heads = ProbabilisticHeads(host.pose_templates(), host.strides, KEYPOINTS)
    calibrations = Calibrations(GaussianCalibration(KEYPOINTS), StudentTCalibration(KEYPOINTS), -2.0, None)
    artifact = Artifact(heads.eval(), calibrations, host.fingerprints, host.layout, 64)
    model = build(host, artifact, ExportSettings("topk", TopkSettings(candidates=20, windows=10)))
    write_folder(folder, model, artifact)
    (folder / MODEL).rename(folder / f"good-{MODEL}")


def damaged_deployed(folder: Path, rng: random.Random) -> None:
    """Damage bytes, or one to three values of the metadata."""
    if rng.random() < 0.3:
        damaged_bytes(MODEL)(folder, rng)
        return
    model = read_model(folder / f"good-{MODEL}")
    facts = {entry.key: entry.value for entry in model.metadata_props if entry.key not in ("format", "checksum")}
    values = mangle({key: json.loads(value) for key, value in facts.items()}, rng)
    for entry in list(model.metadata_props):
        if entry.key in facts and entry.key not in values:
            model.metadata_props.remove(entry)
        elif entry.key in facts:
            entry.value = json.dumps(values[entry.key])
    write_model(model, folder / MODEL)


def read_deployed(folder: Path) -> object:
    model = Deployed(folder)
    image = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    found = [model.predict(image, Detecting(conf=0.0), family) for family in ("gaussian", "student-t")]
    return model.layout, [poses.to_json() for poses in found]


READERS = (
    Reader("base, safetensors", 0.4, own_base, damaged_own_base, lambda f: load_host(f / "base.safetensors")),
    Reader("base, Ultralytics", 0.4, checkpoint, damaged_checkpoint, lambda f: load_host(f / "base.pt")),
    Reader("base, YOLO-NAS", 0.05, nas_checkpoint, damaged_checkpoint, lambda f: load_host(f / "base.pt")),
    Reader("deployed folder", 0.4, deployed_folder, damaged_deployed, read_deployed),
)  # fmt: skip
