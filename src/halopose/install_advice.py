"""Advice on missing packages: a pip command with the requirements of an extra, which needs no index with halopose."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

_EXTRA = re.compile(r"""\bextra\s*==\s*["']([\w-]+)["']""")


def install_command(extra: str) -> str:
    """Return the command that installs what an extra of halopose needs.

    Example:
        >>> install_command("onnx").startswith("pip install")
        True
    """
    try:
        stated = requires("halopose") or []
    except PackageNotFoundError:  # run from sources that are not installed
        stated = []
    found = [text.partition(";") for text in stated]
    packages = [
        requirement.strip()
        for requirement, _, marker in found
        if extra in _EXTRA.findall(marker) and not requirement.startswith("halopose")
    ]
    if not packages:
        return f"pip install 'halopose[{extra}]'"
    return "pip install " + " ".join(f"'{package}'" for package in packages)
