"""The command line in separate processes: exit codes and files."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

import halopose
from halopose.calibration.calibration_file import _checksum
from halopose.cli.app import app, main
from halopose.data.synthetic_poses import World, synthesize
from halopose.evaluation.scores import METRICS
from tests.helpers.mangling import mangled
from tests.helpers.values import present

COMMANDS: dict[str, Any] = vars(get_command(app))["commands"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    run("synthesize", "-o", folder, "--images", 120, "--persons", 400)
    return folder


def run(*arguments: object) -> str:
    """A command in this process; fails the test if the command fails."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str]:
    """Exit code and standard error of the real entry point."""
    monkeypatch.setattr(sys, "argv", ["halopose", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0), capsys.readouterr().err


def test_help_answers_without_heavy_imports() -> None:
    code = "import sys; import halopose.cli.app; sys.exit(bool({'torch', 'scipy', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for command in ("score", "recalibrate", "apply", "synthesize"):
        assert command in run("--help")


def test_score_writes_metrics_csv_and_report(files: Path, tmp_path: Path) -> None:
    output = run("score", files / "predictions.json", files / "truth.json", "-o", tmp_path, "--bootstrap", 5)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    for block in (metrics, metrics["pruned"]):
        for regime in ("uncalibrated", "gaussian", "student_t"):
            assert set(METRICS) <= set(block[regime])
    for key in ("akp_random", "akp_visibility", "akp_skill", "matched_instances", "keypoints"):
        assert metrics[key] > 0
    assert 0 < metrics["pruned"]["kept_fraction"] < 1
    assert metrics["pruned"]["threshold"] < 0
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert len(rows) == 2 * 3 * (1 + 17 + 3)
    whole = next(row for row in rows if row["regime"] == "gaussian" and row["group"] == "all")
    assert float(whole["ace"]) == pytest.approx(metrics["gaussian"]["ace"])
    assert "<html" in (tmp_path / "report.html").read_text()
    assert output.index("The given predictions are") < output.index("next: halopose recalibrate")
    assert output.index("next: halopose recalibrate") < output.index("matched instances")
    assert f"{metrics['matched_instances']} matched instances" in output


def test_calibration_is_found_where_it_was_put(files: Path, tmp_path: Path) -> None:
    """The synthetic deviations are 1.25 times those reported, 1.875 for ankles of small persons."""
    run("recalibrate", files / "predictions.json", files / "truth.json", "-o", tmp_path / "g.json",
        "--family", "gaussian")  # fmt: skip
    content = json.loads((tmp_path / "g.json").read_text())
    tau = dict(zip(content["keypoints"], content["tau"], strict=True))
    assert np.median([tau[name] for name in tau if "ankle" not in name]) == pytest.approx(1.25, rel=0.1)
    assert min(tau["left_ankle"], tau["right_ankle"]) > 1.35
    run("recalibrate", files / "predictions.json", files / "truth.json", "-o", tmp_path / "t.json",
        "--family", "student-t")  # fmt: skip
    nu = json.loads((tmp_path / "t.json").read_text())["nu"]
    assert 2.5 < np.median(nu) < 6


@pytest.mark.parametrize("family", ["gaussian", "student-t"])
def test_recalibrate_apply_score(
    files: Path, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predictions, truth = files / "predictions.json", files / "truth.json"
    calibration, applied = tmp_path / "cal.json", tmp_path / "applied.json"
    run("recalibrate", predictions, truth, "-o", calibration, "--family", family, "--fraction", 0.5)
    run("apply", calibration, predictions, "-o", applied)
    before, after = json.loads(predictions.read_text()), json.loads(applied.read_text())
    for old, new in zip(before, after, strict=True):
        assert all(old[key] == new[key] for key in ("image_id", "bbox", "score", "keypoints"))
    assert all(("dof" in entry) == (family == "student-t") for entry in after)
    code, error = run_main(monkeypatch, capsys, "score", applied, truth, "-o", tmp_path / "refused")
    assert code == 2
    assert "of 120 images" in error
    assert not (tmp_path / "refused").exists()
    run("score", applied, truth, "-o", tmp_path / "s", "--overlap", "exclude", "--bootstrap", 0)
    run("score", predictions, truth, "-o", tmp_path / "g", "--overlap", "exclude", "--bootstrap", 0,
        "--calibration", calibration)  # fmt: skip
    scored = json.loads((tmp_path / "s" / "metrics.json").read_text())
    given = json.loads((tmp_path / "g" / "metrics.json").read_text())
    regime = "gaussian" if family == "gaussian" else "student_t"
    for key in METRICS:  # calibrating the file first or while scoring is the same thing
        assert scored["uncalibrated"][key] == pytest.approx(given[regime][key], rel=1e-9)
    assert given[regime]["nll"] < given["uncalibrated"]["nll"]


def test_a_calibration_of_other_keypoints_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("recalibrate", files / "predictions.json", files / "truth.json", "-o", tmp_path / "c.json",
        "--family", "gaussian")  # fmt: skip
    content = json.loads((tmp_path / "c.json").read_text())
    for key in ("keypoints", "tau", "effective_samples", "sigmas"):
        content[key] = content[key][:5]
    content = {key: value for key, value in content.items() if key not in ("regions", "correlation")}
    content["checksum"] = _checksum(content)
    (tmp_path / "c.json").write_text(json.dumps(content))
    code, error = run_main(
        monkeypatch, capsys, "apply", tmp_path / "c.json", files / "predictions.json", "-o", tmp_path / "x"
    )
    assert (code, error.count("\n"), "5 keypoints, the predictions 17" in error) == (2, 1, True)


def test_a_calibration_of_keypoints_in_another_order_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("recalibrate", files / "predictions.json", files / "truth.json", "-o", tmp_path / "c.json")
    content = json.loads((tmp_path / "c.json").read_text())
    content["keypoints"] = content["keypoints"][::-1]
    content["checksum"] = _checksum(content)
    (tmp_path / "c.json").write_text(json.dumps(content))
    arguments = (files / "predictions.json", files / "truth.json", "-o", tmp_path / "x", "--bootstrap", 0)
    code, error = run_main(monkeypatch, capsys, "score", *arguments, "--calibration", tmp_path / "c.json")
    assert code == 2
    assert "in another order" in error


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "null", '{"format": "halopose-calibration-1"}'])
def test_damaged_calibrations_are_one_line_errors(
    files: Path, tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.json").write_text(content)
    code, error = run_main(
        monkeypatch, capsys, "apply", tmp_path / "c.json", files / "predictions.json", "-o", tmp_path / "x"
    )
    assert code == 2
    assert error.count("\n") == 1
    assert "c.json" in error


def test_a_file_where_a_folder_should_be_is_a_one_line_error(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("halopose.matching.matched_poses.match_poses", lambda *given: pytest.fail("too late"))
    both = files / "predictions.json", files / "truth.json"
    code, error = run_main(monkeypatch, capsys, "score", *both, "-o", tmp_path / "file")
    assert (code, error) == (2, f"halopose: cannot write to {tmp_path / 'file'}: File exists\n")
    code, error = run_main(monkeypatch, capsys, "synthesize", "-o", tmp_path / "file")
    assert code == 2
    assert error.startswith(f"halopose: cannot write to {tmp_path / 'file'}")
    assert error.count("\n") == 1


SCORE = "score p.json t.json -o out"
RECALIBRATE = "recalibrate p.json t.json -o c.json"
FIT = "fit data.yaml --base base.pt -o a.safetensors"
COLLECT = "collect data.yaml --base base.pt -o store"
TRAIN = "train store --base base.pt -o a.safetensors"
CALIBRATE = "calibrate store --base b.pt --artifact a -o out"
EVALUATE = "evaluate data.yaml --base base.pt --artifact a.safetensors -o out"
ABLATE = "ablate data.yaml --base base.pt -o out"
PAPER = "paper data.yaml --base base.pt -o out"
FINETUNE = "finetune data.yaml --base base.pt -o tuned.pt"
ANALYSE = "analyse data.yaml --base base.pt -o out"
PREDICT = "predict photo.jpg --base base.pt --artifact a.safetensors"
TRACK = "track film.mp4 --base base.pt --artifact a.safetensors -o out"
TRIANGULATE = "triangulate cameras.toml a.mp4 b.mp4 -o out"
REPLAY = "land replay --frames film.mp4 --camera camera.yaml --runway KSFO/28R"
NO_COUNT = ("-1", "1.5", "nan", "many")
NO_SIZE = ("-640", "0", "31", "640.5", "nan", "inf")
NO_SIZES = ("", *NO_SIZE, "640,320", "640,640", "640,", "640;320")
NO_SHARE = ("-0.1", "1.1", "nan", "inf", "half")
NONSENSE = {
    (SCORE, "--bootstrap"): ("1", *NO_COUNT),
    (SCORE, "--folds"): ("0", "1", *NO_COUNT),
    (SCORE, "--scale-edges"): ("0,96", "-32,96", "96,32", "32,32", "nan", "32,inf", "small"),
    (SCORE, "--sigmas"): ("0,1", "-1", "nan", "1,inf", "1,,2", "wide"),
    (SCORE, "--seed"): NO_COUNT,
    (RECALIBRATE, "--fraction"): ("0", *NO_SHARE),
    (RECALIBRATE, "--sigmas"): ("0", "nan"),
    ("synthesize -o out", "--images"): ("0", "1", *NO_COUNT),
    ("synthesize -o out", "--persons"): ("0", "1", *NO_COUNT),
    ("synthesize -o out", "--dof"): ("0", "-4", "nan", "inf"),
    ("synthesize -o out", "--overconfidence"): ("0", "-1", "nan", "inf"),
    ("synthesize -o out", "--seed"): (*NO_COUNT, "4294967296"),
    (FIT, "--imgsz"): NO_SIZE,
    (FIT, "--train-sizes"): NO_SIZES,
    (FIT, "--calibration-share"): ("0", "1", *NO_SHARE),
    (FIT, "--epochs"): ("0", *NO_COUNT),
    (FIT, "--alpha"): ("-1", "nan", "inf"),
    (FIT, "--dof"): ("0", "-4", "nan", "inf"),
    (FIT, "--workers"): NO_COUNT,
    (FIT, "--batch"): ("0", *NO_COUNT),
    (FIT, "--seed"): (*NO_COUNT, "4294967296"),
    ("predict photo.jpg", "--max-det"): ("0", *NO_COUNT),
    ("predict photo.jpg", "--vid-stride"): ("0", *NO_COUNT),
    ("track film.mp4", "--max-det"): ("0", *NO_COUNT),
    ("track film.mp4", "--vid-stride"): ("0", *NO_COUNT),
    ("plot metrics.json -o f.pdf", "--width"): ("0", "nan", "-1"),
    ("fit", "--epochs"): ("0",),  # without data it would draw its own
    (COLLECT, "--sizes"): NO_SIZES,
    (COLLECT, "--detections"): NO_COUNT,
    (COLLECT, "--workers"): NO_COUNT,
    (COLLECT, "--batch"): ("0", *NO_COUNT),
    (COLLECT, "--part"): ("3", "0/4", "5/4", "a/b"),
    (TRAIN, "--epochs"): ("0", *NO_COUNT),
    (TRAIN, "--alpha"): ("-1", "nan", "inf"),
    (TRAIN, "--dof"): ("0", "-4", "nan", "inf"),
    (TRAIN, "--seed"): NO_COUNT,
    (CALIBRATE, "--share"): ("0", *NO_SHARE),
    (EVALUATE, "--visibility"): NO_SHARE,
    (PREDICT, "--visibility"): NO_SHARE,
    (EVALUATE, "--imgsz"): NO_SIZE,
    (EVALUATE, "--conf"): NO_SHARE,
    (EVALUATE, "--iou"): NO_SHARE,
    (EVALUATE, "--bootstrap"): ("1", *NO_COUNT),
    (EVALUATE, "--pictures"): NO_COUNT,
    (EVALUATE, "--workers"): NO_COUNT,
    (EVALUATE, "--batch"): ("0", *NO_COUNT),
    (PREDICT, "--conf"): NO_SHARE,
    (PREDICT, "--iou"): NO_SHARE,
    (PREDICT, "--imgsz"): NO_SIZE,
    (PREDICT, "--probability"): ("0", "1", *NO_SHARE),
    (ABLATE, "--imgsz"): NO_SIZE,
    (ABLATE, "--train-sizes"): NO_SIZES,
    (ABLATE, "--calibration-share"): ("0", "1", *NO_SHARE),
    (ABLATE, "--epochs"): ("0", *NO_COUNT),
    (ABLATE, "--alphas"): ("-1", "0,-0.5", "nan", "0,inf", "1,,2", "steep"),
    (ABLATE, "--bootstrap"): ("0", "1", *NO_COUNT),
    (ABLATE, "--workers"): ("0", *NO_COUNT),
    (ABLATE, "--seed"): (*NO_COUNT, "4294967296"),
    (ABLATE, "--seeds"): ("0", "101", *NO_COUNT),
    (PAPER, "--seeds"): ("0", "101", *NO_COUNT),
    (PAPER, "--imgsz"): NO_SIZE,
    (PAPER, "--calibration-share"): ("0", "1", *NO_SHARE),
    (PAPER, "--epochs"): ("0", *NO_COUNT),
    (PAPER, "--bootstrap"): ("0", "1", *NO_COUNT),
    (PAPER, "--pictures"): NO_COUNT,
    (PAPER, "--workers"): ("0", *NO_COUNT),
    (PAPER, "--seed"): (*NO_COUNT, "4294967296"),
    (FINETUNE, "--sigma"): ("0", "-0.1", "nan", "inf", "wide"),
    (FINETUNE, "--epochs"): ("0", *NO_COUNT),
    (FINETUNE, "--lr"): ("0", "-0.1", "nan", "inf", "small"),
    (FINETUNE, "--imgsz"): NO_SIZE,
    (FINETUNE, "--batch"): ("0", *NO_COUNT),
    (FINETUNE, "--freeze"): NO_COUNT,
    (FINETUNE, "--workers"): NO_COUNT,
    (FINETUNE, "--head-epochs"): ("0", *NO_COUNT),
    (FINETUNE, "--conf"): NO_SHARE,
    (FINETUNE, "--bootstrap"): ("0", "1", *NO_COUNT),
    (FINETUNE, "--seed"): (*NO_COUNT, "4294967296"),
    (ANALYSE, "--imgsz"): NO_SIZE,
    (ANALYSE, "--conf"): NO_SHARE,
    (ANALYSE, "--iou"): NO_SHARE,
    (ANALYSE, "--bootstrap"): ("0", "1", *NO_COUNT),
    (ANALYSE, "--seed"): (*NO_COUNT, "4294967296"),
    ("apply c.json p.json -o out", "--region"): ("0", "1", *NO_SHARE),
    (FIT, "--novelty-images"): NO_COUNT,
    ("novelty data.yaml --base b.pt --artifact a -o out", "--novelty-images"): NO_COUNT,
    (EVALUATE, "--alarm"): NO_SHARE,
    (PREDICT, "--alarm"): NO_SHARE,
    ("land simulate", "--alarm"): NO_SHARE,
    (REPLAY, "--alarm"): NO_SHARE,
    (PREDICT, "--monitor"): NO_SHARE,
    (TRACK, "--monitor"): NO_SHARE,
    (TRACK, "--responsive"): ("-1", "nan", "inf", "1000"),
    ("export", "--conf"): NO_SHARE,
    ("export", "--iou"): NO_SHARE,
    (TRACK, "--rate"): ("0", "-25", "nan", "inf"),
    (TRACK, "--conf"): NO_SHARE,
    (TRACK, "--score"): NO_SHARE,
    (TRACK, "--confirm"): ("0", *NO_COUNT),
    (TRACK, "--gap"): ("-1", "nan", "inf"),
    (TRACK, "--iou"): NO_SHARE,
    (TRACK, "--imgsz"): NO_SIZE,
    (TRACK, "--probability"): ("0", "1", *NO_SHARE),
    (TRIANGULATE, "--rate"): ("0", "-25", "nan", "inf"),
    (TRIANGULATE, "--score"): NO_SHARE,
    (TRIANGULATE, "--conf"): NO_SHARE,
    (TRIANGULATE, "--imgsz"): NO_SIZE,
    ("world -o out", "--images"): ("0", *NO_COUNT),
    ("world -o out", "--seed"): NO_COUNT,
    ("world -o out", "--processes"): ("0", *NO_COUNT),
    ("export", "--windows"): ("0", "1001", *NO_COUNT),
    ("export", "--imgsz"): NO_SIZE,
    ("land simulate", "--seed"): NO_COUNT,
    ("land simulate", "--rate"): ("0", "-2", "101", "nan", "inf"),
    ("land simulate", "--conf"): NO_SHARE,
    ("land simulate", "--monitor"): NO_SHARE,
    (REPLAY, "--monitor"): NO_SHARE,
    (REPLAY, "--conf"): NO_SHARE,
    (REPLAY, "--frame-rate"): ("0", "-2", "1001", "nan", "inf"),
    ("land simulate", "--outage"): ("gnss:60-20", "gnss:20-20", "gnss:nan-20", "gnss:20"),
}


@pytest.mark.parametrize(
    ("command", "option", "value"), [(*key, value) for key, values in NONSENSE.items() for value in values]
)
def test_nonsense_is_one_line_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    option: str,
    value: str,
) -> None:
    """The files named do not exist: that the line is about the option shows that nothing else was looked at."""
    monkeypatch.chdir(tmp_path)
    code, error = run_main(monkeypatch, capsys, *command.split(), option, value)
    assert code == 2
    assert error.count("\n") == 1
    assert error.startswith("halopose: ")
    assert option.strip("-") in error
    assert not list(tmp_path.iterdir())


def _named(command: str) -> str:
    """The command without its arguments: two words of a group's."""
    words = command.split()
    return " ".join(words[: 2 if words[0] == "land" else 1])


def test_every_numeric_option_has_its_nonsense() -> None:
    """So that a new option cannot be forgotten above."""
    tested = {(_named(command), option) for command, option in NONSENSE}
    groups = [present(group.typer_instance) for group in app.registered_groups]
    functions = [
        (f"{prefix}{present(command.callback).__name__}", present(command.callback))
        for prefix, commands in [("", app.registered_commands)]
        + [(f"{group.info.name} ", group.registered_commands) for group in groups]
        for command in commands
    ]
    numeric = {
        (command, f"--{name.replace('_', '-')}")
        for command, function in functions
        for name, kind in get_type_hints(function).items()
        if kind in (int, float, int | None, float | None)
    }
    assert numeric <= tested
    assert len(numeric) > 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nonsense", "No such command"),
        ("score", "Missing"),
        (f"{SCORE} --colour red", "No such option"),
        (f"{SCORE} --rule best", "--rule"),
    ],
)
def test_unknown_commands_and_options_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    code, error = run_main(monkeypatch, capsys, *arguments.split())
    assert code == 2
    assert error.count("\n") == 1
    assert message in error
    assert error.endswith("--help)\n")


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        MemoryError(),
        UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"),
        RecursionError("too deep"),
    ],
)
def test_system_errors_are_one_line_and_debug_shows_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("halopose.data.synthetic_poses.synthesize", fail)
    code, printed = run_main(monkeypatch, capsys, "synthesize", "-o", tmp_path)
    assert code == 2
    assert printed.startswith(f"halopose: {type(error).__name__}: ")
    assert printed.endswith("(--debug shows where)\n")
    assert printed.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["halopose", "synthesize", "-o", str(tmp_path), "--debug"])
    with pytest.raises(type(error)):
        main()


