"""Presets of a fit, and their departures from the paper."""

from dataclasses import replace

from halopose.calibration.calibrators import Calibrations
from halopose.fitting.presets import (
    PRESETS,
    departures,
    evaluated_as,
    evaluation_departures,
    evaluation_protocol,
    with_options,
)
from halopose.fitting.settings import FitSettings, TrainSettings
from halopose.protocol import Protocol
from halopose.uncertainty.heads import HeadSettings


def test_the_paper_has_no_departures_and_each_change_is_one() -> None:
    paper = PRESETS["paper"]
    assert departures(paper) == ()
    changes = (
        {"calibration": "matched"},
        {"split_student": True},
        {"covariance": "moment"},
        {"min_samples": 50.0},
        {"cells_per_object": 10},
        {"gamma_ks": 0.3},
        {"rule": "f1"},
        {"region_scales": True},
        {"train": TrainSettings(dof=12.0)},
        {"train": TrainSettings(alpha=0.0)},
        {"train": TrainSettings(scale_weight=False)},
        {"head": HeadSettings(features=True)},
        {"head": HeadSettings("diagonal")},
    )
    for change in changes:
        assert len(departures(replace(paper, **change))) == 1, change
    assert len(departures(FitSettings())) == 6
    assert "true positives of calibration: both" in departures(PRESETS["best"])


def test_options_that_are_given_change_a_preset() -> None:
    given = FitSettings(train=TrainSettings(epochs=2, seed=7), imgsz=320, train_sizes=(320,), match="box")
    found = with_options(PRESETS["best"], given, {"epochs", "match"})
    best = PRESETS["best"]
    assert found.train == replace(best.train, epochs=2)
    assert (found.match, found.imgsz, found.head, found.gamma_ks) == ("box", 320, best.head, 0.3)


def test_the_paper_evaluates_annotated_areas_one_student_t_and_equation_17() -> None:
    protocol = evaluation_protocol("paper", bootstrap=7, area=None)
    assert (protocol.area, protocol.match, protocol.covariance, protocol.bootstrap) == ("annotation", "oks", "paper", 7)
    assert evaluation_protocol("paper", area="box").area == "box"
    assert evaluation_protocol("best").gamma_ks == 0.3
    assert evaluation_protocol(None) == Protocol()
    made = Calibrations.none(3)
    assert evaluated_as(made, "paper").student.covariance == "paper"
    assert evaluated_as(made, None) is made
    assert made.student.covariance == "auto"


def test_an_evaluation_states_the_departures_of_fit_and_protocol() -> None:
    paper = PRESETS["paper"]
    assert evaluation_departures(paper, evaluation_protocol("paper"), "paper") == ()
    assert len(evaluation_departures(paper, Protocol(match="box"), None)) == 2
    split = replace(paper, split_student=True, covariance="auto")
    assert len(evaluation_departures(split, evaluation_protocol("paper"), None)) == 2
    assert evaluation_departures(split, evaluation_protocol("paper"), "paper") == ()
    assert evaluation_departures(None, evaluation_protocol("paper"), None) == ("settings of the fit are unknown",)
