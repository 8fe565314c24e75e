"""Errors against levels as drawn: a dot above the diagonal where the level held, counted by region."""

import re
from dataclasses import replace

import numpy as np
import pytest

from halopose.landing.reports.flight_charts import Diagram, nees_chart, stanford_charts
from halopose.landing.requirements import count_stanford
from halopose.types import Array
from tests.landing.reports.test_flight_pictures import fabricate


def places(chart: Diagram, kind: str) -> Array:
    paths = [path for name, path in chart.shapes if name == kind]
    return np.array(re.findall(r"M([\d.]+) ([\d.]+)h0", "".join(paths)), dtype=float).reshape(-1, 2)


@pytest.mark.parametrize("start", [0.0, 12.3, 1.7e9])
@pytest.mark.parametrize("step", [1e-3, 1.0, 37.0, 1e9])
def test_ticks_are_few_and_count_from_the_first_frame(start: float, step: float) -> None:
    """Frames may be a millisecond or thirty years apart, and stamped in Unix seconds."""
    flight = fabricate()
    slow = replace(flight, frame_times=start + step * np.arange(len(flight.frame_times)))
    marks = nees_chart(slow).x_marks
    assert 2 <= len(marks) <= 7
    assert marks[0][1] == "0 s"
    assert marks[0][0] == pytest.approx(nees_chart(slow).left)
    seconds = np.array([float(text.removesuffix(" s")) for _, text, _ in marks])
    np.testing.assert_allclose(np.diff(seconds), seconds[1])


def test_dots_lie_on_the_side_of_the_diagonal_that_says_whether_the_level_held() -> None:
    flight = fabricate()
    levels = flight.vision_fixes.levels.copy()
    used = np.flatnonzero(flight.vision_fixes.trusted & flight.vision_fixes.solved)
    error = np.abs(flight.vision_fixes.error(flight.position))
    levels[used] = 2 * error[used] + 0.2
    levels[used[:2], 1] = 0.5 * error[used[:2], 1]  # two that mislead, to the side
    flight = replace(flight, vision_fixes=replace(flight.vision_fixes, levels=levels))
    for axis, chart in zip((1, 2), stanford_charts(flight), strict=True):
        diagonal = chart.y(chart.scale.low) - (chart.x(error[used, axis]) - chart.left) / (
            chart.width - chart.left - chart.right
        ) * (chart.height - chart.bottom - chart.top)
        above = chart.y(levels[used, axis]) < diagonal
        np.testing.assert_array_equal(above, error[used, axis] < levels[used, axis])
        count = count_stanford(error[used, axis], levels[used, axis], flight.settings.approach_requirement.limits[axis])
        assert len(places(chart, "dots bad")) == (2 if axis == 1 else 0)
        assert len(places(chart, "dots vision")) + len(places(chart, "dots bad")) == count.total
        assert f"misleading {count.misleading}" in [label for _, label in chart.keys]
