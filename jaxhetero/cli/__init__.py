"""The ``jaxhetero`` command, a module for each subcommand. They read the command line; the work is elsewhere.

Exit codes: 0 for a job that ended well, 2 for a wrong command line or setting, 1 for every other error of our own,
128 + N when signal N ended it. ``launch`` returns the exit code of the process that failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from jaxhetero.cli.coordinator import coordinator_command
from jaxhetero.cli.doctor import doctor_command
from jaxhetero.cli.estimate import estimate_command
from jaxhetero.cli.launch import launch_command
from jaxhetero.cli.reducer import reducer_command
from jaxhetero.cli.slurm import slurm_command
from jaxhetero.cli.status import status_command
from jaxhetero.errors import ConfigError, JaxheteroError


def _show_version(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        from jaxhetero import __version__

        click.echo(f"jaxhetero {__version__}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def commands() -> None:
    """Data-parallel JAX training over workers and CPU reducers."""


for _command in (
    *(coordinator_command, doctor_command, estimate_command, launch_command),
    *(reducer_command, slurm_command, status_command),
):
    commands.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. An error is one line on standard error."""
    try:
        # Not standalone: click's own error output takes three lines.
        return commands.main(arguments, prog_name="jaxhetero", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "jaxhetero"
        return _fail(path, f"{error.format_message()} See `{path} --help`.", error.exit_code)
    except click.ClickException as error:
        return _fail("jaxhetero", error.format_message(), error.exit_code)
    except JaxheteroError as error:
        return _fail("jaxhetero", f"{type(error).__name__}: {error}", 2 if isinstance(error, ConfigError) else 1)
    except (click.Abort, KeyboardInterrupt):
        return 130


def _fail(path: str, message: str, code: int) -> int:
    print(f"{path}: {message}", file=sys.stderr)
    return code
