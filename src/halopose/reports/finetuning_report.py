"""What fine-tuning did to a base, as one html page that needs nothing but a browser.

In: the scores of ``studies.finetuning_study.finetune``. Out: the page's text.
"""

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
        lead=sentence(scores),
        bases=[_capital(name) for name in scores],
        pairs=[" − ".join(_LOSSES[name] for name in pair.split(" - ")) for pair in differences(scores)],
        rows=table(scores),
        plots=coverage_plots(scores),
    )


def _about(scores: dict[str, BaseModelScores]) -> list[str]:
    lines = [f"The base before, and fine-tuned with {_LOSSES[_tuned(scores)]}."]
    if "poks" in scores and "oks" in scores:
        lines.append("The control is tuned alike with the framework's own loss, OKS.")
    return lines


def _tuned(scores: dict[str, BaseModelScores]) -> str:
    return "poks" if "poks" in scores else "oks"


def sentence(scores: dict[str, BaseModelScores]) -> str:
    """What happened to the Gaussian ACE, whether pOKS did it, and what it costs in AP."""
    tuned = _tuned(scores)
    change = scores[tuned].minus(scores["before"], _ACE)
    return f"{_change(scores, tuned, change)}{_cause(scores, tuned, change)}; {_price(scores, tuned)}."


def _change(scores: dict[str, BaseModelScores], tuned: str, change: Difference) -> str:
    first, last = (number(scores[name].estimate[_ACE], 4) for name in ("before", tuned))
    if not change.significant:
        return (
            f"That fine-tuning with {_LOSSES[tuned]} changes the Gaussian ACE is not decided "
            f"({first} before, {last} after: {signed(change)})"
        )
    verb = "lowers" if change.value < 0 else "raises"
    return f"Fine-tuning with {_LOSSES[tuned]} {verb} the Gaussian ACE from {first} to {last} ({signed(change)})"


def _cause(scores: dict[str, BaseModelScores], tuned: str, change: Difference) -> str:
    """By the control, which was trained as long on the same images: what it does too is not due to the loss."""
    if tuned != "poks":
        return ""
    if "oks" not in scores:
        return (
            ", and without a control it is open whether pOKS or longer training does it" if change.significant else ""
        )
    drift = scores["oks"].minus(scores["before"], _ACE)
    rest = scores["oks"].minus(scores["poks"], _ACE)
    end = f"ends at {number(scores['oks'].estimate[_ACE], 4)}, {_beside(rest, 'higher', 'lower')}"
    if not change.significant:
        return f"; the control {end}"
    along = drift.significant and drift.value * change.value > 0
    if rest.significant and rest.value * change.value > 0:
        return f", but the framework's own loss does so even more: the control {end}"
    if rest.significant:
        return f", {'in part due' if along else 'due'} to pOKS: the control {end}"
    return f", but {'so does' if along else 'not decidedly more than'} the control, which {end}"


def _price(scores: dict[str, BaseModelScores], tuned: str) -> str:
    price = scores[tuned].minus(scores["before"], "ap")
    text = f"a change in AP is not decided ({signed(price)})"
    if price.significant:
        text = f"AP {'falls' if price.value < 0 else 'rises'} by {_size(price)}"
    if tuned == "oks" or "oks" not in scores:
        return text
    return f"{text}, and is {_beside(scores[tuned].minus(scores['oks'], 'ap'), 'above', 'below')} the control"


def _beside(difference: Difference, above: str, below: str) -> str:
    if not difference.significant:
        return f"not decidedly {above} or {below} ({signed(difference)})"
    return f"{_size(difference)} {above if difference.value > 0 else below}"


def _size(difference: Difference) -> str:
    return f"{number(abs(difference.value), 4)} ± {number(difference.margin, 4)}"


def table(scores: dict[str, BaseModelScores]) -> list[tuple[str, list[tuple[str, str]], list[tuple[str, bool]]]]:
    """Of each metric its name, value and margin of each base, and each paired difference and if it is decided."""
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
    """Empirical less nominal coverage by regime, jointly and along each axis; all to one scale."""
    shown = slice(2, None, 4)  # of 99 levels, up to the last
    errors = {
        (regime, axis): [np.asarray(one.coverage[regime][axis])[shown] - LEVELS[shown] for one in scores.values()]
        for regime in _REGIMES
        for axis in AXES
    }
    every = np.array(list(errors.values()))
    low, high = (1.05 * float(edge) for edge in (np.nanmin(every, initial=-0.01), np.nanmax(every, initial=0.01)))
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
