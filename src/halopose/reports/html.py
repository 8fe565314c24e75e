"""What html pages share: numbers as text, and templates filled in so that a browser needs nothing else.

In: numbers, differences, the content of a template. Out: text.
"""

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
    """With so many decimals and a true minus, but for zero; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:.{digits}f}"
    return (text if float(text) else text.lstrip("-")).replace("-", "−")


def freedom(dof: float | None, digits: int = 1) -> str:
    """Degrees of freedom; of a Student-t that is a Gaussian they are without bound."""
    return "∞" if dof is not None and dof >= NU_MAX else number(dof, digits)


def digits_of(metric: str) -> int:
    """Decimals of a metric, by its name in metrics.json: the same on every page and in the terminal."""
    return 3 if metric.endswith(("nll", "kept_fraction", "skill")) else 4


def percent(share: float | None) -> str:
    """A share with one decimal, a dash where there is none; 0 and 100 only where it is nothing or all."""
    if share is None or not math.isfinite(share):
        return "–"
    if share in (0, 1):
        return f"{100 * share:.0f}\N{NO-BREAK SPACE}%"
    return f"{number(min(100 * share, 99.9) if share < 1 else 100 * share, 1)}\N{NO-BREAK SPACE}%"


def signed(difference: Difference, digits: int = 4) -> str:
    """With sign and margin; what is compared may also agree to the last bit."""
    if not difference.value and not difference.margin:
        return "same"
    sign = "+" if difference.value > 0 else ""
    return f"{sign}{number(difference.value, digits)} ± {number(difference.margin, digits)}"


def page(template: str, **content: Any) -> str:
    """A template of the package with its content, escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("halopose.reports"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template(template).render(css=asset("report.css"), **content)
    # A name may hold half of a surrogate pair, which a utf-8 file cannot.
    return text.encode("utf-8", "replace").decode("utf-8")


def asset(name: str) -> Markup:
    """A style sheet or script of the package, as it is."""
    return Markup((resources.files("halopose.reports") / "templates" / name).read_text(encoding="utf-8"))


def embedded(content: Any) -> Markup:
    """Json that cannot end its script element: ascii only, and no character that html looks for."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
