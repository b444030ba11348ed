"""`cute-fa bench`: `benchmarks.run` beside the other commands. Benchmarks are in a checkout, not in a wheel."""

from pathlib import Path

import typer

from cute_fa.core.errors import NotSupportedError, expected

CHECKOUT = Path(__file__).parents[2]

# Every option, --help too, belongs to benchmarks.run, which alone knows them.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Measure attention beside its peers on a GPU, from a checkout."""
    if not (CHECKOUT / "benchmarks" / "run.py").is_file():
        advice = "Clone the repository, install it with pip install -e, and run this again"
        raise NotSupportedError(expected("bench", "a checkout of the repository", f"a package in {CHECKOUT}", advice))
    from benchmarks.run import main

    main(context.args, prog="cute-fa bench")
