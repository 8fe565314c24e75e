"""Scores as text: a table for the terminal and a flat csv.

In: the dictionary that ``evaluate`` returns. Out: strings.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from halopose.evaluation.protocol import REGIMES, SCALAR_METRICS

_TITLES = {"uncalibrated": "as given", "gaussian": "Gaussian", "student_t": "Student-t"}


def to_text(metrics: dict[str, Any]) -> str:
    """The three regimes side by side, before and after pruning, and the ranking."""
    pruned = metrics["pruned"]
    lines = [
        f"{metrics['matched_instances']} matched instances, {metrics['keypoints']} keypoints, "
        f"{metrics['images']} images",
        f"{'':10}" + "".join(f"{_TITLES[name]:>22}" for name in REGIMES),
        f"{'':10}" + f"{'all':>13}{'pruned':>9}" * len(REGIMES),
    ]
    for key in SCALAR_METRICS:
        cells = "".join(f"{metrics[name][key]:13.4f}{pruned[name][key]:9.4f}" for name in REGIMES)
        lines.append(f"{key:10}{cells}")
    lines.append(
        f"ranking: AKP {metrics['gaussian']['akp']:.4f}, visibility score {metrics['akp_visibility']:.4f}, "
        f"random {metrics['akp_random']:.4f}, skill {metrics['akp_skill']:.3f}"
    )
    lines.append(f"pruning keeps {100 * pruned['kept_fraction']:.1f} % of keypoints")
    return "\n".join(lines)


def to_csv(metrics: dict[str, Any]) -> str:
    """One row per regime, pruning and group: overall, each keypoint, each scale."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["regime", "pruned", "group", "name", "count", *SCALAR_METRICS])
    for row in _rows(metrics):
        writer.writerow(row)
    return stream.getvalue()


def _rows(metrics: dict[str, Any]) -> Iterator[list[Any]]:
    for pruned, blocks in (("no", metrics), ("yes", metrics["pruned"])):
        for regime in REGIMES:
            block = blocks[regime]
            groups = [("all", "all", block)]
            groups += [("keypoint", name, value) for name, value in block["per_keypoint"].items()]
            groups += [("scale", name, value) for name, value in block["per_scale"].items()]
            for group, name, value in groups:
                yield [regime, pruned, group, name, value["count"], *(value[key] for key in SCALAR_METRICS)]
