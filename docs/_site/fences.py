"""Examples in docstrings as code: markdown would take ``>>>`` for a quotation.

An extension of griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class Fences(griffe.Extension):
    """Puts fences around the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^( *)>>> .*(?:\n.+)*", r"\1```pycon\n\g<0>\n\1```", obj.docstring.value, flags=re.MULTILINE
            )
