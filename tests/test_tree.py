"""Guarantees name an existing test; module and class names are unique; the core knows nothing of flight."""

from __future__ import annotations

import ast
import re
import sys
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


def test_core_names_nothing_of_flight() -> None:
    words = re.compile(r"runway|aircraft|flight|landing|airport|cockpit|gnss|glide|pilot", re.IGNORECASE)
    core = [path for path in SOURCE.rglob("*.*") if path.suffix in (".py", ".html", ".js", ".cpp", ".txt")]
    found = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in core
        if "landing" not in path.relative_to(SOURCE).parts
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if words.search(line)
    ]
    assert found == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_import_contract_names_every_module_of_the_core() -> None:
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    [core] = (contract for contract in contracts if contract["name"] == "The core does not import landing")
    modules = {f"halopose.{path.stem}" for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert (
        modules - set(core["source_modules"])
        == {"halopose.landing", "halopose.__init__", "halopose.__pycache__"} & modules
    )
