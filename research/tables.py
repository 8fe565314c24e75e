"""Figures and tables of results as markdown."""

from __future__ import annotations

from halopose.evaluation.scores import DistributionScores, MetricSummary, Scores


def cell(scores: MetricSummary | Scores, name: str) -> str:
    """A figure by its name, with its interval if it was resampled."""
    digits = 2 if name == "nll" else 3
    text = short(getattr(scores, name), digits)
    interval = scores.interval.get(name) if isinstance(scores, (DistributionScores, Scores)) else None
    return text if interval is None else f"{text} ({short(interval[0], digits)} to {short(interval[1], digits)})"


def short(value: float, digits: int) -> str:
    """A number with a fixed number of digits."""
    return f"{value:.{digits}f}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
