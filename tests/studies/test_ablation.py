"""Rows of an ablation equal those of the pipeline, differences are paired, and reruns resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from halopose.calibration.calibrate import apply_calibrations
from halopose.calibration.thresholds import select_threshold
from halopose.cli.app import app
from halopose.data.dataset_loading import load_dataset
from halopose.data.splits import split_validation
from halopose.errors import HaloposeError
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.resampling import ResampledMetrics
from halopose.evaluation.scores import METRICS, Scores
from halopose.fitting import pipeline
from halopose.fitting.artifact import Artifact
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.settings import FitSettings, TrainSettings
from halopose.hosts.base import Host
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.protocol import Protocol
from halopose.studies import ablation
from halopose.studies.ablation import (
    DEFAULT,
    SCALES,
    AblationResult,
    AblationStudy,
    AblationVariant,
    ablate,
    ablation_variants,
)
from halopose.types import Array
from halopose.uncertainty.heads import HeadSettings, head_settings
from halopose.uncertainty.pruning import localization_confidence
from tests.helpers.models import ROOT, host_of, pose_model, write_scenes
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = FitSettings(
    train=TrainSettings(epochs=1, learning_rate=1e-2, batch=32),
    train_sizes=(64,),
    imgsz=64,
    calibration_share=0.5,
    gamma_ks=0.97,  # so that some keypoints of these scenes are unreliable
)
DRAWS = 6
ALPHAS = (1.0,)
LEFT = ("default", "f1", "diagonal", "isotropic", "last-layer")
KILLED = """
import sys
from pathlib import Path
from tests.studies.test_ablation import run
run(Path(sys.argv[1]), Path(sys.argv[2]), workers=2)
"""


def run(data: Path, folder: Path, **options: Any) -> list[AblationResult]:
    host = host_of("11")
    training, validation = (load_dataset(data, split) for split in ("train", "val"))
    options = {"alphas": ALPHAS, "seeds": 1, "bootstrap": DRAWS, "workers": 1, **options}
    return ablate(host, training, validation, folder, SETTINGS, **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("data"), host_of("11"), {"train": 10, "val": 16})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, data: Path, one_thread: None) -> Path:
    folder = tmp_path_factory.mktemp("ablation")
    run(data, folder)
    return folder


@pytest.fixture(scope="module")
def results(data: Path, folder: Path) -> dict[str, AblationResult]:
    return {result.name: result for result in run(data, folder)}


@pytest.fixture(scope="module")
def fitted(data: Path, folder: Path) -> tuple[Artifact, Scores]:
    """The result of ``pipeline.fit`` on the same data in the same work folder."""
    training, validation = (load_dataset(data, split) for split in ("train", "val"))
    return pipeline.fit(host_of("11"), training, validation, folder / "work", SETTINGS)


def rows_by_name() -> dict[str, AblationVariant]:
    return {row.name: row for row in ablation_variants(SETTINGS, ALPHAS)}


# --- rows ----------------------------------------------------------------------------------------------


def test_rows_differ_from_the_default_and_from_each_other() -> None:
    rows = ablation_variants(FitSettings())
    assert len({row.variant for row in rows}) == len({row.name for row in rows}) == len(rows) == 17
    names = {row.name: row for row in rows}
    assert names["no-importance-weights"].fit.train == TrainSettings(alpha=0.0, scale_weight=False)
    assert names["isotropic"].fit.head == HeadSettings(parameterisation="isotropic")
    assert {row.name for row in rows if row.training == rows[0].training} == {
        DEFAULT, "assigned", "determinant", "eigenvalue", "distance", "f1",
    }  # fmt: skip
    assert {row.fit.train.alpha for row in rows if row.name.startswith("alpha")} == {0.0, 0.5, 2.0, 4.0}


def test_context_rows_are_the_heads_of_fit() -> None:
    rows = {row.name: row.fit.head for row in ablation_variants(FitSettings(head=head_settings(context=True)))}
    assert rows[DEFAULT] == head_settings(context=True)
    assert rows["window"] == head_settings()
    assert rows[DEFAULT].bounded


def test_a_context_row_has_the_bound_of_a_fit(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, head=head_settings(context=True), novelty_images=0)
    host, (training, validation) = host_of("11"), [load_dataset(data, split) for split in ("train", "val")]
    monkeypatch.setattr(ablation, "ablation_variants", lambda fit, alphas: ablation_variants(fit, alphas)[:1])
    [row] = ablate(host, training, validation, tmp_path, settings, seeds=1, bootstrap=2, workers=1)
    artifact, _ = pipeline.fit(host, training, validation, tmp_path / "work", settings)
    assert artifact.heads.settings.bounded
    assert row.estimate["gaussian.nll"] == pytest.approx(scores_of(artifact, tmp_path).gaussian.nll, rel=1e-9)


def test_variants_equal_to_the_default_are_omitted() -> None:
    changed = replace(FitSettings(), head=HeadSettings(warm_start=False), calibration="assigned")
    names = [row.name for row in ablation_variants(changed, (2.0, 2.0))]
    assert "cold-start" not in names
    assert "assigned" not in names
    assert "matched" in names
    assert names.count("alpha-2") == 1


# --- rows are what the pipeline computes ---------------------------------------------------------------


def as_in_the_paper(artifact: Artifact) -> Artifact:
    """The artifact as rows compare it: one Student-t for all keypoints, pruned by confidence only."""
    calibrations = replace(artifact.calibrations, visibility_threshold=None, split_student=None)
    return replace(artifact, calibrations=calibrations)


def scores_of(artifact: Artifact, folder: Path, **options: Any) -> Scores:
    images = artifact.card.images.of("evaluation")
    protocol = Protocol(area="box", **options)
    store = MatchStore(folder / "work" / "val")
    return pipeline.evaluate_artifact(as_in_the_paper(artifact), host_of("11"), store, images, protocol)


def test_the_default_row_is_a_fit(
    results: dict[str, AblationResult], fitted: tuple[Artifact, Scores], folder: Path
) -> None:
    artifact, whole = fitted
    scores, default = scores_of(artifact, folder), results[DEFAULT]
    pruned = scores.pruned
    assert scores.gaussian.metric("nll") == whole.gaussian.metric("nll")
    for distribution in ("gaussian", "student_t"):
        for name in METRICS:
            assert default.estimate[f"{distribution}.{name}"] == pytest.approx(
                scores.distribution(distribution).metric(name), rel=1e-9
            )
            kept = default.estimate[f"pruned.{distribution}.{name}"]
            assert kept == pytest.approx(pruned.distribution(distribution).metric(name), rel=1e-9, nan_ok=True)
    assert default.estimate["akp_skill"] == pytest.approx(scores.akp_skill, rel=1e-9)
    assert default.estimate["kept_fraction"] == pytest.approx(pruned.kept_fraction, rel=1e-12)
    assert default.counts == {"images": scores.images, "keypoints": scores.keypoints}
    content = json.loads((folder / "rows" / "default.json").read_text())
    assert content["threshold"] == pytest.approx(artifact.calibrations.threshold, rel=1e-12)
    assert content["training"]["best_epoch"] == present(artifact.card.training).best_epoch


def test_intervals_equal_those_of_an_evaluation(
    results: dict[str, AblationResult], fitted: tuple[Artifact, Scores], folder: Path
) -> None:
    artifact, _ = fitted
    scores, default = scores_of(artifact, folder, bootstrap=DRAWS), results[DEFAULT]
    for distribution in ("gaussian", "student_t"):
        for name in METRICS:
            own = default.estimate[f"{distribution}.{name}"] + default.margin(f"{distribution}.{name}")
            assert own == pytest.approx(scores.distribution(distribution).interval[name][1], rel=1e-9)
    own = default.estimate["akp_skill"] + default.margin("akp_skill")
    assert own == pytest.approx(scores.interval["akp_skill"][1], rel=1e-9)


def parts_of(folder: Path, row: AblationVariant, images: str) -> tuple[Any, ...]:
    """Heads of a row, and true positives of the calibration or evaluation images, step by step."""
    host, store = host_of("11"), MatchStore(folder / "work" / "val")
    heads, _ = pipeline.train_heads(host, [MatchStore(folder / "work" / "train")], row.fit)
    split = split_validation(store.images, row.fit.calibration_share)
    chosen = split[0 if images == "calibration" else 1]
    truth = store.ground_truth(chosen)
    matched = match_poses(pipeline.predictions_of(heads, store, chosen), truth, row.protocol)
    return heads, store, split, matched


def direct(folder: Path, row: AblationVariant) -> tuple[Any, ...]:
    """True positives and fitted calibrations, without the code under test."""
    heads, store, split, held_out = parts_of(folder, row, "calibration")
    calibrated = pipeline.calibrate_heads(heads, store, split[0], row.fit)
    confidence = localization_confidence(
        calibrated.gaussian.tau_.numpy()[:, None, None] ** 2 * held_out.covariance,
        held_out.box_area * 0.53,
        held_out.layout.kappa,
        row.scalarisation,
    )
    variance = held_out.area[:, None] * held_out.layout.kappa**2
    similarity = np.exp(-(held_out.residual**2).sum(-1) / (2 * variance))
    labelled = held_out.labelled
    threshold = select_threshold(confidence[labelled], similarity[labelled] >= row.fit.gamma_ks, row.rule)
    *_, matched = parts_of(folder, row, "evaluation")
    return matched, replace(calibrated, threshold=threshold, visibility_threshold=None, split_student=None)


@pytest.mark.parametrize("name", ["isotropic", "last-layer", "assigned", "eigenvalue", "f1"])
def test_other_rows_are_direct_calls(results: dict[str, AblationResult], folder: Path, name: str) -> None:
    row = rows_by_name()[name]
    matched, fitted = direct(folder, row)
    scores = evaluate(matched, apply_calibrations(matched, fitted, row.protocol), row.protocol)
    estimate = results[name].estimate
    assert estimate["kept_fraction"] == pytest.approx(scores.pruned.kept_fraction, rel=1e-12)
    for metric in ("ace", "ence_x", "nll", "akp"):
        assert estimate[f"gaussian.{metric}"] == pytest.approx(scores.gaussian.metric(metric), rel=1e-9)
        assert estimate[f"student_t.{metric}"] == pytest.approx(scores.student_t.metric(metric), rel=1e-9)
        pruned = scores.pruned.gaussian.metric(metric)
        assert estimate[f"pruned.gaussian.{metric}"] == pytest.approx(pruned, rel=1e-9, nan_ok=True)
    bins = results[name].variance["y"]
    np.testing.assert_allclose(bins["empirical"], scores.gaussian.curves.variance["y"].empirical)


# --- the paired bootstrap ------------------------------------------------------------------------------


def brute_force(matched: MatchedPoses, fitted: Any, row: AblationVariant, edges: Any) -> dict[str, Array]:
    """Metrics of every resampling, evaluated on copies of the true positives of the resampled images."""
    protocol = replace(row.protocol, scale_edges=tuple(edges))
    images = np.unique(matched.image_ids)
    picks = np.random.default_rng(0).integers(len(images), size=(DRAWS, len(images)))
    draws = []
    for pick in picks:
        copies = matched.select(np.concatenate([np.flatnonzero(matched.image_ids == images[i]) for i in pick]))
        scores = evaluate(copies, apply_calibrations(copies, fitted, protocol), protocol)
        by_scale = [summary.ace for summary in scores.gaussian.per_scale.values()]
        draws.append(
            {
                **{f"gaussian.{name}": scores.gaussian.metric(name) for name in METRICS},
                **{f"student_t.{name}": scores.student_t.metric(name) for name in METRICS},
                "pruned.gaussian.nll": scores.pruned.gaussian.nll,
                "kept_fraction": scores.pruned.kept_fraction,
                "scale.1.ace": by_scale[1],
                "scale.spread": np.nanstd(by_scale),
            }
        )
    return {name: np.array([draw[name] for draw in draws]) for name in draws[0]}


def test_paired_differences_equal_brute_force(folder: Path) -> None:
    rows, expected = {}, {}
    for name in (DEFAULT, "diagonal"):
        row = rows_by_name()[name]
        matched, fitted = direct(folder, row)
        # These scenes have objects of one size, and levels without training, whose variances are all equal.
        generator = np.random.default_rng(1)
        sizes = generator.uniform(0.3, 3, len(matched))
        covariance = matched.covariance * generator.uniform(0.5, 2, (*matched.labelled.shape, 1, 1))
        matched = replace(
            matched,
            area=matched.area * sizes,
            box_area=matched.box_area * sizes,
            covariance=covariance,
            scale=covariance,
        )
        edges = np.quantile(matched.area, np.arange(1, SCALES) / SCALES)
        expected[name] = brute_force(matched, fitted, row, edges)
        distributions = apply_calibrations(matched, fitted, row.protocol)
        measured = ResampledMetrics.of(matched, distributions, row.protocol, edges)
        draws = list(measured.draws(DRAWS, scales=True))
        columns = {metric: np.array([[draw[metric] for draw in draws]]) for metric in draws[0]}
        whole = {metric: np.array([value]) for metric, value in measured.scores(scales=True).items()}
        rows[name] = AblationResult(name, name, whole, columns, {}, [], {})
        for metric, values in expected[name].items():
            assert columns[metric][0] == pytest.approx(values, rel=1e-9, nan_ok=True), metric
    for metric, values in expected["diagonal"].items():
        paired = rows["diagonal"].minus(rows[DEFAULT], metric)
        spread = np.std(values - expected[DEFAULT][metric], ddof=1)
        assert paired.margin == pytest.approx(1.96 * spread, rel=1e-6, abs=1e-12, nan_ok=True), metric
    assert rows["diagonal"].minus(rows[DEFAULT], "gaussian.nll").margin > 0
    assert 0 < rows[DEFAULT].estimate["kept_fraction"] < 1


def test_seeds_are_trainings_of_their_own_and_are_averaged(data: Path, folder: Path) -> None:
    [twice] = run(data, folder, seeds=2, names={DEFAULT})
    study, row = study_of(data, folder), rows_by_name()[DEFAULT]
    both = [present(study.read(row.repeated(seed))).estimate["gaussian.nll"] for seed in (0, 1)]
    assert both[0] != both[1]
    assert twice.values["gaussian.nll"].tolist() == both
    assert twice.estimate["gaussian.nll"] == pytest.approx(np.mean(both))
    assert twice.margin("gaussian.nll") > 1.96 * np.std(twice.draws["gaussian.nll"].mean(0), ddof=1)


def study_of(data: Path, folder: Path) -> AblationStudy:
    """The study that ``run`` reads and writes."""
    stores = [MatchStore(folder / "work" / name) for name in ("train", "val")]
    images = load_dataset(data, "val").image_ids
    return AblationStudy(folder, images, DRAWS, ablation._digest(host_of("11"), stores))


def test_evaluation_without_matches_is_refused(folder: Path) -> None:
    matched, fitted = direct(folder, rows_by_name()[DEFAULT])
    nothing = matched.select(np.zeros(0, dtype=int))
    distributions = apply_calibrations(nothing, fitted, Protocol())
    with pytest.raises(HaloposeError, match="no detection matches"):
        ResampledMetrics.of(nothing, distributions, Protocol(), np.zeros(0))


# --- reruns --------------------------------------------------------------------------------------------


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "rows").iterdir()}


def test_a_rerun_keeps_what_is_there_and_mends_the_rest(
    data: Path, folder: Path, results: dict[str, AblationResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = times(folder)
    done: list[list[str]] = []
    compute = AblationStudy.compute

    def noted(study: AblationStudy, host: Host, rows: list[AblationVariant]) -> Any:
        done.append([row.name for row in rows])
        return compute(study, host, rows)

    monkeypatch.setattr(AblationStudy, "compute", noted)
    run(data, folder)
    assert (done, times(folder)) == ([], before)
    rows = folder / "rows"
    whole = (rows / "f1.json").read_text()
    (rows / "f1.json").write_text(whole[: len(whole) // 2])  # as a full disk would leave it
    (rows / "diagonal.json").unlink()
    other = json.loads((rows / "assigned.json").read_text())
    (rows / "assigned.json").write_text(json.dumps({**other, "key": "of something else"}))
    again = {result.name: result for result in run(data, folder)}
    assert sorted(done) == [["assigned", "f1"], ["diagonal"]]
    after = times(folder)
    assert {name for name in before if after[name] != before[name]} == {
        "f1.json",
        "diagonal.json",
        "assigned.json",
    }
    assert (rows / "f1.json").read_text() == whole
    for name in ("f1", "diagonal", "assigned"):
        assert again[name].estimate == pytest.approx(results[name].estimate, rel=1e-12, nan_ok=True)


def test_other_settings_are_other_rows(data: Path, folder: Path, tmp_path: Path) -> None:
    images = np.arange(4)
    row = rows_by_name()[DEFAULT]
    study = AblationStudy(tmp_path, images, DRAWS, "data")
    keys = [
        study._key(row),
        study._key(replace(row, rule="f1")),
        study._key(replace(row, fit=replace(SETTINGS, calibration_share=0.4))),
        replace(study, bootstrap=DRAWS + 1)._key(row),
        replace(study, data="other")._key(row),
    ]
    assert len(set(keys)) == len(keys)
    assert study._key(row) == study._key(replace(row, title="renamed"))
    assert row.training == replace(row, rule="f1", fit=replace(SETTINGS, calibration="assigned")).training


def children_of(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for child processes in /proc")
def test_a_run_killed_with_its_workers_resumes_to_the_same_rows(
    data: Path, folder: Path, tmp_path: Path, results: dict[str, AblationResult]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(folder, out)
    for path in [*out.glob("work/training-*"), *(out / "rows" / f"{name}.json" for name in LEFT)]:
        path.unlink()
    before = times(out)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, data, out],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))},
        stderr=subprocess.DEVNULL,
    )
    while len(list(out.glob("rows/*.json"))) == len(before) and process.poll() is None:
        time.sleep(0.01)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(workers) >= 2
    while any(Path(f"/proc/{pid}").is_dir() for pid in workers):  # they end with their parent
        time.sleep(0.01)
    kept = {name: value for name, value in times(out).items() if not name.startswith(".")}
    assert len(before) < len(kept) < len(results)
    for result in run(data, out):
        assert result.estimate == pytest.approx(results[result.name].estimate, rel=1e-9, nan_ok=True)
    after = times(out)
    assert {name: after[name] for name in kept} == kept


class Deadly:
    """A host that kills the process that unpickles it, as an out-of-memory error would."""

    device = torch.device("cpu")

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def test_a_worker_that_dies_is_a_one_line_error(tmp_path: Path) -> None:
    jobs = [[row] for row in ablation_variants(SETTINGS)[:2]]
    with pytest.raises(HaloposeError, match="a worker process died"):
        ablation._run(AblationStudy(tmp_path, np.arange(4), DRAWS, "data"), cast(Host, Deadly()), jobs, 2, None)


def test_environment_of_workers_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with ablation._environment({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}):
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "OMP_WAIT_POLICY" not in os.environ


# --- refusals and the command --------------------------------------------------------------------------


def test_refusals(data: Path, folder: Path) -> None:
    host, validation = host_of("11"), load_dataset(data, "val")
    with pytest.raises(HaloposeError, match="16 images"):
        ablate(host, validation, validation, folder)
    for options in ({"alphas": (-1.0,)}, {"bootstrap": 1}):
        with pytest.raises(HaloposeError, match="must not be negative"):
            run(data, folder, **options)


def test_the_command_writes_tables_and_page(
    data: Path, tmp_path: Path, results: dict[str, AblationResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def computed(
        host: Any, training: Any, validation: Any, output: Any, settings: Any, **options: Any
    ) -> list[AblationResult]:
        asked.append((len(training), len(validation), output, settings, options["alphas"], options["workers"]))
        return list(results.values())

    monkeypatch.setattr(ablation, "ablate", computed)
    torch.save({"model": pose_model("11")}, tmp_path / "base.pt")
    out = tmp_path / "out"
    arguments = ["ablate", data, "--base", tmp_path / "base.pt", "-o", out, "--imgsz", 64, "--epochs", 3,
                 "--calibration-share", 0.5, "--workers", 2, "--alphas", "0,3", "--seed", 5,
                 "--context"]  # fmt: skip
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    settings = FitSettings(
        TrainSettings(epochs=3, seed=5),
        head_settings(context=True),
        train_sizes=(64,),
        imgsz=64,
        calibration_share=0.5,
    )
    assert asked == [(10, 16, out, settings, [0.0, 3.0], 2)]
    assert f"{len(results)} rows ->" in done.output
    assert done.output.count("Last-layer heads") == 1
    assert {path.name for path in out.iterdir()} == {"ablation.md", "ablation.csv", "ablation.html"}
