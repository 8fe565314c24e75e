"""Artifact files: lossless round trip, and one-line errors for other content."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from halopose.calibration.calibrators import StudentTCalibration
from halopose.data.tensors import write_tensors
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.uncertainty.heads import HeadSettings, with_bound
from tests.helpers.models import artifact_for, host_of, with_split_student
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")
KIND = "11"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    artifact_for(host_of(KIND)).save(tmp_path / "heads.safetensors")
    return tmp_path / "heads.safetensors"


def rewrite(
    path: Path,
    change_tensors: Callable[[dict[str, Any]], object] = lambda tensors: None,
    change_content: Callable[[dict[str, Any]], object] = lambda content: None,
) -> None:
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()["halopose"][64:])
    change_tensors(tensors)
    change_content(content)
    write_tensors(path, tensors, content)


def refused(path: Path, says: str) -> None:
    with pytest.raises(HaloposeError, match=says) as error:
        Artifact.load(path)
    assert "\n" not in str(error.value)


def test_context_features_and_split_student_t_are_kept(tmp_path: Path) -> None:
    artifact = with_split_student(artifact_for(host_of(KIND), HeadSettings(overlaps=True, features=True, width=16)))
    artifact = replace(artifact, heads=with_bound(artifact.heads, np.linspace(3, 300, len(artifact.layout))))
    artifact.save(tmp_path / "heads.safetensors")
    found = Artifact.load(tmp_path / "heads.safetensors")
    assert found.heads.settings == artifact.heads.settings
    bounds = [present(present(one.heads.context_head).inverse_bound) for one in (found, artifact)]
    assert torch.equal(*bounds)
    for one, other in zip(found.heads.parameters(), artifact.heads.parameters(), strict=True):
        assert torch.equal(one, other)
    split_student, expected = present(found.calibrations.split_student), present(artifact.calibrations.split_student)
    for name in ("kept", "pruned"):
        assert torch.equal(getattr(split_student, name).nu_, getattr(expected, name).nu_)
        assert torch.equal(getattr(split_student, name).tau_, getattr(expected, name).tau_)


@pytest.mark.parametrize(
    "settings",
    [HeadSettings(), HeadSettings("diagonal", "last-layer"), HeadSettings("isotropic", warm_start=False)],
)
@pytest.mark.parametrize(("threshold", "visible"), [(-0.25, None), (float("-inf"), 0.5), (0.0, 0.0)])
def test_round_trip(tmp_path: Path, settings: HeadSettings, threshold: float, visible: float | None) -> None:
    artifact = artifact_for(host_of(KIND), settings)
    calibrations = replace(artifact.calibrations, threshold=threshold, visibility_threshold=visible)
    artifact = replace(artifact, calibrations=calibrations)
    first, second = tmp_path / "deep" / "first.safetensors", tmp_path / "second.safetensors"
    artifact.save(first)
    found = Artifact.load(first)
    found.save(second)
    assert first.read_bytes() == second.read_bytes()
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    for owner, name in (("", "heads"), ("calibrations", "gaussian"), ("calibrations", "student")):
        before, after = (getattr(getattr(one, owner) if owner else one, name).state_dict() for one in (artifact, found))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
    for name in ("base", "layout", "imgsz", "card"):
        assert getattr(found, name) == getattr(artifact, name), name
    assert (found.calibrations.threshold, found.calibrations.visibility_threshold) == (threshold, visible)
    assert (found.heads.settings, found.heads.strides) == (settings, artifact.heads.strides)
    assert [value.requires_grad for value in found.heads.parameters()] == [
        value.requires_grad for value in artifact.heads.parameters()
    ]
    maps = host_of(KIND).forward(torch.rand(1, 3, 64, 64)).features
    with torch.no_grad():
        assert torch.equal(found.heads.dense(maps), artifact.heads.dense(maps))


def test_the_kind_of_covariance_survives(tmp_path: Path) -> None:
    student = StudentTCalibration(17, covariance="paper")
    artifact = artifact_for(host_of(KIND))
    artifact = replace(artifact, calibrations=replace(artifact.calibrations, student=student))
    artifact.save(tmp_path / "paper.safetensors")
    assert Artifact.load(tmp_path / "paper.safetensors").calibrations.student.covariance == "paper"


def test_equal_artifacts_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        artifact_for(host_of(KIND)).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_saving_where_nothing_can_be_written_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "a", tmp_path):
        with pytest.raises(HaloposeError, match="cannot write"):
            artifact_for(host_of(KIND)).save(path)


def test_another_base_is_refused(saved: Path) -> None:
    artifact = Artifact.load(saved)
    artifact.check(host_of(KIND))
    with pytest.raises(HaloposeError, match="another base") as error:
        artifact.check(host_of("v8"))
    assert "\n" not in str(error.value)
    one_to_one = artifact_for(host_of("26-one-to-one"))
    with pytest.raises(HaloposeError, match="another base"):
        one_to_one.check(host_of("26"))


@pytest.mark.parametrize("size", [0, 5, 100, -1, -5000])
def test_truncated_files_are_refused(saved: Path, size: int) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    refused(saved, "damaged")


def test_any_flipped_bit_is_refused(saved: Path) -> None:
    content = saved.read_bytes()
    generator = np.random.default_rng(0)
    header = 8 + int.from_bytes(content[:8], "little")
    for place in [*range(0, header, 97), *generator.integers(header, len(content), 40)]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(generator.integers(8))
        saved.write_bytes(damaged)
        refused(saved, "damaged|not a halopose artifact")


def test_foreign_files_are_refused(saved: Path, tmp_path: Path) -> None:
    refused(tmp_path / "missing.safetensors", "no artifact")
    refused(tmp_path, "no artifact")
    saved.write_bytes(b"\xff" * 1000)
    refused(saved, "damaged")
    save_file({"weight": torch.zeros(3)}, saved)
    refused(saved, "not a halopose artifact")
    for metadata in ("[]", "3", "{", '{"format": "halopose-artifact-2"}'):
        save_file({"weight": torch.zeros(3)}, saved, metadata={"halopose": "0" * 64 + metadata})
        refused(saved, "damaged|not a halopose artifact")


@pytest.mark.parametrize("name", ["heads.levels.1.last.weight", "gaussian.tau_", "student.nu_"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(saved: Path, name: str, value: float) -> None:
    rewrite(saved, lambda tensors: tensors[name].view(-1)[0].fill_(value))
    refused(saved, "damaged")


INCONSISTENT = {
    "no head": lambda content: content.pop("head"),
    "head of another type": lambda content: content.update(head=[]),
    "dispersion": lambda content: content["head"].update(parameterisation="round"),
    "setting": lambda content: content["head"].update(extra=1),
    "names": lambda content: content["layout"]["names"].pop(),
    "strides": lambda content: content["strides"].pop(),
    "templates": lambda content: content["templates"].pop(),
    "sigma": lambda content: content["layout"].update(sigmas=["a"] * 17),
    "mirror": lambda content: content["layout"].update(mirror=[0] * 17),
    "limb": lambda content: content["layout"].update(limbs=[[0, 17]]),
    "area": lambda content: content["layout"].update(area_factor=0),
    "sigmas": lambda content: content["layout"]["sigmas"].pop(),
    "activation": lambda content: content["templates"][0][0].__setitem__(1, "tanh"),
}


@pytest.mark.parametrize("what", INCONSISTENT)
def test_inconsistent_content_is_refused(saved: Path, what: str) -> None:
    rewrite(saved, change_content=INCONSISTENT[what])
    refused(saved, "damaged")


def test_missing_tensors_are_refused(saved: Path) -> None:
    rewrite(saved, lambda tensors: tensors.pop("gaussian.tau_"))
    refused(saved, "damaged")


def test_a_failing_write_leaves_the_old_file_alone(saved: Path, full_disk: Callable[[int | None], None]) -> None:
    before = saved.read_bytes()
    with pytest.raises(HaloposeError, match="cannot write") as error:
        artifact_for(host_of("v8")).save(saved)
    assert "\n" not in str(error.value)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
