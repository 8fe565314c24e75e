"""Residual analysis: known distributions are recognised, the rules follow, and the page is complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from halopose.cli.app import app
from halopose.data.dataset_loading import load_dataset
from halopose.data.files import write_json
from halopose.errors import HaloposeError
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.pipeline import collect_validation
from halopose.fitting.settings import FitSettings
from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost
from halopose.keypoints import Keypoints
from halopose.matching.matched_poses import match_poses
from halopose.protocol import Protocol
from halopose.reports import analysis_report as analysis_page
from halopose.studies.residual_analysis import (
    AnalysisSettings,
    ResidualSample,
    analyse,
    analyse_residuals,
    constant_predictions,
    downweighting,
    equal_bins,
    keypoint_correlation,
    matched_residuals,
    resampled_sums,
    robust_scatter,
    shape,
    shift,
    tails,
)
from tests.helpers.models import pose_model, write_scenes

SETTINGS = AnalysisSettings(bootstrap=100)
NAMES = ("a", "b", "c")
SIGMAS = np.array([0.05, 0.07, 0.1])
LAYOUT = Keypoints.of(3, names=NAMES, sigmas=SIGMAS)


def world(
    count: int = 4000,
    nu: float | None = None,
    covariance: Any = ((0.3, 0.0), (0.0, 0.3)),
    shared: float = 0.0,
    seed: int = 0,
) -> ResidualSample:
    """Residuals of a known distribution; ``shared`` is the correlation between keypoints."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=(count, 3, 2)) * np.sqrt(1 - shared)
    noise += np.sqrt(shared) * generator.normal(size=(count, 1, 2))
    if nu is not None:
        noise /= np.sqrt(generator.chisquare(nu, size=(count, 3, 1)) / nu)
    angle = generator.uniform(0, 2 * np.pi, (count, 3))
    return ResidualSample(
        normalized=noise @ np.linalg.cholesky(np.asarray(covariance)).T,
        labelled=generator.random((count, 3)) < 0.9,
        area=np.exp(generator.uniform(5, 11, count)),
        confidence=generator.uniform(0.1, 0.9, count),
        level=generator.integers(0, 3, count),
        image_ids=np.repeat(np.arange(count // 4), 4),
        visibility=generator.random((count, 3)),
        limb=np.stack([np.cos(angle), np.sin(angle)], axis=-1),
    )


def advice(residuals: ResidualSample, assigned: ResidualSample | None = None) -> dict[str, str]:
    result = analyse_residuals(residuals, assigned or residuals, LAYOUT, SETTINGS)
    return {entry["setting"]: entry["value"] for entry in result["recommendations"]}


def test_a_gaussian_is_recognised() -> None:
    residuals = world()
    found = tails(residuals, robust_scatter(residuals.normalized, residuals.labelled)[0], SETTINGS)["constant"]
    assert found["gain_mean"] < 1e-3
    survival = found["survival"]
    np.testing.assert_allclose(survival["empirical"], survival["gaussian"], atol=0.01)
    printed = advice(residuals)
    assert printed["distribution"] == "gaussian"
    assert printed["dispersion"] == "isotropic"
    assert printed["keypoints"] == "independent"
    assert printed["alpha"] == "0"


def test_heavy_tails_are_recognised() -> None:
    residuals = world(8000, nu=4.0)
    found = tails(residuals, robust_scatter(residuals.normalized, residuals.labelled)[0], SETTINGS)["constant"]
    np.testing.assert_allclose(found["nu"], 4.0, rtol=0.15)
    assert found["gain_interval"][0] > 0.05
    np.testing.assert_allclose(found["survival"]["empirical"], found["survival"]["student_t"], atol=0.01)
    # The gain is the difference of two log densities, here by scipy.
    distribution, scale = residuals.normalized[residuals.labelled], 0.3
    student = stats.multivariate_t(shape=scale * np.eye(2), df=4).logpdf(distribution).mean()
    gaussian = stats.multivariate_normal(cov=distribution.var() * np.eye(2)).logpdf(distribution).mean()
    assert found["gain_mean"] == pytest.approx(student - gaussian, abs=0.02)
    assert advice(residuals)["distribution"] == "student-t"


def test_varying_spread_alone_is_not_called_heavy_tails() -> None:
    """Gaussian within bins: heavy-tailed with a constant scale, not with a scale by bins."""
    residuals = world(12000)
    assert residuals.visibility is not None
    factor = np.where(residuals.visibility < 0.5, 3.0, 0.5)
    residuals = replace(residuals, normalized=residuals.normalized * factor[..., None])
    found = tails(residuals, robust_scatter(residuals.normalized, residuals.labelled)[0], SETTINGS)
    assert found["constant"]["nu_median"] < 5
    assert found["constant"]["gain_mean"] > 0.1
    assert found["binned"]["gain_mean"] < 5e-3
    assert advice(residuals)["distribution"] == "gaussian"


@given(st.floats(-0.8, 0.8), st.floats(0.3, 3.0), st.sampled_from([None, 4.0]))
def test_scatter_has_the_distribution_s_shape(correlation: float, ratio: float, nu: float | None) -> None:
    covariance = np.array([[ratio**2, ratio * correlation], [ratio * correlation, 1.0]])
    residuals = world(3000, nu=nu, covariance=covariance)
    scatter, weight = robust_scatter(residuals.normalized, residuals.labelled)
    np.testing.assert_allclose(scatter / scatter[:, 1:, 1:], np.tile(covariance, (3, 1, 1)), atol=0.25 * ratio)
    found = shape(residuals, weight, AnalysisSettings(bootstrap=30))["image"]
    np.testing.assert_allclose(found["ratio"], ratio, rtol=0.1)
    np.testing.assert_allclose(found["correlation"], correlation, atol=0.08)
    assert (found["correlation_interval"][:, 0] < found["correlation_interval"][:, 1]).all()


def test_shape_decides_the_dispersion() -> None:
    assert advice(world(covariance=((0.6, 0.0), (0.0, 0.2))))["dispersion"] == "diagonal"
    assert advice(world(covariance=((0.6, 0.2), (0.2, 0.4))))["dispersion"] == "full"
    # Errors along the limb, whichever way it points: no correlation in image axes, yet full pays.
    residuals = world()
    assert residuals.limb is not None
    along = (residuals.normalized * residuals.limb).sum(-1, keepdims=True) * residuals.limb
    turned = replace(residuals, normalized=residuals.normalized + along)
    found = shape(turned, robust_scatter(turned.normalized, turned.labelled)[1], SETTINGS)
    assert np.abs(found["image"]["correlation"]).max() < 0.06
    assert found["limb"]["correlation"].min() > 0.2
    assert advice(turned)["dispersion"] == "full"


@given(st.floats(0.0, 0.9))
def test_correlation_of_keypoints(shared: float) -> None:
    residuals = world(3000, shared=shared)
    scatter, weight = robust_scatter(residuals.normalized, residuals.labelled)
    found = keypoint_correlation(residuals, scatter, weight)
    expected = np.where(np.eye(3, dtype=bool), 1.0, shared)
    np.testing.assert_allclose(found["matrix"], expected, atol=0.06)
    assert found["mean"] == pytest.approx(shared, abs=0.05)


def test_shift_is_mended_by_the_right_weights() -> None:
    """Inference keeps cells in proportion to confidence, so alpha 1 is right by construction."""
    everything = world(20000)
    spread = 1.2 - everything.confidence
    everything = replace(everything, normalized=everything.normalized * spread[:, None, None])
    kept = np.random.default_rng(1).random(len(everything)) < everything.confidence
    chosen: dict[str, Any] = {name: None if value is None else value[kept] for name, value in vars(everything).items()}
    rows = {row["alpha"]: row for row in shift(ResidualSample(**chosen), everything, SETTINGS)["weights"]}
    assert min(rows, key=lambda alpha: rows[alpha]["distance"]) == 1.0
    assert rows[1.0]["distance"] < 0.02 < rows[0.0]["distance"]
    confidence = everything.confidence
    kish = confidence.sum() ** 2 / (confidence**2).sum() / len(confidence)
    assert rows[1.0]["effective"] == pytest.approx(kish)
    assert rows[0.0]["effective"] == 1.0
    assert advice(ResidualSample(**chosen), everything)["alpha"] == "1"


def test_gap_is_that_of_kolmogorov_and_smirnov() -> None:
    one, other = world(500, seed=1), world(300, nu=3.0, seed=2)
    row = shift(one, other, SETTINGS)["weights"][0]
    expected = stats.ks_2samp(one.radius[one.labelled], other.radius[other.labelled]).statistic
    assert row["distance"] == pytest.approx(expected, abs=1e-12)


def test_downweighting_is_the_slope_over_the_radius() -> None:
    """w(u) = rho'(u) / u of each objective, by central differences, over its value at zero."""
    found = downweighting(world(nu=5.0))
    nu, tau = found["nu"], found["tau"]
    objectives: dict[str, Callable[[float], float]] = {
        "gaussian": lambda u: u**2 / 2,
        "oks": lambda u: 1 - np.exp(-(u**2) / 2),
        "student_t": lambda u: (nu + 2) / 2 * np.log1p((u / tau) ** 2 / nu),
    }
    step = 1e-4
    for name, objective in objectives.items():
        slope = [(objective(u + step) - objective(u - step)) / (2 * step * u) for u in found["radius"][1:]]
        first = (objective(1e-3 + step) - objective(1e-3 - step)) / (2 * step * 1e-3)
        np.testing.assert_allclose(found[name][1:], np.array(slope) / first, rtol=1e-4, atol=1e-7)


def test_scale_weights_and_pruning_follow_their_rules() -> None:
    residuals = world()
    same_pixels = residuals.normalized / np.sqrt(residuals.area)[:, None, None] * 100
    assert advice(residuals)["scale-weight"] == "on"  # spread grows with the object
    assert advice(replace(residuals, normalized=same_pixels))["scale-weight"] == "off"
    assert advice(residuals)["pruning similarity"] == "0.5"
    precise = replace(residuals, normalized=residuals.normalized / 4)
    assert float(advice(precise)["pruning similarity"]) > 0.8


def test_resampling_keeps_images_whole() -> None:
    images = np.array([5, 5, 9, 9, 9])
    values = np.array([[1.0], [1.0], [10.0], [10.0], [10.0]])
    sums = resampled_sums(images, values, AnalysisSettings(bootstrap=50))
    assert set(sums[:, 0]) <= {4.0, 32.0, 60.0}
    assert len(set(sums[:, 0])) == 3


@given(st.lists(st.floats(-5, 5), min_size=10, max_size=60, unique=True))
def test_bins_have_equal_counts(values: list[float]) -> None:
    index, edges = equal_bins(np.array(values), 5)
    counts = np.bincount(index, minlength=5)
    assert counts.max() - counts.min() <= 2
    assert (np.diff(edges) >= 0).all()


def test_nothing_to_analyse() -> None:
    empty = replace(world(20), labelled=np.zeros((20, 3), dtype=bool))
    with pytest.raises(HaloposeError, match="no labelled keypoint"):
        analyse_residuals(empty, empty, LAYOUT, SETTINGS)


def test_one_keypoint_and_few_instances() -> None:
    residuals = world(12)
    columns = {
        name: value[:, :1] if value is not None and value.ndim > 1 else value for name, value in vars(residuals).items()
    }
    lonely = ResidualSample(**(columns | {"limb": None, "visibility": None}))
    result = analyse_residuals(lonely, lonely, Keypoints.of(1, names=NAMES[:1], sigmas=SIGMAS[:1]), SETTINGS)
    assert "<h1>" in analysis_page.render_analysis(result)


def test_the_page_escapes_and_reads_back(tmp_path: Path) -> None:
    residuals = world(600)
    names = ("<script>alert(1)</script>", "left_eye", "c")
    result = analyse_residuals(residuals, residuals, replace(LAYOUT, names=tuple(names)), SETTINGS)
    page = analysis_page.render_analysis(result, "A & B")
    assert "<script" not in page
    assert "A &amp; B" in page
    write_json(tmp_path / "analysis.json", result)
    assert analysis_page.render_analysis(json.loads((tmp_path / "analysis.json").read_text()), "A & B") == page
    with pytest.raises(HaloposeError, match="shape is missing"):
        analysis_page.render_analysis({"tails": {}})


@pytest.mark.usefixtures("one_thread")
def test_end_to_end(tmp_path: Path) -> None:
    model = pose_model("11")
    torch.save({"model": model}, tmp_path / "base.pt")
    host = UltralyticsHost(model)
    data = write_scenes(tmp_path / "data", host, {"val": 12})
    output = tmp_path / "out"
    arguments = ["analyse", str(data), "--base", str(tmp_path / "base.pt"), "-o", str(output), "--imgsz", "64"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "dispersion" in done.output
    result = json.loads((output / "analysis.json").read_text())
    assert "<svg" in (output / "analysis.html").read_text()
    store = MatchStore(output / "store")
    assert result["matched_instances"] == len(matched_residuals(store))
    # The same true positives and residuals as the evaluation's.
    truth = store.ground_truth()
    matched = match_poses(constant_predictions(store), truth, Protocol())
    own = matched_residuals(store)
    scale = np.sqrt(own.area)[:, None, None] * host.layout.kappa[:, None]
    theirs = matched.residual[matched.labelled]
    np.testing.assert_allclose(
        np.sort((own.normalized * scale)[own.labelled], axis=0), np.sort(theirs, axis=0), atol=1e-9
    )
    training = collect_validation(host, load_dataset(data, "val"), tmp_path / "again", FitSettings(imgsz=64))
    same = analyse(store, training=training)
    assert same["shift"]["weights"] == result["shift"]["weights"]
