"""Verdicts follow from intervals and from the effect of another seed."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.evaluation.bootstrap import Difference
from halopose.fitting.settings import FitSettings
from halopose.studies.ablation import DEFAULT, OTHER_SEED, AblationResult, ablation_variants
from halopose.studies.findings import FINDINGS, Finding, FindingPart, judge, overall, verdict_of

NUMBERS = st.floats(-10, 10)
MARGINS = st.floats(0, 10)
VERDICTS = st.sampled_from(["reproduced", "contradicted", "not decided"])
OPPOSITE = {"reproduced": "contradicted", "contradicted": "reproduced", "not decided": "not decided"}


def result(name: str, values: dict[str, Any], noise: float = 0.0, seed: int = 0) -> AblationResult:
    """A row whose draws are its values plus noise."""
    generator = np.random.default_rng(seed)
    draws = {metric: value + noise * generator.normal(size=50) for metric, value in values.items()}
    return AblationResult(name, name, values, draws, {}, [], {"keypoints": 5000})


@given(NUMBERS, MARGINS)
def test_a_verdict_is_decided_exactly_where_the_interval_excludes_zero(value: Any, margin: float) -> None:
    difference = Difference(value, margin)
    verdict = verdict_of(difference)
    assert (verdict == "reproduced") == (value > margin)
    assert (verdict == "contradicted") == (value < -margin)
    assert difference.significant == (verdict != "not decided")
    assert verdict_of(Difference(-value, margin)) == OPPOSITE[verdict]


@given(NUMBERS, MARGINS, NUMBERS)
def test_nothing_is_decided_within_what_a_seed_changes(value: Any, margin: float, by_seed: float) -> None:
    verdict = verdict_of(Difference(value, margin), by_seed)
    assert verdict == ("not decided" if abs(by_seed) >= abs(value) else verdict_of(Difference(value, margin)))


@pytest.mark.parametrize("value", [1.0, -1.0, math.nan])
def test_an_unknown_margin_decides_nothing(value: float) -> None:
    assert verdict_of(Difference(value, math.nan)) == "not decided"


@given(st.lists(VERDICTS, max_size=4))
def test_a_finding_is_the_conjunction_of_its_parts(verdicts: list[Any]) -> None:
    whole = overall(verdicts)
    assert (whole == "contradicted") == ("contradicted" in verdicts)
    assert (whole == "reproduced") == (bool(verdicts) and set(verdicts) == {"reproduced"})
    assert overall(verdicts[::-1]) == whole


def test_differences_are_paired() -> None:
    shared = np.random.default_rng(0).normal(size=500)
    rows = {
        name: AblationResult(name, name, {"m": value}, {"m": value + shared + spread * shared[::-1]}, {}, [], {})
        for name, value, spread in (("a", 1.0, 0.0), ("b", 1.5, 0.01))
    }
    difference = FindingPart("b over a", ("b", "m"), ("a", "m")).measure(rows)
    assert difference.value == 0.5
    assert difference.margin == pytest.approx(1.96 * 0.01 * shared.std(ddof=1))
    assert rows["a"].margin("m") == pytest.approx(1.96 * shared.std(ddof=1))


def test_a_part_against_a_number_takes_the_rows_own_interval() -> None:
    row = result("f1", {"kept": 0.97}, noise=0.01)
    difference = FindingPart("keeps most", ("f1", "kept"), 0.9).measure({"f1": row})
    assert difference.value == pytest.approx(0.07)
    assert difference.margin == row.margin("kept")


def test_the_seed_is_a_yardstick_for_every_part() -> None:
    finding = Finding(
        "text",
        (
            FindingPart("to the default", ("a", "m"), (DEFAULT, "m")),
            FindingPart("between others", ("a", "m"), ("b", "m")),
            FindingPart("within the default", (DEFAULT, "n"), (DEFAULT, "m")),
        ),
    )
    values = {DEFAULT: (1.0, 5.0), "a": (1.5, 0.0), "b": (1.2, 0.0), OTHER_SEED: (1.4, 5.5)}
    rows = [result(name, {"m": m, "n": n}) for name, (m, n) in values.items()]
    parts = judge(rows, [finding])[0].parts
    assert [part.by_seed for part in parts] == pytest.approx([-0.4, 0.4, 0.1])
    assert [part.verdict for part in parts] == ["reproduced", "not decided", "reproduced"]
    alone = judge(rows[:-1], [finding])[0]
    assert [part.by_seed for part in alone.parts] == [None] * 3
    assert alone.verdict == "reproduced"


def test_findings_are_about_rows_and_metrics_that_there_are() -> None:
    rows = [row.name for row in ablation_variants(FitSettings())]
    for finding in FINDINGS:
        for part in finding.parts:
            assert part.rows <= set(rows)
    metrics = {side[1] for finding in FINDINGS for part in finding.parts for side in (part.larger, part.smaller)
               if isinstance(side, tuple)}  # fmt: skip
    worse = {name: dict.fromkeys(metrics, 1.0) for name in rows}
    judged = judge([result(name, values) for name, values in worse.items()])
    assert [one.text for one in judged] == [finding.text for finding in FINDINGS]
    without = judge([result(name, values) for name, values in worse.items() if name != "diagonal"])
    assert {one.text for one in judged} - {one.text for one in without} == {
        "Full beats diagonal beats isotropic dispersion in NLL"
    }


def test_results_of_the_paper_are_reproduced_and_their_opposite_contradicted() -> None:
    """Values of the tables of the paper for the nano model, with opposite signs for the second half."""
    metrics = {
        "gaussian.ace": 0.0582, "gaussian.ence": 0.0570, "gaussian.nll": 5.62, "gaussian.akp": 0.935,
        "student_t.ace": 0.0016, "student_t.nll": 5.50, "gaussian.ence_x": 0.06, "gaussian.ence_y": 0.06,
        "scale.spread": 0.01, "scale.0.ace": 0.06, "kept_fraction": 0.8,
    }  # fmt: skip
    changes = {
        DEFAULT: {},
        "no-importance-weights": {"gaussian.ace": 0.0689, "gaussian.ence": 0.0637, "gaussian.nll": 5.64},
        "no-scale-weights": {"scale.spread": 0.03, "scale.0.ace": 0.1},
        "diagonal": {"gaussian.nll": 5.67},
        "isotropic": {"gaussian.nll": 5.71, "gaussian.ence_x": 0.2, "gaussian.ence_y": 0.2},
        "last-layer": {"gaussian.ace": 0.1017, "gaussian.nll": 5.85, "gaussian.akp": 0.916},
        "f1": {"kept_fraction": 0.99},
    }
    rows = [result(name, {**metrics, **change}) for name, change in changes.items()]
    assert {one.verdict for one in judge(rows)} == {"reproduced"}
    mirrored = [result(row.name, {name: -value for name, value in row.estimate.items()}) for row in rows]
    assert {one.verdict for one in judge(mirrored)} == {"contradicted"}


def test_small_or_uncertain_differences_contradict_nothing() -> None:
    finding = Finding("text", (FindingPart("NLL rises", ("a", "gaussian.nll"), (DEFAULT, "gaussian.nll")),))
    for fall, count, verdict in (
        (0.05, 5000, "contradicted"), (0.005, 5000, "not decided"), (0.05, 500, "not decided"),
    ):  # fmt: skip
        rows = [result(DEFAULT, {"gaussian.nll": 5.0}), result("a", {"gaussian.nll": 5.0 - fall})]
        rows = [replace(row, counts={"keypoints": count}) for row in rows]
        assert judge(rows, [finding])[0].verdict == verdict
