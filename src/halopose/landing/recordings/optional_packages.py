"""Packages that only recordings need, asked for where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from halopose.errors import HaloposeError


def need(module: str, extra: str = "recordings") -> Any:
    """A module of an extra, or one line that says how to install it."""
    try:
        return import_module(module)
    except ImportError:
        raise HaloposeError(f"this needs the {extra} extra: pip install 'halopose[{extra}]'") from None
