"""The notebooks of the tutorials are those that their scripts generate, with outputs."""

import json
import runpy
from typing import Any

import pytest

from tests.helpers.models import ROOT

GENERATOR = runpy.run_path(str(ROOT / "docs" / "_site" / "notebooks.py"))
ADVICE = "run `python docs/_site/notebooks.py`"


def stored(name: str) -> Any:
    return json.loads((GENERATOR["FOLDER"] / f"{name}.ipynb").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "script"), GENERATOR["TUTORIALS"].items())
def test_notebooks_have_the_cells_of_their_scripts_and_outputs(name: str, script: str) -> None:
    notebook = stored(name)
    fresh = GENERATOR["cells_of"]((ROOT / "examples" / script).read_text(encoding="utf-8"))
    assert [cell["source"] for cell in notebook["cells"]] == [cell["source"] for cell in fresh], ADVICE
    assert len({cell["id"] for cell in notebook["cells"]}) == len(fresh)  # which format 4.5 requires
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert outputs
    assert all(output["output_type"] in ("stream", "execute_result") for output in outputs)


def test_a_run_stores_what_cells_print_and_their_last_value() -> None:
    cells = GENERATOR["cells_of"]("# %% [markdown]\n# # Title\n# %% script\nx = 1\n# %%\nx = 2\nprint(x)\nx + 1\n")
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "code"]  # the second is the set-up cell
    assert cells[0]["source"] == ["# Title"]
    GENERATOR["run"](cells, {})
    printed, value = cells[2]["outputs"]
    assert (printed["text"], value["data"]) == (["2\n"], {"text/plain": "3"})


@pytest.mark.parametrize("name", GENERATOR["TUTORIALS"])
def test_pages_of_notebooks_show_code_outputs_and_pictures(name: str) -> None:
    page, pictures = GENERATOR["page_of"](name)
    assert page.startswith("# ")
    assert f"({name}.ipynb)" in page
    assert "google.colab" not in page  # the set-up cell is for notebooks alone
    assert all(f"]({picture})" in page for picture in pictures)
