"""The benchmark runner on fake measurements: files, subsets, selection and comparison. No timing is asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.interleave import Comparison, compare, median_interval
from benchmarks.rows import Row, as_text, cost, in_time, speedup
from benchmarks.runs import Machine, Run, RunError, begin
from benchmarks.suite import Benchmark, Options, Part, selected

from benchmarks import __main__ as command
from benchmarks import history, regressions, suite

HERE = Machine("a processor", 2, 8.0, "Linux")


def run_of(*rows: Row, machine: Machine = HERE) -> Run:
    return Run("2026-11-18T12:00:00+00:00", "abc1234", machine, {"Python": "3.11.7"}, rows)


def ratio(value: float, spread: float = 0.0, better: str = "higher", name: str = "part.row") -> Row:
    return Row(name, "a ratio", value, value - spread, value + spread, better=better)  # type: ignore[arg-type]


@pytest.fixture
def fake_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts whose figures are made up; the second benchmark of the first part fails."""

    def first(options: Options) -> Iterator[Row]:
        yield speedup("fast.one", "first", Comparison(0.1, 0.2, (2.0,) * options.rounds(5)), "a peer")
        yield cost("fast.two", "second", Comparison(0.1, 0.11, (1.1, 1.12, 1.09)))

    def failing(_: Options) -> Iterator[Row]:
        raise ImportError("No module named 'peer'")
        yield

    def slow(_: Options) -> Iterator[Row]:
        yield Row("slow.one", "third", 3.0, unit="s", better="lower", ours="3 s")

    parts = {
        "fast": Part("Fast", (Benchmark(("one", "two"), first, short=True), Benchmark(("broken",), failing))),
        "slow": Part("Slow", (Benchmark(("one",), slow),)),
    }
    monkeypatch.setattr(suite, "PARTS", parts)
    monkeypatch.setattr(command, "PARTS", parts)


