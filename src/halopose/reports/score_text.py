"""Scores as text: a table for the terminal, and csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from halopose.calibration.calibrate import DISTRIBUTIONS
from halopose.evaluation.region_scores import ALARM_RATES
from halopose.evaluation.scores import METRICS, MetricSummary, Scores
from halopose.reports.html import digits_of, number, percent
from halopose.reports.match_report import match_text

TITLES = {
    "ace": "ACE", "ace_x": "ACE x", "ace_y": "ACE y", "ence": "ENCE", "ence_x": "ENCE x", "ence_y": "ENCE y",
    "nll": "NLL", "akp": "AKP",
}  # fmt: skip
ALARM = 5  # per cent
_DISTRIBUTIONS = DISTRIBUTIONS | {"uncalibrated": "as given"}


def to_text(scores: Scores) -> str:
    """Table of the three distributions before and after pruning, ranking, pruning and alarms."""
    pruned = scores.pruned
    lines = [
        f"{scores.matched_instances} matched instances, {scores.keypoints} keypoints, {scores.images} images "
        f"(matched: OKS >= {scores.settings['oks_threshold']:g})",
        f"{'':10}" + "".join(f"{_DISTRIBUTIONS[name]:>22}" for name in DISTRIBUTIONS),
        f"{'':10}" + f"{'all':>13}{'pruned':>9}" * len(DISTRIBUTIONS),
    ]
    for key in METRICS:
        values = [
            (scores.distribution(name).metric(key), pruned.distribution(name).metric(key)) for name in DISTRIBUTIONS
        ]
        texts = [[number(value, digits_of(key)) for value in pair] for pair in values]
        lines.append(f"{TITLES[key]:10}" + "".join(f"{whole:>13}{kept:>9}" for whole, kept in texts))
    for one in scores.custom.values():
        pairs = [(one.value[name], one.value[f"pruned.{name}"]) for name in DISTRIBUTIONS]
        lines.append(f"{one.title:10}" + "".join(f"{number(a, 4):>13}{number(b, 4):>9}" for a, b in pairs))
    ranked = {
        name: number(getattr(scores, f"akp_{name}"), digits_of(name)) for name in ("visibility", "random", "skill")
    }
    lines.append(
        f"ranking: AKP {number(scores.gaussian.akp, digits_of('akp'))}, visibility score {ranked['visibility']}, "
        f"random {ranked['random']}, skill {ranked['skill']}"
    )
    lines.append(f"pruning keeps {percent(pruned.kept_fraction)} of keypoints")
    for rule in pruned.rules:
        kept, correct = percent(rule.kept_fraction), percent(rule.reliability)
        lines.append(f"  {rule.name:24}keeps {kept:>7}, {correct:>7} of them reliable")
    lines += match_text(scores)
    if scores.departures is not None:
        lines.append(preset_text(scores))
    if scores.novelty is not None:
        at = ALARM_RATES.index(ALARM)
        parts = ((name, getattr(scores.novelty, name)) for name in ("detections", "images"))
        shares = (f"{percent(one.share[at])} ± {percent(one.error[at])} of {name}" for name, one in parts)
        lines.append(f"out-of-distribution alarms at {ALARM} %: {' and '.join(shares)}")
    return "\n".join(lines)


def preset_text(scores: Scores) -> str:
    """Preset and departures from the paper."""
    return (
        f"preset: {scores.preset or 'none'}; departures from the paper: {'; '.join(scores.departures or ()) or 'none'}"
    )


def to_csv(scores: Scores) -> str:
    """Csv with one row per distribution, pruning and group (overall, keypoint or object scale)."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["regime", "pruned", "group", "name", "count", *METRICS])
    for row in _rows(scores):
        writer.writerow(row)
    return stream.getvalue()


def _rows(scores: Scores) -> Iterator[list[Any]]:
    for pruned, part in (("no", scores), ("yes", scores.pruned)):
        for name in DISTRIBUTIONS:
            distribution = part.distribution(name)
            groups: list[tuple[str, str, MetricSummary]] = [("all", "all", distribution)]
            groups += [("keypoint", keypoint, value) for keypoint, value in distribution.per_keypoint.items()]
            groups += [("scale", scale, value) for scale, value in distribution.per_scale.items()]
            for group, member, value in groups:
                yield [name, pruned, group, member, value.count, *(value.metric(key) for key in METRICS)]
