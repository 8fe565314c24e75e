"""The Typer application.

Heavy imports happen inside the commands, so ``halopose --help`` is fast. A `HaloposeError` is printed as one line with
exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from halopose import __version__
from halopose.cli import (
    export_commands,
    fitting_commands,
    multiview_commands,
    prediction_commands,
    report_commands,
    scoring_commands,
    studies_commands,
    tracking_commands,
)
from halopose.cli.options import Program, add_command, read_config
from halopose.cli.terminal import listen, say
from halopose.errors import HaloposeError
from halopose.plugins import load_plugins

app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Calibrated predictive distributions for the keypoints of pose models.",
)

# Typer uses click, or in some versions its own copy of click.
_UsageError: Any = typer.BadParameter.__base__


@app.callback(invoke_without_command=True)
def settings(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Yaml file with options by command, such as fit: {epochs: 20}. Allowed before or after the command."
        ),
    ] = None,
) -> None:
    """Calibrated predictive distributions for the keypoints of pose models."""
    if version:
        say(f"halopose {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        say(context.get_help(), always=True)
        raise typer.Exit
    listen(quiet, verbose)
    if config is not None:
        context.default_map = read_config(config, getattr(context.command, "commands", {}))


COMMANDS = {
    "Predict": (
        prediction_commands.predict,
        tracking_commands.track,
        multiview_commands.triangulate,
        prediction_commands.models,
        report_commands.doctor,
    ),
    "Fit": (
        fitting_commands.fit,
        fitting_commands.collect,
        fitting_commands.train,
        fitting_commands.calibrate,
        fitting_commands.novelty,
        studies_commands.finetune,
    ),
    "Score": (
        prediction_commands.evaluate,
        scoring_commands.score,
        report_commands.plot,
        scoring_commands.recalibrate,
        scoring_commands.apply,
        scoring_commands.leaderboard,
        scoring_commands.convert,
        scoring_commands.sigmas,
        scoring_commands.synthesize,
        studies_commands.analyse,
        studies_commands.ablate,
        studies_commands.paper,
    ),
    "Deploy": (export_commands.export, export_commands.inspect),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        add_command(app, command, panel)
for plugin in load_plugins():
    plugin.register(app)


def main() -> None:
    """Run a command; a user error becomes one line and exit code 2."""
    listen()
    try:
        arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
        sys.exit(app(arguments or ["--help"], standalone_mode=False) or 0)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    except HaloposeError as error:
        message = str(error)
    except (OSError, MemoryError, RecursionError, UnicodeError) as error:
        if "--debug" in sys.argv:
            raise
        message = f"{type(error).__name__}: {str(error) or 'not enough memory'} (--debug shows where)"
    except _UsageError as error:
        message = f"{error.format_message()} ({error.ctx.command_path if error.ctx else 'halopose'} --help)"
    sys.stderr.write(f"halopose: {' '.join(message.split())}\n")
    sys.exit(2)
