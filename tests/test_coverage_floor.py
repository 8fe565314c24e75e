"""The commands of ``make test`` count the lines that parallel test processes run, and fail below a floor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = (Path(__file__).parent.parent / "Makefile").read_text("utf-8")


def slipcover(folder: Path, *arguments: str) -> int:
    """Run slipcover in a folder, without the settings of the tests around it; returns its exit code."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLIPCOVER", "PYTEST"))}
    run = subprocess.run([sys.executable, "-m", "slipcover", *arguments], cwd=folder, env=own, capture_output=True)
    return run.returncode


def test_the_floor_counts_lines_run_by_parallel_processes(tmp_path: Path) -> None:
    pytest.importorskip("slipcover")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "halves.py").write_text("def run():\n    return 1\n\n\ndef unused():\n    return 2\n")
    (tmp_path / "pyproject.toml").write_text(
        '[tool.slipcover]\nsource = "code"\n[tool.pytest.ini_options]\npythonpath = "code"\n'
    )
    (tmp_path / "test_halves.py").write_text("import halves\n\n\ndef test_run():\n    assert halves.run() == 1\n")

    assert slipcover(tmp_path, "--json", "--out", "lines.json", "-m", "pytest", "-n", "1", "test_halves.py") == 0
    assert json.loads((tmp_path / "lines.json").read_text())["summary"]["percent_covered"] == 75

    assert slipcover(tmp_path, "--merge", "lines.json", "--out", "all.json", "--fail-under", "75") == 0
    assert slipcover(tmp_path, "--merge", "lines.json", "--out", "all.json", "--fail-under", "76") == 2


def test_make_test_checks_the_floor() -> None:
    assert re.search(r"slipcover --json --out build/coverage\.json -m pytest", MAKEFILE)
    assert re.search(r"slipcover --merge build/coverage\.json .*--fail-under 95", MAKEFILE)
