"""Fitting the out-of-distribution model: its parts against scipy, and the whole on small scenes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from sklearn.covariance import ledoit_wolf as sklearn_ledoit_wolf
from torch.nn.functional import normalize

from halopose.boxes import box_area
from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.fitting.artifact import Artifact
from halopose.fitting.collecting import collect
from halopose.fitting.feature_cache import CollectSettings, MatchStore
from halopose.fitting.novelty_fitting import (
    calibrate_novelty,
    collect_copies,
    fit_novelty,
    isotonic,
    ledoit_wolf,
    logistic,
    rows_of,
    whitening_of,
    widening_of,
)
from halopose.fitting.settings import NoveltySettings
from halopose.prediction.uncertain_pose import UncertainPose
from tests.helpers.models import artifact_for, host_of, write_scenes
from tests.helpers.outliers import detector
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")
KIND = "v8"
SETTINGS = NoveltySettings(images=12, fewest=5, conf=0.2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("data"), host_of(KIND), {"train": 12, "val": 10})


@pytest.fixture(scope="module")
def stores(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[MatchStore, MatchStore]:
    folder, host = tmp_path_factory.mktemp("stores"), host_of(KIND)
    copies = collect_copies(host, load_dataset(data, "train"), folder / "copies", 64, SETTINGS)
    how = CollectSettings(imgsz=(64,), detections=10, conf=0.2)
    return copies, collect(host, load_dataset(data, "val"), folder / "val", how)


@pytest.fixture(scope="module")
def fitted(stores: tuple[MatchStore, MatchStore]) -> Artifact:
    return fit_novelty(artifact_for(host_of(KIND)), *stores, settings=SETTINGS)


def test_covariance_is_shrunk_as_published() -> None:
    """Against the estimator written out sample by sample."""
    samples = torch.randn(12, 5, dtype=torch.float64) @ torch.randn(5, 5, dtype=torch.float64)
    centred = samples - samples.mean(0)
    plain = centred.T @ centred / 12
    mean = plain.trace() / 5
    distance = (plain - mean * torch.eye(5)).square().sum()
    noise = sum((torch.outer(row, row) - plain).square().sum() for row in centred) / 12**2
    share = min(float(noise / distance), 1.0)
    expected = (1 - share) * plain + share * mean * torch.eye(5)
    torch.testing.assert_close(ledoit_wolf(samples), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("count", [5, 40, 500])
def test_covariance_is_that_of_scikit_learn(count: int) -> None:
    samples = torch.randn(count, 9, dtype=torch.float64) * torch.linspace(0.2, 3, 9, dtype=torch.float64)
    expected, _ = sklearn_ledoit_wolf(samples.numpy())
    np.testing.assert_allclose(ledoit_wolf(samples).numpy(), expected, rtol=1e-6, atol=1e-8)


def test_distances_equal_those_of_pytorch_ood() -> None:
    """Fitted parameters, shrunk and rounded to single precision."""
    vectors, new = torch.randn(300, 6) + 1, 3 * torch.randn(50, 6)
    unit = normalize(vectors.double(), dim=1)
    oracle = detector("Mahalanobis")
    oracle.mu, oracle.precision = unit.mean(0)[None], torch.linalg.inv(ledoit_wolf(unit))
    expected = 2 * oracle.predict_features(normalize(new.double(), dim=1))  # it has half of the square
    found = whitening_of(vectors)(new).square().sum(1)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def test_whitened_features_have_unit_spread() -> None:
    vectors = torch.randn(4000, 6) @ torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.5, 1.0, 0.2])) + 3
    white = whitening_of(vectors)(vectors)
    torch.testing.assert_close(torch.cov(white.T, correction=0), torch.eye(6), rtol=0, atol=0.05)
    assert whitening_of(torch.zeros(0, 4))(torch.randn(3, 4)).square().sum(1).min() > 100


@pytest.mark.parametrize("ridge", [0.1, 3.0])
def test_logistic_regression_is_that_of_a_generic_optimiser(ridge: float) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(80, 4, generator=generator, dtype=torch.float64)
    label = torch.rand(80, generator=generator, dtype=torch.float64)
    weight = torch.rand(80, generator=generator, dtype=torch.float64) + 0.5
    x, y, w = inputs.numpy(), label.numpy(), weight.numpy()

    def loss(at: np.ndarray) -> float:
        odds = x @ at
        return float((w * (np.logaddexp(0, odds) - y * odds)).sum() + ridge / 2 * at @ at)

    expected = optimize.minimize(loss, np.zeros(4), method="BFGS", options={"gtol": 1e-8}).x
    np.testing.assert_allclose(logistic(inputs, label, weight, ridge).numpy(), expected, atol=1e-5)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 4)), min_size=1, max_size=30))
def test_isotonic_regression_is_that_of_scipy(rows: list[tuple[float, float]]) -> None:
    values, weight = np.array(rows).T
    expected = optimize.isotonic_regression(values, weights=weight).x
    np.testing.assert_allclose(isotonic(values, weight), expected, atol=1e-9)


def test_widening_follows_what_was_measured() -> None:
    value = np.linspace(0, 10, 1000)
    excess = np.where(value < 5, 0.9, 4.0)
    excess[::7] = np.nan  # without an object
    knots, factors = widening_of(value, excess, 10)
    assert factors[0] == 1.0  # never narrower
    assert factors[-1] == pytest.approx(4.0)
    assert (np.diff(knots) > 0).all()
    assert (np.diff(factors) >= 0).all()


def test_clean_images_are_usual_and_corrupted_ones_are_not(
    fitted: Artifact, stores: tuple[MatchStore, MatchStore]
) -> None:
    assert fitted.novelty is not None
    rows = rows_of(fitted, stores[0], 0.2)
    value = fitted.novelty.value(rows.evidence).numpy()
    assert np.median(value[~rows.clean]) > np.median(value[rows.clean])
    held = rows_of(fitted, stores[1], 0.2)
    chance = fitted.novelty.p_value(fitted.novelty.value(held.evidence), 0.2).numpy()
    for rate in (0.05, 0.2, 0.5):
        assert (chance <= rate).mean() <= rate


def test_live_predictions_give_the_fitted_novelty(
    fitted: Artifact, stores: tuple[MatchStore, MatchStore], data: Path, tmp_path: Path
) -> None:
    """A live prediction gives the novelty of the stored rows, and the file keeps it."""
    fitted.save(tmp_path / "a.safetensors")
    again = Artifact.load(tmp_path / "a.safetensors")
    model = UncertainPose(host_of(KIND), again)
    plain = UncertainPose(host_of(KIND), replace(fitted, novelty=None))
    assert again.novelty is not None
    held = rows_of(again, stores[1], 0.2)
    images = again.novelty.image_p_value(again.novelty.image_value(held.vectors))
    for record in load_dataset(data, "val").records:
        [poses] = model.predict(record.path, conf=0.2)
        [without] = plain.predict(record.path, conf=0.2)
        assert without.novelty is None
        assert replace(poses, novelty=None, image_novelty=None) == without
        assert poses.image_novelty is not None
        stored_image = images[torch.from_numpy(held.ids == record.image_id)].item()
        assert poses.image_novelty[0] == pytest.approx(stored_image, abs=0.1)  # it is one of ten: a rank apart
        mine = np.flatnonzero(held.image == record.image_id)
        stored = again.novelty.p_value(again.novelty.value(held.evidence[torch.from_numpy(mine)]), 0.2).numpy()
        order = np.argsort(-held.poses.scores[mine], kind="stable")
        best = present(poses.novelty)[: len(order)]
        np.testing.assert_allclose(best, stored[order], atol=0.05)  # windows are stored in half precision


def test_widening_is_an_option(fitted: Artifact, data: Path) -> None:
    path = load_dataset(data, "val").records[0].path
    [narrow] = UncertainPose(host_of(KIND), fitted).predict(path, conf=0.2)
    [wide] = UncertainPose(host_of(KIND), fitted, widen=True).predict(path, conf=0.2)
    ratio = wide.covariance / narrow.covariance
    assert (ratio > 1 - 1e-9).all()
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1, :1, :1], ratio.shape))
    np.testing.assert_array_equal(wide.keypoints, narrow.keypoints)
    with pytest.raises(HaloposeError, match="halopose novelty"):
        UncertainPose(host_of(KIND), replace(fitted, novelty=None), widen=True)


def test_it_refuses_what_it_cannot_fit(stores: tuple[MatchStore, MatchStore]) -> None:
    artifact = artifact_for(host_of(KIND))
    with pytest.raises(HaloposeError, match="too few"):
        fit_novelty(artifact, *stores, settings=replace(SETTINGS, fewest=10_000))
    with pytest.raises(HaloposeError, match="fitted on"):
        fit_novelty(artifact, stores[0], stores[0], settings=SETTINGS)
    with pytest.raises(HaloposeError, match="no detection"):
        rows_of(artifact, stores[1], 0.2, np.zeros(0, dtype=np.int64))


def test_p_values_may_come_from_other_images(stores: tuple[MatchStore, MatchStore], fitted: Artifact) -> None:
    """What was fitted stays bit for bit, and so do p-values if the images are the same ones."""
    same = calibrate_novelty(fitted, stores[1])
    before, after = present(fitted.novelty).to_tensors(), present(same.novelty).to_tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)
    fewer = calibrate_novelty(fitted, stores[1], stores[1].images[:5])
    changed = present(fewer.novelty).to_tensors()
    assert {name for name in before if not torch.equal(before[name], changed[name])} == {"known", "known_images"}
    assert len(changed["known_images"]) == 5
    assert list(present(fewer.card.novelty).calibration) == sorted(stores[1].images[:5].tolist())
    with pytest.raises(HaloposeError, match="fitted on"):
        calibrate_novelty(fitted, stores[0])
    with pytest.raises(HaloposeError, match="out-of-distribution"):
        calibrate_novelty(replace(fitted, novelty=None), stores[1])


def test_fitting_is_deterministic(stores: tuple[MatchStore, MatchStore], fitted: Artifact) -> None:
    again = fit_novelty(artifact_for(host_of(KIND)), *stores, settings=SETTINGS)
    assert again.novelty is not None
    assert fitted.novelty is not None
    for name, value in again.novelty.to_tensors().items():
        assert torch.equal(value, fitted.novelty.to_tensors()[name]), name


def test_errors_are_measured_from_the_mean_of_the_distribution(
    fitted: Artifact, stores: tuple[MatchStore, MatchStore]
) -> None:
    off = torch.tensor([[0.02, -0.01]]).expand(len(fitted.layout), 2)
    moved = replace(fitted, calibrations=replace(fitted.calibrations, offset=off))
    plain, away = (rows_of(one, stores[1], 0.05) for one in (fitted, moved))
    size = np.sqrt(box_area(plain.poses.boxes))[:, None, None]
    np.testing.assert_allclose(away.residual, plain.residual - off.numpy() * size, atol=1e-9)
    np.testing.assert_array_equal(plain.labelled, away.labelled)
    assert plain.labelled.any()
