"""Commands run in this process, as a user would run them."""

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halopose.cli.app import app, main


def base(folder: Path) -> tuple[str, Path]:
    return "--base", folder / "base.pt"


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    monkeypatch.setattr(sys, "argv", ["halopose", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    return error
