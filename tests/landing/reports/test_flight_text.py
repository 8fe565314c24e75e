"""Text of a landing: terminal and page show the same numbers, and labels have units."""

import re

import numpy as np

from halopose.landing.reports.flight_page import render_page
from halopose.landing.reports.flight_text import LABELS, to_text
from halopose.landing.summary import summarise
from tests.landing.reports.test_flight_pictures import fabricate


def test_terminal_and_page_agree_to_the_digit() -> None:
    flight = fabricate()
    summary = summarise(flight)
    page, lines = render_page(flight, summary), to_text(summary).splitlines()
    cells = re.findall(r"<td>(.*?)</td>", page)
    for line in lines[1:-1]:
        for value in re.findall(r"\d+\.\d+(?:\N{NO-BREAK SPACE}%)?", line):
            assert value in cells, line
    counts = re.findall(r"\d+", lines[0])
    assert counts == [
        str(summary[key])
        for key in ("frames", "frames_with_detections", "runway_detected", "position_solved", "trusted")
    ]
    assert set(counts) <= set(cells)


def test_every_value_has_a_label_and_unused_frames_a_reason() -> None:
    flight = fabricate()
    summary = summarise(flight)
    assert set(summary) <= set(LABELS)
    page = render_page(flight, summary)
    assert "_" not in "".join(re.findall(r"<th scope=\"\w+\">(.*?)</th>", page.split("<details>")[0]))
    for why, count in summary["frames_not_used_because"].items():
        assert f"{count} frame{'s' * (count > 1)} not used: {why.removeprefix('not trusted: ')}." in page


def test_unknown_values_are_dashes() -> None:
    summary = summarise(fabricate(blind=True)) | {"fused_nees": np.nan}
    assert "no true positions" in to_text(summary)
