"""Rows of the benchmark: one measured figure each, with its spread, and how rows are printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.interleave import Comparison

HEADINGS = ("what", "halopose", "peer", "ratio")
Better = Literal["higher", "lower", ""]
Unit = Literal["x", "s", "GiB", "images/s", "share", "count"]


@dataclass(frozen=True)
class Row:
    """One figure that runs of the benchmark compare.

    Attributes:
        name: identifier that stays the same between versions, ``part.figure``.
        what: what was measured, in words.
        value: the figure; None if the row was skipped.
        low: lower end of the interval of ``value`` over rounds; None if it was measured once.
        high: upper end of that interval.
        unit: unit of ``value``; ``x`` is a ratio of times, measured in turns.
        better: which direction is an improvement; empty for context that no comparison judges.
        ours: the measured time or amount, for the table.
        peer: the time and name of the peer, for the table.
        skipped: why there is no figure.
    """

    name: str
    what: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    unit: Unit = "x"
    better: Better = ""
    ours: str = ""
    peer: str = ""
    skipped: str = ""

    @property
    def part(self) -> str:
        """The part of the benchmark that the row belongs to."""
        return self.name.partition(".")[0]

    @property
    def ratio(self) -> str:
        """The figure with its interval if it is a ratio, else nothing."""
        if self.value is None or self.unit != "x":
            return ""
        digits = 1 if self.value >= 2 else 3
        spread = "" if self.low is None else f" ({self.low:.{digits}f} to {self.high:.{digits}f})"
        return f"{self.value:.{digits}f}{spread}"


def speedup(name: str, what: str, found: Comparison, peer: str, better: Better = "higher") -> Row:
    """How many times faster ours is than the peer."""
    low, high = found.interval or (None, None)
    shown = f"{in_time(found.peer)}, {peer}"
    return Row(name, what, found.ratio, low, high, "x", better, in_time(found.ours), shown)


def cost(name: str, what: str, found: Comparison, without: str = "without") -> Row:
    """Cost of an addition: ours is without it, the peer with it."""
    low, high = found.interval or (None, None)
    shown = f"{in_time(found.ours)} {without}"
    return Row(name, what, found.ratio, low, high, "x", "lower", in_time(found.peer), shown)


def seconds(name: str, what: str, value: float, peer: str = "", better: Better = "lower") -> Row:
    """A time without a peer."""
    return Row(name, what, value, unit="s", better=better, ours=in_time(value), peer=peer)


def gibibytes(name: str, what: str, value: float, peer: str = "") -> Row:
    """Peak memory."""
    return Row(name, what, value, unit="GiB", better="lower", ours=f"{value:.2f} GiB", peer=peer)


def share(name: str, what: str, value: float, peer: str = "", better: Better = "") -> Row:
    """A part of a whole."""
    return Row(name, what, value, unit="share", better=better, ours=f"{100 * value:.0f} %", peer=peer)


def rate(name: str, what: str, value: float, peer: str = "", better: Better = "higher") -> Row:
    """Images per second."""
    return Row(name, what, value, unit="images/s", better=better, ours=f"{value:.0f} images/s", peer=peer)


def count(name: str, what: str, value: int, peer: str = "") -> Row:
    """A number of events; fewer are better."""
    return Row(name, what, value, unit="count", better="lower", ours=f"{value}", peer=peer)


def in_time(value: float) -> str:
    """Seconds in the unit that shows them, such as 3.2 ms."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            return f"{value * factor:.0f} {unit}" if value * factor >= 100 else f"{value * factor:.3g} {unit}"
    raise AssertionError("unreachable")


def as_text(row: Row) -> str:
    """A line for a terminal."""
    if row.skipped:
        return f"{row.name:30} skipped: {row.skipped}"
    return f"{row.name:30} {row.what:62} {row.ours:>20} {row.ratio:>24}   {row.peer}".rstrip()


def as_markdown(parts: Iterable[tuple[str, Sequence[Row]]], about: str) -> str:
    """A table for each part, after a paragraph about the machine."""
    blocks = [about]
    for title, rows in parts:
        cells = [(row.what, "skipped" if row.skipped else row.ours, row.skipped or row.peer, row.ratio) for row in rows]
        lines = [" | ".join(("", *line, "")).strip() for line in (HEADINGS, *cells)]
        blocks += [f"## {title}", "\n".join([lines[0], "|---|---|---|---|", *lines[1:]])]
    return "\n\n".join(blocks) + "\n"
