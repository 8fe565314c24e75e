"""Write the folder of ``halopose export``: model, single-file runtime, card and README.

The folder does not need this package.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from halopose.data.files import make_folder, write_json, write_text
from halopose.deploy.deployed_model import CARD, MODEL
from halopose.deploy.onnx_file import read_facts, write_model
from halopose.fitting.artifact import Artifact
from halopose.runtime import predict
from halopose.uncertainty.regions import CONDITION

if TYPE_CHECKING:
    from onnx import ModelProto

RUNTIME, LAYOUT = "predict.py", "README.md"


def write_folder(folder: Path | str, model: ModelProto, artifact: Artifact) -> None:
    """Write model, runtime, card and a README that documents inputs and outputs.

    Args:
        folder: Folder to write.
        model: Model of ``onnx_file.build``, quantised or not.
        artifact: Artifact of the model.
    """
    folder = make_folder(folder)
    write_model(model, folder / MODEL)
    write_text(folder / RUNTIME, inspect.getsource(predict))
    write_json(folder / CARD, artifact.card.to_json())
    write_text(folder / LAYOUT, describe(model, artifact))


def describe(model: ModelProto, artifact: Artifact) -> str:
    """Return the README of a deployed folder: inputs, outputs and how to run the model."""
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
            f"Form `{facts.form}`, precision `{facts.precision}`, {len(facts.keypoint_names)} keypoints, input size "
            f"{facts.imgsz}. Written by `halopose export`.",
            "",
            "```console",
            "pip install numpy onnxruntime opencv-python-headless",
            "python predict.py photo.jpg             # prints one line and draws poses/photo.jpg",
            "python predict.py photo.jpg --json --family gaussian",
            "```",
            "",
            "| tensor | shape | meaning |",
            "|---|---|---|",
            *rows,
            "",
            f"`images` is {colour}, from 0 to 1, letterboxed by `prepare` in `predict.py`. Both sides are multiples "
            f"of {max(facts.strides[-1], 32)}. Cells are numbered over all levels (strides "
            f"{', '.join(map(str, facts.strides))}), row by row within a level.",
            "",
            "The covariance of a keypoint is L L^T with L = [[l11, 0], [l21, l22]] in pixels of the input. For "
            "pixels of the image, divide l11 by the gain of the letterbox in x, and l21 and l22 by the gain in y. L "
            "contains the Gaussian temperature. For the Student-t, multiply L by `student_scale` of the metadata; "
            "the degrees of freedom are `student_dof`. If the metadata have `pruned_scale` and `pruned_dof`, these "
            "apply to pruned keypoints.",
            "",
            *_guarantees(facts),
        ]
    )


def _guarantees(facts: predict.Facts) -> list[str]:
    """Paragraphs on conformal regions, joint covariance and out-of-distribution p-values, where available."""
    lines = []
    if facts.regions is not None:
        lines += [
            "`poses.region(0.9)` gives ellipses that contain the true keypoint with a probability of at least 90 %, "
            "without distributional assumptions; with `whole=True` the probability applies to all keypoints of an "
            f"object jointly. This holds for {CONDITION}.",
            "",
        ]
    if facts.correlation is not None:
        lines += ["`poses.joint_covariance()` is the joint covariance of all keypoints of a detection.", ""]
    if facts.novelty is not None:
        lines += [
            "`poses.novelty` and `poses.image_novelty` are p-values: small for detections and images that are out of "
            "distribution. On data like the calibration data, at most a fraction p of them falls below p.",
            "",
        ]
    return lines


_END_TO_END = {
    "letterbox": "gain x, gain y, pad x, pad y, and width and height of each image",
    "image": "number of the image of each detection",
    "classes": "class, counted from 1",
    "boxes": "x1, y1, x2, y2 in pixels of the image",
    "scores": "confidence of the detection",
    "keypoints": "x, y in pixels of the image",
    "visibility": "visibility of each keypoint",
    "covariance": "xx, xy, yy of each keypoint, in squared pixels of the image",
    "scale": "xx, xy, yy of the scale matrix; the covariance for the Gaussian",
    "dof": "degrees of freedom of the Student-t; infinite for the Gaussian",
    "keep": "whether the keypoint is kept",
    "novelty": "out-of-distribution p-value of the detection",
    "image_novelty": "out-of-distribution p-value of the image",
}
_MEANINGS = {
    "images": "input",
    "area": "left, top, right and bottom edge of each image in the input, without padding",
    "boxes": "x1, y1, x2, y2 of each cell, in pixels of the input",
    "scores": "class scores of each cell",
    "keypoints_xy": "x, y of the keypoints of each cell, in pixels of the input",
    "keypoints_conf": "visibilities of the keypoints of each cell",
    "factors": "l11, l21, l22 of the Gaussian Cholesky factors, in pixels of the input",
    "cells": "cell of each row of `factors`, -1 for none",
    "novelty": "out-of-distribution value of each row of `factors`, to be ranked among `known` of the metadata",
    "image_novelty": "out-of-distribution value of the image, to be ranked among `known_images` of the metadata",
    "rows": "cell of each row of `output0`",
}


def _meaning(name: str, facts: predict.Facts) -> str:
    if facts.form == "end2end" and name in _END_TO_END:
        return _END_TO_END[name]
    if name != "output0":
        return _MEANINGS.get(name, "output of the file that heads were added to")
    seen = ", visibility" if facts.visibility else ""
    if facts.layout == "ultralytics-end2end":
        return f"rows, best first: x1, y1, x2, y2, score, class, and x, y{seen} of each keypoint; pixels of the input"
    return (
        "for each cell: box centre x, y, width and height, one score per class, and x, y"
        f"{seen} of each keypoint; pixels of the input"
    )


def _shape(value: object) -> str:
    sizes = value.type.tensor_type.shape.dim  # type: ignore[attr-defined]
    return " x ".join(size.dim_param or str(size.dim_value) for size in sizes)
