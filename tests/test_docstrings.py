"""Examples in docstrings run with the shown output; every public name has one."""

import doctest
import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest

import halopose
from halopose.landing.shipped_detectors import runway_detector
from halopose.landing.world.dataset_writer import write_dataset
from tests.helpers.models import ROOT

SOURCE = ROOT / "src"
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples_of(module: Any) -> list[Any]:
    found = FINDER.find(importlib.import_module(module), module)
    return [pytest.param(test, id=test.name) for test in found if test.examples]


@pytest.mark.parametrize("test", [test for module in MODULES for test in examples_of(module)])
def test_examples_run(
    test: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples" / "photographs" / "astronaut.jpg", "photo.jpg")
    if "UncertainPose.load()" in "".join(example.source for example in test.examples):
        request.getfixturevalue("published_base")
    if test.name == "halopose.fitting.pipeline.fit":
        write_dataset(".", {"train": 6, "val": 6})
        shutil.copy(runway_detector(), "model.safetensors")
    printed: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(test, out=printed.append)
    assert not printed, "".join(printed)


@pytest.mark.parametrize("name", [name for name in halopose.__all__ if name != "__version__"])
def test_public_names_have_an_example(name: str) -> None:
    assert ">>> " in getattr(halopose, name).__doc__
