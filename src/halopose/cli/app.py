"""The command line: each command takes what it acts on as its argument.

Heavy imports happen inside the commands, so that ``halopose --help`` answers at once. A mistake that the
user can mend is printed as one line, and the exit code is 2.
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from halopose.cli import applying, fitting, landing, scoring, studies
from halopose.cli.terminal import listen
from halopose.errors import HaloposeError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Calibrated predictive distributions for the keypoints of pose models.",
)

# Of click, or of the copy of click that some versions of Typer carry.
_UsageError: Any = typer.BadParameter.__base__

for command in (
    scoring.score,
    scoring.recalibrate,
    scoring.apply,
    scoring.synthesize,
    fitting.fit,
    fitting.collect,
    fitting.train,
    fitting.calibrate,
    applying.evaluate,
    applying.predict,
    landing.land,
    studies.ablate,
    studies.finetune,
    studies.analyse,
):
    app.command()(command)


def main() -> None:
    """Run a command; a user's mistake becomes one line and exit code 2."""
    listen()
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0)
    except typer.Abort:
        sys.exit(130)
    except HaloposeError as error:
        message = str(error)
    except _UsageError as error:
        message = f"{error.format_message()} ({error.ctx.command_path if error.ctx else 'halopose'} --help)"
    sys.stderr.write(f"halopose: {' '.join(message.split())}\n")
    sys.exit(2)
