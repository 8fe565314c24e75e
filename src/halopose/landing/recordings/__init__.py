"""Recorded flights: cameras, runways, frames and logs from files, replayed through the same filter."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from halopose.errors import HaloposeError
from halopose.install_advice import install_command


def need(module: str, extra: str = "recordings") -> Any:
    """Import a module of an extra.

    Raises:
        HaloposeError: The extra is not installed; the message says how to install it.
    """
    try:
        return import_module(module)
    except ImportError:
        raise HaloposeError(f"this needs the {extra} extra: {install_command(extra)}") from None
