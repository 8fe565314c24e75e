"""``make bench``: every ratio with what it compares, as one table.

    python -m benchmarks [-o speed.md] [--data data.yaml] [part ...]

Each part runs in a process of its own, so that none disturbs the next, and one that lacks a package, fails or does
not end is a line of the table. ``--data``: photographs to collect from; else two that come with Ultralytics.
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
from dataclasses import asdict
from pathlib import Path

from benchmarks.parts import PARTS
from benchmarks.table import Row, as_markdown, as_text, machine

MARK = "row: "  # before a row in what a part's process prints


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed against peers, measured in turns.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("-o", "--output", type=Path, help="write the tables as markdown")
    parser.add_argument("--data", type=Path, help="YOLO data yaml of photographs to collect from")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if given.inside:
        for row in PARTS[given.parts[0]].rows(given.data):
            print(MARK + json.dumps(asdict(row)), flush=True)
        return
    about = machine()
    print(about, flush=True)
    begin, tables = time.monotonic(), []
    for name in given.parts or PARTS:
        tables.append((PARTS[name].title, _measured(name, given.data)))
    minutes = (time.monotonic() - begin) / 60
    print(f"{minutes:.1f} minutes")
    if given.output:
        given.output.write_text(as_markdown(tables, about), encoding="utf-8")


def _measured(name: str, data: Path | None) -> list[Row]:
    """The rows of a part, shown as they come; what ended it early is the last of them."""
    print(f"\n{PARTS[name].title}", flush=True)
    command = [sys.executable, "-m", "benchmarks", "--inside", name, *(["--data", str(data)] if data else [])]
    rows: list[Row] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        watch = threading.Timer(PARTS[name].most_seconds, process.kill)
        watch.start()
        for line in process.stdout:
            if line.startswith(MARK):
                rows.append(Row(**json.loads(line[len(MARK) :])))
                print(as_text(rows[-1]), flush=True)
        ended = process.wait()
        watch.cancel()
        errors.seek(0)
        said = [line.strip() for line in errors if line.strip()]
    if ended:
        reason = (
            f"not done after {PARTS[name].most_seconds} s"
            if ended == -signal.SIGKILL
            else (said or [f"ended {ended}"])[-1]
        )
        rows.append(Row(f"{name}: the rest", "skipped", reason))
        print(as_text(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    main()
