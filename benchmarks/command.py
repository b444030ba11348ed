"""How the commands of this folder end: one line for what the user can mend, a traceback for our own faults."""

import sys
from collections.abc import Callable

from cute_fa.core.errors import DeviceError, Message


def run_command(main: Callable[[], None], prog: str) -> None:
    """Exit codes as of `cute-fa`: 1 this cannot be done here, 2 wrong arguments."""
    try:
        main()
    except DeviceError as error:
        end(f"{prog}: {error}", 1)
    except ValueError as error:
        if not error.args or not isinstance(error.args[0], Message):
            raise
        end(f"{prog}: {error}", 2)


def end(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)
