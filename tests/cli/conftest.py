"""Data, a checkpoint and an artifact that the tests of several commands share."""

from pathlib import Path

import pytest
import torch

from tests.helpers.commands import base, run
from tests.helpers.models import host_of, pose_model, write_scenes


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a checkpoint, and the artifact that ``halopose fit`` makes of them."""
    folder = tmp_path_factory.mktemp("cli")
    counts = {"train": 14, "val": 10, "test": 6}
    write_scenes(folder, host_of("11"), counts)
    torch.save({"model": pose_model("11")}, folder / "base.pt")
    run("fit", folder / "data.yaml", *base(folder), "-o", folder / "a.safetensors", "--imgsz", 64,
        "--epochs", 2, "--calibration-share", 0.5)  # fmt: skip
    return folder
