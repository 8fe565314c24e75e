"""Scoring without a model: calibration and scored images are disjoint, and contradicting settings are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halopose.evaluation.scores import Scores
from tests.helpers.commands import refused, run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    run("synthesize", "-o", folder, "--images", 60, "--persons", 200)
    return folder


def content_of(path: Path) -> Any:
    return json.loads(path.read_text())


def part_of(files: Path, folder: Path, remainder: int) -> tuple[Path, Path]:
    """Predictions and truth of every other image, written into a folder."""
    truth, entries = content_of(files / "truth.json"), content_of(files / "predictions.json")
    images = [image for image in truth["images"] if image["id"] % 2 == remainder]
    chosen = {image["id"] for image in images}
    annotations = [entry for entry in truth["annotations"] if entry["image_id"] in chosen]
    results = [entry for entry in entries if entry["image_id"] in chosen]
    folder.mkdir()
    (folder / "t.json").write_text(json.dumps(truth | {"images": images, "annotations": annotations}))
    (folder / "p.json").write_text(json.dumps(results))
    return folder / "p.json", folder / "t.json"


def test_images_of_every_calibration_applied_are_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    applied = files / "predictions.json"
    for remainder in (0, 1):
        calibration = tmp_path / f"{remainder}.json"
        run("recalibrate", *part_of(files, tmp_path / f"part{remainder}", remainder), "-o", calibration)
        run("apply", calibration, applied, "-o", tmp_path / f"applied{remainder}.json")
        applied = tmp_path / f"applied{remainder}.json"
    error = refused(monkeypatch, capsys, "score", applied, files / "truth.json", "-o", tmp_path / "s")
    seen = {entry["image_id"] for entry in content_of(applied) if entry.get("calibrated_on")}
    assert seen == {entry["image_id"] for entry in content_of(applied)}
    assert f"{len(seen)} of 60 images" in error


def test_scoring_takes_the_confidence_of_the_calibration(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both, calibration = (files / "predictions.json", files / "truth.json"), tmp_path / "c.json"
    how = "--area", "box", "--scalarisation", "determinant", "--rule", "f1"
    run("recalibrate", *both, "-o", calibration, *how)
    asked = *both, "--calibration", calibration, "--overlap", "allow", "--bootstrap", 0, "-o"
    error = refused(monkeypatch, capsys, "score", *asked, tmp_path / "refused", "--scalarisation", "trace")
    assert "determinant, not trace" in error
    assert not (tmp_path / "refused").exists()
    run("score", *asked, tmp_path / "s")
    pruned = content_of(tmp_path / "s" / "metrics.json")["pruned"]
    assert pruned["threshold"] == pytest.approx(content_of(calibration)["threshold"])
    applied = tmp_path / "applied.json"
    run("apply", calibration, files / "predictions.json", "-o", applied)
    kept = [keep for entry in content_of(applied) for keep in entry["keep"]]
    assert sum(kept) / len(kept) == pytest.approx(pruned["kept_fraction"], abs=0.05)


def test_one_detection_of_a_class_without_annotations_is_no_reason_to_refuse(files: Path, tmp_path: Path) -> None:
    truth, entries = content_of(files / "truth.json"), content_of(files / "predictions.json")
    truth["categories"].append(truth["categories"][0] | {"id": 2, "name": "another"})
    (tmp_path / "t.json").write_text(json.dumps(truth))
    (tmp_path / "p.json").write_text(json.dumps([*entries, entries[0] | {"category_id": 2, "score": 0.01}]))
    run("recalibrate", tmp_path / "p.json", tmp_path / "t.json", "-o", tmp_path / "c.json")
    run("recalibrate", files / "predictions.json", files / "truth.json", "-o", tmp_path / "d.json")
    assert content_of(tmp_path / "c.json")["tau"] == content_of(tmp_path / "d.json")["tau"]
    run("score", tmp_path / "p.json", tmp_path / "t.json", "-o", tmp_path / "s", "--bootstrap", 0)


def test_recalibrating_on_few_objects_warns(files: Path, tmp_path: Path) -> None:
    both = files / "predictions.json", files / "truth.json"
    output = run("recalibrate", *both, "-o", tmp_path / "c.json", "--fraction", 0.05)
    assert "few objects" in output


def without_covariances(source: Path, target: Path) -> Path:
    hidden = ("covariance", "scale", "dof", "keep")
    entries = [{k: v for k, v in entry.items() if k not in hidden} for entry in content_of(source)]
    target.write_text(json.dumps(entries))
    return target


def test_predictions_without_covariances_get_them_from_scores(files: Path, tmp_path: Path) -> None:
    parts = [part_of(files, tmp_path / f"part{remainder}", remainder) for remainder in (0, 1)]
    bare = [without_covariances(part[0], tmp_path / f"bare{n}.json") for n, part in enumerate(parts)]
    run("recalibrate", bare[0], parts[0][1], "-o", tmp_path / "c.json", "--family", "student-t")
    run("apply", tmp_path / "c.json", bare[1], "-o", tmp_path / "applied.json", "--joint", "--region", 0.9)
    entry = content_of(tmp_path / "applied.json")[0]
    assert {"covariance", "scale", "dof", "keep", "correlation", "region"} <= set(entry)
    run("score", bare[1], parts[1][1], "-o", tmp_path / "s", "--calibration", tmp_path / "c.json", "--bootstrap", 0)
    run("score", tmp_path / "applied.json", parts[1][1], "-o", tmp_path / "t", "--bootstrap", 0)
    given, applied = (Scores.from_json(content_of(tmp_path / name / "metrics.json")) for name in "st")
    assert given.student_t.ace < 0.03
    assert given.student_t.nll == pytest.approx(applied.uncalibrated.nll, rel=1e-6)
    run("score", bare[1], parts[1][1], "-o", tmp_path / "u", "--bootstrap", 0)
    assert Scores.from_json(content_of(tmp_path / "u" / "metrics.json")).student_t.ace < 0.03


def test_features_are_used_only_if_held_out_images_improve(files: Path, tmp_path: Path) -> None:
    features = "--features", "score,size,visibility"
    printed = run("recalibrate", files / "predictions.json", files / "truth.json", "-o", tmp_path / "a.json", *features)
    assert "dispersion" not in content_of(tmp_path / "a.json")
    assert "not used" in printed
    entries = content_of(files / "predictions.json")
    for entry in entries:  # in a unit that depends on the box
        share = entry["bbox"][2] * entry["bbox"][3] / 1e6
        entry["covariance"] = [[value / share for value in row] for row in entry["covariance"]]
    (tmp_path / "p.json").write_text(json.dumps(entries))
    run("recalibrate", tmp_path / "p.json", files / "truth.json", "-o", tmp_path / "b.json", *features)
    assert content_of(tmp_path / "b.json")["dispersion"]["base"] == "stated"


def test_a_damaged_dispersion_model_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = without_covariances(files / "predictions.json", tmp_path / "bare.json")
    run("recalibrate", bare, files / "truth.json", "-o", tmp_path / "c.json")
    damaged = (tmp_path / "c.json").read_text().replace('"size"', '"moon"', 1)
    (tmp_path / "d.json").write_text(damaged)
    assert "damaged" in refused(monkeypatch, capsys, "apply", tmp_path / "d.json", bare, "-o", tmp_path / "a.json")
    asked = "recalibrate", bare, files / "truth.json", "-o", tmp_path / "e.json", "--features"
    assert "stated" in refused(monkeypatch, capsys, *asked, "stated")
    assert "hair" in refused(monkeypatch, capsys, *asked, "hair")
