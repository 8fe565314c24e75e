"""Reports of a shift study: a self-contained html page, and a markdown table."""

from __future__ import annotations

from pathlib import Path

from halopose.data.files import write_json, write_text
from halopose.reports.html import number, page, percent
from halopose.reports.plots import Axis, Curve, Plot
from halopose.studies.shift_study import CLEAN, RankingAuroc, ShiftResult, ShiftStep

HEAD = ("", "detections", "in 95 %", "not flagged", "ACE", "not flagged", "AKP", "error, px", "sigma, px",
        "flagged", "images flagged", "wrong", "not flagged")  # fmt: skip


def table(shift: ShiftResult) -> list[list[str]]:
    """One row of texts per step, in the order of ``HEAD``."""
    return [
        [
            _name(row),
            str(row.detections),
            percent(row.coverage),
            percent(row.coverage_kept),
            number(row.ace, 3),
            number(row.ace_kept, 3),
            number(row.akp, 3),
            number(row.error, 1),
            number(row.sigma, 1),
            percent(row.alarms),
            percent(row.image_alarms),
            percent(row.wrong),
            percent(row.wrong_kept),
        ]
        for row in shift.rows
    ]


def to_text(shift: ShiftResult) -> str:
    """The table as markdown, and the AUROC of each ranking."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    lines += [f"| {' | '.join(row)} |" for row in table(shift)]
    lines += ["", *(ranking_text(one) for one in shift.rankings)]
    return "\n".join(lines)


def ranking_text(one: RankingAuroc) -> str:
    """AUROC of one ranking with its interval."""
    ends = f"{number(one.low, 3)} to {number(one.high, 3)}"
    return f"{one.group}: AUROC of the {one.signal} {number(one.auroc, 3)} ({ends})"


def _name(row: ShiftStep) -> str:
    return f"{row.name} {row.severity}" if row.severity else row.name


def write_shift(shift: ShiftResult, folder: Path, title: str) -> None:
    """Write shift.json and shift.html to a folder."""
    write_json(folder / "shift.json", shift.to_json())
    write_text(folder / "shift.html", render_shift(shift, title))


def render_shift(shift: ShiftResult, title: str) -> str:
    """The page (html)."""
    return page(
        "shift.html",
        title=title,
        summary=f"Detections with confidence ≥ {shift.conf:g}. Nominal false-alarm rate {100 * shift.alarm:g} %.",
        head=HEAD,
        rows=table(shift),
        rankings=[
            (one.group, one.signal, number(one.auroc, 3), number(one.low, 3), number(one.high, 3))
            for one in shift.rankings
        ],
        plots=[plot for name in _kinds(shift) for plot in plots_of(shift, name)],
    )


def _kinds(shift: ShiftResult) -> list[str]:
    return list(dict.fromkeys(row.name for row in shift.rows if row.severity))


def plots_of(shift: ShiftResult, name: str) -> list[Plot]:
    """Error and stated sigma, alarms and coverage, by severity."""
    rows = shift.of(name)
    severity = [row.severity for row in rows if row.name in (CLEAN, name)]
    x = Axis("severity", -0.2, max(severity) + 0.2, severity)
    finite = [value for row in rows for value in (row.error, row.sigma) if value == value]
    largest = max(finite, default=1.0) or 1.0
    sizes = Plot(
        name,
        x,
        Axis.linear("pixels, median", 0, 1.1 * largest),
        [
            Curve("error", "uncalibrated", severity, [row.error for row in rows], marked=True),
            Curve("stated sigma", "gaussian", severity, [row.sigma for row in rows], marked=True),
        ],
    )
    shares = Plot(
        f"{name}: shares",
        x,
        Axis.linear("share", 0, 1),
        [
            Curve("flagged", "uncalibrated", severity, [row.alarms for row in rows], marked=True),
            Curve("in 95 %", "gaussian", severity, [row.coverage for row in rows], marked=True),
            Curve("in 95 %, not flagged", "student_t", severity, [row.coverage_kept for row in rows], marked=True),
        ],
    )
    return [sizes, shares]
