"""Figures for papers: panels, formats, and what is refused."""

import math
from pathlib import Path

import numpy as np
import pytest

from halopose.data.files import write_json
from halopose.errors import HaloposeError
from halopose.reports.figures import _transformed, draw_figure, read_scores
from tests.helpers.commands import run
from tests.helpers.evaluations import real_scores


def test_one_run_and_several(tmp_path: Path) -> None:
    scores = real_scores()
    draw_figure({"before": scores}, tmp_path / "one.svg")
    text = (tmp_path / "one.svg").read_text()
    for title in ("Coverage of ellipses", "Reliability of variances", "Q-Q", "as given (ACE", "Gaussian", "Student-t"):
        assert title in text
    draw_figure({"before": scores, "after": scores}, tmp_path / "b" / "two.svg", keypoint=scores.keypoint_names[0])
    text = (tmp_path / "b" / "two.svg").read_text()
    assert text.count("(ACE") == 2
    assert f"before (ACE {scores.student_t.ace:.4f})" in text


def test_command_takes_files_folders_and_names(tmp_path: Path) -> None:
    scores = real_scores()
    for name in ("a", "b"):
        write_json(tmp_path / name / "metrics.json", scores.to_json())
    run("plot", tmp_path / "a", f"new={tmp_path / 'b' / 'metrics.json'}", "-o", tmp_path / "f.pdf")
    assert (tmp_path / "f.pdf").read_bytes().startswith(b"%PDF")
    assert read_scores(tmp_path / "a").student_t.ace == pytest.approx(scores.student_t.ace)


def test_figures_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    scores = real_scores()
    with pytest.raises(HaloposeError, match=r"one of \.pdf"):
        draw_figure({"before": scores}, tmp_path / "f.gif")
    with pytest.raises(HaloposeError, match="has no keypoint 'nose2'"):
        draw_figure({"before": scores}, tmp_path / "f.pdf", keypoint="nose2")
    assert not list(tmp_path.iterdir())


def test_transformed_quantiles_of_exact_coverage_lie_on_the_diagonal() -> None:
    theoretical, empirical = _transformed(np.arange(1, 100) / 100)
    assert np.allclose(theoretical, empirical)
    assert empirical[49] == pytest.approx(2 * math.log(2))  # the median of a chi-square of two degrees of freedom
