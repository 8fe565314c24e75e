"""Help of the commands: groups of options, and an example in each that parses."""

import re
import shlex
from typing import Any

import pytest
from typer.main import get_command

from halopose.cli.app import app
from halopose.cli.option_groups import MANY_OPTIONS
from halopose.cli.options import PanelCommand


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    """Every command by its words, groups left out."""
    found: dict[str, Any] = {}
    for name, command in vars(group)["commands"].items():
        inner = vars(command).get("commands")
        found |= commands(command, f"{prefix}{name} ") if inner else {f"{prefix}{name}": command}
    return found


COMMANDS = commands(get_command(app))


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_parses(name: str) -> None:
    command = COMMANDS[name]
    match = re.search(r"^Example: halopose (.+)$", command.help or "", re.MULTILINE)
    assert match is not None, f"{name} has no example"
    words = shlex.split(match[1])
    given = name.split()
    assert words[: len(given)] == given
    command.make_context(name, words[len(given) :])


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_in_groups_where_there_are_many(name: str) -> None:
    command = COMMANDS[name]
    assert isinstance(command, PanelCommand)
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    titles = {str(each.name): command.panel_of(each) for each in options}
    if len(options) <= MANY_OPTIONS:
        return
    assert [option for option, title in titles.items() if title == "Options"] == []
    assert len(set(titles.values())) > 2


def test_commands_come_in_the_order_of_a_first_hour() -> None:
    text = get_command(app).get_help(get_command(app).make_context("halopose", [], resilient_parsing=True))
    places = [text.index(f"\n{title}:") for title in ("Predict", "Fit", "Score", "Deploy")]
    assert places == sorted(places)
    assert text.index("  predict ") < text.index("  track ") < text.index("  triangulate ")
