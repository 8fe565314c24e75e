"""Markdown reference of the command line, generated from the Typer application."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from halopose.cli.app import app

COMMANDS = "<!-- commands -->"  # replaced by the reference


def command_reference() -> str:
    """Return a section for each command, in alphabetical order, with tables of its arguments and options."""
    commands = _commands(get_command(app), "halopose")
    return "\n".join(line for name, command in commands for line in _section(name, command))


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in sorted(group.commands.items()):
        if getattr(command, "hidden", False):
            continue
        yield f"{prefix} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix} {name}")


def _section(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    rows: dict[str, list[str]] = {"argument": [], "option": []}
    for parameter in command.params:
        record = parameter.get_help_record(context)  # None of a hidden one
        if record is not None:
            rows[parameter.param_type_name].append(_row(*record))
    yield f"## {name}\n"
    yield f"{_paragraphs(command.help or '')}\n"
    for kind, found in rows.items():
        if found:
            yield f"| {kind} | value | meaning | default and range |\n|---|---|---|---|"
            yield "\n".join(found) + "\n"


def _row(left: str, right: str) -> str:
    """Return a table row from the two columns of the help text."""
    names, _, value = left.partition(" <")
    text, extra = re.fullmatch(r"(.*?)(?:\s*\[([^\[\]]*)\])?", " ".join(right.split()), re.DOTALL).groups()  # type: ignore[union-attr]
    cells = (_code(names), _code(value.rstrip(">")), text, _code((extra or "").replace("default: ", "")))
    return "| " + " | ".join(cell.replace("|", " or ") for cell in cells) + " |"


def _code(text: str) -> str:
    """Return text as code, without line breaks inside an option name."""
    return f"`{text}`" if text else ""


def _paragraphs(text: str) -> str:
    """Return help text as Markdown; an example becomes a block of its own."""
    text = "\n".join(line.strip() for line in text.replace("\b", "").strip().splitlines())
    return re.sub(r"^Example: (.*)$", r"```text\n\1\n```", text, flags=re.MULTILINE)
