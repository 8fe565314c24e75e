"""Plots: positions follow the axes, lines are clipped to the frame, ticks are round."""

import math
import re

import jinja2
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from halopose.reports.plots import Axis, Curve, Plot, clipped, decade_ticks, linear_ticks, tick_text
from halopose.types import Array

LINES = arrays(float, st.tuples(st.integers(1, 8), st.just(2)), elements=st.floats(-3, 4, width=32))


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.floats(0, 1))
def test_shares_turn_back_into_values(low: float, width: float, share: float) -> None:
    axis = Axis.linear("", low, low + width)
    assert axis.share(low + share * width) == pytest.approx(share, abs=1e-6)
    assert Axis.log("", width, 7 * width).share(width * 7**share) == pytest.approx(share, abs=1e-9)


def test_nowhere_on_a_logarithmic_axis() -> None:
    shares = Axis.log("", 0.1, 10).share(np.array([None, -1.0, 0.0, 1.0], dtype=float))
    assert not np.isfinite(shares[:3]).any()
    assert shares[3] == pytest.approx(0.5)


def test_bins_have_names_in_their_middle_or_at_their_edges() -> None:
    assert Axis.of_bins("", 2, ["a", "b"]).marks() == [(0.25, "a"), (0.75, "b")]
    assert Axis.of_bins("", 2, ["a", "b", "c"]).marks() == [(0.0, "a"), (0.5, "b"), (1.0, "c")]


@given(LINES)
def test_a_clipped_line_stays_in_the_frame_and_keeps_what_is_inside(points: Array) -> None:
    found = clipped(points)
    assert ((found >= 0) & (found <= 1)).all()
    for point in points[((points >= 0) & (points <= 1)).all(1)]:
        assert (found == point).all(1).any()
    borders = ((found == 0) | (found == 1)).any(1)
    for point in found[~borders]:
        assert (points == point).all(1).any(), "a new point that is not on the border"


@given(LINES)
def test_where_one_segment_crosses_the_frame_is_on_its_way(points: Array) -> None:
    assume(len(points) >= 2)
    start, end = points[:2]
    shares = np.linspace(0, 1, 2001)[:, None]
    way = start + shares * (end - start)
    inside = way[((way >= 0) & (way <= 1)).all(1)]
    assume(len(inside))
    found = clipped(points[:2])
    assert len(found) == 2
    step = np.abs(end - start).max() / 2000
    np.testing.assert_allclose(found, [inside[0], inside[-1]], atol=step + 1e-6)


def test_a_line_ends_at_the_border_and_marks_and_intervals_stay_inside() -> None:
    x, y = Axis.linear("x", 0, 2), Axis.log("y", 1, 100)
    curve = Curve("", "plain", [0, 1, 2, 2], [100, 10, 0.1, np.nan], [10, 0, 1, 1], [1000, 20, 1, 1], marked=True)
    plot = Plot("", x, y, [curve])
    np.testing.assert_allclose(np.array(plot.line(curve)), np.array([[0, 1], [0.5, 0.5], [0.75, 0]]), atol=1e-12)
    np.testing.assert_allclose(np.array(plot.dots(curve)), np.array([[0, 1], [0.5, 0.5]]))
    np.testing.assert_allclose(plot.intervals(curve), [[0, 0.5, 1], [0.5, 0, math.log10(20) / 2]])
    bare = Curve("", "plain", [0, 1], [1, float("nan")])
    assert (plot.dots(bare), plot.intervals(bare), plot.line(bare)) == ([], [], [[0, 0]])


def test_an_interval_without_a_width_is_left_out() -> None:
    plot = Plot("", Axis.linear("x", 0, 1), Axis.linear("y", 0, 1))
    curve = Curve("", "plain", [0, 1], [0.5, 0.5], [0.25, float("nan")], [0.75, float("nan")])
    assert plot.intervals(curve) == [[0, 0.25, 0.75]]


def test_bars_are_cut_at_the_frame() -> None:
    plot = Plot("", Axis.linear("x", 0, 1), Axis.linear("y", 0, 1), bars=[(0, 0.5, 0.3), (0.5, 2, 3), (0, 1, np.nan)])
    assert plot.columns() == [[0, 0.5, 0.3], [0.5, 1, 1]]
    assert Plot("", plot.x, plot.y).columns() == []


@given(st.floats(-1e4, 1e4), st.floats(1e-2, 1e6))
def test_linear_ticks_are_even_round_and_fill_the_axis(low: float, width: float) -> None:
    ticks = np.array(linear_ticks(low, low + width))
    steps = np.diff(ticks)
    slack = 1e-5 * steps[0]
    assert 3 <= len(ticks) <= 7
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)
    assert ticks[0] >= low - slack
    assert ticks[-1] <= low + width + slack
    assert ticks[0] - low < steps[0] + slack
    assert low + width - ticks[-1] < steps[0] + slack
    digits = float(f"{steps[0]:.6e}".split("e")[0])
    assert digits in (1, 2, 2.5, 5)


@given(st.floats(-5, 5), st.floats(0.05, 8))
def test_decade_ticks_lie_between_and_are_never_few_or_many(start: float, decades: float) -> None:
    low, high = 10**start, 10 ** (start + decades)
    ticks = decade_ticks(low, high)
    assert ticks == sorted(ticks)
    assert all(low * (1 - 1e-5) <= tick <= high * (1 + 1e-5) for tick in ticks)
    assert 3 <= len(ticks) <= 9


def test_ticks_read_as_people_write_them() -> None:
    values = (0, 0.25, -0.01, 30, 1e-5, -1e-4, 3e-7, 1e6, 0.1 + 0.2)
    texts = ["0", "0.25", "−0.01", "30", "10⁻⁵", "−10⁻⁴", "3·10⁻⁷", "10⁶", "0.3"]
    assert [tick_text(value) for value in values] == texts


def test_the_macro_draws_what_the_plot_holds() -> None:
    environment = jinja2.Environment(loader=jinja2.PackageLoader("halopose.reports"), autoescape=True)
    draw = vars(environment.get_template("chart.html").module)["chart"]
    curves = [
        Curve("a < b", "gaussian", [0, 1], [0, 1], [0, 0.5], [0.5, 1], marked=True),
        Curve("", "ideal", [0, 1], [0, 1]),
    ]
    plot = Plot("T", Axis.linear("x", 0, 1), Axis.linear("y", 0, 1), curves, [(0, 1, 0.5)])
    text = str(draw(plot, 300, 200))
    assert [text.count(f"<{tag} ") for tag in ("polyline", "circle", "rect")] == [2, 2, 1]
    assert text.count('<line class="gaussian"') == 2
    assert text.count('class="key"') == 1, "only a named curve is in the legend"
    assert "a &lt; b" in text
    assert 'aria-label="T: y by x"' in text
    for x, y in re.findall(r"([\d.]+),([\d.]+) ", text):
        assert 0 <= float(x) <= 300
        assert 0 <= float(y) <= 200
