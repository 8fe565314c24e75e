"""What html pages share: numbers as text, and templates filled in so that a browser needs nothing else.

In: numbers, differences, the content of a template. Out: text.
"""

from __future__ import annotations

import math
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from halopose.evaluation.bootstrap import Difference


def number(value: float | None, digits: int) -> str:
    """With so many decimals and a true minus, but for zero; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:.{digits}f}"
    return (text if float(text) else text.lstrip("-")).replace("-", "−")


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
    css = (resources.files("halopose.reports") / "templates" / "report.css").read_text(encoding="utf-8")
    text = environment.get_template(template).render(css=Markup(css), **content)
    # A name may hold half of a surrogate pair, which a utf-8 file cannot.
    return text.encode("utf-8", "replace").decode("utf-8")


__all__ = ["number", "page", "signed"]
