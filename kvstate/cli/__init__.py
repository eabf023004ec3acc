"""The command ``kvstate``. Exit codes: 0 holds · 1 violation · 2 usage · 3 undecided, which is never a pass.

Commands are imported when they are called, so that ``kvstate --version`` costs nothing. Each is a line in `COMMANDS`.
"""

from __future__ import annotations

import enum
import importlib
import sys
import traceback
from typing import Any, NoReturn


class Exit(enum.IntEnum):
    """What the process returns."""

    HOLDS = 0
    VIOLATION = 1
    USAGE = 2
    UNDECIDED = 3


COMMANDS = {
    "bench": ("kvstate.cli.bench", "Measure the machine: microseconds per request-step, per page."),
    "check": (
        "kvstate.cli.check",
        "Fuzz and walk the machine beside the reference, and drive the scheduler at random.",
    ),
    "replay": ("kvstate.cli.check", "Run a violation's program or schedule again."),
    "run": ("kvstate.cli.run", "Serve a trace through scheduler, manager and backend, every token verified."),
}
"""Name → the module that has the command under the same name, and its line in the help."""


def _needs_the_extra(missing: str) -> NoReturn:
    sys.stderr.write(f"kvstate: the command line needs {missing}; install it with: pip install 'kvstate[check]'\n")
    raise SystemExit(Exit.USAGE)


def _group() -> Any:
    import click
    import rich  # noqa: F401  (missing, it is better missed here than in the middle of a run)

    import kvstate

    class Lazy(click.Group):
        """A group whose commands are imported when they are called."""

        def list_commands(self, ctx: click.Context) -> list[str]:
            return sorted({*COMMANDS, *super().list_commands(ctx)})

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            if cmd_name not in COMMANDS:
                return super().get_command(ctx, cmd_name)
            command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
            assert isinstance(command, click.Command)
            return command

        def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            with formatter.section("Commands"):
                formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])

        def invoke(self, ctx: click.Context) -> Any:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                click.echo("interrupted: undecided", err=True)
                ctx.exit(Exit.UNDECIDED)
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except Exception:
                traceback.print_exc()
                click.echo("kvstate itself failed: undecided", err=True)
                ctx.exit(Exit.UNDECIDED)

    @click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(kvstate.__version__, prog_name="kvstate")
    def main() -> None:
        """Check and measure the state of a paged KV cache.

        Exit codes: 0 holds, 1 violation, 2 usage, 3 undecided (never a pass).
        """

    return main


def _entry() -> Any:
    try:
        return _group()
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        name = error.name
        return lambda: _needs_the_extra(name)


main = _entry()
"""The console script: a click group, or where the `check` extra is missing, something that says so."""
