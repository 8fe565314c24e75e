"""Library calls leave the process as it was, and write neither to frozen values nor to their arrays."""

from __future__ import annotations

import ast
import locale
import logging
import os
import random
import re
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from halopose.calibration.calibrate import cross_fitted, fit_calibrations
from halopose.data.dataset_loading import load_dataset
from halopose.drawing import draw_poses
from halopose.evaluation.evaluate import evaluate
from halopose.fitting.pipeline import fit
from halopose.fitting.settings import FitSettings, TrainSettings
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.protocol import Protocol
from halopose.tracking.tracker import Tracker
from tests.helpers import evaluations
from tests.helpers.models import artifact_for, host_of, photograph, scenes, write_scenes

SOURCE = Path(__file__).parent.parent / "src" / "halopose"
SETTINGS = FitSettings(train=TrainSettings(epochs=1, batch=64), imgsz=64, train_sizes=(64,))


def process_state() -> dict[str, Any]:
    return {
        "threads of torch": torch.get_num_threads(),
        "threads of OpenCV": cv2.getNumThreads(),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": random.getstate(),
        "numpy.random": repr(np.random.get_state()),  # noqa: NPY002
        "torch random": torch.get_rng_state().tolist(),
        "numpy errors": np.geterr(),
        "print options": np.get_printoptions(),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("TORCH")},  # its own
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "root log": (logging.root.level, list(logging.root.handlers)),
        "warning filters": [entry for entry in warnings.filters if "sympy" not in entry[2].__module__],
        "import path": list(sys.path),
    }


def fit_and_predict(folder: Path) -> None:
    host = host_of("11")
    training, validation = (load_dataset(folder / "data.yaml", split) for split in ("train", "val"))
    artifact, _ = fit(host, training, validation, folder / "work", SETTINGS)
    UncertainPose(host, artifact).predict(scenes(2))


def calibrate_and_evaluate(folder: Path) -> None:
    matched = evaluations.poses(200, 3, nu=4.0)
    protocol = Protocol(bootstrap=20)
    fit_calibrations(matched, protocol)
    evaluate(matched, cross_fitted(matched, protocol), protocol)


@pytest.mark.parametrize("call", [fit_and_predict, calibrate_and_evaluate])
def test_the_process_is_left_as_it_was(call: Callable[[Path], None], tmp_path: Path) -> None:
    write_scenes(tmp_path, host_of("11"), {"train": 8, "val": 8})
    before = process_state()
    call(tmp_path)
    after = process_state()
    assert [name for name, value in before.items() if after[name] != value] == []


def contents(value: Any) -> dict[str, bytes]:
    """Bytes of the arrays of a frozen value."""
    arrays = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: array.tobytes() for name, array in arrays.items() if isinstance(array, np.ndarray)}


def test_arrays_of_predictions_are_not_written_to() -> None:
    image = photograph("bus.jpg")
    [poses] = UncertainPose(host_of("11"), artifact_for(host_of("11"))).predict(image, conf=0.1)
    before = contents(poses), image.tobytes()
    draw_poses(image, poses, boxes=True, legend=True)
    tracker = Tracker(poses.layout, rate=30.0)
    for _ in range(3):
        tracker.update(poses)
    poses.to_json()
    assert (contents(poses), image.tobytes()) == before


def test_arrays_of_matched_poses_are_not_written_to() -> None:
    matched = evaluations.partly_labelled(evaluations.poses(200, 3, nu=4.0))
    protocol = Protocol(bootstrap=10)
    before = contents(matched)
    fit_calibrations(matched, protocol)
    evaluate(matched, cross_fitted(matched, protocol), protocol)
    assert contents(matched) == before


WRITES = re.compile(r"vars\(\w+\)(\.(update|pop|clear|setdefault)\(|\[\w+\] = )|__dict__(\.update\(|\[)")


def test_frozen_values_are_set_only_while_they_are_made() -> None:
    """``frozen=True`` can be bypassed by ``vars`` and ``object.__setattr__``; only ``__post_init__`` may do so."""
    wrong = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text("utf-8")
        functions = ast.walk(ast.parse(text)) if "object.__setattr__" in text else ()
        if WRITES.search(text) or any(
            isinstance(node, ast.FunctionDef)
            and node.name != "__post_init__"
            and "object.__setattr__" in ast.unparse(node)
            for node in functions
        ):
            wrong.append(str(path.relative_to(SOURCE)))
    assert wrong == []
