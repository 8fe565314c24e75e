"""Prediction files of the rows of docs/evidence/leaderboard.md, all of the same detections.

    python -m research.leaderboard_variants predictions.json truth.json -o variants/
    halopose leaderboard truth.json 'shipped heads=variants/heads.json' ... -o leaderboard.md

The predictions carry covariances of heads. Variants: the heads themselves; the heads' covariances in the unit of
RF-DETR 1.11, divided by the share of the image that the box covers; no covariances (scores only); covariances from the
visibility score alone, each image by a model of the other images; constants times the size of the box.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from halopose.calibration.dispersion_model import cross_fitted_dispersions
from halopose.data.coco import parse_predictions, read_annotated
from halopose.data.files import read_json, write_json
from halopose.poses import PoseDistributions, triangle
from halopose.protocol import Protocol

OWN = ("covariance", "scale", "dof", "keep", "correlation", "offset")


def main() -> None:
    """Write the variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("predictions", type=Path)
    parser.add_argument("truth", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    content, annotated = read_json(given.predictions), read_annotated(given.truth)
    bare = [{key: value for key, value in entry.items() if key not in OWN} for entry in content]
    areas = {image["id"]: image["width"] * image["height"] for image in read_json(given.truth)["images"]}
    write_json(given.output / "heads.json", content)
    write_json(given.output / "rfdetr-unit.json", [_in_rfdetr_unit(entry, areas) for entry in content])
    write_json(given.output / "scores.json", bare)
    poses = parse_predictions(given.predictions, bare, annotated.truth, annotated.classes, constants=True)
    by_visibility = cross_fitted_dispersions(poses, annotated.truth, Protocol(), ["visibility"])
    write_json(given.output / "visibility.json", _with(bare, by_visibility))
    write_json(given.output / "constants.json", _with(bare, poses))


def _in_rfdetr_unit(entry: dict[str, Any], areas: dict[int, int]) -> dict[str, Any]:
    share = max(entry["bbox"][2] * entry["bbox"][3] / areas[entry["image_id"]], 1e-6)
    factor: dict[str, Any] = {
        key: [[v / share for v in row] for row in entry[key]] for key in ("covariance", "scale") if key in entry
    }
    return {**entry, **factor}


def _with(bare: list[dict[str, Any]], poses: PoseDistributions) -> list[dict[str, Any]]:
    rows = triangle(poses.covariance).tolist()
    return [{**entry, "covariance": row} for entry, row in zip(bare, rows, strict=True)]


if __name__ == "__main__":
    main()
