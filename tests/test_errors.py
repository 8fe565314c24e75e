"""Messages cannot send commands to the terminal."""

import pytest

from halopose.cli.terminal import say
from halopose.errors import HaloposeError, printable


@pytest.mark.parametrize("code", ["\x1b", "\x9b", "\x07", "\r", "\x00", "\u202e", "\u2066"])
def test_control_characters_are_escaped(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"a{code}[2Jb.jpg"
    assert printable("über\tß\n") == "über\tß\n"
    say(name)
    for text in (printable(name), str(HaloposeError(f"cannot read {name}")), capsys.readouterr().out):
        assert code not in text
        assert "[2Jb.jpg" in text
