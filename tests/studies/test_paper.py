"""The page of the paper from a model and data: all tables and figures, the paper's values beside."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halopose.cli.app import app
from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.fitting.presets import PRESETS
from halopose.hosts import loading
from halopose.reports.paper_page import downweighting_plot, paper_files, paper_page
from halopose.reports.svg_file import svg_file
from halopose.studies.paper import PaperStudy, run_paper
from tests.helpers.html_pages import parsed
from tests.helpers.models import host_of, write_scenes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("data"), host_of("11"), {"train": 8, "val": 14})


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, data: Path, one_thread: None) -> PaperStudy:
    paper = PRESETS["paper"]
    settings = replace(
        paper, train=replace(paper.train, epochs=1), imgsz=64, train_sizes=(64,), calibration_share=0.5, gamma_ks=0.97
    )
    training, validation = (load_dataset(data, split) for split in ("train", "val"))
    folder = tmp_path_factory.mktemp("paper")
    return run_paper(host_of("11"), training, validation, folder, settings, seeds=2, bootstrap=3, workers=1)


def test_the_page_has_every_table_and_figure_that_needs_no_other_model(study: PaperStudy) -> None:
    files = paper_files(paper_page(study, ["pictures/a.jpg"]))
    text = files["paper.md"]
    headings = re.findall(r"^## ((?:Table|Figure|Figures) [\d and]+)", text, re.MULTILINE)
    expected = [f"Table {n}" for n in range(1, 6)] + [f"Figure {n}" for n in (2, 4, 5, 7, 8, 12, 13, 15, 16, 18, 19)]
    assert sorted(found.strip() for found in headings) == sorted([*expected, "Figures 3 and 6"])
    linked = set(re.findall(r"\]\((.*?)\)", text)) - {"pictures/a.jpg"}
    assert linked == {name for name in files if name.endswith(".svg")}
    for number in ("0.0016", "0.0582", "0.935", "5.25", "0.0020"):  # the paper's tables 1 to 5
        assert number in text
    assert "Departures from the paper: gamma_KS 0.97, not 0.5." in text
    parsed(files["paper.html"])
    assert len(re.findall("<svg", files["paper.html"])) == len(linked)


def test_ours_are_the_scores_of_the_run(study: PaperStudy) -> None:
    text = paper_files(paper_page(study))["paper.md"]
    line = next(line for line in text.splitlines() if line.startswith("| here, trained in this run | Student-t"))
    assert f"{study.fitted.student_t.ace:.4f}" in line
    assert f"{study.fitted.student_t.ence:.4f}" in line
    assert study.fitted.student_t.ence != study.fitted.gaussian.ence
    assert all(row.seeds == 2 for row in study.ablation)


def test_a_chart_alone_is_a_file_with_title_and_legend() -> None:
    text = svg_file(downweighting_plot(None), 720, 300)
    assert text.startswith("<svg xmlns=")
    assert text.count("polyline") == 6
    assert "Student-t, nu 4" in text


def test_an_artifact_that_has_seen_all_images_is_refused(study: PaperStudy, data: Path, tmp_path: Path) -> None:
    training, validation = (load_dataset(data, split) for split in ("train", "val"))
    seen = validation.subset(study.heads.card.images.of("calibration"))
    with pytest.raises(HaloposeError, match="calibrated on all validation images"):
        run_paper(host_of("11"), training, seen, tmp_path, artifact=study.heads)


def test_the_command_writes_page_charts_heads_and_pictures(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of("11")
    monkeypatch.setattr(loading, "load_host", lambda *_, **__: host)
    options = "--seeds 1 --bootstrap 2 --epochs 1 --imgsz 64 --calibration-share 0.5 --pictures 3 --workers 1"
    arguments = ["paper", str(data), "--base", "base.pt", *options.split(), "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "preset: paper; departures from the paper: none" in done.output
    out = tmp_path / "out"
    assert {"paper.html", "paper.md", "heads.safetensors", "figure-4-1.svg"} <= {path.name for path in out.iterdir()}
    text = (out / "paper.md").read_text(encoding="utf-8")
    assert all((out / name).is_file() for name in re.findall(r"\]\((.*?)\)", text))
