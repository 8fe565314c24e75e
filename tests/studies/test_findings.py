"""Verdicts follow from p-values over images and seeds, adjusted for the number of tests."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.evaluation.bootstrap import Difference, holm, repeated_difference
from halopose.fitting.settings import FitSettings
from halopose.studies.ablation import DEFAULT, AblationResult, ablation_variants
from halopose.studies.findings import FINDINGS, Finding, FindingPart, judge, overall, verdict_of

NUMBERS = st.floats(-10, 10)
VERDICTS = st.sampled_from(["reproduced", "differs here", "not decided"])


def result(name: str, values: dict[str, Any], noise: float = 0.0, seed: int = 0, seeds: int = 1) -> AblationResult:
    """A row whose draws are its values plus noise; each seed adds noise of the same size."""
    generator = np.random.default_rng(seed)
    by_seed = {metric: value + noise * generator.normal(size=seeds) * (seeds > 1) for metric, value in values.items()}
    draws = {metric: value[:, None] + noise * generator.normal(size=50) for metric, value in by_seed.items()}
    return AblationResult(name, name, by_seed, draws, {}, [], {"keypoints": 5000})


@given(NUMBERS, st.floats(0, 1))
def test_a_verdict_is_decided_exactly_where_the_p_value_is_small(value: Any, p: float) -> None:
    verdict = verdict_of(Difference(value, 1.0), p)
    assert (verdict == "reproduced") == (value > 0 and p < 0.05)
    assert (verdict == "differs here") == (value <= 0 and p < 0.05)


def test_an_unknown_p_value_decides_nothing() -> None:
    assert verdict_of(Difference(1.0, math.nan), math.nan) == "not decided"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_equals_statsmodels_definition(p: list[float]) -> None:
    """The k-th smallest of n p-values times n - k + 1, no smaller than those before it, at most 1."""
    adjusted, order = holm(np.array(p)), np.argsort(p, kind="stable")
    running = 0.0
    for rank, place in enumerate(order):
        running = max(running, p[place] * (len(p) - rank))
        assert adjusted[place] == pytest.approx(min(running, 1.0))


def test_intervals_cover_images_and_seeds() -> None:
    """Of 400 studies with 5 seeds, the intervals hold the truth in about 95 %, and those without seeds in fewer."""
    generator = np.random.default_rng(0)
    held = []
    for _ in range(400):
        images = generator.normal()
        trained = images + 2.0 * generator.normal(size=5)
        draws = trained[:, None] + generator.normal(size=200)
        found = repeated_difference(trained, draws)
        held.append((abs(found.value) <= found.margin, abs(found.value) <= 1.96, found.p < 0.05))
    share, without, wrong = np.mean(held, axis=0)
    assert 0.92 < share < 0.98
    assert without < 0.9
    assert wrong == pytest.approx(1 - share)


@given(st.lists(VERDICTS, max_size=4))
def test_a_finding_is_the_conjunction_of_its_parts(verdicts: list[Any]) -> None:
    whole = overall(verdicts)
    assert (whole == "differs here") == ("differs here" in verdicts)
    assert (whole == "reproduced") == (bool(verdicts) and set(verdicts) == {"reproduced"})
    assert overall(verdicts[::-1]) == whole


def test_differences_are_paired() -> None:
    shared = np.random.default_rng(0).normal(size=500)
    rows = {
        name: AblationResult(
            name, name, {"m": np.array([value])}, {"m": (value + shared + spread * shared[::-1])[None]}, {}, [], {}
        )
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
    assert difference.margin == pytest.approx(row.margin("kept"))


def test_many_tests_need_smaller_p_values() -> None:
    """A difference of 2.2 standard errors is decided alone, and not among ten."""
    rows = [result(DEFAULT, {"m": 0.0}), result("a", {"m": 2.2}, noise=1.0, seed=3)]
    draws = rows[1].draws["m"]
    rows[1] = replace(rows[1], draws={"m": 2.2 + (draws - draws.mean()) / draws.std(ddof=1)})
    part = FindingPart("text", ("a", "m"), (DEFAULT, "m"))
    assert judge(rows, [Finding("text", (part,))])[0].verdict == "reproduced"
    assert judge(rows, [Finding("text", (part,) * 10)])[0].verdict == "not decided"


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


def test_results_of_the_paper_are_reproduced_and_their_opposite_differs() -> None:
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
    assert {one.verdict for one in judge(mirrored)} == {"differs here"}


def test_small_or_uncertain_differences_decide_nothing() -> None:
    finding = Finding("text", (FindingPart("NLL rises", ("a", "gaussian.nll"), (DEFAULT, "gaussian.nll")),))
    for fall, count, verdict in (
        (0.05, 5000, "differs here"), (0.005, 5000, "not decided"), (0.05, 500, "not decided"),
    ):  # fmt: skip
        rows = [result(DEFAULT, {"gaussian.nll": 5.0}), result("a", {"gaussian.nll": 5.0 - fall})]
        rows = [replace(row, counts={"keypoints": count}) for row in rows]
        assert judge(rows, [finding])[0].verdict == verdict
