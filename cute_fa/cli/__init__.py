"""The command `cute-fa`: one subcommand a file, and the one place where its errors become messages and exit codes.

`main` is the entry point of `cute-fa` and of `python -m cute_fa`. Importing a subcommand imports neither torch nor the
DSL, so that help is fast and `cute-fa doctor` can tell that one of them is missing.
"""

import sys
from importlib import import_module
from typing import Annotated, NoReturn

from cute_fa import __version__
from cute_fa.core.errors import DeviceError, Message, NotSupportedError
from cute_fa.core.requirements import RICH, TYPER


def main() -> None:
    """Exit codes: 1 this cannot be done here, 2 wrong arguments. Others are our faults and show a traceback."""
    try:
        for package in (TYPER, RICH):
            import_module(package.module)
    except ImportError as error:
        fail(f"the command line needs typer and rich ({error}). Run: pip install '{TYPER}' '{RICH}'", 1)
    app = build_app()
    try:
        app(prog_name="cute-fa")
    except (ValueError, TypeError) as error:
        if not error.args or not isinstance(error.args[0], Message):
            raise
        fail(error, 2)
    except (NotSupportedError, DeviceError) as error:
        fail(error, 1)


def fail(message: object, code: int) -> NoReturn:
    """Ends the process with the message on one line."""
    print("cute-fa:", " ".join(str(message).split()), file=sys.stderr)
    sys.exit(code)


def build_app():
    """The typer app with every subcommand; typer is imported here, not above, because it may be missing."""
    import typer

    from cute_fa.cli.bench import PASS_ON, bench
    from cute_fa.cli.compile import compile
    from cute_fa.cli.doctor import doctor
    from cute_fa.cli.gradcheck import gradcheck
    from cute_fa.cli.inspect import inspect
    from cute_fa.cli.train import train

    app = typer.Typer(
        help="Exact attention for NVIDIA Hopper: train with it, check its gradients, check this machine.",
        rich_markup_mode="rich",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"cute-fa {__version__}")
            raise typer.Exit()

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, help="Print the version and exit.")
        ] = False,
    ) -> None:
        """Options before the subcommand."""

    for command in (train, doctor, gradcheck, inspect, compile):
        app.command()(command)
    app.command(context_settings=PASS_ON)(bench)
    return app
