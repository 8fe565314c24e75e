"""The folder that ``halopose export`` writes: the model, the runtime of one file, and the card.

In: a model of ``onnx_file.build``, quantised or not, and the artifact. Out: files that need none of this package.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from halopose.data.files import make_folder, write_json, write_text
from halopose.deploy import predict
from halopose.deploy.deployed_model import CARD, MODEL
from halopose.deploy.onnx_file import read_facts, write_model
from halopose.fitting.artifact import Artifact
from halopose.uncertainty.regions import CONDITION

if TYPE_CHECKING:
    from onnx import ModelProto

RUNTIME, LAYOUT = "predict.py", "README.md"


def write_folder(folder: Path | str, model: ModelProto, artifact: Artifact) -> None:
    """Model, runtime, card, and a page that says what goes in and comes out."""
    folder = make_folder(folder)
    write_model(model, folder / MODEL)
    write_text(folder / RUNTIME, inspect.getsource(predict))
    write_json(folder / CARD, artifact.card.to_json())
    write_text(folder / LAYOUT, describe(model, artifact))


def describe(model: ModelProto, artifact: Artifact) -> str:
    """The card for a reader: inputs, outputs, and how to run it."""
    facts = read_facts(model, "the model")
    colour = "BGR" if facts.layout == "yolonas" else "RGB"
    rows = [
        f"| `{value.name}` | {_shape(value)} | {_meaning(value.name, facts)} |"
        for value in (*model.graph.input, *model.graph.output)
    ]
    base = artifact.card.base or "a pose model"
    return "\n".join(
        [
            f"# {base} with calibrated keypoint covariances",
            "",
            f"Form `{facts.form}`, precision `{facts.precision}`, {len(facts.keypoint_names)} keypoints, made for "
            f"an input of {facts.imgsz}. Written by `halopose export`.",
            "",
            "```console",
            "pip install numpy onnxruntime opencv-python-headless",
            "python predict.py photo.jpg             # a line, and the picture poses/photo.jpg",
            "python predict.py photo.jpg --json --family student-t",
            "```",
            "",
            "| tensor | shape | meaning |",
            "|---|---|---|",
            *rows,
            "",
            f"`images` is {colour}, 0 to 1, letterboxed as `prepare` in `predict.py` does it; both sides are "
            f"multiples of {max(facts.strides[-1], 32)}. A cell counts over all levels, strides "
            f"{', '.join(map(str, facts.strides))}, each row by row. The covariance of a keypoint is L L^T with "
            "L = [[l11, 0], [l21, l22]] in pixels of the input; divide l11 by the letterbox's gain in x, l21 and "
            "l22 by that in y, for pixels of the image. The Gaussian's temperature is in it. For the Student-t "
            "multiply L by `student_scale` of the metadata; the degrees of freedom are `student_dof`. Where the "
            "metadata have `pruned_scale` and `pruned_dof`, those are for keypoints that pruning takes out.",
            "",
            *_promises(facts),
        ]
    )


def _promises(facts: predict.Facts) -> list[str]:
    """What the metadata promise beyond the law of each keypoint."""
    lines = []
    if facts.regions is not None:
        lines += [
            "`poses.region(0.9)` gives ellipses that hold the true keypoint with at least 90 %, whatever its law, "
            f"and with `whole=True` all keypoints of an object together: of {CONDITION}.",
            "",
        ]
    if facts.correlation is not None:
        lines += ["`poses.joint_covariance()` is the covariance of all keypoints of a detection together.", ""]
    if facts.novelty is not None:
        lines += [
            "`poses.novelty` is small for a detection unlike anything seen, `poses.image_novelty` for such "
            "an image: on data like those of calibration at most a share p falls below p.",
            "",
        ]
    return lines


_MEANINGS = {
    "images": "input",
    "area": "left, top, right, bottom of each image in the input, without its padding",
    "boxes": "x1, y1, x2, y2 of each cell, in pixels of the input",
    "scores": "of each cell, a class",
    "keypoints_xy": "x, y of each cell's keypoints, in pixels of the input",
    "keypoints_conf": "visibilities of each cell's keypoints",
    "factors": "l11, l21, l22 of the Gaussian's Cholesky factors, in pixels of the input",
    "cells": "the cell that a row of `factors` belongs to, -1 for none",
    "novelty": "how unlike the data the cell of each row of `factors` is, compared with `known` of the metadata",
    "image_novelty": "how unlike the data the image is, compared with `known_images` of the metadata",
    "rows": "the cell that a row of `output0` comes from",
}


def _meaning(name: str, facts: predict.Facts) -> str:
    if name != "output0":
        return _MEANINGS[name]
    seen = ", visibility" if facts.visibility else ""
    if facts.layout == "ultralytics-end2end":
        return f"rows, best first: x1, y1, x2, y2, score, class, and of each keypoint x, y{seen}; pixels of the input"
    return (
        "of each cell: x, y of the box's centre, its width and height, a score a class, and of each keypoint x, y"
        f"{seen}; pixels of the input"
    )


def _shape(value: object) -> str:
    sizes = value.type.tensor_type.shape.dim  # type: ignore[attr-defined]
    return " x ".join(size.dim_param or str(size.dim_value) for size in sizes)
