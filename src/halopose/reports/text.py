"""Scores as text: a table for the terminal and a flat csv.

In: ``Scores``. Out: strings.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from halopose.evaluation.calibrations import LAWS
from halopose.evaluation.scores import METRICS, Scores, Summary

_TITLES = LAWS | {"uncalibrated": "as given"}


def to_text(scores: Scores) -> str:
    """The three laws side by side, before and after pruning, and the ranking."""
    pruned = scores.pruned
    lines = [
        f"{scores.matched_instances} matched instances, {scores.keypoints} keypoints, {scores.images} images",
        f"{'':10}" + "".join(f"{_TITLES[name]:>22}" for name in LAWS),
        f"{'':10}" + f"{'all':>13}{'pruned':>9}" * len(LAWS),
    ]
    for key in METRICS:
        cells = "".join(
            f"{scores.law(name).metric(key):13.4f}{pruned.law(name).metric(key):9.4f}" for name in LAWS
        )
        lines.append(f"{key:10}{cells}")
    lines.append(
        f"ranking: AKP {scores.gaussian.akp:.4f}, visibility score {scores.akp_visibility:.4f}, "
        f"random {scores.akp_random:.4f}, skill {scores.akp_skill:.3f}"
    )
    lines.append(f"pruning keeps {100 * pruned.kept_fraction:.1f} % of keypoints")
    for rule in pruned.rules:
        kept, correct = 100 * rule.kept_fraction, 100 * rule.reliability
        lines.append(f"  {rule.name:24}keeps {kept:5.1f} %, {correct:5.1f} % of those reliable")
    return "\n".join(lines)


def to_csv(scores: Scores) -> str:
    """One row per law, pruning and group: overall, each keypoint, each scale."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["regime", "pruned", "group", "name", "count", *METRICS])
    for row in _rows(scores):
        writer.writerow(row)
    return stream.getvalue()


def _rows(scores: Scores) -> Iterator[list[Any]]:
    for pruned, part in (("no", scores), ("yes", scores.pruned)):
        for name in LAWS:
            law = part.law(name)
            groups: list[tuple[str, str, Summary]] = [("all", "all", law)]
            groups += [("keypoint", keypoint, value) for keypoint, value in law.per_keypoint.items()]
            groups += [("scale", scale, value) for scale, value in law.per_scale.items()]
            for group, member, value in groups:
                yield [name, pruned, group, member, value.count, *(value.metric(key) for key in METRICS)]
