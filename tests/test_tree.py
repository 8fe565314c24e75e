"""Guarantees in docs/explanation/reliability.md name a test that exists; class and module names are unique."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "halopose"
STANDALONE = SOURCE / "runtime" / "predict.py"  # copied into every exported folder
RELIABILITY = ROOT / "docs" / "explanation" / "reliability.md"
GUARANTEES = re.findall(r"`(tests/\S+?\.py)::(\w+)`", RELIABILITY.read_text("utf-8"))
TREES = {path: ast.parse(path.read_text("utf-8")) for path in SOURCE.rglob("*.py")}


@pytest.mark.parametrize(("path", "name"), GUARANTEES)
def test_a_guarantee_names_an_existing_test(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_there_are_many_guarantees() -> None:
    assert len(GUARANTEES) > 25


def test_module_names_are_unique() -> None:
    names = Counter(path.stem for path in TREES if not path.stem.startswith("__"))
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for path, tree in TREES.items()
        if path != STANDALONE
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in names.items() if count > 1} == {}
