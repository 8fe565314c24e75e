"""Public names: complete, each from one module, and not loaded by ``import halopose``."""

import ast
from pathlib import Path

import pytest

import halopose
from tests.helpers.models import run_script


@pytest.mark.parametrize("name", [name for name in halopose.__all__ if name != "__version__"])
def test_names_equal_those_of_their_homes(name: str) -> None:
    thing = getattr(halopose, name)
    assert thing.__name__ == name
    assert thing.__module__ == halopose._HOMES[name]
    assert thing.__doc__
    assert name in dir(halopose)


def test_type_checkers_see_the_same_names_from_the_same_homes() -> None:
    """What stands under TYPE_CHECKING is what is imported lazily."""
    tree = ast.parse(Path(halopose.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {
        alias.name: node.module for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert told == halopose._HOMES
    assert set(halopose.__all__) == {*told, "__version__"}


def test_the_import_brings_nothing_along() -> None:
    heavy = {"torch", "numpy", "scipy", "cv2", "typer"}
    assert run_script(f"import sys, halopose; print({heavy} & set(sys.modules))").strip() == "set()"


def test_other_names_are_missing_as_usual() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Confidence'"):
        halopose.Confidence  # noqa: B018
