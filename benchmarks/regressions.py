"""Compare two runs of the benchmark and mark the rows that changed by more than their noise."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from benchmarks.rows import Row
from benchmarks.runs import Run

TURNS_NOISE = 0.02  # of a ratio measured in turns: the smallest change that is judged
ALONE_NOISE = 0.10  # of a figure measured alone, which depends on the load of the machine
Verdict = Literal["worse", "better", "same", "new", "gone", "skipped", "other machine", "context"]


@dataclass(frozen=True)
class Change:
    """One row of two runs.

    Attributes:
        name: name of the row.
        before: the row of the earlier run, if it has one.
        after: the row of the later run, if it has one.
        change: relative change of the figure; positive is an improvement where the row has a direction.
        noise: relative change explained by the spread of the two figures.
        verdict: ``worse`` or ``better`` for changes beyond the noise.
    """

    name: str
    before: Row | None
    after: Row | None
    change: float
    noise: float
    verdict: Verdict


def changes(before: Run, after: Run) -> list[Change]:
    """Every row of either run, in the order of the later one.

    Figures other than ratios are judged only if both runs come from the same machine. Rows that a subset leaves out
    are not listed.
    """
    names = [row.name for row in after.rows]
    if not after.subset:
        names += [row.name for row in before.rows if row.name not in names]
    same_machine = before.machine == after.machine
    return [_change(name, before.row(name), after.row(name), same_machine) for name in names]


def _change(name: str, before: Row | None, after: Row | None, same_machine: bool) -> Change:
    nan = math.nan
    if before is None or after is None:
        return Change(name, before, after, nan, nan, "new" if before is None else "gone")
    if before.value is None or after.value is None:
        return Change(name, before, after, nan, nan, "skipped")
    relative = after.value / before.value - 1 if before.value else nan
    gain = -relative if after.better == "lower" else relative
    least = TURNS_NOISE if after.unit == "x" and after.low is not None else ALONE_NOISE
    noise = max(math.hypot(_half_width(before), _half_width(after)), least)
    verdict: Verdict = "same"
    if not after.better:
        verdict = "context"
    elif after.unit != "x" and not same_machine:
        verdict = "other machine"
    elif abs(gain) > noise:
        verdict = "better" if gain > 0 else "worse"
    return Change(name, before, after, gain, noise, verdict)


def _half_width(row: Row) -> float:
    """Half the width of the interval, relative to the figure; 0 without an interval."""
    if row.low is None or row.high is None or not row.value:
        return 0.0
    return (row.high - row.low) / 2 / abs(row.value)


def as_text(found: Iterable[Change]) -> str:
    """One line per row; worse rows are marked, and counted at the end."""
    listed = list(found)
    lines = [f"{'row':34} {'before':>10} {'after':>10} {'gain':>8} {'noise':>7}  verdict"]
    for one in listed:
        mark = {"worse": "WORSE", "better": "better"}.get(one.verdict, one.verdict)
        lines.append(
            f"{one.name:34} {_figure(one.before):>10} {_figure(one.after):>10} {_percent(one.change):>8} "
            f"{_percent(one.noise, sign=False):>7}  {mark}"
        )
    counts = {verdict: sum(one.verdict == verdict for one in listed) for verdict in ("worse", "better", "same")}
    return "\n".join([*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())])


def _figure(row: Row | None) -> str:
    return "" if row is None or row.value is None else f"{row.value:.4g}"


def _percent(value: float, sign: bool = True) -> str:
    if math.isnan(value):
        return ""
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"