def test_help_has_short_and_long_names_and_no_line_is_cut() -> None:
    listed = run("-h")
    assert listed == run("--help")
    assert run("--version").strip() == f"halopose {halopose.__version__}"
    for name, command in COMMANDS.items():
        whole = (command.callback.__doc__ or "").splitlines()[0].partition(". ")[0]
        assert whole in " ".join(listed.split()), name
        shown = " ".join(run(name, "-h").split())
        for parameter in command.params:
            assert " ".join((getattr(parameter, "help", None) or "").split()) in shown, (name, parameter.name)


@pytest.mark.parametrize(("words", "expected"), [("pred", "predict"), ("predict --prob", "--probability")])
def test_the_shell_completes_commands_and_options(words: str, expected: str) -> None:
    script = "import sys; sys.argv = ['halopose']; from halopose.cli.app import main; main()"
    asked = {"_HALOPOSE_COMPLETE": "complete_bash", "COMP_WORDS": f"halopose {words}"}
    environment = {**os.environ, **asked, "COMP_CWORD": str(words.count(" ") + 1)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert expected in done.stdout.split()


def test_no_arguments_are_a_call_for_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["halopose"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert "synthesize" in capsys.readouterr().out


TRUTH, RESULTS = synthesize(World(images=4, persons=8, detections_per_image=3))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(mangled({"truth": TRUTH, "predictions": RESULTS}), st.sampled_from(["score", "recalibrate"]))
def test_mangled_files_never_show_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: Any, command: str
) -> None:
    for name in ("truth", "predictions"):
        (tmp_path / f"{name}.json").write_text(json.dumps(content.get(name)))
    arguments = [command, tmp_path / "predictions.json", tmp_path / "truth.json", "-o", tmp_path / "out"]
    arguments += ["--bootstrap", "0"] if command == "score" else []
    code, error = run_main(monkeypatch, capsys, *arguments)
    assert code in (0, 2)
    assert "Traceback" not in error
    if code == 2:
        assert error.startswith("halopose: ")
        assert error.count("\n") == 1


def test_commands_run_without_docstrings() -> None:
    """`python -OO` removes docstrings, from which the help is made, and assertions."""
    words = [sys.executable, "-OO", "-m", "halopose", "models", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_lists_commands_by_task() -> None:
    """Prediction comes first; commands of plug-ins have a separate heading."""
    listed = run("--help")
    places = [listed.index(title) for title in ("Predict:", "Fit:", "Score:", "Deploy:", "Plug-ins:")]
    assert places == sorted(places)
    assert places[0] < listed.index("predict ") < listed.index("track ") < places[1]
