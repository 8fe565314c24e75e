"""Shared parts of html reports: formatting of numbers, and self-contained pages from templates."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from halopose.calibration.estimation import NU_MAX
from halopose.evaluation.bootstrap import Difference


def number(value: float | None, digits: int) -> str:
    """A number with this many decimals and a minus sign; a dash if it is unknown. Zero has no sign."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:.{digits}f}"
    return (text if float(text) else text.lstrip("-")).replace("-", "−")


def freedom(dof: float | None, digits: int = 1) -> str:
    """Degrees of freedom; infinite at the upper bound of the fit, where a Student-t is a Gaussian."""
    return "∞" if dof is not None and dof >= NU_MAX else number(dof, digits)


def digits_of(metric: str) -> int:
    """Decimals of a metric by its name in metrics.json, on pages and in the terminal."""
    return 3 if metric.endswith(("nll", "kept_fraction", "skill")) else 4


def percent(share: float | None) -> str:
    """A share in per cent with one decimal; 0 and 100 without, only if exact. A dash if it is unknown."""
    if share is None or not math.isfinite(share):
        return "–"
    if share in (0, 1):
        return f"{100 * share:.0f}\N{NO-BREAK SPACE}%"
    return f"{number(min(100 * share, 99.9) if share < 1 else 100 * share, 1)}\N{NO-BREAK SPACE}%"


def signed(difference: Difference, digits: int = 4) -> str:
    """A difference with sign and margin; "same" if both values are identical."""
    if not difference.value and not difference.margin:
        return "same"
    sign = "+" if difference.value > 0 else ""
    return f"{sign}{number(difference.value, digits)} ± {number(difference.margin, digits)}"


_PACKAGE = "halopose.reports"


def page(template: str, *, package: str = _PACKAGE, **content: Any) -> str:
    """Fill in a template; the content is escaped.

    Args:
        template: File name in the folder ``templates`` of the package.
        package: Package with the template; it may extend the templates of the reports.
        content: Variables of the template.
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in (package, _PACKAGE)]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template(template).render(css=asset("report.css"), **content)
    # A name may contain half of a surrogate pair, which utf-8 cannot encode.
    return text.encode("utf-8", "replace").decode("utf-8")


def asset(name: str, *, package: str = _PACKAGE) -> Markup:
    """A style sheet or script of a package, without escaping."""
    return Markup((resources.files(package) / "templates" / name).read_text(encoding="utf-8"))


def embedded(content: Any) -> Markup:
    """Json that cannot end its script element: ascii only, with <, > and & escaped."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
