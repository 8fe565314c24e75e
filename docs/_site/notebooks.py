"""Notebooks of the tutorials, generated from scripts in examples/.

`python docs/_site/notebooks.py` runs the scripts and writes all notebooks; a name after it writes that one alone.

A script is divided by lines that begin with `# %%`. `# %% [markdown]` begins text, `# %%` code, and `# %% script` code
that the notebook does not have.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
TUTORIALS = {
    "first-prediction": "quickstart.py",
    "fit-your-own-model": "your_own_model.py",
    "filter-with-covariances": "filter_keypoints.py",
    "deploy": "deploy_model.py",
    "land": "land_by_camera.py",
}
SETUP = """\
# In Google Colab: install halopose and fetch the photographs. Elsewhere this only sets the folder of the photographs.
import sys
from pathlib import Path

PHOTOGRAPHS = Path("../../examples/photographs")
if "google.colab" in sys.modules:
    # The published packages; or upload the two wheels of `make dist` and install those instead.
    %pip install -q "halopose[ultralytics,onnx,landing]" halopose-models
    import skimage

    PHOTOGRAPHS = Path("photographs")
    PHOTOGRAPHS.mkdir(exist_ok=True)
    for name, sample in (("astronaut", "astronaut"), ("photographer", "camera")):
        skimage.io.imsave(PHOTOGRAPHS / f"{name}.jpg", getattr(skimage.data, sample)())"""


def cells_of(script: str) -> list[dict[str, Any]]:
    """Return the cells of a notebook without outputs, the set-up cell after the title included."""
    parts = re.split(r"^# %%(.*)\n", script, flags=re.MULTILINE)[1:]
    cells = []
    for kind, body in zip(parts[::2], parts[1::2], strict=True):
        if kind.strip() == "[markdown]":
            cells.append(_cell("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)))
        elif kind.strip() != "script":
            cells.append(_cell("code", body.strip()))
    cells.insert(1, _cell("code", SETUP))
    return [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells)]


def _cell(kind: str, source: str) -> dict[str, Any]:
    code: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True), **code}


def run(cells: list[dict[str, Any]], names: dict[str, Any]) -> None:
    """Run the code cells in order and store their outputs.

    Args:
        cells: Cells of `cells_of`; the set-up cell is not run.
        names: Variables that the cells find.
    """
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        cell["execution_count"] = number
        source = "".join(cell["source"])
        if source != SETUP:
            cell["outputs"] = list(_outputs(source, number, names))


def _outputs(source: str, number: int, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a cell; yield what it prints and, if it ends with an expression, its value."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # type: ignore[attr-defined]
    if printed.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}
    if value is not None:
        yield {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": _data(value)}


def _data(value: Any) -> dict[str, Any]:
    """Return the representations of a value: a picture if it has one, and text."""
    data: dict[str, Any] = {"text/plain": repr(value)}
    picture = value._repr_png_() if hasattr(value, "_repr_png_") else None
    if picture is not None:
        data["image/jpeg"] = base64.b64encode(_jpeg(picture)).decode()
    return data


def _jpeg(png: bytes) -> bytes:
    """Return a PNG photograph as JPEG, which is a fifth of its size."""
    import cv2
    import numpy as np

    pixels = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    assert pixels is not None
    return bytes(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 88])[1])


def page_of(name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by file name.

    Args:
        name: Name of the tutorial, a key of `TUTORIALS`.
    """
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    lines, pictures = [], {}
    for cell in cells:
        source = "".join(cell["source"])
        if source == SETUP:
            lines.append(
                f"*This page is a notebook: [download it]({name}.ipynb) and open it in Jupyter or Google Colab. "
                f"As a script: [{TUTORIALS[name]}](../../examples/{TUTORIALS[name]}).*"
            )
            continue
        lines.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                lines.append("```{ .text .output }\n" + "".join(output["text"]).rstrip() + "\n```")
            elif "image/jpeg" in output["data"]:
                picture = f"{name}-{len(pictures)}.jpg"
                pictures[picture] = base64.b64decode(output["data"]["image/jpeg"])
                lines.append(f"![{output['data']['text/plain']}]({picture})")
            else:
                lines.append(f"```{{ .text .output }}\n{output['data']['text/plain']}\n```")
    return "\n\n".join(lines) + "\n", pictures


def main() -> None:
    """Run all tutorials and write their notebooks."""
    import tempfile

    chosen = sys.argv[1:] or list(TUTORIALS)
    for name in chosen:
        cells = cells_of((ROOT / "examples" / TUTORIALS[name]).read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            run(cells, {"__name__": "notebook", "PHOTOGRAPHS": ROOT / "examples" / "photographs"})
            os.chdir(ROOT)
        language = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        notebook = {"cells": cells, "metadata": language, "nbformat": 4, "nbformat_minor": 5}
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        (FOLDER / f"{name}.ipynb").write_text(text, encoding="utf-8")
        sys.stdout.write(f"-> docs/tutorials/{name}.ipynb\n")


if __name__ == "__main__":
    main()
