"""The protocol on data whose law is known: what is right passes, every flaw is seen, nothing leaks."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from halopose.data.coco import parse_predictions, read_ground_truth
from halopose.data.files import write_json
from halopose.data.splits import image_folds
from halopose.data.synthetic import World, synthesize
from halopose.errors import HaloposeError
from halopose.evaluation.calibrations import REGIMES, Fitted, Given, Regimes, cross_fitted, fit_gaussian, given_law
from halopose.evaluation.keypoint_statistics import Statistics, curves_of, summaries
from halopose.evaluation.matching import keypoint_similarity
from halopose.evaluation.protocol import SCALAR_METRICS, evaluate
from halopose.evaluation.true_positives import MatchedPoses, Protocol, match_poses
from halopose.uncertainty.distributions import Gaussian, StudentT, scale_tril_from_raw
from halopose.uncertainty.pruning import localization_confidence

SEEDS = st.integers(0, 2**32 - 1)


def poses(instances, keypoints, nu=None, seed=0, images=None, flaw=1.0):
    """True positives drawn from their own law, ``flaw`` times as far from the truth; no selection by OKS."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(instances, keypoints, 3)) * [1.0, 2.0, 1.0] + 1.5
    raw[..., 1] -= 1.5
    factors = scale_tril_from_raw(torch.from_numpy(raw))
    dof = None if nu is None else np.full(keypoints, float(nu))
    law = Gaussian(factors) if dof is None else StudentT(factors, torch.from_numpy(dof))
    residual = flaw * law.sample(1, torch.Generator().manual_seed(seed))[0].numpy()
    images = images or max(instances // 3, 2)
    return MatchedPoses(
        image_ids=np.sort(rng.integers(0, images, instances)) * 7 + 1,
        objects=np.arange(instances),
        residual=residual,
        labelled=rng.random((instances, keypoints)) < 2,
        covariance=law.covariance.numpy(),
        scale=law.scale.numpy(),
        visibility=rng.random((instances, keypoints)),
        area=np.exp(rng.uniform(np.log(300), np.log(60_000), instances)),
        box_area=np.exp(rng.uniform(np.log(300), np.log(60_000), instances)),
        dof=dof,
        names=tuple(f"k{i}" for i in range(keypoints)),
        sigmas=np.linspace(0.05, 0.1, keypoints),
    )


def partly_labelled(matched, seed=0, share=0.7):
    labelled = np.random.default_rng(seed).random(matched.labelled.shape) < share
    return replace(matched, labelled=labelled)


def as_given(matched, thresholds=-np.inf, law=None):
    """Score the predictions' own law, uncalibrated, as all three regimes."""
    law = law or given_law(matched)
    return Regimes(
        dict.fromkeys(REGIMES, law), law.covariance.numpy(), np.full(len(matched), thresholds), "as given"
    )


def text(result, tmp_path):
    write_json(tmp_path / "metrics.json", result)
    return (tmp_path / "metrics.json").read_text()


def statistics_of(law, matched):
    confidence = localization_confidence(law.covariance.numpy(), matched.area, matched.sigmas)
    similarity = keypoint_similarity(matched.residual, matched.area, matched.sigmas)
    return Statistics.of(law, matched.residual, matched.labelled, confidence, similarity)


def diagnose(law, matched):
    """Scalars and plot data of one law."""
    statistics = statistics_of(law, matched)
    keypoint = np.nonzero(matched.labelled)[1]
    everyone = np.zeros(len(keypoint), dtype=np.int64)
    return summaries(statistics, everyone, 1)[0], curves_of(statistics, keypoint, matched.names)


def qq_ratio(curves, axis, low, high, name="k0"):
    """Mean of empirical over theoretical quantiles between two positions."""
    points = curves["qq_keypoints"][name][axis] if curves["qq"] is None else curves["qq"][axis]
    start, stop = int(low * len(points["theoretical"])), int(high * len(points["theoretical"]))
    return float(np.mean((points["empirical"] / points["theoretical"])[start:stop]))


# --- the right law passes, every flaw is seen -------------------------------------------------------------


@pytest.fixture(scope="module", params=[None, 5], ids=["gaussian", "student-t"])
def truthful(request):
    """200,000 keypoints that follow the law predicted for them."""
    return poses(50_000, 4, request.param, seed=1)


def test_data_drawn_from_the_model_are_calibrated(truthful):
    result = evaluate(truthful, as_given(truthful))["uncalibrated"]
    assert result["count"] == 200_000
    for axis in ("", "_x", "_y"):
        assert result[f"ace{axis}"] <= 0.003
        assert result[f"ence{axis}"] <= 0.02
    law = given_law(truthful)
    _, curves = diagnose(law, truthful)
    assert qq_ratio(curves, "joint", 0.3, 0.9) == pytest.approx(1, abs=0.03)
    assert qq_ratio(curves, "x", 0.7, 0.9) == pytest.approx(1, abs=0.03)
    assert qq_ratio(curves, "y", 0.1, 0.3) == pytest.approx(1, abs=0.03)
    moments = curves["moments"]
    size = np.trace(moments["predicted"])
    np.testing.assert_allclose(moments["empirical"] / size, moments["predicted"] / size, atol=0.05)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_every_diagnostic_sees_a_scale_error(truthful, factor):
    law = given_law(truthful)
    flawed = replace(law, scale_tril=law.scale_tril * factor)
    if isinstance(law, StudentT):
        flawed = replace(flawed, moment=law.covariance * factor**2)
    right, _ = diagnose(law, truthful)
    wrong, curves = diagnose(flawed, truthful)
    for axis in ("", "_x", "_y"):
        assert wrong[f"ace{axis}"] > 0.015 > 5 * right[f"ace{axis}"]
        assert wrong[f"ence{axis}"] == pytest.approx(abs(1 / factor - 1), abs=0.03)
        assert wrong[f"ence{axis}"] > 3 * right[f"ence{axis}"]
    assert wrong["nll"] > right["nll"] + 0.005
    assert qq_ratio(curves, "joint", 0.3, 0.8) == pytest.approx(factor**-2, rel=0.03)
    assert qq_ratio(curves, "x", 0.7, 0.9) == pytest.approx(1 / factor, rel=0.03)


def test_coverage_and_qq_see_a_wrong_tail(truthful):
    """The covariance is right, the shape is not: variance calibration alone would be content."""
    law = given_law(truthful)
    if isinstance(law, StudentT):
        flawed = Gaussian(torch.linalg.cholesky(law.covariance))
    else:
        flawed = StudentT(law.scale_tril * (3 / 5) ** 0.5, torch.full((4,), 5.0).double(), law.covariance)
    right, _ = diagnose(law, truthful)
    wrong, curves = diagnose(flawed, truthful)
    assert wrong["ence"] == pytest.approx(right["ence"], rel=1e-6)
    for axis in ("", "_x", "_y"):
        assert wrong[f"ace{axis}"] > 0.015 > 5 * right[f"ace{axis}"]
    assert wrong["nll"] > right["nll"] + 0.01
    tail, body = qq_ratio(curves, "joint", 0.95, 1), qq_ratio(curves, "joint", 0.2, 0.5)
    if isinstance(law, StudentT):
        assert tail > 1.5  # further out than a Gaussian goes
        assert body < 0.95
    else:
        assert tail < 0.7
        assert body > 1.05


def test_marginals_and_nll_see_swapped_axes(truthful):
    law = given_law(truthful)
    scale, covariance = (matrix[..., ::-1, ::-1].copy() for matrix in (truthful.scale, truthful.covariance))
    swapped = replace(truthful, scale=scale, covariance=covariance)
    right, _ = diagnose(law, truthful)
    wrong, _ = diagnose(given_law(swapped), swapped)
    for axis in ("_x", "_y"):
        assert wrong[f"ace{axis}"] > 0.02
        assert wrong[f"ence{axis}"] > 0.1
    assert wrong["nll"] > right["nll"] + 0.1
    assert wrong["ence"] == pytest.approx(right["ence"], rel=1e-6)  # the trace is the same


def test_calibration_mends_a_scale_error():
    matched = poses(8000, 4, None, seed=2, flaw=1.4)
    result = evaluate(matched)
    assert result["uncalibrated"]["ace"] > 0.1
    assert result["uncalibrated"]["ence"] > 0.3
    for regime in ("gaussian", "student_t"):
        assert result[regime]["ace"] < 0.006
        assert result[regime]["ence"] < 0.04
    np.testing.assert_allclose(result["calibration"]["tau"], 1.4, rtol=0.03)
    heavy = evaluate(poses(8000, 4, 3, seed=2, flaw=1.4))
    assert heavy["student_t"]["ace"] < 0.006 < heavy["gaussian"]["ace"]
    np.testing.assert_allclose(heavy["calibration"]["nu"], 3, rtol=0.2)


# --- statistics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [None, 4])
def test_statistics_are_their_definitions(nu):
    """Coverage by the paper's own inequalities (eqs. 25, 26 and appendix D.1), Q-Q by appendix D.2."""
    matched = partly_labelled(poses(400, 3, nu, seed=3))
    law = given_law(matched)
    scalars, curves = diagnose(law, matched)
    mask = matched.labelled
    residual, scale, covariance = matched.residual[mask], matched.scale[mask], law.covariance.numpy()[mask]
    distance = np.einsum("ni,nij,nj->n", residual, np.linalg.inv(scale), residual)
    standard = residual / np.sqrt(np.diagonal(scale, axis1=1, axis2=2))
    joint, marginal = (stats.chi2(2), stats.norm()) if nu is None else (stats.f(2, nu), stats.t(nu))
    limit = 1 if nu is None else 2
    levels = np.arange(1, 100) / 100
    np.testing.assert_allclose(
        curves["coverage"]["joint"], [(distance <= limit * joint.ppf(a)).mean() for a in levels]
    )
    for i, axis in enumerate("xy"):
        expected = [(np.abs(standard[:, i]) <= marginal.ppf((1 + a) / 2)).mean() for a in levels]
        np.testing.assert_allclose(curves["coverage"][axis], expected)
    assert scalars["ace"] == pytest.approx(np.abs(curves["coverage"]["joint"] - levels).mean(), rel=1e-12)
    assert scalars["count"] == mask.sum()
    nll = -law.log_prob(torch.from_numpy(matched.residual)).numpy()[mask]
    assert scalars["nll"] == pytest.approx(nll.mean(), rel=1e-12)
    order = np.argsort(covariance.trace(axis1=1, axis2=2))
    parts = np.array_split(order, 20)
    half = (residual**2).sum(1) / 2
    np.testing.assert_allclose(curves["variance"]["joint"]["empirical"], [half[p].mean() for p in parts])
    for k, name in enumerate(matched.names):
        mine = np.nonzero(mask)[1] == k
        for i, axis in enumerate("xy"):
            assert_on_qq(curves["qq_keypoints"][name][axis], standard[mine, i], marginal.ppf)
        assert_on_qq(curves["qq_keypoints"][name]["joint"], distance[mine], lambda p: limit * joint.ppf(p))
    assert (curves["qq"] is None) == (nu is not None)


def assert_on_qq(points, values, quantile):
    """Every point is (q((n - 1/2) / N), n-th smallest value) for some n."""
    expected = quantile((np.arange(len(values)) + 0.5) / len(values))
    rank = np.abs(expected[:, None] - points["theoretical"]).argmin(0)
    np.testing.assert_allclose(points["theoretical"], expected[rank], rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(points["empirical"], np.sort(values)[rank], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("nu", [None, 4])
def test_resampling_with_ones_changes_nothing(nu):
    matched = partly_labelled(poses(500, 3, nu, seed=4))
    statistics = statistics_of(given_law(matched), matched)
    ones = np.ones(len(statistics.nll), dtype=int)
    whole = summaries(statistics, np.zeros(len(ones), dtype=np.int64), 1)[0]
    resampled = statistics.resampled(ones)
    assert set(resampled) == set(SCALAR_METRICS)
    for name, value in resampled.items():
        assert value == pytest.approx(whole[name], rel=1e-12), name


def repeated(statistics, weight):
    """The same statistics with copies instead of weights."""
    index = np.arange(len(weight)).repeat(weight)
    values = {}
    for field in fields(Statistics):
        value = getattr(statistics, field.name)
        if isinstance(value, dict):
            values[field.name] = {axis: column[index] for axis, column in value.items()}
        else:
            values[field.name] = None if value is None else value[index]
    return Statistics(**values)


@settings(max_examples=15)
@given(SEEDS, st.sampled_from([None, 4]))
def test_resampling_is_copying(seed, nu):
    rng = np.random.default_rng(seed)
    matched = partly_labelled(poses(100, 3, nu, seed=seed % 1000), seed)
    statistics = statistics_of(given_law(matched), matched)
    weight = rng.integers(0, 4, len(statistics.nll))
    copied = repeated(statistics, weight)
    expected = summaries(copied, np.zeros(weight.sum(), dtype=np.int64), 1)[0]
    for name, value in statistics.resampled(weight).items():
        assert value == pytest.approx(expected[name], rel=1e-10), name


@settings(max_examples=15)
@given(SEEDS, st.sampled_from([None, 4]))
def test_taking_a_part_is_measuring_the_part(seed, nu):
    rng = np.random.default_rng(seed)
    matched = poses(60, 3, nu, seed=seed % 1000)
    kept = rng.random(matched.labelled.shape) < 0.6
    part = replace(matched, labelled=kept)
    law = given_law(matched)
    taken = statistics_of(law, matched).take(kept[matched.labelled])
    direct = statistics_of(law, part)
    group = np.nonzero(kept)[1]
    np.testing.assert_equal(summaries(taken, group, 3), summaries(direct, group, 3))
    for axis in ("joint", "x", "y"):
        np.testing.assert_array_equal(taken.by_variance[axis], direct.by_variance[axis])
    np.testing.assert_array_equal(taken.by_confidence, direct.by_confidence)


def test_groups_are_each_one_alone():
    matched = partly_labelled(poses(300, 4, 4, seed=5))
    statistics = statistics_of(given_law(matched), matched)
    group = np.nonzero(matched.labelled)[1]
    for k, block in enumerate(summaries(statistics, group, 5)[:4]):
        alone = summaries(statistics.take(group == k), np.zeros((group == k).sum(), dtype=np.int64), 1)[0]
        assert block == pytest.approx(alone, rel=1e-12)
    empty = summaries(statistics, group, 5)[4]
    assert empty["count"] == 0
    assert all(np.isnan(empty[name]) for name in SCALAR_METRICS)


# --- shards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [None, 4])
def test_shards_merge_to_the_whole(nu, tmp_path):
    matched = partly_labelled(poses(240, 3, nu, seed=6, flaw=1.2))
    protocol = Protocol(bootstrap=5)
    whole = text(evaluate(matched, protocol=protocol), tmp_path)
    rng = np.random.default_rng(0)
    for _ in range(3):
        shard = rng.integers(0, 4, 10_000)[matched.image_ids]
        parts = [matched.select(np.flatnonzero(shard == s)) for s in rng.permutation(4)]
        merged = MatchedPoses.concatenate(parts)
        assert text(evaluate(merged, protocol=protocol), tmp_path) == whole


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    content, entries = synthesize(World(images=80, persons=250))
    path = tmp_path_factory.mktemp("synthetic") / "truth.json"
    write_json(path, content)
    truth = read_ground_truth(path)
    return parse_predictions("predictions", entries, truth), truth


def test_shards_of_predictions_merge_to_the_whole(synthetic, tmp_path):
    predictions, truth = synthetic
    whole = text(evaluate(match_poses(predictions, truth)), tmp_path)
    parts = [match_poses(predictions[predictions.image_ids % 3 == s], truth) for s in (2, 0, 1)]
    assert text(evaluate(MatchedPoses.concatenate(parts)), tmp_path) == whole


def test_overlapping_shards_are_refused():
    matched = poses(30, 3)
    image = matched.image_ids[10]
    first = matched.select(np.flatnonzero(matched.image_ids <= image))
    second = matched.select(np.flatnonzero(matched.image_ids >= image))
    with pytest.raises(HaloposeError, match="same image"):
        MatchedPoses.concatenate([first, second])


@pytest.mark.parametrize(
    "change",
    [{"dof": np.full(3, 9.0)}, {"dof": None}, {"names": ("a", "b", "c")}, {"sigmas": np.full(3, 0.5)}],
    ids=["dof", "no dof", "names", "sigmas"],
)
def test_shards_of_different_kinds_are_refused(change):
    """Whatever the first shard says would silently be taken for all of them."""
    matched = poses(30, 3, 4)
    half = matched.image_ids <= matched.image_ids[15]
    first, second = (matched.select(np.flatnonzero(part)) for part in (half, ~half))
    with pytest.raises(HaloposeError):
        MatchedPoses.concatenate([first, replace(second, **change)])


# --- cross-fitting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [None, 4])
@pytest.mark.parametrize("folds", [2, 5])
def test_cross_fitting_never_uses_an_images_own_data(nu, folds):
    matched = partly_labelled(poses(300, 3, nu, seed=7))
    protocol = Protocol(folds=folds)
    before = cross_fitted(matched, protocol)
    fold = image_folds(matched.image_ids, folds)
    for image in np.unique(matched.image_ids)[::17]:
        mine = matched.image_ids == image
        wild = np.where(mine[:, None, None], 1e3 * matched.residual + 50, matched.residual)
        after = cross_fitted(replace(matched, residual=wild), protocol)
        same = fold == fold[mine][0]
        for name in ("gaussian", "student_t"):
            assert torch.equal(before.laws[name].scale_tril[same], after.laws[name].scale_tril[same])
            assert torch.equal(before.laws[name].covariance[same], after.laws[name].covariance[same])
            moved = before.laws[name].scale_tril[~same] != after.laws[name].scale_tril[~same]
            assert moved.any()  # the others do learn from it
        assert torch.equal(before.laws["student_t"].dof[same], after.laws["student_t"].dof[same])
        np.testing.assert_array_equal(before.thresholds[same], after.thresholds[same])


def test_each_fold_is_calibrated_on_the_others():
    matched = poses(300, 3, seed=8, flaw=1.3)
    regimes = cross_fitted(matched, Protocol(folds=3))
    fold = image_folds(matched.image_ids, 3)
    for number in range(3):
        mine, rest = fold == number, matched.select(np.flatnonzero(fold != number))
        fitted = Fitted.on(rest, Protocol())
        moments = np.einsum("nki,nkij,nkj->k", rest.residual, np.linalg.inv(rest.covariance), rest.residual)
        expected = (moments / (2 * len(rest)))[:, None, None] * matched.covariance[mine]
        np.testing.assert_allclose(regimes.laws["gaussian"].covariance[mine], expected, rtol=1e-9, atol=1e-9)
        assert (regimes.laws["student_t"].dof[mine] == fitted.student.nu_).all()
        assert (regimes.thresholds[mine] == fitted.threshold).all()


@given(st.lists(st.integers(0, 2**53), min_size=2, max_size=60), st.integers(2, 7))
def test_folds_are_by_image_and_even(ids, folds):
    images = np.array(ids)
    if len(np.unique(images)) < 2:
        with pytest.raises(HaloposeError, match="different images"):
            image_folds(images, folds)
        return
    fold = image_folds(images, folds)
    by_image = {image: {int(f) for f in fold[images == image]} for image in ids}
    assert all(len(numbers) == 1 for numbers in by_image.values())
    sizes = np.bincount([numbers.pop() for numbers in by_image.values()], minlength=folds)
    assert sizes.max() - sizes.min() <= 1
    # The order of the data does not matter.
    order = np.argsort(images, kind="stable")
    np.testing.assert_array_equal(image_folds(images[order], folds), fold[order])


# --- pruning ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [None, 4])
def test_pruning_alters_nothing_but_the_selection(nu):
    matched = partly_labelled(poses(300, 3, nu, seed=9))
    protocol = Protocol(bootstrap=5)
    regimes = cross_fitted(matched, protocol)
    result = evaluate(matched, regimes, protocol)
    confidence = localization_confidence(regimes.covariance, matched.area, matched.sigmas)
    kept = confidence >= regimes.thresholds[:, None]
    share = kept[matched.labelled].mean()
    assert 0.05 < share < 0.95
    assert result["pruned"]["kept_fraction"] == pytest.approx(share, rel=1e-12)
    # Pruned metrics and their intervals are those of the kept keypoints under the same laws ...
    selected = evaluate(replace(matched, labelled=matched.labelled & kept), regimes, protocol)
    # ... and the metrics of everything do not know of the threshold.
    unpruned = evaluate(matched, replace(regimes, thresholds=np.full(len(matched), -np.inf)), protocol)
    assert unpruned["pruned"]["kept_fraction"] == 1
    for name in REGIMES:
        np.testing.assert_equal(result["pruned"][name], selected[name])
        np.testing.assert_equal(result[name], unpruned[name])
        np.testing.assert_equal(unpruned["pruned"][name], unpruned[name])
        for plot in ("coverage", "variance", "moments"):
            np.testing.assert_equal(result["curves"][name][plot], unpruned["curves"][name][plot])
            np.testing.assert_equal(result["curves_pruned"][name][plot], selected["curves"][name][plot])


def test_pruning_raises_reliability():
    matched = poses(3000, 3, 4, seed=10)
    result = evaluate(matched)
    curve = result["pruning_curve"]
    correct = keypoint_similarity(matched.residual, matched.area, matched.sigmas) >= 0.5
    assert curve["kept"][-1] == 1
    assert curve["reliability"][-1] == pytest.approx(correct.mean(), rel=1e-12)
    assert curve["reliability"][50] > correct.mean() + 0.1
    assert curve["nll"][-1] == pytest.approx(result["gaussian"]["nll"], rel=1e-12)


def test_everything_pruned_is_still_an_answer():
    """A threshold chosen elsewhere may prune all of this data."""
    matched = poses(30, 3)
    result = evaluate(matched, as_given(matched, thresholds=np.inf))
    assert result["pruned"]["kept_fraction"] == 0
    assert np.isnan(result["pruned"]["gaussian"]["ace"])


# --- bootstrap --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bootstrapped():
    matched = partly_labelled(poses(900, 3, 4, seed=11, flaw=1.5))
    return matched, evaluate(matched, protocol=Protocol(bootstrap=40, seed=3))


def test_bootstrap_intervals_hold_the_point_estimate(bootstrapped):
    _, result = bootstrapped
    for block in (result["uncalibrated"], result["pruned"]["uncalibrated"]):
        for name in SCALAR_METRICS:
            low, high = block["interval"][name]
            assert low < block[name] < high, name
    for regime in REGIMES:
        for name in ("nll", "akp"):
            low, high = result[regime]["interval"][name]
            assert low < result[regime][name] < high, (regime, name)
    for name in ("akp_visibility", "akp_random", "akp_skill"):
        low, high = result["interval"][name]
        assert low < result[name] < high, name


def test_bootstrap_is_reproducible_and_leaves_the_estimates_alone(bootstrapped, tmp_path):
    matched, result = bootstrapped
    again = evaluate(matched, protocol=Protocol(bootstrap=40, seed=3))
    assert text(again, tmp_path) == text(result, tmp_path)
    other = evaluate(matched, protocol=Protocol(bootstrap=40, seed=4))
    assert other["gaussian"]["interval"] != result["gaussian"]["interval"]
    plain = evaluate(matched, protocol=Protocol(seed=3))
    for name in SCALAR_METRICS:
        assert plain["gaussian"][name] == result["gaussian"][name]
    assert "interval" not in plain["gaussian"]


def test_bootstrap_reports_progress():
    seen = []
    matched = poses(30, 3)
    evaluate(matched, protocol=Protocol(bootstrap=4), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_bootstrap_resamples_images_not_keypoints():
    """All keypoints of an image share their fate: with the errors of images alike, intervals are wider."""
    matched = poses(600, 4, seed=12, images=60)
    shared = np.exp(np.random.default_rng(0).normal(0, 0.6, matched.image_ids.max() + 1))[matched.image_ids]
    clustered = replace(matched, residual=matched.residual * shared[:, None, None])
    shuffled = np.random.default_rng(1).permutation(shared)
    scattered = replace(matched, residual=matched.residual * shuffled[:, None, None])
    widths = []
    for data in (clustered, scattered):
        low, high = evaluate(data, as_given(data), Protocol(bootstrap=60))["uncalibrated"]["interval"]["nll"]
        widths.append(high - low)
    assert widths[0] > 1.3 * widths[1]


# --- the whole result -------------------------------------------------------------------------------------


def test_cells_and_blocks_add_up(synthetic):
    predictions, truth = synthetic
    matched = match_poses(predictions, truth)
    result = evaluate(matched)
    assert result["keypoints"] == matched.labelled.sum() == result["cells"]["count"].sum()
    assert result["matched_instances"] == len(matched) == sum(s["instances"] for s in result["scales"])
    for regime in REGIMES:
        for part in ("per_keypoint", "per_scale"):
            blocks = result[regime][part].values()
            assert sum(block["count"] for block in blocks) == result["keypoints"]
            pooled = sum(block["count"] * block["nll"] for block in blocks if block["count"])
            assert pooled / result["keypoints"] == pytest.approx(result[regime]["nll"], rel=1e-9)
        counts, half = result["cells"]["count"], np.nan_to_num(result["cells"][regime]["50"])
        covered = (counts * half).sum() / counts.sum()
        assert covered == pytest.approx(result["curves"][regime]["coverage"]["joint"][49], rel=1e-9)
    json.loads(json.dumps(result["settings"]))


def test_calibrations_fitted_elsewhere():
    train, test = poses(4000, 3, seed=13, flaw=1.3), poses(3000, 3, seed=14, flaw=1.3)
    fitted = Fitted.on(train, Protocol())
    regimes = cross_fitted(test, Protocol(), Given(fitted.gaussian, fitted.student, fitted.threshold))
    tau = fitted.gaussian.tau_.numpy()[:, None, None]
    np.testing.assert_allclose(regimes.laws["gaussian"].covariance, tau**2 * test.covariance, rtol=1e-9)
    assert (regimes.laws["student_t"].dof == fitted.student.nu_).all()
    assert (regimes.thresholds == fitted.threshold).all()
    assert regimes.source == "given: gaussian, student, threshold"
    result = evaluate(test, regimes)
    assert result["gaussian"]["ace"] < 0.015 < result["uncalibrated"]["ace"]


def test_what_is_not_given_is_cross_fitted():
    matched = partly_labelled(poses(300, 3, seed=16, flaw=1.3))
    given_gaussian = Given(gaussian=fit_gaussian(poses(500, 3, seed=17)))
    own, mixed = cross_fitted(matched, Protocol()), cross_fitted(matched, Protocol(), given_gaussian)
    assert torch.equal(own.laws["student_t"].scale_tril, mixed.laws["student_t"].scale_tril)
    tau = given_gaussian.gaussian.tau_.numpy()[:, None, None]
    np.testing.assert_allclose(mixed.laws["gaussian"].covariance, tau**2 * matched.covariance, rtol=1e-9)
    assert not np.array_equal(own.thresholds, mixed.thresholds)


@pytest.mark.parametrize("area", ["annotation", "box"])
def test_area_of_the_confidence(area):
    matched = poses(300, 3, seed=15)
    protocol = Protocol(area=area)
    result = evaluate(matched, as_given(matched), protocol)
    used = matched.area if area == "annotation" else 0.53 * matched.box_area
    confidence = localization_confidence(matched.covariance, used, matched.sigmas)
    assert result["pruning_curve"]["threshold"][0] == pytest.approx(confidence.max(), rel=1e-9)


@pytest.mark.parametrize("empty", ["instances", "labels"])
def test_nothing_matched_is_an_error(empty):
    matched = poses(20, 3)
    if empty == "instances":
        matched = matched.select(np.zeros(0, dtype=int))
    else:
        matched = replace(matched, labelled=np.zeros((20, 3), dtype=bool))
    with pytest.raises(HaloposeError, match=r"no detection matches an annotated object at OKS 0\.5"):
        evaluate(matched)


def test_one_image_cannot_be_cross_fitted():
    with pytest.raises(HaloposeError, match="at least two"):
        evaluate(poses(20, 3, images=1))
