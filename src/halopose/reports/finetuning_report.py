"""Self-contained html page that compares a fine-tuned base model with the original and a control."""

from __future__ import annotations

import numpy as np

from halopose.evaluation.bootstrap import Difference
from halopose.evaluation.metrics import LEVELS
from halopose.evaluation.scores import AXES
from halopose.reports.html import digits_of, freedom, number, page, signed
from halopose.reports.plots import Axis, Curve, Plot
from halopose.studies.finetuning_study import REPORT_METRICS, BaseModelScores, differences

_ACE = "gaussian.ace"
_KINDS = ("uncalibrated", "gaussian", "student_t")
_REGIMES = {"gaussian": "Gaussian", "student_t": "Student-t"}
_LOSSES = {"before": "before", "poks": "pOKS", "oks": "OKS"}


def render_finetuning(scores: dict[str, BaseModelScores], title: str) -> str:
    """The page (html)."""
    return page(
        "finetune.html",
        title=title,
        summary=" ".join(_about(scores)),
        lead=outcome(scores),
        bases=[_capital(name) for name in scores],
        pairs=[" − ".join(_LOSSES[name] for name in pair.split(" - ")) for pair in differences(scores)],
        rows=table(scores),
        plots=coverage_plots(scores),
    )


def _about(scores: dict[str, BaseModelScores]) -> list[str]:
    lines = [f"The base model before and after fine-tuning with {_LOSSES[_tuned(scores)]}."]
    if "poks" in scores and "oks" in scores:
        lines.append("The control is fine-tuned in the same way with the framework's own loss, OKS.")
    return lines


def _tuned(scores: dict[str, BaseModelScores]) -> str:
    return "poks" if "poks" in scores else "oks"


def outcome(scores: dict[str, BaseModelScores]) -> str:
    """Sentences on the change of the Gaussian ACE, its cause, and the change in AP."""
    tuned = _tuned(scores)
    change = scores[tuned].minus(scores["before"], _ACE)
    sentences = [_change(scores, tuned, change), *_cause(scores, tuned, change), *_accuracy(scores, tuned)]
    return " ".join(sentences)


def _change(scores: dict[str, BaseModelScores], tuned: str, change: Difference) -> str:
    first, last = (number(scores[name].estimate[_ACE], 4) for name in ("before", tuned))
    if not change.significant:
        return (
            f"Fine-tuning with {_LOSSES[tuned]} does not significantly change the Gaussian ACE "
            f"({first} before, {last} after: {signed(change)})."
        )
    verb = "lowers" if change.value < 0 else "raises"
    return f"Fine-tuning with {_LOSSES[tuned]} {verb} the Gaussian ACE from {first} to {last} ({signed(change)})."


def _cause(scores: dict[str, BaseModelScores], tuned: str, change: Difference) -> list[str]:
    """Attribution of the change by the control, which was trained equally long on the same images."""
    if tuned != "poks":
        return []
    if "oks" not in scores:
        return ["Without a control the cause is unknown: pOKS or longer training."] if change.significant else []
    drift = scores["oks"].minus(scores["before"], _ACE)
    rest = scores["oks"].minus(scores["poks"], _ACE)
    sentences = [f"The control reaches {number(scores['oks'].estimate[_ACE], 4)}, {_compared(rest)} pOKS."]
    if change.significant:
        also = drift.significant and drift.value * change.value > 0
        if not rest.significant:
            cause = "not shown to be due to pOKS"
        elif rest.value * change.value > 0:
            cause = "not due to pOKS: the framework's own loss has a larger effect"
        else:
            cause = "partly due to pOKS" if also else "due to pOKS"
        sentences.append(f"The change is {cause}.")
    return sentences


def _accuracy(scores: dict[str, BaseModelScores], tuned: str) -> list[str]:
    change = scores[tuned].minus(scores["before"], "ap")
    sentences = [f"AP does not change significantly ({signed(change)})."]
    if change.significant:
        sentences = [f"AP {'falls' if change.value < 0 else 'rises'} by {_size(change)}."]
    if tuned == "poks" and "oks" in scores:
        sentences.append(f"It is {_compared(scores[tuned].minus(scores['oks'], 'ap'))} the control.")
    return sentences


def _compared(difference: Difference) -> str:
    if not difference.significant:
        return f"not significantly different ({signed(difference)}) from"
    return f"{_size(difference)} {'above' if difference.value > 0 else 'below'}"


def _size(difference: Difference) -> str:
    return f"{number(abs(difference.value), 4)} ± {number(difference.margin, 4)}"


def table(scores: dict[str, BaseModelScores]) -> list[tuple[str, list[tuple[str, str]], list[tuple[str, bool]]]]:
    """Name of each metric, value and margin by model, and paired differences with their significance."""
    between = differences(scores)
    rows = []
    for metric, name in REPORT_METRICS.items():
        digits = digits_of(metric)
        values = [(number(one.estimate[metric], digits), number(one.margin(metric), digits)) for one in scores.values()]
        paired = [(signed(pair[metric], digits), pair[metric].significant) for pair in between.values()]
        rows.append((name, values, paired))
    blank = [("", False)] * len(between)
    rows.append(("ν, median", [(freedom(one.nu), "") for one in scores.values()], blank))
    rows.append(("Matched instances", [(f"{one.matched_instances:,}", "") for one in scores.values()], blank))
    return rows


def to_text(scores: dict[str, BaseModelScores]) -> str:
    """The table for the terminal."""
    lines = [f"{'':18}" + "".join(f"{name:>18}" for name in (*scores, *differences(scores)))]
    for name, values, paired in table(scores):
        cells = [f"{value} ± {margin}" if margin else value for value, margin in values]
        lines.append(f"{name:18}" + "".join(f"{cell:>18}" for cell in [*cells, *(text for text, _ in paired)]))
    return "\n".join(line.rstrip() for line in lines)


def coverage_plots(scores: dict[str, BaseModelScores]) -> list[Plot]:
    """Empirical minus nominal coverage by regime, joint and along each axis, with a common y axis."""
    shown = slice(2, None, 4)  # every fourth of the 99 levels, with the last
    errors = {
        (regime, axis): [np.asarray(one.coverage[regime][axis])[shown] - LEVELS[shown] for one in scores.values()]
        for regime in _REGIMES
        for axis in AXES
    }
    values = np.array(list(errors.values()))
    low, high = (1.05 * float(edge) for edge in (np.nanmin(values, initial=-0.01), np.nanmax(values, initial=0.01)))
    x, y = Axis.linear("nominal", 0, 1), Axis.linear("empirical − nominal coverage", low, high)
    plots = []
    for (regime, axis), drawn in errors.items():
        metric = f"{regime}.ace" if axis == "joint" else f"{regime}.ace_{axis}"
        curves = [
            Curve(f"{_capital(name)}, {number(scores[name].estimate[metric], 4)}", kind, LEVELS[shown], error)
            for name, kind, error in zip(scores, _KINDS, drawn, strict=False)
        ]
        title = f"{_REGIMES[regime]}, {'joint' if axis == 'joint' else f'along {axis}'}"
        plots.append(Plot(title, x, y, [Curve("", "ideal", (0, 1), (0, 0)), *curves]))
    return plots


def _capital(name: str) -> str:
    return "Before" if name == "before" else _LOSSES[name]