@pytest.fixture
def in_process(fake_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process, which knows the fake parts."""
    monkeypatch.setattr(command, "_apart", lambda *given: list(command.measure(*given)))


def test_compare_runs_both_in_turns() -> None:
    calls: list[str] = []
    found = compare(lambda: calls.append("ours"), lambda: calls.append("peer"), rounds=3)
    assert calls == ["ours", "peer"] * 4
    assert len(found.ratios) == 3
    assert found.divided(ours=2, peer=4).ratios == pytest.approx([one / 2 for one in found.ratios])


def test_interval_of_the_median_by_order_statistics() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    values = [float(number) for number in range(1, 41)]
    assert median_interval(values) == (14.0, 27.0)  # the tabulated ranks for n = 40: 14 and 27


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    run = run_of(ratio(2.0, 0.1), Row("part.none", "nothing", skipped="no package"))
    run.write(tmp_path / "new" / "run.json")
    assert Run.read(tmp_path / "new" / "run.json") == run
    assert "skipped" not in json.loads((tmp_path / "new" / "run.json").read_text())["rows"][0]


def test_begin_names_machine_versions_and_commit() -> None:
    run = begin("short")
    assert run.subset == "short"
    assert run.machine.cores >= 1
    assert {"Python", "torch", "numpy"} <= set(run.versions)
    assert run.machine.processor in run.about()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "rows": [{"wrong": 1}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run\.json"):
        Run.read(tmp_path / "run.json")
    with pytest.raises(RunError, match="cannot read"):
        Run.read(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (ratio(10.0), ratio(9.0), "worse"),
        (ratio(10.0), ratio(11.0), "better"),
        (ratio(10.0), ratio(9.85), "same"),  # within the least noise of 2 %
        (ratio(10.0, 1.0), ratio(9.0, 1.0), "same"),  # within the spread of both
        (ratio(1.02, better="lower"), ratio(1.06, better="lower"), "worse"),
        (ratio(1.06, better="lower"), ratio(1.02, better="lower"), "better"),
        (ratio(10.0, better=""), ratio(1.0, better=""), "context"),
        (ratio(10.0), Row("part.row", "a ratio", skipped="failed"), "skipped"),
        (
            Row("part.row", "", 1.0, unit="s", better="lower"),
            Row("part.row", "", 1.09, unit="s", better="lower"),
            "same",
        ),
        (
            Row("part.row", "", 1.0, unit="s", better="lower"),
            Row("part.row", "", 1.2, unit="s", better="lower"),
            "worse",
        ),
    ],
)
def test_changes_beyond_the_noise_are_judged(before: Row, after: Row, verdict: str) -> None:
    (found,) = regressions.changes(run_of(before), run_of(after))
    assert found.verdict == verdict
    assert ("WORSE" in regressions.as_text([found])) == (verdict == "worse")


def test_seconds_of_another_machine_are_not_judged() -> None:
    before = Row("part.row", "", 1.0, unit="s", better="lower")
    other = run_of(replace(before, value=9.0), ratio(1.0, name="part.ratio"), machine=replace(HERE, cores=64))
    found = regressions.changes(run_of(before, ratio(2.0, name="part.ratio")), other)
    assert [one.verdict for one in found] == ["other machine", "worse"]


def test_rows_of_one_run_alone_are_named() -> None:
    before, after = run_of(ratio(1.0, name="part.old")), run_of(ratio(1.0, name="part.new"))
    assert [(one.name, one.verdict) for one in regressions.changes(before, after)] == [
        ("part.new", "new"),
        ("part.old", "gone"),
    ]
    subset = replace(after, subset="selected")
    assert [one.name for one in regressions.changes(before, subset)] == ["part.new"]


def test_rows_are_selected_by_name_prefix_and_pattern() -> None:
    assert selected("protocol.stage.folds", ())
    assert selected("protocol.stage.folds", ("protocol.stage",))
    assert selected("protocol.stage.folds", ("*.folds",))
    assert not selected("protocol.stage.folds", ("protocol.sta", "folds"))


def test_a_whole_run_writes_json_and_tables(in_process: None, tmp_path: Path) -> None:
    paths = tmp_path / "run.json", tmp_path / "speed.md"
    assert command.main(["--json", str(paths[0]), "-o", str(paths[1])]) == 0
    run = Run.read(paths[0])
    assert [row.name for row in run.rows] == ["fast.one", "fast.two", "fast.broken", "slow.one"]
    assert (run.rows[1].value, run.rows[1].low, run.rows[1].high) == (1.1, 1.09, 1.12)
    assert "peer" in run.rows[2].skipped
    assert run.subset == ""
    assert "| third | 3 s |" in paths[1].read_text()
    assert "1.100 (1.090 to 1.120)" in paths[1].read_text()


def test_short_only_and_part_select_rows(in_process: None, tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    def rows(*arguments: str) -> tuple[str, list[str]]:
        assert command.main([*arguments, "--json", str(path)]) == 0
        run = Run.read(path)
        return run.subset, [row.name for row in run.rows]

    assert rows("--short") == ("short", ["fast.one", "fast.two"])
    assert rows("--only", "fast.two") == ("selected", ["fast.two"])
    assert rows("--only", "*.one") == ("selected", ["fast.one", "slow.one"])
    assert rows("slow") == ("selected", ["slow.one"])


def test_compare_marks_what_is_worse(in_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tmp_path / "before.json"
    run_of(ratio(3.0, name="fast.one"), ratio(1.1, 0.02, "lower", "fast.two")).write(before)
    assert command.main(["fast", "--compare", str(before)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("fast.one ") and "WORSE" in line)
    assert lines[-1].startswith("1 worse")
    assert command.main(["--compare", str(before), "--measured", str(before)]) == 0


@pytest.mark.parametrize(
    "arguments", [["unknown"], ["--only", "unknown.row"], ["--compare", "missing.json", "--short"]]
)
def test_user_mistakes_end_before_anything_is_measured(in_process: None, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(arguments)
    assert error.value.code == 2


def test_a_part_runs_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    rows = command._apart("landing", Options(most_rounds=1), ("landing.update-irs",))
    assert [row.name for row in rows] == ["landing.update-irs"]
    assert rows[0].value
    assert rows[0].unit == "s"
    assert as_text(rows[0]) in capsys.readouterr().out


def test_names_of_rows_are_unique_and_the_short_subset_covers_the_users_paths() -> None:
    assert len(set(suite.names())) == len(suite.names())
    short = {
        f"{part}.{name}" for part, one in suite.PARTS.items() for b in one.benchmarks if b.short for name in b.names
    }
    assert {"protocol.pycocotools", "predicting.shipped", "exporting.topk", "training.epoch", "landing.fix"} <= short


def test_rounds_are_fewer_in_the_short_subset() -> None:
    assert Options().rounds(40) == 40
    assert Options(short=True).rounds(40) == 13
    assert Options(short=True).rounds(3) == 3
    assert Options(most_rounds=1).rounds(40) == 1


@pytest.mark.parametrize(("value", "text"), [(3.21, "3.21 s"), (0.0321, "32.1 ms"), (0.5, "500 ms"), (2e-7, "0.2 µs")])
def test_times_are_written_in_their_unit(value: float, text: str) -> None:
    assert in_time(value) == text


def test_the_chart_shows_every_committed_run() -> None:
    runs = history.runs()
    assert len(runs) >= 6
    svg = history.chart(runs)
    assert all(svg.count(f"{run.date[:10]}, {run.commit}") >= 6 for run in runs)
    assert history.TARGET.read_text(encoding="utf-8") == svg, "redraw it: python -m benchmarks.history"
    charted = {name for name, *_ in (*history.FASTER, *history.COSTS)}
    assert charted <= set(suite.names())
