"""Scores as json: lossless, with the documented keys, and with one-line errors for damaged content."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.data.files import read_json
from halopose.errors import HaloposeError
from halopose.evaluation.evaluate import evaluate
from halopose.evaluation.scores import METRICS, RANKINGS, DistributionScores, Scores
from halopose.protocol import Protocol
from halopose.reports.score_report import render_report
from halopose.reports.score_text import to_csv, to_text
from tests.helpers.evaluations import (
    as_given,
    json_text,
    partly_labelled,
    poses,
    real_scores,
    with_distribution,
    with_informative_visibility,
    with_pruned_distribution,
)
from tests.helpers.mangling import mangled, refusal


def assert_same(one: Scores, other: Scores) -> None:
    """Equal in every number including NaN, and in types."""
    np.testing.assert_equal(asdict(one), asdict(other))
    assert one.settings == other.settings
    assert one.cells.count.dtype == other.cells.count.dtype


def with_everything() -> Scores:
    """Intervals, a visibility threshold, and keypoints without samples."""
    matched = with_informative_visibility(partly_labelled(poses(200, 3, 4, seed=2)))
    return evaluate(matched, protocol=Protocol(visibility=True, bootstrap=4, scale_edges=(1024.0, 1e9)))


def all_pruned() -> Scores:
    matched = poses(30, 3)
    return evaluate(matched, as_given(matched, threshold=np.inf))


CASES: dict[str, Callable[[], Scores]] = {
    "plain": real_scores,
    "everything": with_everything,
    "nothing pruned": lambda: real_scores(prune=False),
    "all pruned": all_pruned,
    "one scale": lambda: real_scores(edges=()),
    "empty scale": lambda: real_scores(edges=(1e9,)),
    "as given": lambda: replace(real_scores(), calibration=replace(real_scores().calibration, nu=None, tau_t=None)),
}


@pytest.mark.parametrize("case", CASES)
def test_json_and_back_is_the_same(case: str, tmp_path: Path) -> None:
    scores = CASES[case]()
    assert_same(Scores.from_json(scores.to_json()), scores)
    written = json_text(scores, tmp_path)
    again = Scores.from_json(read_json(tmp_path / "metrics.json"))
    if case != "all pruned":  # json has no infinity: a threshold above everything reads as one below
        assert_same(again, scores)
    assert json_text(again, tmp_path) == written


def test_the_cases_hold_what_they_should() -> None:
    scores = with_everything()
    assert scores.pruned.visibility_threshold is not None
    assert scores.interval
    assert scores.gaussian.interval
    assert scores.pruned.student_t.interval
    assert math.isnan(scores.gaussian.per_scale["large"].ace)
    assert scores.scales[-1].high == math.inf
    assert real_scores(prune=False).pruned.threshold == -math.inf
    assert math.isnan(all_pruned().pruned.gaussian.nll)
    assert real_scores().student_t.curves.qq is None


NUMBERS = st.floats(allow_infinity=False)  # NaN among them


@settings(max_examples=25)
@given(
    st.sampled_from(list(DISTRIBUTIONS)),
    st.dictionaries(st.sampled_from(METRICS), NUMBERS),
    NUMBERS,
    st.booleans(),
)
def test_any_numbers_survive_json_text(
    distribution: str, numbers: dict[str, float], other: float, pruned: bool
) -> None:
    interval = {name: (value, other) for name, value in numbers.items()}
    scores = (with_pruned_distribution if pruned else with_distribution)(
        real_scores(), distribution, **numbers, interval=interval
    )
    scores = replace(scores, akp_skill=other, interval={"akp_skill": (other, other)})
    text = json.dumps(scores.to_json(), default=np.ndarray.tolist)
    assert_same(Scores.from_json(json.loads(text)), scores)  # NaN as NaN
    text = json.dumps(json.loads(text, parse_constant=lambda constant: None))
    read = Scores.from_json(json.loads(text))  # NaN as null, as files have it
    assert_same(replace(read, scales=scores.scales), scores)
    assert read.scales == scores.scales


def test_documented_keys_are_there() -> None:
    """The keys that docs/reference/files.md documents."""
    content = with_everything().to_json()
    metrics = ("ace", "ace_x", "ace_y", "ence", "ence_x", "ence_y", "nll", "akp")
    assert metrics == METRICS
    for part in (content, content["pruned"]):
        for distribution in ("uncalibrated", "gaussian", "student_t"):
            block = part[distribution]
            assert {*metrics, "count", "per_keypoint", "per_scale", "interval"} == set(block)
            assert set(block["interval"]) == set(metrics)
            for group in (*block["per_keypoint"].values(), *block["per_scale"].values()):
                assert {*metrics, "count"} == set(group)
    assert {"akp_random", "akp_visibility", "akp_skill", "matched_instances", "keypoints"} <= set(content)
    assert {"kept_fraction", "threshold", "visibility_threshold", "rules"} <= set(content["pruned"])
    assert {"curves", "curves_pruned", "cells", "pruning_curve", "calibration", "settings"} <= set(content)
    assert set(content["cells"]) == {"count", *DISTRIBUTIONS}
    assert set(content["cells"]["gaussian"]) == {"50", "90", "95"}
    for curves in (content["curves"], content["curves_pruned"]):
        for distribution in DISTRIBUTIONS:
            assert set(curves[distribution]) == {"coverage", "variance", "moments", "qq", "qq_keypoints"}
            assert set(curves[distribution]["variance"]["x"]) == {"predicted", "empirical"}
    assert set(content["curves"]["gaussian"]["qq"]["joint"]) == {"theoretical", "empirical"}
    assert set(content["pruning_curve"]) == {"kept", "reliability", "threshold", "nll"}
    assert "interval" in content
    assert "interval" not in real_scores().to_json()


def test_distributions_and_metrics_by_name_are_their_attributes() -> None:
    scores = real_scores()
    for name in DISTRIBUTIONS:
        assert scores.distribution(name) is getattr(scores, name)
        assert scores.pruned.distribution(name) is getattr(scores.pruned, name)
        assert {metric: scores.distribution(name).metric(metric) for metric in METRICS} == {
            column.name: getattr(scores.distribution(name), column.name)
            for column in fields(DistributionScores)
            if column.name in METRICS
        }
    assert set(RANKINGS) == set(with_everything().interval)
    assert "instances" in repr(scores)
    assert len(repr(scores)) < 200


# --- damage -----------------------------------------------------------------------------------------------

CONTENT = json.loads(json.dumps(real_scores().to_json(), default=np.ndarray.tolist))


@pytest.mark.parametrize("content", [None, 3, "text", [], {}, {"keypoints": 3}, [CONTENT]])
def test_files_that_are_not_metrics_are_refused(content: Any) -> None:
    with pytest.raises(HaloposeError, match="not the metrics") as error:
        Scores.from_json(content)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key", [key for key in CONTENT if key not in ("interval", "regions", "joint", "limbs", "matches")]
)
def test_missing_keys_are_named(key: str) -> None:
    content = {name: value for name, value in CONTENT.items() if name != key}
    with pytest.raises(HaloposeError, match=f"'{key}' is missing"):
        Scores.from_json(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("images",), math.inf),
        (("images",), None),
        (("keypoints",), "many"),
        (("akp_skill",), 10**400),
        (("keypoint_names",), ["nose"]),
        (("scales",), []),
        (("cells", "count"), [[1, 2]]),
        (("cells", "count", 0, 0), None),
        (("cells", "gaussian", "95"), None),
        (("calibration", "tau"), [1.0]),
        (("calibration", "tau"), None),
        (("curves", "gaussian", "coverage", "joint"), [0.5] * 98),
        (("curves", "gaussian", "coverage", "joint"), None),
        (("curves", "gaussian", "variance", "x", "empirical"), [1.0]),
        (("curves", "student_t", "moments", "predicted"), [1.0, 2.0]),
        (("pruning_curve", "nll"), []),
        (("pruned", "rules"), ["all"]),
        (("pruned", "gaussian", "per_keypoint"), [1]),
        (("gaussian", "interval"), {"ace": [1]}),
        (("settings",), [1]),
    ],
)
def test_wrong_values_are_refused_in_one_line(path: tuple[Any, ...], value: Any) -> None:
    content = copy.deepcopy(CONTENT)
    node = content
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(HaloposeError, match="not the metrics") as error:
        Scores.from_json(content)
    assert "\n" not in str(error.value)


@settings(max_examples=80)
@given(mangled(CONTENT))
def test_mangled_metrics_are_refused_or_can_be_reported(content: Any) -> None:
    scores, line = refusal(Scores.from_json, content)
    assert "\n" not in line
    if scores is not None:
        assert all((render_report(scores), to_text(scores), to_csv(scores)))
