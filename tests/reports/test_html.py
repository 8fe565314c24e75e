"""Numbers as text, and pages with hostile content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.evaluation.bootstrap import Difference
from halopose.reports.html import freedom, number, page, percent, signed
from tests.helpers.html_pages import EVIL, parsed


@given(st.floats(-1e6, 1e6), st.integers(0, 5))
def test_a_number_reads_back_and_zero_has_no_sign(value: float, digits: int) -> None:
    text = number(value, digits)
    assert "-" not in text
    assert float(text.replace("−", "-")) == pytest.approx(value, abs=0.5001 * 10.0**-digits)
    if not float(text.replace("−", "-")):
        assert "−" not in text


@given(st.floats(0, 1))
def test_a_share_is_all_or_nothing_only_where_it_is(share: float) -> None:
    text = percent(share)
    assert text.endswith("\N{NO-BREAK SPACE}%")
    assert (text[:-2] == "100") == (share == 1)
    assert (text[:-2] == "0") == (share == 0)
    assert float(text[:-2]) == pytest.approx(100 * share, abs=0.1)


def test_values_that_are_not_numbers_are_a_dash() -> None:
    assert [percent(value) for value in (None, float("nan"))] == ["–"] * 2
    assert [number(value, 2) for value in (None, float("nan"), float("inf"))] == ["–"] * 3


def test_degrees_of_freedom_of_a_gaussian_are_without_bound() -> None:
    assert [freedom(value) for value in (None, 4.25, 1e7)] == ["–", "4.2", "∞"]


def test_differences_have_sign_and_margin_or_are_the_same() -> None:
    assert signed(Difference(0.12345, 0.01)) == "+0.1235 ± 0.0100"
    assert signed(Difference(-0.12, 0.01), 2) == "−0.12 ± 0.01"
    assert signed(Difference(0.0, 0.0)) == "same"
    assert signed(Difference(0.0, 0.1), 1) == "0.0 ± 0.1"


def test_a_page_escapes_and_is_utf8() -> None:
    text = page("page.html", title=EVIL, summary="half a pair: \ud800")
    text.encode("utf-8")
    assert "script" not in parsed(text).tags
    assert "{{ 7 * 7 }}" in text
