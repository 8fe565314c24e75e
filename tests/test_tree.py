"""The shape of the tree: short functions, files and folders; and every promise of the docs names its test."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "halopose"
LONGEST_FUNCTION, LONGEST_FILE, LARGEST_FOLDER = 60, 500, 14
ONE_FILE_BY_DESIGN = {SOURCE / "deploy" / "predict.py"}  # users copy it


def functions_of(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]


def test_functions_fit_on_a_screen() -> None:
    """A command's options are its signature; elsewhere a long function does too many things."""
    paths = [path for path in SOURCE.rglob("*.py") if "cli" not in path.relative_to(SOURCE).parts]
    long = [
        f"{path.relative_to(ROOT)}: {function.name}"
        for path in [*paths, *(ROOT / "experiments").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
        for function in functions_of(path)
        if (function.end_lineno or 0) - function.lineno + 1 > LONGEST_FUNCTION
    ]
    assert not long


def test_files_and_folders_can_be_overlooked() -> None:
    modules = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]
    assert len(modules) > 100
    for path in set(modules) - ONE_FILE_BY_DESIGN:
        assert path.read_text("utf-8").count("\n") <= LONGEST_FILE, path
    folders = Counter(path.parent for path in modules)
    assert {folder: count for folder, count in folders.items() if count > LARGEST_FOLDER} == {}


PROOFS = re.findall(r"`(tests/\S+?\.py)::(\w+)`", (ROOT / "docs" / "reliability.md").read_text("utf-8"))


@pytest.mark.parametrize(("path", "name"), PROOFS)
def test_what_is_promised_names_a_test(path: str, name: str) -> None:
    assert name in {function.name for function in functions_of(ROOT / path)}


def test_many_things_are_promised() -> None:
    assert len(PROOFS) > 25
