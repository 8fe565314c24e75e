"""``make bench``: measure every ratio with its spread, write it as JSON and compare it with an earlier run.

    python -m benchmarks [part ...] [--short] [--only NAME] [--json run.json] [-o tables.md]
    python -m benchmarks --compare before.json [--measured after.json]

Each part runs in a separate process, so that no part affects the next. A benchmark that lacks a package, fails or does
not end becomes a skipped row. With --compare the exit status is 1 if a row is worse by more than its noise.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import regressions
from benchmarks.rows import Row, as_markdown, as_text
from benchmarks.runs import Run, RunError, begin
from benchmarks.suite import PARTS, Options, names, selected

MARK = "row: "  # before a row in the output of a part's process


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed against peers, measured in turns.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--short", action="store_true", help="a subset of about three minutes")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="rows of this name or pattern")
    parser.add_argument("--list", action="store_true", help="print the names of all rows and stop")
    parser.add_argument("--json", type=Path, help="write the run to this file")
    parser.add_argument("-o", "--output", type=Path, help="write the tables as markdown")
    parser.add_argument("--compare", type=Path, metavar="BEFORE", help="mark rows that are worse than in this file")
    parser.add_argument("--measured", type=Path, metavar="AFTER", help="compare this file instead of measuring")
    parser.add_argument("--data", type=Path, help="YOLO data yaml of photographs to collect from")
    parser.add_argument("--rounds", type=int, help="at most this many rounds, to try a row out")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    for pattern in given.only:
        if not any(selected(name, (pattern,)) for name in names()):
            parser.error(f"no row {pattern}: --list prints their names")
    if given.list:
        print("\n".join(names()))
        return 0
    options, only = Options(given.data, given.short, given.rounds), tuple(given.only)
    if given.inside:
        for row in measure(given.parts[0], options, only):
            print(MARK + json.dumps(asdict(row)), flush=True)
        return 0
    try:
        before = Run.read(given.compare) if given.compare else None
        after = Run.read(given.measured) if given.measured else None
    except RunError as error:
        parser.error(str(error))
    if after is None:
        after = _run(given.parts or list(PARTS), options, only)
    if given.json:
        after.write(given.json)
    if given.output:
        given.output.write_text(tables(after), encoding="utf-8")
    if before is None:
        return 0
    found = regressions.changes(before, after)
    print("\n" + regressions.as_text(found))
    return int(any(one.verdict == "worse" for one in found))


def measure(part: str, options: Options, only: tuple[str, ...] = ()) -> Iterator[Row]:
    """Measure the selected rows of a part; a failed benchmark gives one skipped row."""
    for benchmark in PARTS[part].benchmarks:
        if (options.short and not benchmark.short and not only) or not benchmark.has(part, only):
            continue
        try:
            yield from (row for row in benchmark.measure(options) if selected(row.name, only))
        except Exception as error:  # noqa: BLE001  # the next benchmark may still work
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            yield Row(f"{part}.{benchmark.names[0]}", "", skipped=reason)


def tables(run: Run) -> str:
    """The run as markdown, a table for each part."""
    parts = {row.part for row in run.rows}
    rows = ((PARTS[part].title, [row for row in run.rows if row.part == part]) for part in PARTS if part in parts)
    return as_markdown(rows, run.about())


def _run(parts: list[str], options: Options, only: tuple[str, ...]) -> Run:
    subset = "selected" if only or len(parts) < len(PARTS) else "short" if options.short else ""
    run, start = begin(subset), time.monotonic()
    print(run.about(), flush=True)
    rows: list[Row] = []
    for part in parts:
        if any(one.has(part, only) and (one.short or only or not options.short) for one in PARTS[part].benchmarks):
            rows += _apart(part, options, only)
    minutes = (time.monotonic() - start) / 60
    print(f"{minutes:.1f} minutes")
    return replace(run, rows=tuple(rows), minutes=round(minutes, 1))


def _apart(part: str, options: Options, only: tuple[str, ...]) -> list[Row]:
    """Measure the rows of a part in a separate process and print each at once."""
    print(f"\n{PARTS[part].title}", flush=True)
    command = [sys.executable, "-m", "benchmarks", "--inside", part]
    command += [*(["--data", str(options.data)] if options.data else []), *(["--short"] if options.short else [])]
    command += [f"--rounds={options.most_rounds}"] if options.most_rounds else []
    command += [f"--only={pattern}" for pattern in only]
    rows: list[Row] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        watch = threading.Timer(PARTS[part].most_seconds, process.kill)
        watch.start()
        for line in process.stdout:
            if line.startswith(MARK):
                rows.append(Row(**json.loads(line[len(MARK) :])))
                print(as_text(rows[-1]), flush=True)
        status = process.wait()
        watch.cancel()
        errors.seek(0)
        messages = [line.strip() for line in errors if line.strip()]
    if status:
        late = f"not done after {PARTS[part].most_seconds} s"
        reason = late if status == -signal.SIGKILL else (messages or [f"exit status {status}"])[-1]
        rows.append(Row(f"{part}.unfinished", "", skipped=reason))
        print(as_text(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
