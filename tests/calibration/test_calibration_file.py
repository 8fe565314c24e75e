"""Calibration files: bit-identical round trip, and one-line errors for damaged files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halopose.calibration.calibrate import cross_fitted, fit_calibrations, fit_gaussian, fit_student
from halopose.calibration.calibration_file import (
    CalibrationFile,
    Pruning,
    _checksum,
    apply_to_file,
    distributions_under,
    images_seen,
    only_images,
)
from halopose.calibration.calibrators import GaussianCalibration, StudentTCalibration
from halopose.data.coco import SEEN_MARK, parse_predictions
from halopose.data.files import read_json, write_json
from halopose.errors import HaloposeError
from halopose.matching.greedy_matching import true_pairs
from halopose.matching.matched_poses import match_poses
from halopose.protocol import Protocol
from halopose.types import Family
from halopose.uncertainty.distributions import StudentT
from tests.helpers.evaluations import poses, synthetic_poses, with_informative_visibility
from tests.helpers.mangling import mangled, refusal

FAMILIES: tuple[Family, ...] = get_args(Family)
IMAGES = np.array([1, 8, 15])
ANNOTATED = Protocol(area="annotation")  # a threshold of box areas would decide what applying keeps


def fitted_file(family: Family, seed: int = 0, keypoints: int = 3) -> CalibrationFile:
    return CalibrationFile.fit(poses(200, keypoints, 4, seed, flaw=1.3), IMAGES, family, ANNOTATED)


@pytest.mark.parametrize("family", FAMILIES)
def test_fitting_is_that_of_the_protocol(family: Family) -> None:
    matched = poses(200, 3, 4, flaw=1.3)
    file, fitted = fitted_file(family), fit_calibrations(matched, ANNOTATED)
    expected = fitted.gaussian if family == "gaussian" else fitted.student
    assert file.family == family
    assert file.names == matched.layout.names
    assert file.threshold == fitted.threshold
    for name, value in expected.state_dict().items():
        assert torch.equal(file.calibration.state_dict()[name], value)


@pytest.mark.parametrize("threshold", [-0.25, -np.inf])
@pytest.mark.parametrize("family", FAMILIES)
def test_files_survive_a_round_trip(family: Family, threshold: float, tmp_path: Path) -> None:
    file = replace(fitted_file(family), threshold=threshold)
    file.save(tmp_path / "c.json")
    again = CalibrationFile.load(tmp_path / "c.json")
    assert (again.family, again.names, again.threshold) == (family, file.names, threshold)
    np.testing.assert_array_equal(again.image_ids, file.image_ids)
    assert again.calibration.state_dict().keys() == file.calibration.state_dict().keys()
    for name, value in file.calibration.state_dict().items():
        assert torch.equal(again.calibration.state_dict()[name], value), name
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "c.json").read_bytes()


def test_documented_keys_are_there(tmp_path: Path) -> None:
    """docs/reference/files.md names them."""
    shared = {"format", "family", "keypoints", "tau", "effective_samples", "threshold", "image_ids", "checksum"}
    shared |= {"regions", "correlation", "area", "scalarisation", "rule", "gamma_ks", "sigmas", "area_factor"}
    own: dict[Family, set[str]] = {"gaussian": set(), "student-t": {"nu", "moment_tau", "pruning_tau"}}
    for family, more in own.items():
        fitted_file(family).save(tmp_path / "c.json")
        assert set(read_json(tmp_path / "c.json")) == shared | more


@pytest.mark.parametrize("family", FAMILIES)
def test_applying_scales_what_was_predicted(family: Family) -> None:
    predictions, _ = synthetic_poses()
    file = fitted_file(family, keypoints=17)
    applied = file.apply(predictions)
    tau = file.calibration.tau_.numpy()[:, None, None]
    np.testing.assert_allclose(applied.scale, tau**2 * predictions.scale, rtol=1e-9)
    for name in ("boxes", "scores", "keypoints", "visibility", "keep", "class_ids", "image_ids"):
        assert getattr(applied, name) is getattr(predictions, name), name
    if isinstance(file.calibration, StudentTCalibration):
        moment = file.calibration.moment_tau_.numpy()[:, None, None]
        np.testing.assert_allclose(applied.covariance, moment**2 * predictions.covariance, rtol=1e-9)
        np.testing.assert_array_equal(applied.dof, np.tile(file.calibration.nu_, (len(applied), 1)))
    else:
        np.testing.assert_allclose(applied.covariance, tau**2 * predictions.covariance, rtol=1e-9)
        assert applied.dof is None


def test_other_keypoints_are_refused() -> None:
    with pytest.raises(HaloposeError, match="3 keypoints, the predictions 17"):
        fitted_file("gaussian").apply(synthetic_poses()[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prediction_file_keeps_all_but_its_distribution(family: Family, tmp_path: Path) -> None:
    predictions, _ = synthetic_poses()
    entries = [{**entry, "note": number} for number, entry in enumerate(predictions.to_json())]
    before = next(entry for entry in entries if entry["image_id"] not in IMAGES)
    before[SEEN_MARK] = True  # of a calibration applied before, which has seen that image
    write_json(tmp_path / "p.json", entries)
    file = fitted_file(family, keypoints=17)
    assert apply_to_file(file, tmp_path / "p.json", tmp_path / "new.json") == len(entries)
    content = read_json(tmp_path / "new.json")
    for old, new in zip(entries, content, strict=True):
        assert (SEEN_MARK in new) == (old["image_id"] in IMAGES or old is before)
        same = set(old) - {"covariance", SEEN_MARK}
        assert {key: new[key] for key in same} == {key: old[key] for key in same}
    applied, expected = parse_predictions("new.json", content, None), file.apply(predictions)
    np.testing.assert_array_equal(applied.covariance, expected.covariance)
    np.testing.assert_array_equal(applied.scale, expected.scale)
    assert (applied.dof is None) == (family == "gaussian")


def test_a_calibration_is_not_applied_twice(tmp_path: Path) -> None:
    """Another one is: it was fitted on what the first has written."""
    write_json(tmp_path / "p.json", synthetic_poses()[0].to_json())
    first, second = fitted_file("gaussian", keypoints=17), fitted_file("student-t", keypoints=17)
    apply_to_file(first, tmp_path / "p.json", tmp_path / "once.json")
    apply_to_file(second, tmp_path / "once.json", tmp_path / "both.json")
    for source in ("once.json", "both.json"):
        with pytest.raises(HaloposeError, match="scaled twice"):
            apply_to_file(first, tmp_path / source, tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("unit", [1e-14, 1.0])
def test_unreadable_calibrations_are_not_written(family: Family, unit: float, tmp_path: Path) -> None:
    matched = poses(200, 3, 4, flaw=1.3)
    matched = replace(matched, covariance=unit * matched.covariance, scale=unit * matched.scale)
    file = CalibrationFile.fit(matched, IMAGES, family, ANNOTATED)
    if unit == 1:
        file.save(tmp_path / "c.json")
        CalibrationFile.load(tmp_path / "c.json")
        return
    with pytest.raises(HaloposeError, match="units of covariance"):
        file.save(tmp_path / "c.json")
    assert not (tmp_path / "c.json").exists()


# --- the threshold -----------------------------------------------------------------------------------------


def test_how_the_threshold_was_fitted_is_in_the_file(tmp_path: Path) -> None:
    protocol = Protocol(area="box", scalarisation="determinant", threshold_rule="f1", gamma_ks=0.6)
    matched = poses(200, 3, 4, flaw=1.3)
    CalibrationFile.fit(matched, IMAGES, "gaussian", protocol).save(tmp_path / "c.json")
    again = CalibrationFile.load(tmp_path / "c.json")
    assert again.pruning == Pruning.of(protocol, matched.layout)
    distributions_under([again], matched, protocol)


def test_files_without_these_settings_mean_trace_and_annotated_areas(tmp_path: Path) -> None:
    content = content_of("gaussian", tmp_path)
    for name in ("area", "scalarisation", "rule", "gamma_ks", "sigmas", "area_factor"):
        del content[name]
    (tmp_path / "c.json").write_text(json.dumps(content | {"checksum": _checksum(content)}))
    file = CalibrationFile.load(tmp_path / "c.json")
    assert file.pruning == Pruning("annotation", "trace", None)
    distributions_under(
        [file], poses(200, 3, 4, seed=1), replace(ANNOTATED, threshold_rule="f1")
    )  # by which rule nobody knows


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"area": "box"}, "area annotation, not box"),
        ({"scalarisation": "determinant"}, "scalarisation trace, not determinant"),
        ({"threshold_rule": "f1"}, "rule youden, not f1"),
        ({"gamma_ks": 0.7}, "gamma_ks 0.5, not 0.7"),
    ],
)
def test_a_threshold_of_another_confidence_is_refused(setting: dict[str, Any], words: str) -> None:
    matched = poses(200, 3, 4, seed=1)
    with pytest.raises(HaloposeError, match=words):
        distributions_under([fitted_file("gaussian")], matched, replace(ANNOTATED, **setting))
    # That of the Gaussian's file is taken: how the other's was fitted does not matter.
    gaussian = CalibrationFile.fit(matched, IMAGES, "gaussian", replace(ANNOTATED, **setting))
    distributions_under([fitted_file("student-t"), gaussian], matched, replace(ANNOTATED, **setting))


def test_a_threshold_of_other_sigmas_is_refused() -> None:
    matched = poses(200, 3, 4, seed=1)
    layout = replace(matched.layout, sigmas=(0.1, 0.2, 0.3))
    with pytest.raises(HaloposeError, match="other sigmas"):
        distributions_under([fitted_file("gaussian")], replace(matched, layout=layout), ANNOTATED)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_threshold_of_box_areas_decides_what_applying_keeps(family: Family, tmp_path: Path) -> None:
    """As scoring with the file would."""
    predictions, truth = synthetic_poses()
    protocol = Protocol(area="box", scalarisation="eigenvalue")
    matched = match_poses(predictions, truth, protocol)
    gaussian, file = (CalibrationFile.fit(matched, truth.images, name, protocol) for name in ("gaussian", family))
    expected = distributions_under([gaussian], matched, protocol).kept(matched)
    assert 0 < expected.mean() < 1
    write_json(tmp_path / "p.json", predictions.to_json())
    apply_to_file(file, tmp_path / "p.json", tmp_path / "new.json")
    applied = parse_predictions("new.json", read_json(tmp_path / "new.json"), None)
    np.testing.assert_array_equal(match_poses(applied, truth, protocol).image_ids, matched.image_ids)
    detections, objects = true_pairs(applied, truth)
    order = np.lexsort((objects, truth.image_ids[objects]))
    assert (np.asarray(applied.keep)[detections[order]] == expected).mean() > 0.999


# --- scoring under files ----------------------------------------------------------------------------------


def test_distributions_under_files_are_those_given() -> None:
    matched = poses(200, 3, 4, seed=1)
    gaussian, student = fitted_file("gaussian"), replace(fitted_file("student-t", seed=2), threshold=-9.0)
    distributions = distributions_under([student, gaussian], matched, ANNOTATED)
    tau = gaussian.calibration.tau_.numpy()[:, None, None]
    np.testing.assert_allclose(
        distributions.distributions["gaussian"].covariance, tau**2 * matched.covariance, rtol=1e-9
    )
    distribution = distributions.distributions["student_t"]
    assert isinstance(distribution, StudentT)
    np.testing.assert_array_equal(
        distribution.dof.expand(200, 3), np.tile(student.calibration.state_dict()["nu_"], (200, 1))
    )
    assert (distributions.threshold == gaussian.threshold).all()
    alone = distributions_under([student], matched, ANNOTATED)
    assert (alone.threshold == -9.0).all()
    assert "student, threshold; 5 folds" in alone.source
    own = cross_fitted(matched, ANNOTATED)
    assert torch.equal(alone.distributions["gaussian"].scale_tril, own.distributions["gaussian"].scale_tril)
    assert torch.equal(
        distributions_under([], matched, ANNOTATED).distributions["gaussian"].scale_tril,
        own.distributions["gaussian"].scale_tril,
    )


def test_the_protocol_selects_the_covariance_of_a_student_t() -> None:
    matched = poses(200, 3, 4, seed=1)
    files = [fitted_file("gaussian"), fitted_file("student-t")]
    nu = files[1].calibration.state_dict()["nu_"][:, None, None]
    distribution = distributions_under(files, matched, replace(ANNOTATED, covariance="paper")).distributions[
        "student_t"
    ]
    torch.testing.assert_close(distribution.covariance, nu / (nu - 2) * distribution.scale)
    other = distributions_under(files, matched, ANNOTATED).distributions["student_t"]
    assert torch.equal(distribution.scale, other.scale)
    assert isinstance(distribution, StudentT)
    assert distribution.moment is None
    assert isinstance(other, StudentT)
    assert other.moment is not None


def test_visibility_is_looked_at_beside_files() -> None:
    matched = with_informative_visibility(poses(200, 3, 4, seed=1))
    files = [fitted_file("gaussian"), fitted_file("student-t")]
    assert distributions_under(files, matched, ANNOTATED).visibility_threshold is None
    assert distributions_under(files, matched, replace(ANNOTATED, visibility=True)).visibility_threshold is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_calibrating_first_or_while_scoring_is_the_same(family: Family) -> None:
    predictions, truth = synthetic_poses()
    matched = match_poses(predictions, truth)
    calibration = (fit_gaussian if family == "gaussian" else fit_student)(matched)
    file = CalibrationFile(calibration, truth.layout.names, -np.inf, IMAGES)
    first = cross_fitted(match_poses(file.apply(predictions), truth), ANNOTATED).distributions["uncalibrated"]
    name = "gaussian" if family == "gaussian" else "student_t"
    while_scoring = distributions_under([file], matched, ANNOTATED).distributions[name]
    torch.testing.assert_close(first.scale, while_scoring.scale)
    torch.testing.assert_close(first.covariance, while_scoring.covariance)


# --- damage -----------------------------------------------------------------------------------------------


def content_of(family: Family, folder: Path) -> dict[str, Any]:
    fitted_file(family).save(folder / "good.json")
    content: dict[str, Any] = read_json(folder / "good.json")
    return content


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "halopose-calibration-0"}, "is not a calibration"),
        ({"family": "cauchy"}, "damaged"),
        ({"tau": [1.0, 1.0]}, "damaged"),
        ({"tau": [1.0, 0.0, 1.0]}, "damaged"),
        ({"tau": [1.0, 1e200, 1.0]}, "damaged"),
        ({"tau": [1.0, -1.0, 1.0]}, "damaged"),
        ({"tau": [1.0, None, 1.0]}, "damaged"),
        ({"nu": [2.0, 3.0, 3.0]}, "damaged"),
        ({"nu": [10**400, 3.0, 3.0]}, "damaged"),
        ({"moment_tau": [1.0, 0.0, 1.0]}, "damaged"),
        ({"keypoints": ["a"]}, "damaged"),
        ({"threshold": "low"}, "damaged"),
        ({"threshold": float("nan")}, "damaged"),
        ({"threshold": "nan"}, "damaged"),
        ({"threshold": float("inf")}, "damaged"),
        ({"area": "foo"}, "damaged"),
        ({"rule": "foo"}, "damaged"),
        ({"gamma_ks": 2.0}, "damaged"),
        ({"sigmas": [0.1, 0.1]}, "damaged"),
        ({"area_factor": 0.0}, "damaged"),
        ({"image_ids": ["a"]}, "damaged"),
        ({"image_ids": [10**30]}, "damaged"),
    ],
)
def test_damaged_files_are_one_line_errors(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """What is wrong in itself is refused even if its checksum is right."""
    path = tmp_path / "c.json"
    content = content_of("student-t", tmp_path) | changes
    path.write_text(json.dumps(content | {"checksum": _checksum(content)}))
    with pytest.raises(HaloposeError, match=words) as error:
        CalibrationFile.load(path)
    assert "c.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    content = content_of("gaussian", tmp_path)
    for changes in ({"tau": [1.0, 1.1, 1.2]}, {"keypoints": content["keypoints"][::-1]}):
        (tmp_path / "c.json").write_text(json.dumps(content | changes))
        with pytest.raises(HaloposeError, match="checksum does not match"):
            CalibrationFile.load(tmp_path / "c.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrations")
    content_of("student-t", folder)
    return folder


@given(data=st.data())
def test_mangled_files_read_or_are_refused(folder: Path, data: st.DataObject) -> None:
    content = data.draw(mangled(read_json(folder / "good.json")))
    (folder / "mangled.json").write_text(json.dumps(content))
    file, line = refusal(CalibrationFile.load, folder / "mangled.json")
    assert "\n" not in line
    if file is None:
        return
    distribution = file.calibration(torch.eye(2, dtype=torch.float64).expand(len(file.names), 2, 2))
    assert (torch.linalg.eigvalsh(distribution.covariance) > 0).all()
    assert not np.isnan(file.threshold)


def file_of(*images: int) -> CalibrationFile:
    return CalibrationFile(GaussianCalibration(1), ("tip",), -np.inf, np.array(images, dtype=np.int64))


def test_seen_images_are_marked_or_listed() -> None:
    content: list[dict[str, Any]] = [
        {"image_id": 9, SEEN_MARK: True},
        {"image_id": 4, SEEN_MARK: True},
        {"image_id": 9, SEEN_MARK: True},
        {"image_id": 1},
        {"image_id": 2, SEEN_MARK: False},
    ]
    assert images_seen(content, []).tolist() == [4, 9]
    assert images_seen(content, [file_of(7, 4), file_of(3)]).tolist() == [3, 4, 7, 9]
    assert images_seen([], [file_of()]).tolist() == []
    assert images_seen([], []).dtype == np.int64


@pytest.mark.parametrize("seed", range(3))
def test_only_images_selects_in_predictions_and_ground_truth(seed: int) -> None:
    predictions, truth = synthetic_poses()
    chosen = np.random.default_rng(seed).choice(truth.images, 25, replace=False)
    some, objects = only_images(predictions, truth, chosen)
    assert some.image_ids is not None
    assert predictions.image_ids is not None
    np.testing.assert_array_equal(objects.images, np.sort(chosen))
    assert len(some) == np.isin(predictions.image_ids, chosen).sum() < len(predictions)
    assert len(objects) == np.isin(truth.image_ids, chosen).sum() < len(truth)
    assert set(some.image_ids) <= set(chosen)
    assert set(objects.image_ids) <= set(chosen)
    # Images are independent: true positives are those of the whole, in the images chosen.
    whole, part = match_poses(predictions, truth), match_poses(some, objects)
    expected = whole.select(np.flatnonzero(np.isin(whole.image_ids, chosen)))
    np.testing.assert_equal(vars(replace(part, objects=expected.objects)), vars(expected))
