"""Scenes and settings that the tests of stores and of collecting share."""

from pathlib import Path

import pytest

from halopose.fitting.feature_cache import CollectSettings
from tests.helpers.models import host_of, write_scenes

KIND = "v8"
SETTINGS = CollectSettings(imgsz=(64,), detections=5, conf=0.05)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    return write_scenes(tmp_path_factory.mktemp("data"), host_of(KIND), {"train": 6, "val": 3})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"
